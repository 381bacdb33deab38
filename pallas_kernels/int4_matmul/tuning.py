"""Tile sizes of the kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallas_kernels.common import tiles
from pallas_kernels.common.tiles import (
    FEW_ROWS,
    MANY_GROUPS,
    MMA_OUTPUTS,
    SHARED_BYTES,
    TILE,
    SmallMConfig,
    config_of_many,
    padded,
    small_m_is_faster,
    split_options,
    with_stages,
)
from pallas_kernels.dispatch import processors
from pallas_kernels.int4_matmul.coding import BLOCK, HALF
from pallas_kernels.int4_matmul.triton import TileConfig

# Measured on an NVIDIA H200 (jax 0.11.2, bfloat16, int4 in groups of 32), in microseconds with the
# sum of parts, and for 5376 x 43008 with joining the first tiles with the last ones:
#
#   inputs x outputs       rows  1      8      16     32     64     128
#   5376 x 43008     Triton      36     39 *   45 *   65 *   100 *  174 *
#                    mma                37     39     51     84
#                    Mosaic             47 *   50 *   54 *   64     94
#   21504 x 5376     Triton      19.5   22.9 * 25.4 * 34 *   60 *   109 *
#                    mma                21.4   22.6   28.4   42
#                    Mosaic             26.5 * 27.5 * 29.8 * 33     48
#   5376 x 16384     Triton      16.4   18.0 * 20.1 * 28 *          72 *
#                    mma                16.7   18.3   22.8   34
#                    Mosaic             20.9 * 22.3 * 23.8 * 28     38 *
#   8192 x 5376      Triton      11.9   13.4 * 14.3 * 19 *          45 *
#                    mma                11.4   12.2   14.7   21
#                    Mosaic             13.1 * 14.1 * 15.3 * 17.6   24 *
#   2816 x 8192      Triton      7.9    9.2 *  9.9 *  14 *   21 *   42 *
#                    mma                7.1    8.0    9.9
#                    Mosaic             9.3 *  9.7 *  8.5 *  13 *   15 *
#   4096 x 2816      Triton      5.4    6.1 *  6.9 *  8.6 *  13 *   21 *
#                    mma                5.1    5.9    7.0
#   2816 x 4224      Triton      5.4    6.2 *  7.0 *  9.2 *  11 *   15 *
#                    mma                5.1    6.1    6.9
#   2112 x 2816      Triton      4.2    4.7 *  5.3 *  6.1 *  8.5 *  13 *
#                    mma                4.4    4.9    5.8
#
# An asterisk: before codes became numbers times scales in one `fma`. "mma" for 4096 x 2816, 2816 x
# 4224, and 32 rows of 2816 x 8192 had steps of 128 inputs; with 256 of them 8 and 16 rows of 2816 x
# 8192 take 7.1 and 8.0 instead of 7.9 and 8.5. For 5376 x 43008 they take 37.4, 39.0 and 50.5
# instead of 37.6, 40.6 and 51.7, and are no faster where tiles are split and have 256 outputs.
#
# Many rows, in a loop of products, which adds some 2 to each. From 513 rows on Triton's kernel is
# not used, and the figure is that of a weight that is written out in 16 bits:
#
#   inputs x outputs       rows  256    512    2048
#   5376 x 43008     Triton             661
#                    Mosaic             347
#   21504 x 5376     Triton             333    766
#                    Mosaic      91     171    653
#   5376 x 16384     Mosaic      68     125
#   8192 x 5376      Mosaic      43     81
#   2816 x 8192      Triton      41     66     170
#                    Mosaic      24     38     131
#   4096 x 2816      Triton      32     48
#                    Mosaic      20     27
#   2816 x 4224      Triton      28     46
#                    Mosaic      21.5   26
#   2112 x 2816      Triton      27     27
#                    Mosaic      18     21.5
#
# bfloat16 takes 115, 64, 18 and 12 for 2 rows of 5376 x 43008, 21504 x 5376, 2816 x 8192 and 4096 x
# 2816. Tiles of 64 x 128 and 128 x 128 of Triton's kernel took 200 and 274 for 128 rows of 5376 x
# 43008. All configs are `early`, so that numbers are the same ones in a plain pass and in a verify
# pass, whatever their rows.
TABLE = (
    # Each row: most rows of x, config.
    (8, TileConfig(8, 128, warps=2, stages=6, early=True)),
    (16, TileConfig(16, 128, warps=2, stages=6, early=True)),
    (32, TileConfig(32, 128, warps=2, stages=4, early=True)),
    (float("inf"), TileConfig(64, 256, warps=4, stages=4, early=True)),
)
# Warps that keep a processor reading.
WARPS = 8


def config_for(rows: int, blocks: int, outputs: int, scale_bytes: int = 2) -> TileConfig:
    """Return the tile sizes of Triton's kernel: the first row of the table that holds, `fitted`."""
    config = next(config for max_rows, config in TABLE if rows <= max_rows)
    return fitted(config, rows, blocks, outputs, scale_bytes)


