"""A product of few rows with 4-bit codes in Pallas Mosaic, for Hopper, by TMA and `mma.sync`.

`common/mma.py` has the products, and `dequantise.py` the conversion. Of the 32 bytes of a block two
threads take the low halves of 16 each, and two others the high halves. So all codes that a thread
has of an output have one scale.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float

from pallas_kernels.common.mma import Lane, Numbers, Refs, Weight, add_products, rows_ring, write
from pallas_kernels.common.mosaic import StepOps
from pallas_kernels.common.registers import at, four_words, i32, word, words
from pallas_kernels.common.tiles import TILE
from pallas_kernels.int4_matmul import dequantise_mosaic
from pallas_kernels.int4_matmul.coding import BLOCK, HALF, Codes
from pallas_kernels.int4_matmul.dequantise import SHIFT
from pallas_kernels.int4_matmul.mosaic import LINE, launch, loading
from pallas_kernels.int4_matmul.tuning import ROWS, MmaConfig

_TWICE = "prmt.b32 $0, $1, 0, 0x1010;"


def _steps(
    x_ref, codes_ref, scales_ref, ring, x_ring, scale_ring, *, group: int, config: MmaConfig
) -> StepOps:
    """Return the operations of a step of `config.blocks` blocks of inputs.

    Args:
      group: inputs that share a scale.
    """
    rows = x_ring.shape[1]
    load_weight = loading(codes_ref, scales_ref, ring, scale_ring, group=group, config=config)

    def load(tile, row_tile, step, slot, full):
        load_weight(tile, step, slot, full)
        x = x_ref.at[pl.ds(row_tile * rows, rows), pl.ds(step * config.inputs, config.inputs)]
        plgpu.copy_gmem_to_smem(x, x_ring.at[slot], full)

    def multiply(sums, slot):
        refs = ring.at[slot], scale_ring.at[slot]
        numbers = functools.partial(numbers_of, group=group, outputs=config.outputs, piece=TILE)
        return add_products(sums, x_ring.at[slot], refs, numbers)

    def finish(total, first):
        return total * 2.0**SHIFT

    return StepOps(load, multiply, finish)


def _write_rows(result: Array, out_ref: Any, first: Array) -> None:
    """Write sums [64, rows] of the outputs from `first` on."""
    count, width = out_ref.shape
    for row in range(0, count, ROWS):
        to = out_ref.at[pl.ds(row, 1), pl.ds(first, TILE)]
        write(result, to, row, width, shared=False, rows=count - row)


def numbers_of(
    lane: Lane, codes: Any, scales: Any, *, group: int, outputs: int, piece: int
) -> Numbers:
    """Return the conversion of codes [blocks, outputs, 32] and scales [groups, outputs] in memory.

    Args:
      piece: number of outputs between a piece and the next.
    """
    half, high = arith.andi(lane.part, word(1)), arith.shrui(lane.part, word(1))
    is_high = arith.cmpi(arith.CmpIPredicate.ne, high, word(0))
    own = dequantise_mosaic.Half(
        *(arith.select(is_high, b, a) for a, b in zip(*dequantise_mosaic.halves(), strict=True))
    )
    first = arith.addi(lane.first, lane.output)
    of_codes = arith.addi(arith.muli(first, word(HALF)), arith.muli(half, word(HALF // 2)))
    of_codes = arith.addi(of_codes, arith.muli(lane.block, word(outputs * HALF)))
    of_scales = arith.muli(first, word(2))
    of_scales = arith.addi(of_scales, arith.muli(lane.block, word(2 * BLOCK * outputs // group)))
    # The high halves are the second group of a block, unless groups are longer.
    second = arith.muli(high, word(2 * outputs)) if group < BLOCK else word(0)

    def numbers(block: int, which: int, below: int) -> list[list[Any]]:
        output = which * piece + below * 8
        start = word((block * outputs + output) * HALF)
        codes_of_thread = four_words(codes, arith.addi(of_codes, start))
        start = word(2 * (block * BLOCK // group * outputs + output))
        where = at(scales, arith.addi(arith.addi(of_scales, second), start))
        bits = llvm.load(ir.IntegerType.get_signless(16), where)
        (scale,) = words(_TWICE, 1, arith.extui(i32(), bits), effects=False)
        by = dequantise_mosaic.factors(scale, own, effects=False)
        return [
            dequantise_mosaic.numbers(eight, own, by, effects=False) for eight in codes_of_thread
        ]

    return numbers


@dataclasses.dataclass(frozen=True)
class Int4Weight(Weight):
    """Codes of 4 bits.

    Attributes:
      codes: uint8, [*experts, matrices * blocks, lines of a block, 128]. Gate and up of a block are
        neighbours.
      scales: bfloat16, [*experts, matrices * groups, outputs].
      group: inputs that share a scale.
    """

    codes: Array
    scales: Array
    group: int

    @classmethod
    def of(
        cls, weight: Codes, config: Any, group: int, *, experts: bool = False, gated: bool = False
    ) -> Int4Weight:
        """Return a weight whose codes are [*experts, blocks, *matrices, outputs, 32]."""
        assert weight.scales is not None
        outputs, leading = weight.codes.shape[-2], weight.codes.shape[: 1 if experts else 0]
        codes = weight.codes.reshape(*leading, -1, outputs * HALF // LINE, LINE)  # as they lie
        return cls(config, gated, codes, weight.scales.reshape(*leading, -1, outputs), group)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.codes, self.scales

    @property
    def rings(self) -> tuple[Any, ...]:
        stages, blocks = self.config.stages, self.matrices * self.config.blocks
        lines, groups = self.width * HALF // LINE, blocks * BLOCK // self.group
        return (
            plgpu.SMEM((stages, blocks, lines, LINE), self.codes.dtype),
            plgpu.SMEM((stages, groups, self.width), self.scales.dtype),
        )

    @property
    def loads(self) -> int:
        return 2

    def copies(
        self, refs: Refs, rings: Refs, index: Refs, column: Array, step: Array, slot: Array
    ) -> list[tuple[Any, Any]]:
        copies = []
        for ref, ring in zip(refs, rings, strict=True):
            _, count, width = ring.shape[:3]
            region = pl.ds(step * count, count), pl.ds(column * width, width)
            copies.append((ref.at[*index, *region], ring.at[slot]))
        return copies

    def numbers(self, lane: Lane, *memory: Any) -> Numbers:
        outputs = self.config.outputs * self.config.pieces
        return numbers_of(lane, *memory, group=self.group, outputs=outputs, piece=self.apart)

    def factors(
        self, refs: Refs, index: Refs, column: Array, warpgroup: Array, rows: int
    ) -> list[Any]:
        return [2.0**SHIFT] * self.config.pieces


def linear_mma(
    x: Float[Array, "R K"], weight: Codes, *, group: int, dtype: DTypeLike, config: MmaConfig
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.int4_matmul.linear`, which checks them."""

    def x_ring(rows: int) -> Any:
        return rows_ring(config.stages, rows, config.inputs)

    kwargs: Any = dict(
        group=group, dtype=dtype, config=config, loads=3, sums="carried", write=_write_rows
    )
    return launch(_steps, x, weight, x_ring, **kwargs)
