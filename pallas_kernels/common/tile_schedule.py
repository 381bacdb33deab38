"""The tiles that each block of threads of a Mosaic kernel multiplies, in their order.

`tiles.py` chooses the tiles. `mosaic.py` multiplies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


class WorkTile(NamedTuple):
    """Steps of a tile that a block multiplies, and the result that gets the sums."""

    tile: Array
    begin: Array
    count: Array
    out: int  # index of the result
    split: Array


class TileSchedule(NamedTuple):
    """Tiles of a block: whole ones first, and then parts of others.

    Attributes:
      wholes: number of whole tiles.
      whole: returns the i-th whole tile.
      steps: of each of them.
      parts: the parts of other tiles.
    """

    wholes: Array | int
    whole: Callable[[Array | int], WorkTile]
    steps: int
    parts: Sequence[WorkTile]

    @property
    def one_at_most(self) -> bool:
        """Tell whether no block has two whole tiles. The code then needs no loop."""
        return isinstance(self.wholes, int) and self.wholes <= 1

    @property
    def begins(self) -> list[Array | int]:
        """Return the number of steps before each part, and of all."""
        counts = (part.count for part in self.parts)
        return list(itertools.accumulate(counts, initial=self.wholes * self.steps))

    def at(self, i: Array) -> tuple[Array, Array]:
        """Return the tile of the i-th step, and the index of the step within the tile."""
        tile, step = self.whole(0).tile, i
        if not self.one_at_most:
            each = jnp.int32(self.steps)
            tile, step = self.whole(lax.div(i, each)).tile, lax.rem(i, each)
        for begin, part in zip(self.begins, self.parts, strict=False):
            mine, at = part.tile, part.begin + i - begin
            # Where nothing comes before, there is nothing to choose.
            first = isinstance(begin, int) and begin == 0
            tile = mine if first else jnp.where(i >= begin, mine, tile)
            step = at if first else jnp.where(i >= begin, at, step)
        return tile, step


def schedule_for(block: Array, blocks: int, tiles: int, steps: int, config: Any) -> TileSchedule:
    """Return the tiles of one block.

    Args:
      steps: of a tile.
      config: as in `multiply_tiles`.
    """
    whole, zero = whole_tiles(config, tiles), jnp.int32(0)
    rest = tiles - whole

    def whole_tile(i: Array | int) -> WorkTile:
        return WorkTile(block + i * blocks, zero, jnp.int32(steps), 0, zero)

    parts = []
    for i in range(0, rest * config.splits, blocks):
        split, tile = lax.div(i + block, rest), lax.rem(i + block, rest)
        begin, end = (lax.div((split + j) * steps, config.splits) for j in range(2))
        count = jnp.where(split < config.splits, end - begin, 0)
        parts.append(WorkTile(whole + tile, begin, count, int(whole > 0), split))
    even = whole % blocks == 0
    wholes = whole // blocks if even else lax.div(whole + blocks - 1 - block, blocks)
    return TileSchedule(wholes, whole_tile, steps, parts)


def whole_tiles(config: Any, tiles: int) -> int:
    """Return the number of whole tiles."""
    return config.whole if config.splits > 1 else tiles


def tile_position(tile: Array, config: Any) -> tuple[Array, Array | int]:
    """Return the index of the outputs of a tile, and that of its rows.

    Tiles of the same outputs are neighbours. They run at once and share codes in L2.
    """
    if config.row_tiles == 1:
        return tile, 0
    count = jnp.int32(config.row_tiles)
    return lax.div(tile, count), lax.rem(tile, count)
