"""Tile sizes of the kernels, by the mean number of tokens per expert."""

from __future__ import annotations

from pallas_kernels.dispatch import HOPPER_SHARED_BYTES
from pallas_kernels.experts.launch import Tiling
from pallas_kernels.experts.tile_config import MmaConfig, MosaicConfig
from pallas_kernels.experts.triton import Block
from pallas_kernels.int4_matmul.triton import TileConfig

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
# memory that a program has on an A100. `tiling_for` makes them smaller for GPUs with less.
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
    configs = (
        TileConfig(rows, outputs, splits, unroll, warps, stages, early=True)
        for outputs, splits, unroll, warps, stages in (gate_up, down)
    )
    return Tiling(rows, *configs)


# The same for codes of 8 bits (int8), gate and up with the sum of shared inputs, then down, beside
# the time of reading the experts in use at 4.3 TB/s. 16 to 64 tokens an expert lie between sizes
# that were measured, and so do 9 to 16 tokens.
#
#   tokens                  1     8    32   128   512  2048
#   gate and up            14    61   115   135   209   555
#   reading                 7    47   106   118   118   118
#   down                    9    30    61    73   118   301
#   reading                 4    24    53    59    59    59
#
# Blocks of 64 inputs are half a line of memory: gate and up take 97 for 8 tokens, and 186 for 32.
# From 16 rows on four warps of `coded` use the instructions for whole groups of warps, for which
# Triton takes bytes apart: 200 for 128 tokens. So `triton` has the middle sizes. Its down takes 91
# for 128 tokens. 512 tokens here and below are without `mosaic.py`, which has them on Hopper.
EIGHT_BITS = (
    (0.2, _coded(8, (64, 11, 2, 4, 2), (64, 1, 2, 2, 4))),
    (0.75, _coded(8, (64, 2, 2, 4, 3), (64, 1, 2, 2, 4))),
    (4.0, _coded(8, (64, 1, 2, 4, 3), (64, 1, 2, 2, 4))),
    (
        16.0,
        Tiling(16, Block(64, 128, warps=4, stages=5), TileConfig(16, 64, 1, 2, 2, 4, early=True)),
    ),
    (48.0, Tiling(32, Block(64, 128, warps=4, stages=4), Block(128, 64, warps=4, stages=4))),
    (64.0, Tiling(64, Block(128, 64, warps=8, stages=4), Block(128, 64, warps=8, stages=4))),
    (float("inf"), _coded(128, (64, 1, 1, 4, 4), (128, 1, 1, 4, 4))),
)


# The same for codes of 4 bits (int4 in groups of 32):
#
#   tokens                  1     8    32   128   512
#   gate and up            11    44    89   108   236
#   reading                 4    26    59    66    66
#   down                    7    22    38    47    97
#   reading                 2    13    30    33    33
#
# Tiles of 16 rows take 108 and 42 for 32
# tokens, and tiles of 8 rows 114 and 56 for 128. nvfp4, whose scales are read one step ahead only,
# takes 192 for gate and up of 32 tokens with tiles of 16 rows.
FOUR_BITS = (
    (0.2, _coded(8, (64, 22, 1, 1, 2), (64, 1, 1, 1, 5))),
    (0.5, _coded(8, (64, 11, 1, 1, 3), (128, 1, 1, 2, 6))),
    (4.0, _coded(8, (64, 1, 1, 1, 4), (128, 1, 1, 2, 4))),
    (16.0, _coded(16, (64, 1, 1, 1, 3), (128, 1, 1, 2, 4))),
    (48.0, _coded(32, (64, 1, 1, 1, 4), (128, 1, 1, 2, 4))),
    (float("inf"), _coded(64, (64, 1, 1, 4, 4), (128, 1, 1, 4, 4))),
)


