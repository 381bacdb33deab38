"""Tile sizes of the Triton kernel, by rows."""

from __future__ import annotations

import dataclasses

from pallas_kernels.grouped.coding import HALF
from pallas_kernels.grouped.triton import Cut

# Measured on an NVIDIA H200 (jax 0.11.2, bfloat16, int4 in groups of 32), in microseconds with some
# 3 of the loop around it:
#
#   inputs x outputs       rows  2    16    32   128   512
#   5376 x 43008                48     -    72   178   590
#   21504 x 5376                31    34     -     -     -
#   2816 x 8192                9.8  11.7     -     -     -
#   4096 x 2816                8.0     -     -     -     -
#   2112 x 2816                6.6     -     -     -     -
#
# bfloat16 takes 115, 64, 18 and 12 for the first four at 2 rows. Tiles of 64 x 128 and 128 x 128 took
# 200 and 274 for 128 rows. All are `early`, so that numbers are the same ones in a plain pass and in
# a verify pass, whatever their rows.
TABLE = (
    # Each row: most rows of x, cut.
    (8, Cut(8, 128, warps=2, stages=6, early=True)),
    (16, Cut(16, 128, warps=2, stages=6, early=True)),
    (32, Cut(32, 128, warps=2, stages=4, early=True)),
    (float("inf"), Cut(64, 256, warps=4, stages=4, early=True)),
)
# Warps that keep all processors of an H200 reading.
WARPS = 132 * 8


def cut_for(rows: int, blocks: int, outputs: int, scale_bytes: int = 2) -> Cut:
    """Return how to cut a product: the first row of the table whose limit is not exceeded, `fitted`."""
    cut = next(cut for most, cut in TABLE if rows <= most)
    return fitted(cut, rows, blocks, outputs, scale_bytes)


def fitted(cut: Cut, rows: int, blocks: int, outputs: int, scale_bytes: int = 2) -> Cut:
    """Return a cut whose outputs, splits and steps divide these sizes.

    There are as many splits as keep the GPU busy. A split reads 3 blocks at least, because its part
    of the result is written and read again.

    Args:
      scale_bytes: of a scale or of a zero, whichever is shorter. With few rows there are no more
        warps than let each thread load 4 bytes of scales: see `operand.FourBits`.
    """
    tile = min(cut.outputs, outputs & -outputs)
    warps = cut.warps
    if cut.rows <= 16:
        warps = max(1, min(warps, tile * scale_bytes // 128))
    tiles = outputs // tile * -(-rows // cut.rows)
    divisors = [s for s in range(1, blocks + 1) if blocks % s == 0 and blocks // s >= 3] or [1]
    splits = next((s for s in divisors if tiles * s * warps >= WARPS), divisors[-1])
    cut = cut.dividing(outputs, blocks // splits)
    return dataclasses.replace(cut, splits=splits, warps=warps)


PROCESSORS = 132  # of an H200
TILE = 64  # outputs of a warpgroup of the Mosaic kernel
GROUPS = 4  # warpgroups of a block
FEWEST_MOSAIC_ROWS = 33
MOSAIC_ROWS = 128  # at most; sums take half of all registers then
SHARED_BYTES = 224 << 10  # of a block


@dataclasses.dataclass(frozen=True)
class MosaicCut:
    """How the Mosaic kernel cuts a product, in tiles of 256 outputs.

    Attributes:
      splits: blocks of threads that share the inputs of a tile.
      stages: blocks of inputs that the ring in shared memory holds, 3 at least.
      whole: how many tiles come first, which are not split. They are as many as all processors take
        once or several times.
    """

    splits: int = 1
    stages: int = 4
    whole: int = 0


def pieces(rows: int) -> int:
    """Return in how many pieces of rows the Mosaic kernel writes its result."""
    return -(-rows // 64)


def padded(rows: int) -> int:
    """Return how many rows the Mosaic kernel takes for some: a multiple of 8 in each piece."""
    return -(-rows // (8 * pieces(rows))) * 8 * pieces(rows)


def mosaic_cut_for(rows: int, blocks: int, outputs: int) -> MosaicCut | None:
    """Return how the Mosaic kernel cuts a product; None where it does not fit."""
    if rows > MOSAIC_ROWS or outputs % (GROUPS * TILE):
        return None
    rows, tiles, found = padded(rows), outputs // (GROUPS * TILE), []
    # Nanoseconds of a processor for a tile: the arithmetic, or its share of reading.
    tile_ns = blocks * max(1024 * rows / 128 / 1.3, 9216 / 30)
    for splits in range(1, min(12, blocks // 8) + 1):
        for whole in {0, tiles // PROCESSORS * PROCESSORS if splits > 1 else 0}:
            rest = tiles - whole
            if not rest:
                continue
            time = -(-rest * splits // PROCESSORS) * (tile_ns / splits + 2000)
            if whole:
                time += whole / PROCESSORS * (tile_ns + 2000) + 2000
            if splits > 1:  # parts are written and read
                time += 1500 + 8 * splits * rows * rest * GROUPS * TILE / 4000
            found.append((time, splits, whole))
    _, splits, whole = min(found)
    step = GROUPS * TILE * HALF + 2 * HALF * 2 * rows + 2 * 2 * GROUPS * TILE
    result = GROUPS * rows // pieces(rows) * TILE * (4 if splits > 1 else 2)
    stages = min(8, (SHARED_BYTES - result) // step)
    return MosaicCut(splits, stages, whole) if stages >= 3 else None