def fitted(
    config: TileConfig, rows: int, blocks: int, outputs: int, scale_bytes: int = 2
) -> TileConfig:
    """Return a config whose outputs, splits and steps divide these sizes.

    The splits keep all processors reading, and give the one with most programs as little as can be:
    at 2 rows 21504 x 5376 takes 22.6 us with 12 splits, which are 3.8 programs a processor, and
    26.7 with 14, which are 4.5. A split reads 3 blocks at least, because its part of the result is
    written and read again.

    Args:
      scale_bytes: of a scale or of a zero, whichever is shorter. With few rows there are no more
        warps than let each thread load 4 bytes of scales: see `operand.FourBits`.
    """
    tile = min(config.outputs, outputs & -outputs)
    warps, few_rows = config.warps, config.rows <= 16
    if few_rows:
        warps = max(1, min(warps, tile * scale_bytes // 128))
    tiles, at_once = outputs // tile * -(-rows // config.rows), processors()

    def programs(splits: int) -> int:
        return -(-tiles * splits // at_once)  # of the processor that has most

    def time(splits: int) -> int:
        # A program starts, ends and has its part added up in the time of two blocks.
        return programs(splits) * (blocks // splits + 2)

    divisors = [s for s in range(1, blocks + 1) if blocks % s == 0 and blocks // s >= 3] or [1]
    busy = [s for s in divisors if programs(s) * warps >= WARPS]
    splits = min(busy, key=time) if busy else divisors[-1]
    stages = config.stages
    if few_rows:  # so many steps that the programs of a processor run at once
        step_bytes = tile * (HALF + 2 * scale_bytes) + 2 * BLOCK * config.rows
        shared_memory = SHARED_BYTES // min(programs(splits), WARPS) - 1024
        stages = max(3, min(stages, shared_memory // step_bytes))
    config = config.dividing(outputs, blocks // splits)
    return dataclasses.replace(config, splits=splits, warps=warps, stages=stages)


ROWS = 8  # the Mosaic kernel pads rows to a multiple of it
MAX_SMALL_M_ROWS = 16
MAX_MMA_ROWS = 32
LARGE_FOR_SMALL_M = 100e6  # for `small_m.py`: see `tiles.small_m_is_faster`
NUMBERS_OF_TWO_GROUPS = 60e6  # of a weight: from there on two warpgroups share rows in `small_m.py`
LARGE_NUMBERS = 30e6  # of a weight; smaller ones have smaller tiles


@dataclasses.dataclass(frozen=True)
class MosaicConfig(tiles.MosaicConfig):
    """Tile sizes of the Mosaic kernel.

    Attributes:
      blocks: of 64 inputs, of a step.
    """

    blocks: int = 1

    @property
    def inputs(self) -> int:
        return self.blocks * BLOCK

    def step_bytes(self, rows: int) -> int:
        return self.blocks * (self.outputs * HALF + 2 * BLOCK * rows + 2 * 2 * self.outputs)


@dataclasses.dataclass(frozen=True)
class MmaConfig(MosaicConfig):
    """Tile sizes of the kernel of few rows, in `mma.py`.

    Attributes:
      pieces: of 64 outputs, of a warpgroup.
    """

    pieces: int = 2

    @property
    def outputs(self) -> int:
        return self.groups * self.pieces * TILE


def mosaic_is_faster(rows: int, blocks: int, outputs: int) -> bool:
    """Tell whether a Mosaic kernel is faster than Triton's, by the figures above.

    The kernel of very few rows is faster wherever it has a config. The others take 8 rows and more.
    Rows are padded to a multiple of 8 by a kernel of about 1 us. 9 to 15 rows of small weights gain
    less.
    """
    if _small_m_config_for(rows, blocks, outputs):
        return True
    if rows < ROWS:
        return False
    return rows > 16 or rows % ROWS == 0 or blocks * BLOCK * outputs >= LARGE_NUMBERS


def mosaic_config_for(
    rows: int, blocks: int, outputs: int, result_bytes: int = 2
) -> SmallMConfig | MosaicConfig | None:
    """Return the tile sizes of a Mosaic kernel; None where none fits."""
    if config := _small_m_config_for(rows, blocks, outputs):
        return config
    if rows <= MAX_MMA_ROWS:
        return _mma_config_for(rows, blocks, outputs, result_bytes)
    if rows > FEW_ROWS:
        return _large_m_config_for(rows, blocks, outputs, result_bytes)
    groups = next((n for n in (4, 2) if outputs % (n * TILE) == 0), None)
    if groups is None:
        return None
    rows, tiles = padded(rows, ROWS), outputs // (groups * TILE)
    step = 2 if blocks % 2 == 0 else 1
    # By the times of 5376 x 43008: 8 for a block of inputs and a row, 700 at least.
    tile_ns = blocks * max(8.0 * rows, 700.0) * groups / 4
    max_splits = max(1, min(12, blocks // 4))
    for _, splits, whole in sorted(split_options(tiles, groups * TILE, rows, tile_ns, max_splits)):
        config = MosaicConfig(groups, splits, whole=whole, blocks=step)
        if config := with_stages(config, rows, blocks // step, result_bytes):
            return config
    return None


def _small_m_config_for(rows: int, blocks: int, outputs: int) -> SmallMConfig | None:
    """Return the tile sizes of the kernel of very few rows; None where none fits or is faster."""
    inputs, narrow = blocks * BLOCK, outputs <= 3 * processors() * MMA_OUTPUTS
    large = LARGE_NUMBERS if narrow and rows > ROWS else LARGE_FOR_SMALL_M
    if rows > MAX_SMALL_M_ROWS or not small_m_is_faster(inputs, outputs, large):
        return None
    if inputs * outputs >= NUMBERS_OF_TWO_GROUPS or (rows > ROWS and not narrow):
        config = SmallMConfig(groups=2, per_processor=2)
    elif rows > ROWS:
        config = SmallMConfig(
            stages=3, per_processor=3
        )  # one column of outputs for each block of threads
    else:
        config = SmallMConfig()
    return None if outputs % config.outputs else config


def gated_config_for(rows: int, outputs: int) -> SmallMConfig | None:
    """Return the tile sizes of gate and up with the activation; None where it is not faster.

    Three blocks a processor with three stages were the fastest of six configs for 1 and 8 rows of
    31B on an H100: 47.5 and 48.8 us. 16 rows are slower than with `mma.py` by the forecast for an
    H200 in `docs/weight-format-speed.md`.

    Args:
      outputs: of gate.
    """
    config = SmallMConfig(stages=3, per_processor=3)
    return None if rows > ROWS or outputs % config.outputs else config


def _mma_config_for(
    rows: int, blocks: int, outputs: int, result_bytes: int = 2
) -> MmaConfig | None:
    """Return the tile sizes of the kernel of few rows; None where none fits."""
    rows = padded(rows, ROWS)
    options, max_splits = [], max(1, min(12, blocks // 4))
    for pieces in (2, 1) if blocks * BLOCK * outputs >= LARGE_NUMBERS else (1,):
        config = MmaConfig(2, pieces=pieces)
        if outputs % config.outputs == 0:
            # By the times of 5376 x 43008 with 8 to 32 rows, for 64 inputs.
            tile_ns = blocks * (max(285, 235 + 5 * rows) if pieces == 2 else 190 + 3.2 * rows)
            of_pieces = split_options(
                outputs // config.outputs, config.outputs, rows, tile_ns, max_splits
            )
            options += [(time, splits, whole, pieces) for time, splits, whole in of_pieces]
    for _, splits, whole, pieces in sorted(options):
        # Longer steps were faster for small tiles, and where many steps follow each other.
        step = math.gcd(blocks, 4 if whole or pieces == 1 else 2)
        config = MmaConfig(2, splits, whole=whole, blocks=step, pieces=pieces)
        if config := with_stages(config, rows, blocks // step, result_bytes):
            return config
    return None


def _large_m_config_for(rows: int, blocks: int, outputs: int, result_bytes: int) -> Any:
    if outputs % (MANY_GROUPS * TILE):
        return None

    def config(rows: int) -> MosaicConfig:
        # With more rows, shared memory does not hold enough steps of two blocks of inputs.
        return MosaicConfig(blocks=2 if rows <= FEW_ROWS and blocks % 2 == 0 else 1)

    sizes = rows, blocks * BLOCK, outputs
    return config_of_many(config, *sizes, multiple=ROWS, result_bytes=result_bytes)
