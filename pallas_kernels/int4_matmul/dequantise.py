"""Codes of 4 bits to numbers inside of kernels, without the instructions that convert.

Triton alone converts codes one at a time, which takes several times as many instructions. Here a
byte permutation puts two bytes into the low halves of two bfloat16.

**int4 times its scale.** A bfloat16 whose high byte is 0 is the number of its low byte times
2^-133. So one `fma` makes a code times a scale of it, rounded once:

    byte * (scale * 2^93) - 8 * scale * 2^-40 = (byte - 8) * scale * 2^-40

The high four bits of a byte need no shift: they are 16 times as much. 2^133 is no bfloat16. Hence
numbers are 2^40 times too small (`SHIFT`), and sums are shifted back. They are otherwise those of a
product in bfloat16, if no scale is below 2^-86 or above 2^34. Eight codes take 10 instructions.

**Without a scale**, int4 is 128 + code, less 136. Both are exact. **e2m1** has its bits put where
bfloat16 has sign, exponent and fraction. That number is 2^126 times too small, which a product
makes good, also exactly.

The interpreter has no assembly. There the same numbers come from `coding.numbers`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, UInt8

from pallas_kernels.int4_matmul.coding import numbers

_LOW = "and.b32 x, $2, 0x0f0f0f0f;"
_HIGH = "shr.u32 x, $2, 4; and.b32 x, x, 0x0f0f0f0f;"
# c: the number subtracted from 128 + code.
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
_DECODE = {
    ("int4", 0): _INT4.format(half=_LOW, minus=_MINUS_136),
    ("int4", 1): _INT4.format(half=_HIGH, minus=_MINUS_136),
    ("e2m1", 0): _E2M1.format(mask="0x0f0f0f0f", sign="shl.b32 z, y, 4;", down=2),
    ("e2m1", 1): _E2M1.format(mask="0xf0f0f0f0", sign="mov.b32 z, y;", down=6),
}
SHIFT = 40
UP = 2.0 ** (133 - SHIFT), 2.0 ** (129 - SHIFT)
"""Factors of scales for the low and for the high half of bytes."""
DOWN = -8 * 2.0**-SHIFT
_SUBTRACT = "{ .reg .b32 minus; mov.b32 minus, 0xbf80bf80; fma.rn.bf16x2 $0, $2, minus, $1; }"
_MULTIPLY_ADD = "fma.rn.f32 $0, $1, $2, $3;"


def times(out: str, x: str, y: str) -> str:
    """Return assembly that multiplies two bfloat16 by two.

    The zero that is added keeps the sign of a zero.
    """
    return f"{{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 {out}, {x}, {y}, zero; }}"


def scaled(mask: str, up: str, next_up: str, down: str, next_down: str) -> str:
    """Return assembly from half of the bytes in $2 to four codes times their scales, in $0 and $1.

    Args:
      mask: of the half.
      up, down: scales times `UP` and `DOWN`, for the first two codes. Then those for the others.
    """
    return f"""{{ .reg .b32 x, y, z; and.b32 x, $2, {mask};
prmt.b32 y, x, 0, 0x4140; prmt.b32 z, x, 0, 0x4342;
fma.rn.bf16x2 $0, y, {up}, {down}; fma.rn.bf16x2 $1, z, {next_up}, {next_down}; }}"""


def half_numbers(
    packed: UInt8[Array, "N J"], kind: str, half: int, dtype: jnp.dtype, *, interpret: bool
) -> Float[Array, "N J"]:
    """Return the numbers of the low (0) or high (1) halves of bytes, exactly."""
    if interpret:
        return numbers(packed >> 4 if half else packed & 15, kind).astype(dtype)
    return _asm(_DECODE[kind, half], "=r,=r,r", 4, jnp.dtype(jnp.bfloat16), packed)


def scaled_numbers(
    packed: UInt8[Array, "N J"], scales: Float[Array, " N"], half: int
) -> Float[Array, "N J"]:
    """Return int4 of the low (0) or high (1) halves of bytes times scales times 2^-`SHIFT`.

    It is assembly: for bfloat16, and not interpreted.
    """
    up, down = (
        multiply(scales, jnp.full_like(scales, by), interpret=False)[:, None]
        for by in (UP[half], DOWN)
    )
    code = scaled(("0x0f0f0f0f", "0xf0f0f0f0")[half], "$3", "$4", "$5", "$6")
    return _asm(code, "=r,=r,r,r,r,r,r", 4, jnp.dtype(jnp.bfloat16), packed, up, down)


def multiply(x: Array, y: Array, *, interpret: bool) -> Array:
    """Return x * y, of bfloat16 where not interpreted."""
    return x * y if interpret else _asm(times("$0", "$1", "$2"), "=r,r,r", 2, x.dtype, x, y)


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
