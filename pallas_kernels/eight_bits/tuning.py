"""Tile sizes of both kernels, and where they are faster than XLA's product."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.eight_bits.triton import Cut

MOST_ROWS = 256  # with more, the product takes as long as its arithmetic

# Measured on an NVIDIA H200 (jax 0.11.2), microseconds with the sum of parts. XLA chooses tiles by
# timing them, and its choices differ from run to run: the best and the worst of up to three runs.
#
#   inputs x outputs    rows    2          16           32          64           128          256
#   5376 x 43008   int8 XLA     57, 70     158          88, 104     110          163          248
#                  int8         -          69           83          107          -            211
#                  fp8 XLA      71         58           86          -            113          -
#                  fp8          62         -            -           -            -            -
#   21504 x 5376   int8 XLA     41, 124    72           49, 56      130          102          204
#                  int8         32         44           39          48           66           -
#                  fp8 XLA      43         43           49          -            98           -
#   2560 x 20480   int8 XLA     17         -            28          -            -            -
#                  int8         18         -            24          -            -            -
#   10240 x 2560   int8 XLA     9          -            16          -            -            -
#                  int8         11         -            14          -            -            -
#   2560 x 3072    int8 XLA     5          -            8           -            -            -
#                  int8         7          -            8           -            -            -
#
# Up to 32 rows it is Triton's kernel, beyond Mosaic's. With 43008 outputs and 128 rows, tiles for
# all outputs alike took 196: 168 blocks are two rounds of 132 processors. So `MosaicCut.whole`
# divides the second round. That was not measured.
TABLE = (
    # Each row: most rows of x, most outputs, cut, programs for each processor.
    (8, 8192, Cut(8, 128, inputs=128, warps=4, stages=4), 4),
    (8, float("inf"), Cut(8, 64, inputs=128, warps=2, stages=5), 10),
    (16, float("inf"), Cut(16, 64, inputs=128, warps=2, stages=5), 10),
    (32, float("inf"), Cut(32, 64, inputs=128, warps=2, stages=4), 4),
    (MOST_ROWS, float("inf"), Cut(64, 64, inputs=128, warps=2, stages=4), 4),
)
PROCESSORS = 132  # of an H200
# Steps that Mosaic's kernel reads, and how many fit into shared memory.
STEPS = ((64, 8), (64, 7), (64, 6), (64, 5), (64, 4), (64, 3))
START_NS = 2000  # of a block, until it multiplies, and after
# Bytes a ns: of codes and of all that a processor reads, and of parts of all processors.
CODES_A_NS, READ_A_NS, PARTS_A_NS = 32, 45, 4000
LINE = 64  # inputs of what Mosaic's wgmma is handed: rows of 128 bytes
TILE = 64  # outputs of it
SHARED_BYTES = 224 << 10  # of a block


@dataclasses.dataclass(frozen=True)
class MosaicCut:
    """How the Mosaic kernel cuts a product.

    Attributes:
      outputs: of each warpgroup of a block.
      inputs: of a step.
      splits: blocks that share the inputs of a tile; 0: each processor takes an equal share of all
        steps of all tiles.
      stages: steps that the ring in shared memory holds, 3 at least.
      whole: how many tiles come first, which are not split. They are as many as all processors take
        once or several times.
      groups: warpgroups of a block.
      together: neighbouring blocks that load rows once, for all of them.
      narrow: whether a thread loads two codes at once, and not four.
    """

    outputs: int = 64
    inputs: int = 64
    splits: int = 1
    stages: int = 5
    whole: int = 0
    groups: int = 4
    together: int = 1
    narrow: bool = True

    @property
    def tile(self) -> int:
        """Outputs of a block."""
        return self.groups * self.outputs

    def shared_bytes(self, rows: int, result_bytes: int) -> int:
        """Return the shared memory of a block: the ring, and tiles of results."""
        step = self.inputs * (self.tile + 2 * rows)
        # Parts of sums are float32.
        return self.stages * step + self.groups * written_rows(rows) * TILE * (
            4 if self.splits > 1 else result_bytes
        )


def written_rows(rows: int) -> int:
    """Return how many rows of a result Mosaic's kernel holds in shared memory, and writes, at once."""
    return padded(rows) // -(-rows // 64)