def tiling_for(
    tokens_an_expert: float, bits: int = 16, shared_memory: int = HOPPER_SHARED_BYTES
) -> Tiling:
    """Return the tiling for this mean number of tokens per expert.

    It is the first row of the table whose limit is not exceeded. GPUs with less shared memory than
    Hopper load fewer steps ahead.

    Args:
      bits: of a weight: 16, or 8 or 4 where it is a code.
      shared_memory: bytes of shared memory that a program can have.
    """
    table = {16: TABLE, 8: EIGHT_BITS, 4: FOUR_BITS}[bits]
    tiling = next(tiling for at_most, tiling in table if tokens_an_expert <= at_most)
    gate_up, down = (
        config.fitting(tiling.rows, bits // 8, matrices, shared_memory)
        if isinstance(config, Block)
        else config
        for config, matrices in ((tiling.gate_up, 2), (tiling.down, 1))
    )
    return Tiling(tiling.rows, gate_up, down)


def _mosaic(rows: tuple[int, ...], gate_up: tuple[int, int], down: tuple[int, int]) -> Tiling:
    """Return a tiling for the kernels of `mosaic.py` from (columns, stages) of both products."""
    return Tiling(rows[-1], MosaicConfig(rows, *gate_up), MosaicConfig(rows, *down))


def _few_tokens_tiling(down_stages: int) -> Tiling:
    """Return a tiling of 8 rows for the kernels of `mma.py`."""
    gate_up = MmaConfig((8,), groups=2, stages=4, per_processor=2)
    down = MmaConfig((8,), groups=1, stages=down_stages, per_processor=3, shared=False)
    return Tiling(8, gate_up, down)


# The Mosaic kernels, where these are faster. Each row: more tokens per expert than this, and at
# most this. Measured like the others. For many tokens (`mosaic.py`) whole calls with routing,
# copies of tokens and sums; best of the configs:
#
#   tokens                     32   128   512
#   int8, Triton              189   217   342
#   int8, Mosaic              212   232   303, of which 174 and 107 are products
#   int4, Triton              137   164   349
#   int4, Mosaic              147   176   222, of which 124 and 74 are products
#
# Since then codes become numbers in fewer instructions. In one run gate and up, and down, of 1, 8,
# 32, 128 and 512 tokens (the last ones Mosaic's) took:
#
#   int8   13.4  57.2  117   137   160        7.5  31.9  61.3  71.8  96.4
#   int4   9.2   42.7  85.6  110   121        6.6  22.5  35.6  42.3  72.0
#
# Copies and sums are 7 of these for 32 tokens, and 15 for 512. Blocks take turns in waiting, so
# that many on a processor are fast: int4 with two stages and two columns, 285 for 512 tokens. Two
# warpgroups a block took 395 for int8 and 128 tokens, and 433 for 512.
#
# For few tokens (`mma.py`) gate and up, down, and all kernels of a call:
#
#   tokens                 1     2     4     8    16    32    64   128   256
#   int4, Triton         9.1    15    26    41    80    86   100   108   176
#                        6.9   9.1    13    22    28    35    40    42    57
#                         22    32    47    72   114   128   148   158   245
#   int4, mma            8.1    13    22    33    49    65    75    89   111
#                        6.4   8.7    13    20    28    36    40    43    60
#                         21    29    44    63    89   114   129   148   190
#   int8, Triton                            56   101   110         135
#                                           31    45    58          71
#                                           94   153   175         214
#   int8, mma                               52    79   106         136
#                                           30    46    62
#                                           92   137   181         223
#
# The totals of 8 and 32 tokens of int4 are added up of runs with other configs, and 1 token was run
# with one warpgroup for gate and up. Where warps of down share inputs it takes 21 and 41 for 8 and
# 32 tokens. 64 tokens in tiles of 16 rows take 89 and 47. Results that went through shared memory
# and TMA took 24 and 47 for down of 8 and 32 tokens: a warpgroup waited for the last one to be
# read. Of e4m3, 16 tokens take 85 and 51, and 109 and 46 in Triton.
_TO_16 = (8, 16)
MOSAIC_EIGHT_BITS = (
    (0.4, 1.25, _few_tokens_tiling(down_stages=2)),
    (16.0, 48.0, _mosaic((32, 64), (1, 3), (1, 3))),
)
MOSAIC_FOUR_BITS = (
    (0.1, 4.0, _few_tokens_tiling(down_stages=3)),
    (
        4.0,
        16.0,
        Tiling(
            16,
            MmaConfig(_TO_16, groups=1, stages=3, per_processor=3, shared=False),
            MmaConfig(_TO_16, groups=2, pieces=1, stages=4, per_processor=2, shared=False),
        ),
    ),
    (16.0, 48.0, _mosaic((32, 48), (1, 3), (2, 3))),
)


def mosaic_tiling_for(tokens_an_expert: float, bits: int) -> Tiling | None:
    """Return the tiling for the Mosaic kernels; None where those of Triton are faster."""
    table = {16: (), 8: MOSAIC_EIGHT_BITS, 4: MOSAIC_FOUR_BITS}[bits]
    return next(
        (t for more_than, at_most, t in table if more_than < tokens_an_expert <= at_most), None
    )
