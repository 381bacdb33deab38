"""Tile sizes of the Triton kernels, by the mean number of tokens per expert."""

from __future__ import annotations

from pallas_kernels.experts.launch import Tiling
from pallas_kernels.experts.triton import Block
from pallas_kernels.grouped.triton import Cut

# Measured on an NVIDIA H200 (jax 0.11.2, bfloat16) with the experts of 26B-A4B: 2816 x 704, and 8
# of 128 per token. The kernels of one layer take:
#
#   tokens                    2 (equal)    8   16   32   64  128  256  512
#   microseconds                     33  146  225  308  347  357  368  384
#   times the reading time          1.5  1.0  1.0  1.0  1.0  1.0  1.0  1.1
#
# The reading time is that of reading the experts in use once at 4.3 TB/s. 2,048 tokens take 692 us
# and 4,096 take 1,157 us; their arithmetic alone would take 250 and 500 us.
#
# Blocks of 32 columns were slower in every case tried (up to 32 tokens). Several programs for the
# inputs of one block were no faster for 2 tokens. No block needs more than the 163 KiB of shared
# memory that a program has on an A100.
TABLE = (
    # Each row: most tokens per expert (mean), tiling.
    (0.75, Tiling(16, Block(64, 128, warps=4, stages=4), Block(64, 64, warps=4, stages=4))),
    (4.0, Tiling(16, Block(64, 128, warps=4, stages=5), Block(128, 64, warps=4, stages=4))),
    (12.0, Tiling(16, Block(128, 64, warps=4, stages=5), Block(128, 64, warps=4, stages=4))),
    (24.0, Tiling(32, Block(128, 64, warps=8, stages=5), Block(128, 64, warps=4, stages=4))),
    (64.0, Tiling(64, Block(128, 64, warps=8, stages=4), Block(128, 64, warps=8, stages=4))),
    (
        float("inf"),
        Tiling(128, Block(128, 32, warps=8, stages=4), Block(256, 32, warps=8, stages=4)),
    ),
)


def _coded(rows: int, gate_up: tuple[int, ...], down: tuple[int, ...]) -> Tiling:
    """Return a tiling for codes from (outputs, splits, unroll, warps, stages) of both products."""
    cuts = (
        Cut(rows, outputs, splits, unroll, warps, stages, early=True)
        for outputs, splits, unroll, warps, stages in (gate_up, down)
    )
    return Tiling(rows, *cuts)


EIGHT_BITS = (
    (0.2, _coded(8, (64, 11, 2, 2, 2), (64, 1, 2, 2, 4))),
    (0.5, _coded(8, (64, 2, 2, 2, 3), (64, 1, 2, 2, 4))),
    (2.0, _coded(8, (64, 1, 2, 2, 4), (64, 1, 2, 2, 4))),
    (16.0, _coded(16, (64, 1, 2, 4, 3), (64, 1, 2, 2, 4))),
    (48.0, _coded(32, (64, 1, 2, 2, 3), (128, 1, 1, 2, 4))),
    (float("inf"), _coded(128, (64, 1, 1, 4, 4), (128, 1, 1, 4, 4))),
)
# The same for codes of 4 bits. Microseconds, with some of the loop around a product:
#
#   tokens           2 (equal)    8   32  128  512
#   gate and up             26   61  119  124  247
#   down                    16   34   58   62  118
#
# Without shared inputs gate and up take 61 for 2 tokens, and 79 for 8. Tiles of 32 rows take 241 and
# 86 for 128 tokens, and tiles of 64 rows 256 and 139 for 512.
FOUR_BITS = (
    (0.2, _coded(8, (64, 22, 1, 1, 2), (64, 1, 1, 1, 5))),
    (0.5, _coded(8, (64, 2, 1, 1, 3), (128, 1, 1, 2, 6))),
    (2.0, _coded(8, (64, 1, 1, 1, 4), (128, 1, 1, 2, 4))),
    (16.0, _coded(16, (64, 1, 1, 1, 3), (128, 1, 1, 2, 4))),
    (48.0, _coded(32, (64, 1, 1, 1, 4), (128, 1, 1, 2, 4))),
    (float("inf"), _coded(64, (64, 1, 1, 4, 4), (128, 1, 1, 4, 4))),
)


def tiling_for(tokens_an_expert: float, bits: int = 16) -> Tiling:
    """Return the tiling for this mean number of tokens per expert.

    It is the first row of the table whose limit is not exceeded.

    Args:
      bits: of a weight: 16, or 8 or 4 where it is a code.
    """
    table = {16: TABLE, 8: EIGHT_BITS, 4: FOUR_BITS}[bits]
    return next(tiling for most, tiling in table if tokens_an_expert <= most)
