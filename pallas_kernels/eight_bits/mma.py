"""Codes of 8 bits for products by `mma.sync` in Pallas Mosaic."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import arith

from pallas_kernels.eight_bits.decode import assembly
from pallas_kernels.mma import Lane, Numbers
from pallas_kernels.registers import four_words, word, words
from pallas_kernels.tiles import BLOCK


def numbers_of(lane: Lane, codes: Any, *, kind: Any, inputs: int, piece: int) -> Numbers:
    """Return what makes numbers of codes [outputs, inputs] in memory.

    Args:
      piece: how many outputs lie between a piece and the next.
    """
    of_output = arith.muli(arith.addi(lane.first, lane.output), word(inputs))
    of_inputs = arith.addi(arith.muli(lane.block, word(BLOCK)), arith.muli(lane.part, word(16)))
    start, code = arith.addi(of_output, of_inputs), assembly(kind)

    def numbers(block: int, which: int, below: int) -> list[list[Any]]:
        beyond = (which * piece + below * 8) * inputs + block * BLOCK
        four = four_words(codes, arith.addi(start, word(beyond)))
        return [words(code, 2, four_codes, effects=False) for four_codes in four]

    return numbers
