"""Codes of int4 times their scales, in registers of Mosaic kernels. See `dequantise.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.common.registers import twice, word, words
from pallas_kernels.int4_matmul.dequantise import DOWN, UP, scaled, times

_SCALED = scaled("$3", "$4", "$4", "$5", "$5")


class Half(NamedTuple):
    """The half of bytes that a thread decodes, in registers: a mask, and the factor of scales."""

    mask: Any
    up: Any


def halves() -> tuple[Half, Half]:
    """Return the low and the high half."""
    low, high = (
        Half(word(m), twice(up)) for m, up in zip((0x0F0F0F0F, 0xF0F0F0F0), UP, strict=True)
    )
    return low, high


def factors(scale: Any, half: Half, *, effects: bool) -> tuple[Any, Any]:
    """Return the factors for `numbers`, from a scale that a register holds twice, in bfloat16."""
    up, down = (
        words(times("$0", "$1", "$2"), 1, scale, by, effects=effects)[0]
        for by in (half.up, twice(DOWN))
    )
    return up, down


def of_outputs(scales: Any, half: Half) -> list[tuple[Any, Any]]:
    """Return the factors for each scale that a thread has of an array of bfloat16."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    pairs = (vector.broadcast(pair, vector.extract(s, [], [0])) for s in scales.registers.flat)
    return [factors(scale, half, effects=True) for scale in pairs]


def numbers(codes: Any, half: Half, by: tuple[Any, Any], *, effects: bool) -> list[Any]:
    """Return four codes times a scale in two registers of bfloat16, 2^40 times too small."""
    return words(_SCALED, 2, codes, half.mask, *by, effects=effects)
