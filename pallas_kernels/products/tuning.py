"""Tile sizes of the product of few rows, by the size of the weight."""

from __future__ import annotations

from pallas_kernels.products.triton import Tiling

# Measured on an NVIDIA H200 (jax 0.11.2, bfloat16, 2 rows; 16 take at most 5 % more), us a product and TB/s: 1536 x 2560
# 4.4 and 1.8, 2048 x 1536 3.7 and 1.7, 6144 x 1536 7.1 and 2.7, 4096 x 2816 7.8 and 2.9, 2816 x 8192 13.1 and 3.5,
# 21504 x 5376 55 and 4.2. XLA's own, tuned by trying: 7.0, 3.9, 6.4, -, 13.0, and 1 us to add its splits.
WIDE = 2560  # columns from which blocks of 128 are better than of 64
PROGRAMS = 132  # one for each of an H200's multiprocessors
MOST_SPLITS = 16  # they are written and read again


def tiling_for(inputs: int, columns: int) -> Tiling:
    """Return a tiling with even splits, if there are any, and enough of them to fill the GPU."""
    block, stages = (128, 4) if columns >= WIDE else (64, 6)
    blocks = -(-columns // block)
    even = [s for s in range(1, MOST_SPLITS + 1) if inputs % (64 * s) == 0] or [1]
    splits = next((s for s in even if s * blocks >= PROGRAMS), even[-1])
    return Tiling(block, 64, splits, warps=4, stages=stages)
