"""Codes of 8 bits to bfloat16 inside of Triton kernels: four codes in 8 (int8) or 10 (e4m3) instructions.

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
from jaxtyping import Array, BFloat16, Shaped

_INT8 = """{ .reg .b32 y, z, one; mov.b32 one, 0x3f803f80;
prmt.b32 z, $2, 0x43434343, 0x4140; and.b32 y, z, 0xff7fff7f;
lop3.b32 z, z, 0xff80ff80, 0x80008000, 0xea; fma.rn.bf16x2 $0, y, one, z;
prmt.b32 z, $2, 0x43434343, 0x4342; and.b32 y, z, 0xff7fff7f;
lop3.b32 z, z, 0xff80ff80, 0x80008000, 0xea; fma.rn.bf16x2 $1, y, one, z; }"""
# The zero that is added is negative, so that the sign of a zero stays.
_E4M3 = """{ .reg .b32 y, z, c, zero; mov.b32 c, 0x7b807b80; mov.b32 zero, 0x80008000;
prmt.b32 z, $2, 0, 0x1404; shr.u32 y, z, 4; and.b32 y, y, 0x07f007f0;
lop3.b32 y, z, 0x80008000, y, 0xea; fma.rn.bf16x2 $0, y, c, zero;
prmt.b32 z, $2, 0, 0x3424; shr.u32 y, z, 4; and.b32 y, y, 0x07f007f0;
lop3.b32 y, z, 0x80008000, y, 0xea; fma.rn.bf16x2 $1, y, c, zero; }"""


def numbers(codes: Shaped[Array, "N K"], *, interpret: bool) -> BFloat16[Array, "N K"]:
    """Return codes of int8 or e4m3 as bfloat16, which holds them exactly."""
    if interpret:
        return codes.astype(jnp.bfloat16)
    [out] = plgpu.elementwise_inline_asm(
        _INT8 if codes.dtype == jnp.int8 else _E4M3,
        args=[codes],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return out


# Of two words: one byte of both, as two neighbours.
_INT8_WORDS = """{{ .reg .b32 y, z, one; mov.b32 one, 0x3f803f80;
prmt.b32 z, $1, $2, 0x{c}{c}{b}{b}; lop3.b32 y, z, 0x007f007f, 0x43004300, 0xea;
lop3.b32 z, z, 0x00800080, 0xc300c300, 0xea; fma.rn.bf16x2 $0, y, one, z; }}"""
_E4M3_WORDS = """{{ .reg .b32 y, z, c, zero; mov.b32 c, 0x7b807b80; mov.b32 zero, 0x80008000;
prmt.b32 z, $1, $2, 0x{c}{c}{b}{b}; shr.u32 y, z, 4; and.b32 y, y, 0x07f007f0;
lop3.b32 y, z, 0x80008000, y, 0xea; fma.rn.bf16x2 $0, y, c, zero; }}"""


def numbers_of_words(words, kind, byte: int, *, interpret: bool):
    """Return the numbers of the first, second, third or fourth bytes of words."""
    if interpret:
        part = (words >> (8 * byte)).astype(jnp.uint8)
        return jax.lax.bitcast_convert_type(part, kind).astype(jnp.bfloat16)
    code = _INT8_WORDS if kind == jnp.int8 else _E4M3_WORDS
    [out] = plgpu.elementwise_inline_asm(
        code.format(b=byte, c=byte + 4),
        args=[words],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return out
