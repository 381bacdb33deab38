"""The arrays of 4-bit codes with a scale for each group of inputs, and the numbers they stand for.

Two codings have 16 codes each:

    int4    q = code - 8, so -8 to 7
    e2m1    bits s e e m: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero

A number is (q - zero) * scale * factor. Zeros belong to groups, factors to outputs, and either may
be absent. `BLOCK` inputs of an output are 32 bytes. The low half of byte j is the code of input j,
the high half that of input j + 32. A GPU then unpacks 32 neighbouring inputs with one mask, and all
of them share a scale where groups have 32 inputs or more.

The arrays have the axes of the weight, [*leading, inputs, *trailing]. In the codes the axis of
inputs has an entry for each block, and a last axis holds its 32 bytes. In the scales and zeros it
has an entry for each group. The last block and the last group may reach past the inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Num, UInt8

BLOCK = 64  # inputs of a block
HALF = BLOCK // 2

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True)
class Coding:
    """The numbers that codes stand for.

    Attributes:
      kind: "int4" or "e2m1".
      group: inputs that share a scale: 16, 32, 64 or 128.
    """

    kind: Literal["int4", "e2m1"]
    group: int


class Codes(NamedTuple):
    """The arrays of a weight. The module says which axes they have.

    A weight of 8-bit codes, int8 or e4m3, has these too: codes [*outputs, *inputs] and factors
    [*outputs]. It has no scales, and no `Coding`.
    """

    codes: Num[Array, "..."]
    scales: Num[Array, "*axes"] | None = None
    """Of a float dtype; or uint8, where u stands for 2^(u - 127)."""
    zeros: Num[Array, "*axes"] | None = None
    """int8, from -8 to 7."""
    factors: Float[Array, "*axes"] | None = None
    """float32, with the axes of the weight without that of inputs."""


def pack(codes: Any, axis: int) -> Any:
    """Pack codes from 0 to 15 by two: uint8 [*axes] becomes [*axes, 32]. Padding is 8.

    The codes are of JAX or of numpy, and so is the result.
    """
    xp = np if isinstance(codes, np.ndarray) else jnp
    codes = xp.moveaxis(codes, axis, -1)
    past = -codes.shape[-1] % BLOCK
    codes = xp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, past)], constant_values=8)
    halves = codes.reshape(*codes.shape[:-1], -1, 2, HALF)
    packed = halves[..., 0, :] | halves[..., 1, :] << 4
    return xp.moveaxis(packed, -2, axis)


def pack_pairs(pairs: Any) -> Any:
    """Pack pairs of neighbours, as in files: uint8 [*axes, inputs / 2] becomes [*axes, blocks, 32].

    Args:
      pairs: of JAX or of numpy, as the result is. Input 2j is in the low half of byte j.
    """
    xp = np if isinstance(pairs, np.ndarray) else jnp
    past = -pairs.shape[-1] % HALF
    if past:
        pairs = xp.pad(pairs, [(0, 0)] * (pairs.ndim - 1) + [(0, past)], constant_values=0x88)
    if xp is np:
        return _pack_words(pairs).reshape(*pairs.shape[:-1], -1, HALF)
    halves = pairs.reshape(*pairs.shape[:-1], -1, 2, HALF // 2)
    first, second = halves[..., 0, :], halves[..., 1, :]
    both = xp.stack([first & 15 | second << 4, first >> 4 | second & 0xF0], axis=-1)
    return both.reshape(*both.shape[:-2], HALF)


def _pack_words(pairs: np.ndarray) -> np.ndarray:
    """Pack whole blocks with numpy: eight bytes at once, and a slab that fits a cache at a time."""
    low, high = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
    words = np.ascontiguousarray(pairs).reshape(-1).view(np.uint64).reshape(-1, 2, 2)
    out, step = np.empty((len(words), HALF // 2, 2), np.uint8), (1 << 20) // HALF
    for start in range(0, len(words), step):
        first, second = words[start : start + step, 0], words[start : start + step, 1]
        slab = out[start : start + step]
        slab[..., 0] = (first & low | (second & low) << 4).view(np.uint8)
        slab[..., 1] = ((first & high) >> 4 | second & high).view(np.uint8)
    return out


def unpack(packed: UInt8[Array, "*blocks 32"], axis: int, inputs: int) -> UInt8[Array, "*axes"]:
    """Return the codes, from 0 to 15. The inverse of `pack`."""
    packed = jnp.moveaxis(packed, axis, -2)
    codes = jnp.stack([packed & 15, packed >> 4], axis=-2)
    codes = codes.reshape(*codes.shape[:-3], -1)[..., :inputs]
    return jnp.moveaxis(codes, -1, axis)


def numbers(codes: UInt8[Array, "*axes"], kind: str) -> Float[Array, "*axes"]:
    """Return the numbers of codes from 0 to 15, float32."""
    wide = codes.astype(jnp.int32)
    if kind == "int4":
        return (wide - 8).astype(jnp.float32)
    # The three low bits are the top of a float16's exponent and of its fraction, times 2^-14.
    bits = (wide & 8) << 12 | (wide & 7) << 9
    half = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
    return half.astype(jnp.float32) * 2.0**14


def scale_numbers(scales: Num[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Return scales in float32."""
    if scales.dtype == jnp.uint8:
        return lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
    if scales.dtype == jnp.float8_e4m3fn:
        # The same value as a float16, times 2^-8. GPUs before 8.9 cannot convert e4m3.
        bits = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint16)
        bits = (bits & 0x80) << 8 | (bits & 0x7F) << 7
        half = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
        return half.astype(jnp.float32) * 2.0**8
    return scales.astype(jnp.float32)


def dequantise(weight: Codes, coding: Coding, *, axis: int, inputs: int) -> Float[Array, "*axes"]:
    """Return the weight in float32.

    Args:
      axis: that of the inputs.
      inputs: how many there are.
    """

    def spread(x: Array) -> Array:
        return jnp.repeat(x, coding.group, axis=axis)[_first(axis, inputs)]

    w = numbers(unpack(weight.codes, axis, inputs), coding.kind)
    if weight.zeros is not None:
        w = w - spread(weight.zeros.astype(jnp.float32))
    assert weight.scales is not None
    w = w * spread(scale_numbers(weight.scales))
    if weight.factors is not None:
        w = w * jnp.expand_dims(weight.factors, axis)
    return w


def _first(axis: int, count: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(count))
