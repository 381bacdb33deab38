"""Tile sizes of the Triton kernel, by rows."""

from __future__ import annotations

import dataclasses

from pallas_kernels.grouped.triton import Cut

# Compiled for an H200, not measured yet. All are `early`, so that numbers are the same ones in a
# plain pass and in a verify pass, whatever their rows.
TABLE = (
    # Each row: most rows of x, cut.
    (8, Cut(8, 128, unroll=1, warps=2, stages=6, early=True)),
    (16, Cut(16, 128, unroll=1, warps=2, stages=6, early=True)),
    (32, Cut(32, 128, unroll=1, warps=2, stages=4, early=True)),
    (64, Cut(64, 128, unroll=1, warps=4, stages=4, early=True)),
    (float("inf"), Cut(128, 128, unroll=1, warps=8, stages=4, early=True)),
)
# Programs that keep all processors of an H200 reading.
PROGRAMS = 132 * 4


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
    tiles = outputs // tile * -(-rows // cut.rows)
    divisors = [s for s in range(1, blocks + 1) if blocks % s == 0 and blocks // s >= 3] or [1]
    splits = next((s for s in divisors if tiles * s >= PROGRAMS), divisors[-1])
    cut = dataclasses.replace(cut.dividing(outputs, blocks // splits), splits=splits)
    if cut.rows > 16:
        return cut
    return dataclasses.replace(cut, warps=max(1, min(cut.warps, tile * scale_bytes // 128)))
