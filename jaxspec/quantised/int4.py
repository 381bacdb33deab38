"""The formats of 4 bits a number, with a scale for each group of inputs: int4, nvfp4 and mxfp4.

`int4` has integers, `nvfp4` and `mxfp4` have floats.

    int4     q from -8 to 7                       w = q * scale              groups of 16 to 128
    zeros    the same, and a zero for each group  w = (q - zero) * scale
    nvfp4    e2m1: 0 0.5 1 1.5 2 3 4 6 and signs  w = q * scale * factor     groups of 16, e4m3 scales
    mxfp4    e2m1                                 w = q * scale              groups of 32, 2^n scales

On load int4 has bfloat16 scales. The scale of a group makes its largest magnitude -8, as in GGUF's
Q4_0, so weights that were trained for that grid are found again. Scales of the other formats clip
nothing. Each output of nvfp4 has a float32 factor, which puts its e4m3 scales where they have all
their bits.

Files may have scales of another dtype, and a group size of their own. Each such combination is a
format: "int4-g128-float16-zeros". `from_int4` and `from_float4` make
weights of the arrays of a file.

`pallas_kernels.int4_matmul` multiplies. `pallas_kernels.int4_matmul.coding` says how codes are packed.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspec.quantised.array import QuantisedArray
from jaxspec.quantised.format import (
    Format,
    FormatError,
    QuantisedWeight,
    Shape,
    get_format,
    register,
)
from jaxspec.shapes import Array, Float, Int
from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.int4_matmul import Codes, Coding, gated, linear
from pallas_kernels.int4_matmul.coding import BLOCK, dequantise, pack, pack_pairs, scale_numbers
from pallas_kernels.int8_matmul import sums

GROUPS = (32, 16, 64, 128)
"""Sizes of groups of integers. The first is that of `int4`."""
_LARGEST_E2M1, _LARGEST_E4M3 = 6.0, 448.0
# Where a magnitude rounds up to the next of e2m1's. A tie goes to the even code.
_MIDDLES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True))
_MIDDLES += ((5.0, False),)


class Grouped(Format):
    """A code of four bits for each number, and a scale for each group of inputs."""

    least_capability = 8.0

    def __init__(
        self,
        name: str,
        title: str,
        coding: Coding,
        scales: Any,
        *,
        zeros: bool = False,
        factors: bool = False,
        on_load: bool = False,
    ):
        """Make a format.

        Args:
          scales: their dtype; uint8 means powers of two.
          zeros: whether each group has a zero.
          factors: whether each output has a factor.
        """
        self.name, self.title, self.on_load = name, title, on_load
        self.coding, self.scales_dtype = coding, jnp.dtype(scales)
        self.zeros, self.factors = zeros, factors
        self.block = max(BLOCK, coding.group)

    def parts(
        self, shape: Shape, contracting_axes: tuple[int, ...]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        last = contracting_axes[-1]

        def cut(size: int) -> list[int]:
            return [-(-n // size) if i == last else n for i, n in enumerate(shape)]

        arrays = {
            "codes": ((*cut(BLOCK), BLOCK // 2), jnp.uint8),
            "scales": (tuple(cut(self.coding.group)), self.scales_dtype),
        }
        if self.zeros:
            arrays["zeros"] = arrays["scales"][0], jnp.int8
        if self.factors:
            kept = tuple(n for i, n in enumerate(shape) if i not in contracting_axes)
            arrays["factors"] = kept, jnp.float32
        return {part: jax.ShapeDtypeStruct(*about) for part, about in arrays.items()}

    def axes(
        self, part: str, ndim: int, contracting_axes: tuple[int, ...]
    ) -> tuple[int | None, ...]:
        if part == "factors":
            return tuple(i for i in range(ndim) if i not in contracting_axes)
        return (*range(ndim), None) if part == "codes" else tuple(range(ndim))

    def quantise(
        self, x: Float[Array, "..."], contracting_axes: tuple[int, ...]
    ) -> dict[str, Array]:
        last, group, arrays = contracting_axes[-1], self.coding.group, {}
        x = x.astype(jnp.float32)
        if self.factors:
            factors = jnp.max(jnp.abs(x), axis=contracting_axes, keepdims=True)
            factors = factors / np.float32(_LARGEST_E2M1 * _LARGEST_E4M3)
            arrays["factors"] = jnp.squeeze(factors, contracting_axes)
            x = x / _divisor(factors)
        groups = jnp.moveaxis(x, last, -1)
        padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[last] % group)]
        groups = jnp.pad(groups, padding).reshape(*groups.shape[:-1], -1, group)
        if self.coding.kind == "int4":
            scales, zeros = self._steps(groups)
            codes = jnp.round(groups / _divisor(scales.astype(jnp.float32))) + zeros
            codes = (jnp.clip(codes, -8, 7) + 8).astype(jnp.uint8)
            if self.zeros:
                arrays["zeros"] = jnp.moveaxis(zeros[..., 0].astype(jnp.int8), -1, last)
        else:
            scales = self._float_scales(groups)
            codes = _e2m1_codes(groups / _divisor(scale_numbers(scales)))
        codes = codes.reshape(*codes.shape[:-2], -1)[..., : x.shape[last]]
        arrays["codes"] = pack(jnp.moveaxis(codes, -1, last), last)
        arrays["scales"] = jnp.moveaxis(scales[..., 0], -1, last)
        return arrays

    def _steps(self, groups: Float[Array, "... g"]) -> tuple[Array, Array]:
        """Return the scale and the zero of each group, [..., 1]."""
        low = jnp.min(groups, axis=-1, keepdims=True)
        high = jnp.max(groups, axis=-1, keepdims=True)
        if not self.zeros:
            farthest = jnp.where(-low >= high, low, high)
            return (farthest / -8).astype(self.scales_dtype), jnp.zeros_like(low)
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        scales = ((high - low) / 15).astype(self.scales_dtype)
        zeros = jnp.round(-8 - low / _divisor(scales.astype(jnp.float32)))
        return scales, jnp.clip(zeros, -8, 7)

    def _float_scales(self, groups: Float[Array, "... g"]) -> Array:
        """Return the scale of each group as it is stored, [..., 1]."""
        scales = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / np.float32(_LARGEST_E2M1)
        if self.scales_dtype != jnp.uint8:
            return jnp.minimum(scales, _LARGEST_E4M3).astype(self.scales_dtype)
        fraction, exponent = jnp.frexp(scales)  # the least power of two that is not below
        exponent = jnp.where(fraction == 0.5, exponent - 1, exponent)
        return jnp.clip(exponent + 127, 1, 254).astype(jnp.uint8)

    def dequantise(self, weight: QuantisedWeight) -> Float[Array, "..."]:
        return self._numbers(weight).astype(weight.dtype)

    def _numbers(self, weight: QuantisedWeight) -> Float[Array, "..."]:
        """Return the weight in float32."""
        last = weight.contracting_axes[-1]
        parts = dict(weight.parts)
        if self.factors:  # they have no contracting axis at all
            parts["factors"] = jnp.expand_dims(parts["factors"], weight.contracting_axes[:-1])
        codes = Codes(**parts)
        return dequantise(codes, self.coding, axis=last, inputs=weight.shape[last])

    def multiply(
        self, rows: Float[Array, "R *in"], weight: QuantisedWeight, dtype: Any
    ) -> Float[Array, "R *out"]:
        inputs_first, several = 0 in weight.contracting_axes, len(weight.contracting_axes) > 1
        cut = max(BLOCK, self.coding.group)  # neither blocks nor groups may end within an axis
        if several and (not inputs_first or weight.shape[weight.contracting_axes[-1]] % cut):
            numbers = self.dequantise(weight).astype(rows.dtype)
            return sums(rows, numbers, weight.contracting_axes).astype(dtype)
        kept = tuple(n for i, n in enumerate(weight.shape) if i not in weight.contracting_axes)
        outputs = math.prod(kept)

        def flat(part: str) -> Array | None:
            if part not in weight.parts:
                return None
            array = weight.parts[part]
            if part == "factors":
                return array.reshape(outputs)
            end = array.shape[-1:] if part == "codes" else ()
            return array.reshape(*((-1, outputs) if inputs_first else (outputs, -1)), *end)

        codes = Codes(*(flat(part) for part in Codes._fields))  # type: ignore[arg-type]
        out = linear(
            rows.reshape(rows.shape[0], -1),
            codes,
            coding=self.coding,
            inputs_first=inputs_first,
            dtype=dtype,
        )
        return out.reshape(rows.shape[0], *kept)

    def multiply_gated(
        self,
        rows: Float[Array, "R D"],
        weight: QuantisedWeight,
        activation: Activation,
        dtype: Any,
    ) -> Float[Array, "R F"]:
        options: Any = dict(coding=self.coding, activation=activation, dtype=dtype)
        return gated(rows, Codes(**weight.parts), **options)

    def rows(self, weight: QuantisedWeight, ids: Int[Array, "*ids"]) -> Float[Array, "*ids D"]:
        assert 0 not in weight.contracting_axes
        parts = {name: array[ids] for name, array in weight.parts.items()}
        shape = (*ids.shape, *weight.shape[1:])
        contracting_axes = tuple(i + ids.ndim - 1 for i in weight.contracting_axes)
        of_ids = QuantisedArray(
            parts,
            format=self.name,
            shape=shape,
            dtype=weight.dtype,
            contracting_axes=contracting_axes,
        )
        return self.dequantise(of_ids)

    def codes_of_experts(self, weight: QuantisedWeight) -> tuple[Codes, Coding]:
        return Codes(**weight.parts), self.coding

    def of_arrays(
        self,
        pairs: Any,
        scales: Any,
        zeros: Any,
        factors: Any,
        shape: Shape,
        contracting_axes: Shape,
    ) -> dict[str, Any]:
        """Return the arrays of a weight, given those of a file. They are of JAX or of numpy, as these.

        Args:
          pairs: codes from 0 to 15, two a byte, the first in the low half: uint8
            [*outputs, inputs / 2], as files hold matrices.
          scales, zeros: [*outputs, groups].
          factors: [*outputs].
          shape, contracting_axes: of the weight, whose contracting axes make up the axis of inputs.

        Raises:
          FormatError: groups do not divide the inputs, or shapes do not fit.
        """
        group, inputs = self.coding.group, shape[contracting_axes[-1]]
        if inputs % group:
            raise FormatError(
                f"{self.name} has groups of {group}, which do not divide {inputs} inputs"
            )
        kept = tuple(i for i in range(len(shape)) if i not in contracting_axes)
        order = [(*kept, *contracting_axes).index(i) for i in range(len(shape))]

        xp = np if isinstance(pairs, np.ndarray) else jnp

        def by_axes(name: str, array: Any, size: int) -> Any:
            sizes = tuple(shape[i] for i in kept) + tuple(shape[i] for i in contracting_axes[:-1])
            expected = math.prod(sizes) * (inputs // size)
            if array.size != expected:
                raise FormatError(f"{name} has {array.size} numbers, expected {expected}")
            return array.reshape(*sizes, inputs // size)

        arrays = {
            "codes": pack_pairs(by_axes("codes", pairs, 2)).transpose(*order, len(order)),
            "scales": by_axes("scales", xp.asarray(scales, self.scales_dtype), group).transpose(
                order
            ),
        }
        if self.zeros:
            arrays["zeros"] = by_axes("zeros", xp.asarray(zeros, np.int8), group).transpose(order)
        if self.factors:
            of_outputs = tuple(shape[i] for i in kept)
            factors = xp.asarray(factors, np.float32)
            one_each = factors.reshape(of_outputs) if factors.size > 1 else factors.reshape(())
            arrays["factors"] = xp.broadcast_to(one_each, of_outputs)
        return arrays


def from_int4(
    pairs: Any,
    scales: Any,
    zeros: Any = None,
    *,
    shape: Shape,
    contracting_axes: tuple[int, ...],
    dtype: Any,
) -> QuantisedArray:
    """Return a weight of 4-bit integers that a file holds: w = (q - zero) * scale. Nothing is rounded.

    Args:
      pairs: q + 8, from 0 to 15, two a byte: uint8 [*outputs, inputs / 2]. The first of two is in
        the low half. All arrays are of JAX, or all of numpy.
      scales: float32, bfloat16 or float16, [*outputs, inputs / group].
      zeros: int8 from -8 to 7, as scales; None where all are 0.
      shape, contracting_axes, dtype: of the weight. Its contracting axes make up the axis of inputs.

    Raises:
      FormatError: there is no format for such groups or scales, or shapes do not fit.
    """
    name = int4_name(2 * pairs.shape[-1] // scales.shape[-1], scales.dtype, zeros is not None)
    return _made(name, pairs, scales, zeros, None, shape, contracting_axes, dtype)


def from_float4(
    pairs: Any,
    scales: Any,
    factor: Any = None,
    *,
    shape: Shape,
    contracting_axes: tuple[int, ...],
    dtype: Any,
) -> QuantisedArray:
    """Return a weight of 4-bit floats that a file holds: w = e2m1 * scale * factor. Nothing is rounded.

    Args:
      pairs: codes from 0 to 15, two a byte, as in `from_int4`.
      scales: [*outputs, inputs / group]. float8_e4m3fn and groups of 16 (NVFP4), or uint8 and groups
        of 32, where u stands for 2^(u - 127) (MXFP4).
      factor: float32 [*outputs] or a scalar, which multiplies; None for 1.
      shape, contracting_axes, dtype: of the weight. Its contracting axes make up the axis of inputs.

    Raises:
      FormatError: there is no format for such groups or scales, or shapes do not fit.
    """
    about = np.dtype(scales.dtype), 2 * pairs.shape[-1] // scales.shape[-1]
    if about == (np.dtype(ml_dtypes.float8_e4m3fn), 16):
        factors = np.ones((), np.float32) if factor is None else factor
        return _made("nvfp4", pairs, scales, None, factors, shape, contracting_axes, dtype)
    if about != (np.dtype(np.uint8), 32) or factor is not None:
        raise FormatError(
            f"4-bit floats with scales of {about[0]} and groups of {about[1]}; expected "
            "float8_e4m3fn and 16 (NVFP4), or uint8 and 32 without a factor (MXFP4)"
        )
    return _made("mxfp4", pairs, scales, None, None, shape, contracting_axes, dtype)


def int4_name(group: int, scales: Any = jnp.bfloat16, zeros: bool = False) -> str:
    """Return the name of a format of 4-bit integers.

    Raises:
      FormatError: there is none for this group or dtype.
    """
    dtype = np.dtype(scales).name
    if group not in GROUPS or dtype not in _SCALES:
        raise FormatError(
            f"4-bit integers with groups of {group} and scales of {dtype}; expected groups of "
            f"{', '.join(map(str, GROUPS))} and scales of {', '.join(_SCALES)}"
        )
    name = "int4" if group == 32 else f"int4-g{group}"
    return name + ("" if dtype == "bfloat16" else f"-{dtype}") + ("-zeros" if zeros else "")


def _made(
    name: str,
    pairs: Any,
    scales: Any,
    zeros: Any,
    factors: Any,
    shape: Any,
    contracting_axes: Any,
    dtype: Any,
) -> QuantisedArray:
    format = get_format(name)
    assert isinstance(format, Grouped)
    parts = format.of_arrays(pairs, scales, zeros, factors, shape, contracting_axes)
    return QuantisedArray(
        parts, format=name, shape=shape, dtype=dtype, contracting_axes=contracting_axes
    )


def _divisor(scales: Array) -> Array:
    """Return scales to divide by: 1 for a group of zeros, whose codes are 0 whatever divides them."""
    return jnp.where(scales != 0, scales, 1)


def _e2m1_codes(x: Float[Array, "*axes"]) -> Array:
    """Return the codes of the nearest 4-bit floats. Ties go to even codes."""
    magnitude = jnp.abs(x)
    codes = jnp.zeros(x.shape, jnp.uint8)
    for middle, up in _MIDDLES:
        beyond = magnitude >= middle if up else magnitude > middle
        codes = codes + beyond.astype(jnp.uint8)
    return codes | jnp.signbit(x).astype(jnp.uint8) << 3


_SCALES = ("bfloat16", "float16", "float32")


def _register() -> None:
    for zeros in (False, True):
        for scales in _SCALES:
            for group in GROUPS:
                title = f"4-bit integers, groups of {group}, scales in {scales}"
                register(
                    Grouped(
                        int4_name(group, scales, zeros),
                        title + (" and zeros" if zeros else ""),
                        Coding("int4", group),
                        scales,
                        zeros=zeros,
                        on_load=scales == "bfloat16",
                    )
                )
    e2m1 = "4-bit floats (e2m1), groups of"
    scales = "16, scales in e4m3, a float32 factor per channel"
    nvfp4 = Grouped(
        "nvfp4",
        f"{e2m1} {scales}",
        Coding("e2m1", 16),
        jnp.float8_e4m3fn,
        factors=True,
        on_load=True,
    )
    register(nvfp4)
    title = f"{e2m1} 32, powers of two as scales"
    register(Grouped("mxfp4", title, Coding("e2m1", 32), jnp.uint8, on_load=True))


_register()
