"""Codes of 8 bits to bfloat16 inside of Triton kernels: two codes in 4 (int8) or 5 (e4m3) instructions.

The compiler alone converts codes one at a time, through float32. Here a byte permutation spreads two
codes over two bfloat16.

    int8    0x4300 + the low seven bits are the number 128 + those bits. What is subtracted is 128, or
            256 for a negative code: 0xC300 + the sign bit.
    e4m3    Seven bits go where bfloat16 has exponent and fraction, and the sign where it has the
            sign. That number is 2^120 times too small, which a product makes good.

Both are exact. A code that is no number (e4m3 0x7f) would become 480. No format has such codes.

The interpreter has no assembly. There the same numbers come from a conversion.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Shaped

# Two bytes, both halves of z, to two bfloat16. {out}: the register of the result.
_INT8 = """lop3.b32 y, z, 0x007f007f, 0x43004300, 0xea;
lop3.b32 z, z, 0x00800080, 0xc300c300, 0xea; fma.rn.bf16x2 {out}, y, c, z;"""
# Two bytes, the high ones of both halves of z. The zero that is added is negative, so that the sign of
# a zero stays.
_E4M3 = """shr.u32 y, z, 4; and.b32 y, y, 0x07f007f0; lop3.b32 y, z, 0x80008000, y, 0xea;
fma.rn.bf16x2 {out}, y, c, zero;"""
_FOUR = """{{ .reg .b32 x, y, z, c, zero; mov.b32 c, {factor}; mov.b32 zero, 0x80008000;
mov.b32 x, $2;
prmt.b32 z, x, 0, 0x1100; {first}
prmt.b32 z, x, 0, 0x3322; {second} }}"""
_TWO = """{{ .reg .b32 y, z, c, zero; mov.b32 c, {factor}; mov.b32 zero, 0x80008000;
prmt.b32 z, $1, 0, 0x1100; {first} }}"""
_OF_INT8 = dict(factor="0x3f803f80", first=_INT8.format(out="$0"), second=_INT8.format(out="$1"))
_OF_E4M3 = dict(factor="0x7b807b80", first=_E4M3.format(out="$0"), second=_E4M3.format(out="$1"))


def assembly(kind: DTypeLike) -> str:
    """Return what makes two registers $0 and $1 of bfloat16 of a register $2 of four codes."""
    return _FOUR.format(**(_OF_INT8 if jnp.dtype(kind) == jnp.int8 else _OF_E4M3))


def pair(kind: DTypeLike) -> str:
    """Return what makes a register $0 of two bfloat16 of two codes, the low half of a register $1."""
    return _TWO.format(**(_OF_INT8 if jnp.dtype(kind) == jnp.int8 else _OF_E4M3))


def numbers(codes: Shaped[Array, "N K"], *, interpret: bool) -> BFloat16[Array, "N K"]:
    """Return codes of int8 or e4m3 as bfloat16, which holds them exactly."""
    if interpret:
        return codes.astype(jnp.bfloat16)
    [out] = plgpu.elementwise_inline_asm(
        assembly(codes.dtype),
        args=[codes],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return out
