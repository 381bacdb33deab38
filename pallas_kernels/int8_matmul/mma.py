"""Codes of 8 bits for products by `mma.sync` in Pallas Mosaic."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array

from pallas_kernels.common.mma import Lane, Numbers, Refs, Weight, of_outputs
from pallas_kernels.common.mosaic import BY_OUTPUT, load_as
from pallas_kernels.common.registers import four_words, word, words
from pallas_kernels.common.tiles import BLOCK, TILE
from pallas_kernels.int8_matmul.dequantise import assembly, factor


def numbers_of(lane: Lane, codes: Any, *, kind: Any, inputs: int, piece: int) -> Numbers:
    """Return the conversion of codes [outputs, inputs] in memory.

    Args:
      piece: number of outputs between a piece and the next.
    """
    of_output = arith.muli(arith.addi(lane.first, lane.output), word(inputs))
    of_inputs = arith.addi(arith.muli(lane.block, word(BLOCK)), arith.muli(lane.part, word(16)))
    start, code = arith.addi(of_output, of_inputs), assembly(kind)

    def numbers(block: int, which: int, below: int) -> list[list[Any]]:
        beyond = (which * piece + below * 8) * inputs + block * BLOCK
        four = four_words(codes, arith.addi(start, word(beyond)))
        return [words(code, 2, four_codes, effects=False) for four_codes in four]

    return numbers


@dataclasses.dataclass(frozen=True)
class Int8Weight(Weight):
    """Codes of 8 bits.

    Attributes:
      codes: int8 or e4m3, [*experts, *matrices, outputs, inputs].
      scales: float32, of outputs: [*experts, *matrices, outputs].
    """

    codes: Array
    scales: Array

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.codes, self.scales

    @property
    def rings(self) -> tuple[Any, ...]:
        shape = self.config.stages, self.matrices * self.width, self.config.inputs
        return (plgpu.SMEM(shape, self.codes.dtype),)

    @property
    def loads(self) -> int:
        return self.matrices

    def copies(
        self, refs: Refs, rings: Refs, index: Refs, column: Array, step: Array, slot: Array
    ) -> list[tuple[Any, Any]]:
        (ring,), inputs = rings, self.config.inputs
        region = pl.ds(column * self.width, self.width), pl.ds(step * inputs, inputs)
        return [
            (
                refs[0].at[*index, *matrix, *region],
                ring.at[slot, pl.ds(i * self.width, self.width)],
            )
            for i, matrix in enumerate([(0,), (1,)] if self.gated else [()])
        ]

    def numbers(self, lane: Lane, *memory: Any) -> Numbers:
        kwargs: Any = dict(kind=self.codes.dtype, inputs=self.config.inputs, piece=self.apart)
        return numbers_of(lane, *memory, **kwargs)

    def factors(
        self, refs: Refs, index: Refs, column: Array, warpgroup: Array, rows: int
    ) -> list[Any]:
        factors = []
        for piece in range(self.config.pieces):
            matrix = (*index, piece) if self.gated else index
            own = refs[1].at[*matrix, self.outputs(column, warpgroup, piece)]
            if self.config.shared:
                own = of_outputs(own, rows)
            else:
                own = load_as(own, BY_OUTPUT, optimized=False)
                own = lax.broadcast_in_dim(own, (TILE, rows), [0])
            factors.append(own * factor(self.codes.dtype))
        return factors
