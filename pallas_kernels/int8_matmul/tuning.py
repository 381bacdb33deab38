"""Tile sizes of the kernels, and where they are faster than XLA's product."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.common import tiles
from pallas_kernels.common.tiles import (
    BYTES_A_NS,
    FEW_ROWS,
    MANY_GROUPS,
    MANY_ROWS,
    TILE,
    SmallMConfig,
    config_of_many,
    padded,
    small_m_is_faster,
    split_options,
    with_stages,
)
from pallas_kernels.dispatch import processors
from pallas_kernels.int8_matmul.triton import TileConfig

MAX_ROWS = 256  # of Triton's kernel
MAX_SMALL_M_ROWS = 8  # of `small_m.py`

# Measured on an NVIDIA H200 (jax 0.11.2), microseconds with the sum of parts, and for 5376 x 43008
# with joining the first tiles with the last ones. XLA chooses tiles by timing them, and its choices
# differ from run to run: the best of up to four runs. In a whole step of 26B-A4B it took 14 for
# 2816 x 4224 and 2 rows, not 9. Products of bfloat16 are XLA's too.
#
#   inputs x outputs    rows  2     8      16     32     64     128
#   5376 x 43008   int8 XLA   58    57     85     88     110    153
#                  int8       62    65     64     75     82     121
#                  fp8 XLA         58     58     86     77     113
#                  fp8                           75     89
#                  bfloat16        131           128    111    119
#   21504 x 5376   int8 XLA         36     50     49     68     102
#                  int8       32    32     33     36     43     53
#                  fp8 XLA         43     43     49     50     98
#                  fp8                           38     44
#                  bfloat16        73            76     71     68
#   5376 x 16384   int8 XLA         29            40     48     58
#                  int8       23    24     26     26     31     39
#                  fp8                           27     37
#   5376 x 18432   int8 XLA   28 to 40     42
#                  int8       30
#   8192 x 5376    int8 XLA         15            24     32     46
#                  int8       14           14     18     21     25
#                  fp8                           17     22
#   2816 x 4224    int8 XLA         8.8    8.6    10.3   13.1   17.5
#                  int8             6.9    7.0    7.3    9.2    11.6
#                  fp8 XLA, fp8                  8.8, 7.2  11.3, 8.8
#   2112 x 2816    int8 XLA         8.2           10.5   14.0   18.5
#                  int8             5.2    5.2    5.6    6.9    8.9
#                  fp8 XLA, fp8                  10, 6.0   12, 6.9
#   2816 x 8192    int8 XLA         10.3          15.9   19.7   27.8
#                  int8             9.4    10.7   11.4   13.3   16.9
#                  fp8 XLA, fp8                  14, 12    18, 14
#   4096 x 2816    int8 XLA         6.5           10.4   13.6   18.3
#                  int8             6.8    7.0    7.6    9.2    11.6
#                  fp8 XLA, fp8                  8.4, 7.7  11, 8.9
#   2560 x 20480   int8 XLA   17                  28            39
#                  int8       18                  24     28     35
#   10240 x 2560   int8 XLA   9                   16            32
#                  int8       11                  13     14     18
#   2560 x 3072    int8 XLA   5 to 7              8             15
#                  int8       5.5                 6.4    7.9    9.7
#
# Many rows, in a loop of products, which adds some 2 to each:
#
#   inputs x outputs    rows  256    512    2048
#   5376 x 43008   int8 XLA          537
#                  int8       192    350
#                  bfloat16          346
#   21504 x 5376   int8 XLA                 756
#                  int8       98     177    660
#                  bfloat16          193    654
#   5376 x 16384   int8       73     133
#   8192 x 5376    int8       47     84
#   2816 x 8192    int8 XLA   36     62     184
#                  int8       27     42     137
#                  bfloat16   41     72     137
#   4096 x 2816    int8 XLA   25     32
#                  int8       20     28
#                  bfloat16   20     32
#   2816 x 4224    int8 XLA   25     33
#                  int8       19     27
#                  bfloat16   25     35
#   2112 x 2816    int8 XLA   19     19
#                  int8       17.5   22
#                  bfloat16   17     22
#
# Since then four int8 become numbers in 5 instructions instead of 8. It gives, in Mosaic's kernel,
# 78.4 to 74.9 for 64 rows of 5376 x 43008 and 112.5 to 108.0 for 128; 52.8 to 49.1 for 128 rows of
# 21504 x 5376; 31.4 to 27.6 for 64 rows of 5376 x 16384; and for 16 rows 64.5 to 63.5, 35.8 to
# 35.1, 25.4 to 24.8, 17.8 to 16.7 (8192 x 5376), 10.9 to 10.6 (2816 x 8192), 7.9 to 6.6 (4096 x
# 2816), 7.8 to 6.8 (2816 x 4224) and 5.5 to 5.0 (2112 x 2816). Triton's takes 8.9, 5.3 and 3.9
# instead of 9.2, 5.5 and 4.2 for 1 row of 2816 x 8192, 2816 x 4224 and 2112 x 2816.
#
# fp8 of XLA takes 60 for 512 rows of 2816 x 8192, and 229 for 21504 x 5376. Tiles of 128 rows and
# lines of 128 codes take 46 and 197 in fp8, and 46 and 200 in int8.
#
# fp8 takes 36, 26, 17 and 67 for 16 rows of 21504 x 5376, 5376 x 16384, 8192 x 5376 and 5376 x
# 43008 in Mosaic's kernel, and 42, 29, 16 and 62 in XLA.
#
# Rounded rows, fp8 x fp8, kernels alone with the sum of parts. XLA's kernel adds with fewer bits:
#
#   inputs x outputs    rows  2     8      16     32     64     128
#   5376 x 43008   XLA                     54            62     63
#                  floats                                61     72
#   21504 x 5376   XLA        34    36     36     36     37     39
#                  floats     30    30     30     31     34     38
#   5376 x 16384   XLA        28    28     28     30     30     25
#                  floats     22    22     23     23     24     27
#   8192 x 5376    floats     14    14     15     16     17     20
#
# With tiles of 256 outputs it takes 57 without a join for 16 rows of 5376 x 43008. A copy of rows
# for two blocks at once, by TMA's multicast, changes nothing.
#
# The kernel of codes is Triton's for up to 8 rows, and Mosaic's from 16 on. Mosaic's for 32 rows,
# and for fp8, was measured when the first tiles and the last ones had a kernel each. Triton's takes
# 67, 36, 30 and 17 for 16 rows of 5376 x 43008, 21504 x 5376, 5376 x 16384 and 8192 x 5376, and 83,
# 38, 30 and 20 for 32.
ANY, SMALL = float("inf"), 26e6
TABLE = (
    # Each row: most rows of x, most numbers of the weight, most outputs, config, programs for each
    # processor.
    (8, SMALL, ANY, TileConfig(8, 64, inputs=128, warps=4, stages=5), 2),
    (8, ANY, 8192, TileConfig(8, 128, inputs=128, warps=4, stages=4), 2),
    (8, ANY, 16384, TileConfig(8, 64, inputs=128, warps=4, stages=7), 2),
    (8, ANY, ANY, TileConfig(8, 64, inputs=128, warps=2, stages=5), 8),
    (16, ANY, ANY, TileConfig(16, 64, inputs=128, warps=2, stages=5), 10),
    (32, ANY, ANY, TileConfig(32, 64, inputs=128, warps=2, stages=4), 4),
    (MAX_ROWS, ANY, ANY, TileConfig(64, 64, inputs=128, warps=2, stages=4), 4),
)
MIN_NUMBERS = 5e6  # of a weight; smaller ones were not measured
MIN_NUMBERS_OF_MANY = 10e6
MIN_NUMBERS_OF_SUMS = 40e6  # for smaller ones both take about as long
LARGE_NUMBERS = 80e6
LARGE_INT8, LARGE_FP8 = 60e6, 30e6  # for `small_m.py`: see `tiles.small_m_is_faster`
# Large products for which Triton's kernel is faster with up to 8 rows.
LARGE = ((21504, 5376), (5376, 16384), (8192, 5376), (5376, 18432))
# Codes that TMA loads side by side. With few rows it is slow with fewer than 128 bytes.
LINE, MIN_LINE = 128, 64
ROWS = 16  # Mosaic's kernel pads rows to a multiple of it


@dataclasses.dataclass(frozen=True)
class MosaicConfig(tiles.MosaicConfig):
    """Tile sizes of a Mosaic kernel.

    Attributes:
      line: inputs of a step, 128 or 64.
      row_bytes: of a number of the rows.
    """

    stages: int = 5
    line: int = LINE
    row_bytes: int = 2

    @property
    def inputs(self) -> int:
        return self.line

    def step_bytes(self, rows: int) -> int:
        return self.line * (self.outputs + self.row_bytes * rows)


def config_for(rows: int, inputs: int, outputs: int) -> TileConfig:
    """Return the tile sizes of Triton's kernel, from the first row of the table that fits."""
    fit = (
        row[3:]
        for row in TABLE
        if rows <= row[0] and inputs * outputs <= row[1] and outputs <= row[2]
    )
    config, programs = next(fit, TABLE[-1][3:])
    step = min(config.inputs, inputs & -inputs)
    tile = min(config.outputs, outputs & -outputs)
    tiles = outputs // tile * -(-rows // config.rows)
    at_once = processors()
    splits = max(1, at_once * programs // tiles)
    # One more where this leaves the processor with most programs less to do.
    splits = min(splits, splits + 1, key=lambda s: -(-tiles * s // at_once) / s)
    # A split has 4 steps at least, because its part of the result is written and read again.
    splits = max(1, min(splits, inputs // step // 4))
    return dataclasses.replace(config, outputs=tile, inputs=step, splits=splits)


def mosaic_config_for(
    rows: int, inputs: int, outputs: int, result_bytes: int = 2
) -> SmallMConfig | MosaicConfig | None:
    """Return the tile sizes of a Mosaic kernel; None where none fits."""
    if rows <= MAX_SMALL_M_ROWS:
        # As many stages as shared memory has room for.
        config = SmallMConfig(blocks=4, stages=8 if rows <= 2 else 6)
        return None if outputs % config.outputs else config
    if rows > FEW_ROWS:
        return _large_m_config_for(rows, inputs, outputs, result_bytes)
    rows, line = padded(rows, ROWS), LINE if inputs % LINE == 0 else MIN_LINE
    options, max_splits = [], max(1, min(12, inputs // LINE // 2))
    # With more rows the ring of 4 groups would hold too few steps.
    for groups in (4, 2) if rows <= 64 else (2,):
        tile = groups * TILE
        if outputs % tile == 0 and inputs % line == 0:
            # By the times of 132 or 264 tiles of 5376 inputs, for each 64 of them.
            tile_ns = inputs / 64 * groups * (125 + rows * (0.35 if groups == 4 else 0.85))
            ways = split_options(outputs // tile, tile, rows, tile_ns, max_splits)
            options += [(time, groups, splits, whole) for time, splits, whole in ways]
    for _, groups, splits, whole in sorted(options):
        config = MosaicConfig(groups, splits, whole=whole, line=line)
        if config := with_stages(config, rows, inputs // line, result_bytes):
            return config
    return None


def gated_config_for(rows: int, outputs: int) -> SmallMConfig | None:
    """Return the tile sizes of gate and up with the activation; None where none fits.

    With 8 rows two of the four blocks fit on a processor at once. On an H100 8 rows of 31B take
    79.4 us, and 82.5 with three blocks; those of E4B 21.0, 22.0 with three, and 21.3 with four
    stages, where four fit.

    Args:
      outputs: of gate.
    """
    config = SmallMConfig(blocks=4, stages=6)
    return None if rows > MAX_SMALL_M_ROWS or outputs % config.outputs else config


def _large_m_config_for(rows: int, inputs: int, outputs: int, result_bytes: int) -> Any:
    if outputs % (MANY_GROUPS * TILE) or inputs % MIN_LINE:
        return None

    def config(rows: int) -> MosaicConfig:
        # With more rows, shared memory does not hold enough steps of whole lines.
        return MosaicConfig(line=LINE if rows <= FEW_ROWS and inputs % LINE == 0 else MIN_LINE)

    sizes = rows, inputs, outputs
    return config_of_many(config, *sizes, multiple=ROWS, result_bytes=result_bytes)


def sums_config_for(
    rows: int, inputs: int, outputs: int, result_bytes: int = 2
) -> MosaicConfig | None:
    """Return the tile sizes of the kernel of 8-bit floats; None where none fits."""
    config = MosaicConfig(groups=2, line=LINE if inputs % LINE == 0 else MIN_LINE, row_bytes=1)
    if rows > FEW_ROWS or outputs % config.outputs or inputs % config.line:
        return None
    rows, steps = padded(rows, ROWS), inputs // config.line
    # By the times of the sizes of 31B, for 128 inputs.
    tile_ns = inputs / LINE * config.groups * (150 + 0.8 * rows)
    sizes, max_splits = (
        (outputs // config.outputs, config.outputs, rows),
        max(1, min(12, steps // 4)),
    )
    ways = split_options(*sizes, tile_ns, max_splits, least_ns=inputs * outputs / BYTES_A_NS)
    # Whole tiles before others were no faster: 74 us and a join, not 72, for 128 rows of 5376 x
    # 43008.
    _, splits, _ = min(way for way in ways if not way[2])
    return with_stages(dataclasses.replace(config, splits=splits), rows, steps, result_bytes)


def triton_is_faster(rows: int, inputs: int, outputs: int, *, fp8: bool) -> bool:
    """Tell whether Triton's kernel is faster than XLA's product, by the figures above.

    For many rows this matters where Mosaic's kernel cannot run.
    """
    numbers = inputs * outputs
    if rows <= 8:
        small = MIN_NUMBERS <= numbers <= SMALL and inputs < outputs and not fp8
        return small or (inputs, outputs) in LARGE
    if rows <= 16 and fp8:
        return False
    return rows <= 32 and numbers >= (25e6 if fp8 else MIN_NUMBERS)


def mosaic_is_faster(rows: int, inputs: int, outputs: int, *, fp8: bool) -> bool:
    """Tell whether a Mosaic kernel is faster than XLA's product, by the figures above."""
    if rows <= MAX_SMALL_M_ROWS:
        large = LARGE_FP8 if fp8 else LARGE_INT8
        return inputs * outputs >= MIN_NUMBERS and small_m_is_faster(inputs, outputs, large)
    if fp8 and rows <= 16:
        return rows == 16 and inputs * outputs >= LARGE_NUMBERS and outputs <= 20_000
    if fp8 and 32 < rows <= FEW_ROWS and outputs > 20_000:
        return False
    least = MIN_NUMBERS if rows <= MANY_ROWS else MIN_NUMBERS_OF_MANY
    return rows >= 16 and inputs * outputs >= least


def gated_is_faster(inputs: int, outputs: int) -> bool:
    """Tell whether one kernel of gate and up is faster than their product and an activation.

    Args:
      outputs: of gate.
    """
    return 2 * inputs * outputs >= MIN_NUMBERS


def sums_are_faster(rows: int, inputs: int, outputs: int) -> bool:
    """Tell whether the kernel of 8-bit floats is faster than XLA's, by the figures above."""
    return rows <= 64 and inputs * outputs >= MIN_NUMBERS_OF_SUMS and outputs <= 20_000
