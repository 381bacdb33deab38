"""Tile configs of the Mosaic kernels of products with codes, and the choice of splits.

`int8_matmul` and `int4_matmul` have such kernels. `mosaic.py` and `small_m.py` have their programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from pallas_kernels.dispatch import processors

TILE = 64  # outputs of a warpgroup
SHARED_BYTES = 224 << 10  # of a block of threads
PIECE = 32  # rows of a result that a warpgroup writes at once
BYTES_A_NS = 4400  # of weights that all processors read in a nanosecond
START_NS = 2500  # of a block, until it multiplies
WRITE_NS = 2500  # of a block, until its sums are written and it multiplies again
PARTS_A_NS = 4000  # bytes of parts of sums that all processors read or write in a nanosecond
JOIN_NS = 2000  # of putting whole tiles and the rest together in the activation's kernel
FEW_ROWS = 128  # rows up to which a tile has all of them
MANY_ROWS = 256  # the most of a tile, where there are more
MMA_ROWS = 8  # of one `mma.sync`
MMA_OUTPUTS = 16
BLOCK = 64  # inputs, of which a thread has 16
SMALL_NUMBERS = 15e6  # of a weight of which few processors may read the rest
MANY_GROUPS = 2  # warpgroups of a block, where there are more


@dataclasses.dataclass(frozen=True)
class SmallMConfig:
    """Tile sizes of the kernel of very few rows, in `small_m.py`.

    Attributes:
      groups: warpgroups of a block that multiply, 16 outputs each. One more loads.
      blocks: of 64 inputs, of a step, a multiple of 4. The last step may reach past the inputs.
      stages: steps that the ring in shared memory holds.
      per_processor: blocks of threads for each processor. Those beyond what fits at once run when
        others end.
      pieces: of a warpgroup: one, or gate and up. The launchers set it.
      shared: as in `experts.tile_config.MmaConfig`.
    """

    groups: int = 1
    blocks: int = 8
    stages: int = 4
    per_processor: int = 4
    pieces: int = 1
    shared: ClassVar[bool] = True

    @property
    def inputs(self) -> int:
        """Inputs of a step."""
        return self.blocks * BLOCK

    @property
    def outputs(self) -> int:
        """Outputs of a block of threads."""
        return self.groups * MMA_OUTPUTS


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """Tile sizes of the kernel of `mosaic.py`.

    Each kind of codes has a subclass.

    Attributes:
      groups: warpgroups of a block of threads, of 64 outputs each.
      splits: blocks of threads that share the inputs of a tile.
      stages: steps that the ring in shared memory holds, 3 at least.
      whole: tiles that come first and are not split: as many as all processors take once or several
        times.
      row_tiles: tiles that the rows are divided among.
    """

    groups: int = 4
    splits: int = 1
    stages: int = 4
    whole: int = 0
    row_tiles: int = 1

    @property
    def inputs(self) -> int:
        """Inputs of a step."""
        raise NotImplementedError

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return self.groups * TILE

    def step_bytes(self, rows: int) -> int:
        """Return the shared memory of a step of the ring."""
        raise NotImplementedError

    def shared_bytes(self, rows: int, result_bytes: int = 2) -> int:
        """Return the shared memory of a block: the ring, and a piece of a result."""
        size = 4 if self.splits > 1 else result_bytes  # parts of sums are float32
        return self.stages * self.step_bytes(rows) + self.outputs * min(rows, PIECE) * size


def small_m_is_faster(inputs: int, outputs: int, large: float) -> bool:
    """Tell whether to take the kernel of `small_m.py`, where rows are few enough.

    It was timed on an H100, whose memory is slower than an H200's. So large weights stay with the
    kernels that were timed on an H200. If some processors have two tiles and most have one, most
    are idle at the end. Small weights lose less by that than by sums of parts.

    Args:
      large: how many numbers a large weight has, or more.
    """
    even = outputs >= 2 * processors() * MMA_OUTPUTS
    return inputs * outputs < (large if even else SMALL_NUMBERS)


def padded(rows: int, multiple: int) -> int:
    """Return a number of rows rounded up to a multiple."""
    return -(-rows // multiple) * multiple


def split_options(
    tiles: int,
    outputs: int,
    rows: int,
    tile_ns: float,
    max_splits: int,
    *,
    row_tiles: int = 1,
    join_ns: float = JOIN_NS,
    least_ns: float = 0,
) -> list[tuple[float, int, int]]:
    """Return the ways to split a product: nanoseconds, splits, whole tiles.

    A tile may be split: several blocks share its inputs, and their parts are added. As many tiles
    as all processors take once or several times may come first and stay whole. A processor
    multiplies its tiles one after the other, and loads the next one meanwhile.

    Args:
      outputs, rows: of a tile.
      tile_ns: time of one block for a whole tile.
      max_splits: blocks that may share a tile.
      row_tiles: number of tiles with the same outputs. All of them are whole, or all are split.
      join_ns: time of joining whole tiles and the rest.
      least_ns: least time of all tiles, which the memory sets.
    """
    options, at_once = [], processors()
    together = math.lcm(at_once, row_tiles)
    for splits in range(1, max_splits + 1):
        for whole in {0, (tiles - 1) // together * together}:
            rest = tiles - whole
            rounds = -(-rest * splits // at_once)
            time = whole // at_once * (tile_ns + WRITE_NS)
            time += START_NS + rounds * (tile_ns / splits + WRITE_NS)
            time += max(0, least_ns - (whole // at_once + rounds / splits) * tile_ns)
            if whole:
                time += join_ns
            if splits > 1:  # parts are written and read
                time += 1500 + 8 * splits * rows * rest * outputs / PARTS_A_NS
            options.append((time, splits, whole))
    return options


class SplitOption(NamedTuple):
    """A way to split a product of many rows.

    Attributes:
      time: nanoseconds.
      rows: of a tile.
      row_tiles, splits, whole: as in `MosaicConfig`.
    """

    time: float
    rows: int
    row_tiles: int
    splits: int
    whole: int


def split_options_of_many(rows: int, inputs: int, outputs: int, multiple: int) -> list[SplitOption]:
    """Return the ways to split a product of many rows, the quickest first.

    A block has two warpgroups, and a tile up to 256 rows. Their sums then fill half of all
    registers.

    Args:
      multiple: of rows of a tile.
    """
    options, tile = [], MANY_GROUPS * TILE
    max_splits = max(1, min(12, inputs // 256))
    for row_tiles in {-(-rows // MANY_ROWS), -(-rows // FEW_ROWS)}:
        mine = padded(rows, multiple * row_tiles) // row_tiles
        # By the times of 5376 x 16384 with tiles of 128 and of 256 rows, 4 and 8 bits: 0.42 to 0.44
        # and 0.71 to 0.76 us for 64 inputs.
        tile_ns = inputs / 64 * (130 + 2.4 * mine)
        join_ns = JOIN_NS + 4 * mine * row_tiles * outputs / PARTS_A_NS  # read and written
        sizes = outputs // tile * row_tiles, tile, mine
        ways = split_options(*sizes, tile_ns, max_splits, row_tiles=row_tiles, join_ns=join_ns)
        options += [
            SplitOption(time, mine, row_tiles, splits, whole) for time, splits, whole in ways
        ]
    return sorted(options)


def config_of_many(
    config_for: Callable[[int], MosaicConfig],
    rows: int,
    inputs: int,
    outputs: int,
    *,
    multiple: int,
    result_bytes: int,
) -> Any:
    """Return the config of the quickest split of a product of many rows; None where none fits.

    Args:
      config_for: from the rows of a tile to a config, whose splits and tiles are set here.
      multiple: of rows of a tile.
    """
    for option in split_options_of_many(rows, inputs, outputs, multiple):
        config = dataclasses.replace(
            config_for(option.rows),
            groups=MANY_GROUPS,
            splits=option.splits,
            whole=option.whole,
            row_tiles=option.row_tiles,
        )
        if config := with_stages(config, option.rows, inputs // config.inputs, result_bytes):
            return config
    return None


def with_stages(config: Any, rows: int, steps: int, result_bytes: int) -> Any:
    """Return the config with as many stages as fit into shared memory; None if too few fit.

    Args:
      config: has `splits`, `stages`, `whole` and `shared_bytes`.
      steps: of a tile.
      result_bytes: of a number of the result.
    """
    for stages in range(8, 2, -1):
        config = dataclasses.replace(config, stages=stages)
        if config.shared_bytes(rows, result_bytes) <= SHARED_BYTES:
            return config if results_are_apart(config, steps) else None
    return None


def results_are_apart(config: Any, steps: int) -> bool:
    """Tell whether no warpgroup writes parts of sums while another one still writes a whole tile.

    Both are written from the same shared memory. A warpgroup is ahead of another by the steps of
    the ring at most.
    """
    return not config.whole or steps // config.splits > config.stages
