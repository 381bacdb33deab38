"""Which of our formats holds what a quantised file stores, and the arrays of that format.

`checkpoints_convert.quantised` knows files. `jaxspec.quantised` knows what models multiply by. Only
here they meet.
"""

from __future__ import annotations

import numpy as np

from checkpoints_convert.quantised.announced import Spec
from checkpoints_convert.quantised.sources import PerChannel, Source
from checkpoints_convert.rules import Shape

_OF_BLOCKS = "int8"
"""The format of weights in blocks of 128 x 128. It has a scale for each row of blocks, so numbers are
rounded again, and the steps of int8 are finer than those of fp8 for all but the smallest numbers."""


def is_lossless(spec: Spec) -> bool:
    """Tell whether our format keeps codes and scales of the file to the bit."""
    return spec.per != "block"


def format_of(spec: Spec, name: str, shape: Shape, summed: tuple[int, ...]) -> str | None:
    """Return the format of a weight that a file stores in some way; None if it is read as numbers.

    Args:
      name, shape, summed: of the weight.

    Raises:
      CheckpointError: its groups do not divide its inputs.
    """
    if spec.per == "block":
        return _OF_BLOCKS
    if spec.kind in ("int8", "fp8") and spec.per in ("tensor", "channel"):
        return spec.kind
    return None


def parts_of(
    source: Source, format: str, shape: Shape, summed: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return the arrays of a format that hold a weight of a file. Nothing is rounded.

    Args:
      source: the weight with its rows in the order of the kept axes.
    """
    assert isinstance(source, PerChannel)
    inputs = tuple(shape[i] for i in summed)
    kept = tuple(n for i, n in enumerate(shape) if i not in summed)
    return {
        "codes": source.codes.reshape(*kept, *inputs),
        "scales": np.ascontiguousarray(source.scales.reshape(kept)),
    }
