"""How Mosaic kernels cut products of rows with codes: tiles of outputs, shares of inputs, pieces of rows.

`eight_bits` and `grouped` have such kernels. `pallas_kernels.mosaic` has what their programs share.
"""

from __future__ import annotations

import dataclasses
from typing import Any

TILE = 64  # outputs of a warpgroup
PROCESSORS = 132  # of an H200
SHARED_BYTES = 224 << 10  # of a block of threads
PIECE = 32  # rows of a result that a warpgroup writes at once
START_NS = 2500  # of a block, until it multiplies
WRITE_NS = 2500  # of a block, until its sums are written and it multiplies again
PARTS_A_NS = 4000  # bytes of parts of sums that all processors read or write in a nanosecond


def padded(rows: int, multiple: int) -> int:
    """Return the next multiple, from a number of rows on."""
    return -(-rows // multiple) * multiple


def shares(
    tiles: int, outputs: int, rows: int, tile_ns: float, most: int
) -> list[tuple[float, int, int]]:
    """Return the ways to share a product among processors: nanoseconds, splits, whole tiles.

    A tile may be split: several blocks share its inputs, and their parts are added. As many tiles as
    all processors take at once, or several times, may come first and stay whole. A processor takes its
    shares one after the other, and loads the next one while it multiplies.

    Args:
      outputs: of a tile.
      tile_ns: what one block takes for a whole tile.
      most: splits.
    """
    found = []
    for splits in range(1, most + 1):
        for whole in {0, (tiles - 1) // PROCESSORS * PROCESSORS}:
            rest = tiles - whole
            rounds = -(-rest * splits // PROCESSORS)
            time = whole // PROCESSORS * (tile_ns + WRITE_NS)
            time += START_NS + rounds * (tile_ns / splits + WRITE_NS)
            if whole:  # these and the rest are put together
                time += 2000
            if splits > 1:  # parts are written and read
                time += 1500 + 8 * splits * rows * rest * outputs / PARTS_A_NS
            found.append((time, splits, whole))
    return found


def with_stages(cut: Any, rows: int, steps: int, result_bytes: int) -> Any:
    """Return a cut with as many stages as shared memory has room for, or None if it does not fit.

    Args:
      cut: has `splits`, `stages`, `whole` and `shared_bytes`.
      steps: of a tile.
      result_bytes: of a number of the result.
    """
    for stages in range(8, 2, -1):
        cut = dataclasses.replace(cut, stages=stages)
        if cut.shared_bytes(rows, result_bytes) <= SHARED_BYTES:
            return cut if results_are_apart(cut, steps) else None
    return None


def results_are_apart(cut: Any, steps: int) -> bool:
    """Tell whether no warpgroup writes parts of sums while another one still writes a whole tile.

    Both are written from the same shared memory. A warpgroup is ahead of another by the steps of the
    ring at most.
    """
    return not cut.whole or steps // cut.splits > cut.stages
