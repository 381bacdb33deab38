"""A product of few rows with four-bit codes in Pallas Mosaic, for Hopper: TMA loads, mma.sync multiplies.

`pallas_kernels/mma.py` says how it multiplies, and `decode.py` how codes become numbers. Of the 32 bytes
of a block two threads take the low halves of 16 each, and two others the high halves. So all codes that
a thread has of an output have one scale.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float

from pallas_kernels.grouped import scaled
from pallas_kernels.grouped.coding import BLOCK, HALF, Codes
from pallas_kernels.grouped.decode import SHIFT
from pallas_kernels.grouped.mosaic import launch, loading
from pallas_kernels.grouped.tuning import ROWS, MmaCut
from pallas_kernels.mma import Lane, Numbers, add_products, rows_ring, write
from pallas_kernels.mosaic import Steps
from pallas_kernels.registers import at, four_words, i32, word, words
from pallas_kernels.tiles import TILE

_TWICE = "prmt.b32 $0, $1, 0, 0x1010;"


def _steps(
    x_ref, codes_ref, scales_ref, ring, x_ring, scale_ring, *, group: int, cut: MmaCut
) -> Steps:
    """Return how `cut.blocks` blocks of inputs are multiplied.

    Args:
      group: inputs that share a scale.
    """
    rows = x_ring.shape[1]
    load_weight = loading(codes_ref, scales_ref, ring, scale_ring, group=group, cut=cut)

    def load(tile, row_tile, step, place, there):
        load_weight(tile, step, place, there)
        x = x_ref.at[pl.ds(row_tile * rows, rows), pl.ds(step * cut.inputs, cut.inputs)]
        plgpu.copy_gmem_to_smem(x, x_ring.at[place], there)

    def multiply(sums, place):
        refs = ring.at[place], scale_ring.at[place]
        numbers = functools.partial(numbers_of, group=group, outputs=cut.outputs, piece=TILE)
        return add_products(sums, x_ring.at[place], refs, numbers)

    def finish(total, first):
        return total * 2.0**SHIFT

    def write_rows(result, out_ref, first):
        count, width = out_ref.shape
        for row in range(0, count, ROWS):
            to = out_ref.at[pl.ds(row, 1), pl.ds(first, TILE)]
            write(result, to, row, width, shared=False, rows=count - row)

    return Steps(load, multiply, finish, write_rows)


def numbers_of(
    lane: Lane, codes: Any, scales: Any, *, group: int, outputs: int, piece: int
) -> Numbers:
    """Return what makes numbers of codes [blocks, outputs, 32] and scales [groups, outputs] in memory.

    Args:
      piece: how many outputs lie between a piece and the next.
    """
    half, high = arith.andi(lane.part, word(1)), arith.shrui(lane.part, word(1))
    is_high = arith.cmpi(arith.CmpIPredicate.ne, high, word(0))
    own = scaled.Half(*(arith.select(is_high, b, a) for a, b in zip(*scaled.halves(), strict=True)))
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
        by = scaled.factors(scale, own, effects=False)
        return [scaled.numbers(eight, own, by, effects=False) for eight in codes_of_thread]

    return numbers


def linear_mma(
    x: Float[Array, "R K"], weight: Codes, *, group: int, dtype: DTypeLike, cut: MmaCut
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.grouped.linear`, which checks them."""

    def x_ring(rows: int) -> Any:
        return rows_ring(cut.stages, rows, cut.inputs)

    how: Any = dict(group=group, dtype=dtype, cut=cut, loads=3, sums="carried")
    return launch(_steps, x, weight, x_ring, **how)