def padded(rows: int) -> int:
    """Return how many rows Mosaic's kernel takes for some: two multiples of 8 for each piece of 64."""
    return -(-rows // (16 * -(-rows // 64))) * 16 * -(-rows // 64)


def first_step(block: Any, steps: int) -> Any:
    """Return the first of all steps that a block takes, where blocks take equal shares of them."""
    return block * steps // PROCESSORS


def block_of(step: Any, steps: int) -> Any:
    """Return which block takes a step, where blocks take equal shares of all steps."""
    return ((step + 1) * PROCESSORS - 1) // steps


def parts_of_tiles(tiles: int, steps: int) -> np.ndarray:
    """Return how many blocks take steps of each tile, where blocks take equal shares of all steps.

    Args:
      steps: of a tile.
    """
    first = np.arange(tiles) * steps
    return block_of(first + steps - 1, tiles * steps) - block_of(first, tiles * steps) + 1


def cut_for(rows: int, inputs: int, outputs: int) -> Cut:
    """Return how Triton's kernel cuts a product: by the first row of the table that fits."""
    fit = (row[2:] for row in TABLE if rows <= row[0] and outputs <= row[1])
    cut, programs = next(fit, TABLE[-1][2:])
    step = min(cut.inputs, inputs & -inputs)
    tile = min(cut.outputs, outputs & -outputs)
    tiles = outputs // tile * -(-rows // cut.rows)
    # A split has 4 steps at least, because its part of the result is written and read again.
    splits = max(1, min(round(PROCESSORS * programs / tiles), inputs // step // 4))
    return dataclasses.replace(cut, outputs=tile, inputs=step, splits=splits)


def mosaic_cut_for(rows: int, inputs: int, outputs: int, result_bytes: int = 2) -> MosaicCut | None:
    """Return how the Mosaic kernel cuts a product; None where it does not fit."""
    if rows > MOST_ROWS or outputs % (2 * TILE) or inputs % LINE:
        return None
    found, rows = [], padded(rows)
    for groups in (4, 2):
        tiles, rest = divmod(outputs, groups * TILE)
        if rest or groups * rows > 4 * 128:  # sums take half of all registers
            continue
        tile = groups * TILE
        # Arithmetic, codes from memory, codes and rows through the L2.
        step_ns = max(
            groups * (70 + rows), LINE * tile / CODES_A_NS, LINE * (tile + 2 * rows) / READ_A_NS
        )
        whole_ns = step_ns * inputs / LINE
        for splits in range(1, min(12, inputs // LINE // 4) + 1):
            # All tiles alike, or whole ones on all processors first.
            for whole in {0, tiles // PROCESSORS * PROCESSORS if splits > 1 else 0}:
                split = tiles - whole
                if not split:
                    continue
                rounds = -(-split * splits // PROCESSORS)
                time = rounds * (whole_ns / splits + START_NS)
                if whole:
                    time += whole / PROCESSORS * (whole_ns + START_NS) + START_NS
                if splits > 1:  # parts are written and read
                    time += 1500 + 8 * splits * rows * split * tile / PARTS_A_NS
                found.append((time, groups, splits, whole))
    for _, groups, splits, whole in sorted(found):
        for step, stages in STEPS:
            cut = MosaicCut(TILE, step, splits, stages, whole, groups)
            if inputs % step == 0 and cut.shared_bytes(rows, result_bytes) <= SHARED_BYTES:
                return cut
    return None


def triton_is_faster(rows: int, inputs: int, outputs: int, *, fp8: bool) -> bool:
    """Tell whether Triton's kernel is faster than XLA's product, by the figures above."""
    if rows <= 8:
        return inputs * outputs >= 80e6
    return ((rows <= 16 and not fp8) or 16 < rows <= 32) and inputs * outputs >= 25e6


def mosaic_is_faster(rows: int, inputs: int, outputs: int, *, fp8: bool) -> bool:
    """Tell whether Mosaic's kernel is faster than XLA's product, by the figures above.

    Beyond 128 rows its results were not compared on a device.
    """
    if fp8 and rows > 64 and outputs > 2 * 128 * PROCESSORS:
        return False
    return 32 < rows <= 128 and inputs * outputs >= 40e6
