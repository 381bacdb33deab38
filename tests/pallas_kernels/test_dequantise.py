"""Codes to numbers by the instructions that a GPU runs, here on a CPU, for every code."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int4_matmul import coding, dequantise


def of_bits(bits: int) -> np.ndarray:
    """Return the two bfloat16 of a register."""
    return np.asarray([bits & 0xFFFF, bits >> 16], np.uint16).view(jnp.bfloat16)


def run(code: str, word: int, **registers: int) -> np.ndarray:
    """Return the four bfloat16 that assembly makes of the four bytes of a register, and of others."""
    values = {"$2": word, **registers}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    def permuted(x: int, y: int, selector: int) -> int:
        of_both = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        chosen = bytes(of_both[selector >> 4 * i & 7] for i in range(4))
        return int.from_bytes(chosen, "little")

    def multiplied_and_added(*bits: int) -> int:
        x, y, z = (of_bits(b).astype(np.float64) for b in bits)
        low, high = (x * y + z).astype(jnp.bfloat16).view(np.uint16)
        return int(low) | int(high) << 16

    operations = {
        "mov.b32": lambda x: x,
        "and.b32": lambda x, y: x & y,
        "or.b32": lambda x, y: x | y,
        "shl.b32": lambda x, y: x << y & 0xFFFFFFFF,
        "shr.u32": lambda x, y: x >> y,
        "prmt.b32": permuted,
        "fma.rn.bf16x2": multiplied_and_added,
    }
    statements = (s.strip() for s in re.sub(r"[{}]", "", code).split(";"))
    for statement in statements:
        operation, _, arguments = statement.partition(" ")
        if operation not in ("", ".reg"):
            to, *given = (a.strip() for a in arguments.split(","))
            values[to] = operations[operation](*map(value, given))
    return np.concatenate([of_bits(values["$0"]), of_bits(values["$1"])])


# Every byte at every place of a register, beside bytes with other bits.
BYTES = np.asarray([[b, b ^ 0xFF, b ^ 0xD5, b ^ 0x2A] for b in range(256)], np.uint8)


def of_every_byte(code: str, **registers: int) -> np.ndarray:
    words = (int.from_bytes(four.tobytes(), "little") for four in BYTES)
    return np.stack([run(code, word, **registers) for word in words]).astype(np.float32)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("kind", ["int4", "e2m1"])
def test_every_code_of_4_bits(kind: str, half: int) -> None:
    codes = BYTES >> 4 if half else BYTES & 15
    expected = coding.numbers(jnp.asarray(codes), kind)
    found = of_every_byte(dequantise._DECODE[kind, half])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("scale", [1.0, -0.0123, 3.4e-5, 2.0**-80, 1.99 * 2.0**33])
def test_every_int4_times_a_scale_is_rounded_once(scale: float, half: int) -> None:
    """Numbers are those of a product in bfloat16, shifted, also for unusual scales."""
    by = jnp.bfloat16(scale)
    registers = {
        "up": twice(by * jnp.bfloat16(dequantise.UP[half])),
        "down": twice(by * jnp.bfloat16(dequantise.DOWN)),
    }
    code = dequantise.scaled(("0x0f0f0f0f", "0xf0f0f0f0")[half], "up", "up", "down", "down")
    found = of_every_byte(code, **registers)
    codes = BYTES >> 4 if half else BYTES & 15
    expected = np.asarray(coding.numbers(jnp.asarray(codes), "int4").astype(jnp.bfloat16) * by)
    np.testing.assert_array_equal(found * 2.0**dequantise.SHIFT, expected.astype(np.float32))


def twice(number: Any) -> int:
    bits = int(np.asarray(number, jnp.bfloat16).view(np.uint16))
    return bits << 16 | bits
