"""Codes to numbers inside of Triton kernels, without the instructions that convert.

Four bytes of 4-bit codes become eight bfloat16 in 11 instructions. Triton alone takes six times as
many, because it converts codes one at a time. Here a byte permutation puts two codes into the low
bits of two bfloat16 whose exponent is that of 128. So int4 is 128 + code, less 136. Both are exact.
e2m1 has its bits put where bfloat16 has sign, exponent and fraction. That number is 2^126 times too
small, which a product makes good, also exactly.

Four codes of 8 bits become four bfloat16 in 8 instructions (int8) or 12 (e4m3). Triton alone takes
conversions, of which a processor of an H200 does 16 a clock. That is some 4 TB of codes a second on
all processors, and the memory delivers 4.3. An int8 is its low 7 bits as 128 + x, less 128 or, where
it is negative, 256: that is its own high bit, put where bfloat16 has an exponent. An e4m3 gets its
bits put where bfloat16 has them, and is then 2^120 times too small.

The interpreter has no assembly. There the same numbers come from `coding.numbers`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, UInt8

from pallas_kernels.grouped.coding import numbers

_LOW = "and.b32 x, $2, 0x0f0f0f0f;"
_HIGH = "shr.u32 x, $2, 4; and.b32 x, x, 0x0f0f0f0f;"
# c: what is subtracted of 128 + code.
_INT4 = """{{ .reg .b32 x, y, one, c; mov.b32 one, 0x3f803f80; mov.b32 c, 0x{minus}{minus};
{half}
prmt.b32 y, x, 0x43434343, 0x4140; fma.rn.bf16x2 $0, y, one, c;
prmt.b32 y, x, 0x43434343, 0x4342; fma.rn.bf16x2 $1, y, one, c; }}"""
# c: 2^126. The zero that is added is negative, so that the sign of a zero stays.
_E2M1 = """{{ .reg .b32 x, y, z, zero, c; mov.b32 c, 0x7e807e80; mov.b32 zero, 0x80008000;
and.b32 x, $2, {mask};
prmt.b32 y, x, 0, 0x1404;
{sign} and.b32 z, z, 0x80008000; shr.u32 y, y, {down}; and.b32 y, y, 0x01c001c0; or.b32 y, y, z;
fma.rn.bf16x2 $0, y, c, zero;
prmt.b32 y, x, 0, 0x3424;
{sign} and.b32 z, z, 0x80008000; shr.u32 y, y, {down}; and.b32 y, y, 0x01c001c0; or.b32 y, y, z;
fma.rn.bf16x2 $1, y, c, zero; }}"""
_MINUS_136 = "c308"
_INT8 = """{ .reg .b32 x, s, y, c, one; mov.b32 one, 0x3f803f80;
and.b32 x, $2, 0x7f7f7f7f; and.b32 s, $2, 0x80808080;
prmt.b32 y, x, 0x43434343, 0x4140; prmt.b32 c, s, 0xc3c3c3c3, 0x4140;
fma.rn.bf16x2 $0, y, one, c;
prmt.b32 y, x, 0x43434343, 0x4342; prmt.b32 c, s, 0xc3c3c3c3, 0x4342;
fma.rn.bf16x2 $1, y, one, c; }"""
_E4M3 = """{ .reg .b32 y, s, zero, c; mov.b32 c, 0x7b807b80; mov.b32 zero, 0x80008000;
prmt.b32 y, $2, 0, 0x1404; and.b32 s, y, 0x80008000;
shr.u32 y, y, 4; and.b32 y, y, 0x07f007f0; or.b32 y, y, s; fma.rn.bf16x2 $0, y, c, zero;
prmt.b32 y, $2, 0, 0x3424; and.b32 s, y, 0x80008000;
shr.u32 y, y, 4; and.b32 y, y, 0x07f007f0; or.b32 y, y, s; fma.rn.bf16x2 $1, y, c, zero; }"""
_OF_BYTES = {"int8": _INT8, "float8_e4m3fn": _E4M3}
_DECODE = {
    ("int4", 0): _INT4.format(half=_LOW, minus=_MINUS_136),
    ("int4", 1): _INT4.format(half=_HIGH, minus=_MINUS_136),
    ("e2m1", 0): _E2M1.format(mask="0x0f0f0f0f", sign="shl.b32 z, y, 4;", down=2),
    ("e2m1", 1): _E2M1.format(mask="0xf0f0f0f0", sign="mov.b32 z, y;", down=6),
}
MULTIPLY = "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }"
_SUBTRACT = "{ .reg .b32 minus; mov.b32 minus, 0xbf80bf80; fma.rn.bf16x2 $0, $2, minus, $1; }"
_MULTIPLY_ADD = "fma.rn.f32 $0, $1, $2, $3;"


def assembly(kind: str, half: int = 0) -> str:
    """Return what makes bfloat16 of four bytes in $2: the first two numbers in $0, the others in $1.

    Args:
      kind: of 8 bits ("int8", "float8_e4m3fn") or of 4 ("int4", "e2m1").
      half: of bytes that hold two codes of 4 bits, 0 for the low one.
    """
    return _OF_BYTES[kind] if kind in _OF_BYTES else _DECODE[kind, half]


def half_numbers(
    packed: UInt8[Array, "N J"], kind: str, half: int, dtype: jnp.dtype, *, interpret: bool
) -> Float[Array, "N J"]:
    """Return the numbers of the low (0) or high (1) halves of bytes. A dtype holds them exactly."""
    if interpret:
        return numbers(packed >> 4 if half else packed & 15, kind).astype(dtype)
    return _asm(_DECODE[kind, half], "=r,=r,r", 4, jnp.dtype(jnp.bfloat16), packed)


def byte_numbers(
    codes: UInt8[Array, "N J"], of: jnp.dtype, dtype: jnp.dtype, *, interpret: bool
) -> Float[Array, "N J"]:
    """Return the numbers of bytes that are int8 or e4m3, none of them NaN, in a dtype that holds all."""
    if interpret:
        return lax.bitcast_convert_type(codes, of).astype(dtype)
    return _asm(_OF_BYTES[of.name], "=r,=r,r", 4, jnp.dtype(jnp.bfloat16), codes)


def multiply(x: Array, y: Array, *, interpret: bool) -> Array:
    """Return x * y, of bfloat16 where not interpreted."""
    return x * y if interpret else _asm(MULTIPLY, "=r,r,r", 2, x.dtype, x, y)


def subtract(x: Array, y: Array, *, interpret: bool) -> Array:
    """Return x - y, of bfloat16 where not interpreted."""
    return x - y if interpret else _asm(_SUBTRACT, "=r,r,r", 2, x.dtype, x, y)


def multiply_add(x: Array, y: Array, z: Array, *, interpret: bool) -> Array:
    """Return x * y + z of float32, in one instruction."""
    return x * y + z if interpret else _asm(_MULTIPLY_ADD, "=f,f,f,f", 1, z.dtype, x, y, z)


def _asm(code: str, constraints: str, pack: int, dtype: jnp.dtype, *args: Array) -> Array:
    """Apply assembly to `pack` neighbours at a time."""
    args = tuple(jnp.broadcast_to(x, args[0].shape) for x in args)
    [out] = plgpu.elementwise_inline_asm(
        code,
        args=args,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out
