"""Tile sizes of the Triton kernel, by rows."""

from __future__ import annotations

import dataclasses

from pallas_kernels.eight_bits.triton import Cut

MOST_ROWS = 256  # with more, the product takes as long as its arithmetic

TABLE = (
    # Each row: most rows of x, cut, programs for each processor.
    (8, Cut(8, 64, inputs=128, warps=2, stages=5), 5),
    (16, Cut(16, 64, inputs=128, warps=2, stages=5), 5),
    (32, Cut(32, 64, inputs=128, warps=2, stages=4), 4),
    (MOST_ROWS, Cut(64, 64, inputs=128, warps=2, stages=4), 4),
)
PROCESSORS = 132  # of an H200
LEAST_MOSAIC_ROWS = 64


LINE = 64  # inputs of what Mosaic's wgmma is handed: rows of 128 bytes
TILE = 64  # outputs of it
SHARED_BYTES = 224 << 10  # of a block


@dataclasses.dataclass(frozen=True)
class MosaicCut:
    """How the Mosaic kernel cuts a product.

    Attributes:
      outputs: of each of the two warpgroups of a block.
      inputs: of a step.
      splits: blocks that share the inputs of a tile.
      stages: steps that the ring in shared memory holds.
      whole: how many tiles come first, which are not split. They are as many as all processors take
        once or several times.
    """

    outputs: int = 128
    inputs: int = 128
    splits: int = 1
    stages: int = 3
    whole: int = 0

    def shared_bytes(self, rows: int) -> int:
        """Return the shared memory of a block: the ring, and tiles of results, in float32 at most."""
        step = self.inputs * (2 * self.outputs + 2 * rows)
        return self.stages * step + 2 * rows * TILE * 4


def cut_for(rows: int, inputs: int, outputs: int) -> Cut:
    """Return how to cut a product: the first row of the table whose limit is not exceeded, `fitted`."""
    cut, programs = next((row[1:] for row in TABLE if rows <= row[0]), TABLE[-1][1:])
    return fitted(cut, programs, rows, inputs, outputs)


def fitted(cut: Cut, programs: float, rows: int, inputs: int, outputs: int) -> Cut:
    """Return a cut whose tiles and steps divide these sizes.

    There are as many splits as give each processor some programs. A split has 2 steps at least,
    because its part of the result is written and read again.

    Args:
      programs: for each processor.
    """
    step = min(cut.inputs, inputs & -inputs)
    tile = min(cut.outputs, outputs & -outputs)
    tiles = outputs // tile * -(-rows // cut.rows)
    splits = max(1, min(round(PROCESSORS * programs / tiles), inputs // step // 2))
    return dataclasses.replace(cut, outputs=tile, inputs=step, splits=splits)


def faster_than_xla(rows: int, inputs: int, outputs: int) -> bool:
    """Tell whether the kernel was faster than XLA's product, or would be by the table above."""
    del rows, inputs, outputs
    return True


def mosaic_cut_for(rows: int, inputs: int, outputs: int) -> MosaicCut | None:
    """Return how the Mosaic kernel cuts a product; None where Triton's is faster."""
    if rows < LEAST_MOSAIC_ROWS or outputs % (2 * TILE):
        return None
    found = []
    for own in (128, 64):
        if outputs % (2 * own) or own * rows > 128 * 128:  # sums take half of all registers
            continue
        tiles = outputs // (2 * own)
        rounds, rest = divmod(tiles, PROCESSORS)
        splits = max(1, PROCESSORS // rest) if rest else 1
        for step, stages in ((128, 4), (128, 3), (64, 5), (64, 4), (64, 3), (64, 2)):
            splits = min(splits, inputs // step // 2)
            cut = MosaicCut(own, step, splits, stages, rounds * PROCESSORS if splits > 1 else 0)
            if inputs % step == 0 and cut.shared_bytes(rows) <= SHARED_BYTES:
                time = (rounds + (1 / splits if rest else 0)) * own
                # Narrow tiles read rows twice as often.
                found.append((time * (1 if own == 128 else 1.15), own, cut))
                break
    return min(found, key=lambda one: one[:2])[2] if found else None
