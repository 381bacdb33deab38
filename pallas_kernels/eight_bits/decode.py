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
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, DTypeLike, Shaped

# Two bytes, both halves of z, to two bfloat16. {out}: the register of the result.
_INT8 = """lop3.b32 y, z, 0x007f007f, 0x43004300, 0xea;
lop3.b32 z, z, 0x00800080, 0xc300c300, 0xea; fma.rn.bf16x2 {out}, y, c, z;"""
# Two bytes, the high ones of both halves of z. The zero that is added is negative, so that the sign of
# a zero stays.
_E4M3 = """shr.u32 y, z, 4; and.b32 y, y, 0x07f007f0; lop3.b32 y, z, 0x80008000, y, 0xea;
fma.rn.bf16x2 {out}, y, c, zero;"""
_ONE, _POWER = "0x3f803f80", "0x7b807b80"  # 1 and 2^120
_NEIGHBOURS = """{{ .reg .b32 x, y, z, c, zero; mov.b32 c, {factor}; mov.b32 zero, 0x80008000;
mov.b32 x, $2;
prmt.b32 z, x, 0, 0x1100; {first}
prmt.b32 z, x, 0, 0x3322; {second} }}"""
_OF_WORDS = """{{ .reg .b32 y, z, c, zero; mov.b32 c, {factor}; mov.b32 zero, 0x80008000;
prmt.b32 z, $1, $2, 0x{b}{b}{a}{a}; {first} }}"""

# The first and the second two codes of $1, as two bfloat16.
E4M3_PAIRS = tuple(
    "{ .reg .b32 y, z, c, zero; mov.b32 c, " + _POWER + "; mov.b32 zero, 0x80008000; "
    f"prmt.b32 z, $1, 0, {places}; " + _E4M3.format(out="$0") + " }"
    for places in ("0x1100", "0x3322")
)


def numbers(
    codes: Shaped[Array, "N K"], kind: DTypeLike, byte: int | None, *, interpret: bool
) -> BFloat16[Array, "N K"]:
    """Return codes as bfloat16, which holds them exactly.

    Args:
      codes: of int8 or e4m3; or words of four, of which one is returned.
      kind: the dtype of codes.
      byte: which code of a word; None for codes that are not in words.
    """
    is_int8 = jnp.dtype(kind) == jnp.int8
    if interpret:
        if byte is not None:
            codes = lax.bitcast_convert_type((codes >> (8 * byte)).astype(jnp.uint8), kind)
        return codes.astype(jnp.bfloat16)
    body, factor = (_INT8, _ONE) if is_int8 else (_E4M3, _POWER)
    if byte is None:
        halves = dict(first=body.format(out="$0"), second=body.format(out="$1"))
        code, constraints, pack = _NEIGHBOURS.format(factor=factor, **halves), "=r,=r,r", 4
    else:
        places = dict(a=byte, b=byte + 4, first=body.format(out="$0"))
        code, constraints, pack = _OF_WORDS.format(factor=factor, **places), "=r,r,r", 2
    [out] = plgpu.elementwise_inline_asm(
        code,
        args=[codes],
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return out
