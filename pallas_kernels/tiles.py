"""How Mosaic kernels cut products of rows with codes: tiles of outputs, shares of inputs, pieces of rows.

`eight_bits` and `grouped` have such kernels. `pallas_kernels.mosaic` has what their programs share.
"""

from __future__ import annotations

TILE = 64  # outputs of a warpgroup
PROCESSORS = 132  # of an H200
SHARED_BYTES = 224 << 10  # of a block of threads
START_NS = 2000  # of a block, until it multiplies, and after
PARTS_A_NS = 4000  # bytes of parts of sums that all processors read or write in a nanosecond


def pieces(rows: int) -> int:
    """Return in how many pieces of rows a kernel writes its result."""
    return -(-rows // 64)


def padded(rows: int, multiple: int) -> int:
    """Return how many rows a kernel takes for some: a multiple in each of their pieces."""
    multiple *= pieces(rows)
    return -(-rows // multiple) * multiple


def shares(
    tiles: int, outputs: int, rows: int, tile_ns: float, most: int
) -> list[tuple[float, int, int]]:
    """Return the ways to share a product among processors: nanoseconds, splits, whole tiles.

    A tile may be split: several blocks share its inputs, and their parts are added. As many tiles as
    all processors take at once, or several times, may come first and stay whole.

    Args:
      outputs: of a tile.
      tile_ns: what one block takes for a whole tile.
      most: splits.
    """
    found = []
    for splits in range(1, most + 1):
        for whole in {0, tiles // PROCESSORS * PROCESSORS if splits > 1 else 0}:
            rest = tiles - whole
            if not rest:
                continue
            time = -(-rest * splits // PROCESSORS) * (tile_ns / splits + START_NS)
            if whole:
                time += whole / PROCESSORS * (tile_ns + START_NS) + START_NS
            if splits > 1:  # parts are written and read
                time += 1500 + 8 * splits * rows * rest * outputs / PARTS_A_NS
            found.append((time, splits, whole))
    return found
