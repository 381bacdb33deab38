"""Tile sizes of the Mosaic kernels of experts."""

from __future__ import annotations

import dataclasses

from pallas_kernels.int4_matmul.coding import BLOCK


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """Tile sizes of the kernels of `mosaic.py`.

    Attributes:
      rows: numbers of rows that a tile may have, multiples of 8 that grow. A tile of an expert
        holds as many pairs as the last.
      columns: of a block: pairs of tiles of 64 outputs, which it multiplies one after another.
      stages: steps that the ring in shared memory holds, 2 at least.
    """

    rows: tuple[int, ...]
    columns: int = 1
    stages: int = 3


@dataclasses.dataclass(frozen=True)
class MmaConfig:
    """Tile sizes of the kernels of `mma.py`.

    Attributes:
      rows: as in `MosaicConfig`.
      groups: warpgroups of a block that multiply. One more loads.
      shared: whether the warps of a warpgroup share inputs. They then have 16 outputs of each
        piece, else 16 each.
      pieces: of a warpgroup: gate and up, or so many neighbours of down.
      stages: steps that the ring in shared memory holds.
      blocks: of 64 inputs, of a step; where they are shared a multiple of 4, of which a warp has a
        quarter.
      per_processor: blocks of threads that a processor runs at once.
    """

    rows: tuple[int, ...]
    groups: int = 2
    pieces: int = 2
    stages: int = 4
    blocks: int = 4
    per_processor: int = 2
    shared: bool = True

    @property
    def outputs(self) -> int:
        """Outputs of a block, of each piece."""
        return self.groups * (16 if self.shared else 64)

    @property
    def inputs(self) -> int:
        """Inputs of a step."""
        return self.blocks * BLOCK
