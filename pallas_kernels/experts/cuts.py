"""How the Mosaic kernel cuts a product."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MosaicCut:
    """How the kernels of `mosaic.py` cut a product.

    Attributes:
      rows: numbers of rows that a tile may have, multiples of 8 that grow. A tile of an expert holds
        as many pairs as the last.
      columns: of a block: pairs of tiles of 64 outputs, which it multiplies one after another.
      stages: steps that the ring in shared memory holds, 2 at least.
    """

    rows: tuple[int, ...]
    columns: int = 1
    stages: int = 3
