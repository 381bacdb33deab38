"""Codes of 8 bits to bfloat16 inside of kernels: four codes in 5 (int8) or 10 (e4m3) instructions.

The compiler alone converts codes one at a time, through float32, with instructions of which a
processor of an H200 does 16 a clock. That is some 4 TB of codes a second on all processors, and the
memory delivers 4.3. Here a byte permutation spreads two codes over two bfloat16.

    int8    A bfloat16 whose high byte is 0 is the number of its low byte times 2^-133. With its sign
            bit turned, a code is 128 more, as a number from 0 to 255. One `fma` multiplies by
            2^127, the largest power of bfloat16, and takes the 128 off again. So numbers are
            `factor` = 64 times too small.
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
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Shaped

# First come constants, and the instructions for all codes at once.
_FIRST = {
    "int8": "mov.b32 up, 0x7f007f00; mov.b32 down, 0xc000c000; xor.b32 x, {codes}, 0x80808080;",
    # The zero that is added is negative, so that the sign of a zero stays.
    "float8_e4m3fn": "mov.b32 up, 0x7b807b80; mov.b32 down, 0x80008000; mov.b32 x, {codes};",
}
# Two bytes of x to two numbers. An e4m3 is put into both bytes of its bfloat16.
_PAIR = {
    "int8": "prmt.b32 y, x, 0, {spread}; fma.rn.bf16x2 {out}, y, up, down;",
    "float8_e4m3fn": """prmt.b32 z, x, 0, {spread}; shr.u32 y, z, 4; and.b32 y, y, 0x07f007f0;
lop3.b32 y, z, 0x80008000, y, 0xea; fma.rn.bf16x2 {out}, y, up, down;""",
}
_SPREAD = {"int8": ("0x4140", "0x4342"), "float8_e4m3fn": ("0x1100", "0x3322")}


def factor(kind: DTypeLike, *, interpret: bool = False) -> float:
    """Return the factor by which numbers are too small."""
    return 64.0 if jnp.dtype(kind) == jnp.int8 and not interpret else 1.0


def assembly(kind: DTypeLike) -> str:
    """Return assembly from four codes in a register $2 to bfloat16 in registers $0 and $1."""
    return _assembly(jnp.dtype(kind).name, "$2", "$0", "$1")


def pair(kind: DTypeLike) -> str:
    """Return assembly from two codes in the low half of a register $1 to bfloat16 in $0."""
    return _assembly(jnp.dtype(kind).name, "$1", "$0")


def _assembly(kind: str, codes: str, *out: str) -> str:
    pairs = (
        _PAIR[kind].format(spread=spread, out=register)
        for spread, register in zip(_SPREAD[kind], out, strict=False)
    )
    first = _FIRST[kind].format(codes=codes)
    return f"{{ .reg .b32 x, y, z, up, down; {first}\n" + "\n".join(pairs) + " }"


def numbers(
    codes: Shaped[Array, "N K"], kind: DTypeLike, *, interpret: bool
) -> BFloat16[Array, "N K"]:
    """Return codes as bfloat16, which holds them exactly, `factor` times too small.

    Args:
      codes: int8 or e4m3; or their bytes, as uint8.
      kind: dtype of the codes.
    """
    if interpret:
        return lax.bitcast_convert_type(codes, kind).astype(jnp.bfloat16)
    [out] = plgpu.elementwise_inline_asm(
        assembly(kind),
        args=[codes],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return out
