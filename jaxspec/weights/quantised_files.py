"""The way from a quantised file to a format of `jaxspec.quantised`.

`checkpoints_convert.quantised` knows files, and `jaxspec.quantised` knows the formats that models
multiply by. Only this file knows both. Read `format_of`, then `to_quantised`.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.quantised.quantization_config import Spec
from checkpoints_convert.quantised.stored_weights import (
    GroupedFloat4,
    GroupedInt4,
    PerChannel,
    StoredWeight,
)
from checkpoints_convert.rules import Shape
from jaxspec.quantised.array import QuantisedArray
from jaxspec.quantised.format import get_format
from jaxspec.quantised.int4 import GROUPS, from_float4, from_int4, int4_name

_OF_BLOCKS = "int8"
"""The format of weights in blocks of 128 x 128. It has a scale for each row of blocks, so numbers are
rounded again, and the steps of int8 are finer than those of fp8 for all but the smallest numbers."""


def is_lossless(spec: Spec) -> bool:
    """Return whether our format keeps codes and scales of the file to the bit."""
    return spec.per != "block"


def format_of(
    spec: Spec,
    name: str,
    shape: Shape,
    contracting_axes: tuple[int, ...],
    quantize: str | None = None,
) -> str | None:
    """Return the format of a weight that a file stores quantised; None if it is read as numbers.

    Weights in a format that no model multiplies by, such as GGUF's Q6_K, are read as numbers.

    Args:
      name, shape, contracting_axes: of the weight.
      quantize: the format that the user chose.

    Raises:
      CheckpointError: its groups do not divide its inputs.
    """
    if spec.per == "block":
        return quantize or _OF_BLOCKS
    if spec.kind in ("int8", "fp8") and spec.per in ("tensor", "channel"):
        return spec.kind
    if spec.kind in ("nvfp4", "mxfp4"):
        _check_groups(name, spec, shape, contracting_axes)
        return spec.kind
    if spec.kind != "int4":
        return None
    whole = math.prod(shape[i] for i in contracting_axes)
    return int4_name(
        _group_of(name, spec, whole, shape, contracting_axes),
        _DTYPES[spec.scales],
        not spec.symmetric,
    )


_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def _group_of(
    name: str, spec: Spec, whole: int, shape: Shape, contracting_axes: tuple[int, ...]
) -> int:
    """Return the group of the format that holds 4-bit integers.

    Other groups, and a scale for all inputs, become several groups with the same scale. They are of
    64 at most: that divides 704, so both weights of 26B-A4B's experts have one format.
    """
    last, stored = shape[contracting_axes[-1]], spec.group or whole
    if stored in GROUPS and last % stored == 0:
        return stored
    fitting = [group for group in GROUPS if group < 128 and not (stored % group or last % group)]
    if not fitting:
        raise CheckpointError(
            f"{name}: has 4-bit integers in groups of {stored} of {last} inputs, and groups of "
            f"{', '.join(map(str, GROUPS))} are read: take a build with one of these"
        )
    return max(fitting)


def _check_groups(name: str, spec: Spec, shape: Shape, contracting_axes: tuple[int, ...]) -> None:
    if shape[contracting_axes[-1]] % spec.group:
        raise CheckpointError(
            f"{name}: groups of {spec.group} do not divide its {shape[contracting_axes[-1]]} inputs"
        )


def to_quantised(
    source: StoredWeight, format: str, shape: Shape, contracting_axes: tuple[int, ...]
) -> QuantisedArray:
    """Return a weight of a file in a format. Nothing is rounded. Its dtype is float32.

    Args:
      source: the weight with its rows in the order of the kept axes. Its arrays are of JAX or of
        numpy, and so are those of the result.
    """
    about: dict[str, Any] = dict(shape=shape, contracting_axes=contracting_axes, dtype=np.float32)
    if isinstance(source, GroupedInt4):
        of_ours = get_format(format).parts(shape, contracting_axes)["scales"].shape
        times = math.prod(of_ours) // math.prod(source.scales.shape)
        scales, zeros = source.scales, source.zeros
        if times > 1:
            xp = np if isinstance(scales, np.ndarray) else jnp
            scales = xp.repeat(scales, times, axis=-1)
            zeros = None if zeros is None else xp.repeat(zeros, times, axis=-1)
        made = from_int4(source.pairs, scales, zeros, **about)
    elif isinstance(source, GroupedFloat4):
        made = from_float4(source.pairs, source.scales, source.factor, **about)
    else:
        assert isinstance(source, PerChannel)
        inputs = tuple(shape[i] for i in contracting_axes)
        kept = tuple(n for i, n in enumerate(shape) if i not in contracting_axes)
        codes, scales = source.codes.reshape(*kept, *inputs), source.scales.reshape(kept)
        return QuantisedArray({"codes": codes, "scales": scales}, format=format, **about)
    assert made.format == format, (made.format, format)
    return made
