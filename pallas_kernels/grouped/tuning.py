"""Tile sizes of the Triton kernel, by rows."""

from __future__ import annotations

import dataclasses

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
