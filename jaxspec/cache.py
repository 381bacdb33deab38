"""Store keys and values in caches of fixed shape, which are written in place.

Each array of a cache is [C, K, page, H]: C pages of as many slots each. Heads come before slots,
because XLA transposes the other order at the edge of the decode loop. A row has one page of its
own, or several pages, which a table lists in the order of the row's slots.

The cache of a full layer holds every position: position p is in slot p of the row. The cache of a
sliding layer is a ring of R slots, in which position p is in slot p mod R. Nothing is ever erased.
The number of written positions tells which position a slot holds. Rejected tokens are rolled back
by a length that does not count them.

On a mesh that splits the rows of a batch, each part of the rows has caches of its own. Numbers of rows and
of pages count those of a part, see `mesh.on_each_part`.

A ring has at least `slack` more slots than its window. A pass may therefore write up to `slack`
tokens before it reads, and any of these tokens may be rejected. No write hides a key that a later
query still sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.mesh import CACHE_AXES, ROWS, on_each_part
from jaxspec.shapes import Array, Bool, DTypeLike, Float, Int
from pallas_kernels.attention import KVSegment, gathered
from pallas_kernels.qkv import Destination, write_kv

RING_MULTIPLE = 64  # ring sizes are rounded up to a multiple of this, so that kernels can tile them
PAGE = 64
"""Slots of a page where a row has several. Kernels read 64 or 128 keys at a time."""
NO_PAGE = 0
"""The page that no row has. A table lists it where a row has no page. Nothing is written to it."""

Tables = dict[int, Int[Array, "_ _"]]
"""The pages of each row, [R, N], by the number of slots that a row has in a cache."""
HostTables = dict[int, np.ndarray]
"""The same in host memory."""
SEGMENT_AXES = KVSegment(CACHE_AXES, CACHE_AXES, ROWS, ROWS, ROWS)
DESTINATION_AXES = Destination(CACHE_AXES, CACHE_AXES, ROWS, ROWS)
T = TypeVar("T")


@dataclass(frozen=True)
class Paging:
    """The numbers of pages of caches whose rows have several.

    Attributes:
      rows: that can have pages.
      tokens: for which there are pages, whichever rows have them.
      parts: of the rows, on a mesh that splits them. Each has pages of its own, for its share of the tokens.
      prefixes: stored prefixes of `prefix_tokens` tokens each, for which each part has pages besides.
    """

    rows: int
    tokens: int
    parts: int = 1
    prefixes: int = 0
    prefix_tokens: int = 0

    def num_pages(self, row_slots: int) -> int:
        """Return the pages of a part of a cache whose rows have at most so many slots, `NO_PAGE` included.

        Each row may have a last page with one token. If there are prefixes, one of a whole row fits.
        """
        rows, tokens = self.rows // self.parts, -(-self.tokens // self.parts)
        largest = rows * pages_for(row_slots)
        count = 1 + min(largest, pages_for(tokens) + rows)
        if not self.prefixes:
            return count
        of_prefixes = self.prefixes * pages_for(min(row_slots, self.prefix_tokens))
        return count + max(pages_for(row_slots), of_prefixes)


def pages_for(slots: int) -> int:
    """Return the pages that hold so many slots."""
    return -(-slots // PAGE)


class KVCache(struct.PyTreeNode):
    """The keys and values of one layer.

    Attributes:
      table: the pages of each row of a pass; see `with_tables`. None: row i has page i.
      ring_slack: the slots that a ring has beyond its window. None: slot s holds position s.
      row_slots: the slots of a row that has several pages. None: a row has one.
    """

    k: Float[Array, "C K page H"]
    v: Float[Array, "C K page H"]
    table: Int[Array, "b N"] | None = None
    ring_slack: int | None = struct.field(pytree_node=False, default=None)
    row_slots: int | None = struct.field(pytree_node=False, default=None)

    @property
    def num_slots(self) -> int:
        """Slots of a row."""
        return self.k.shape[2] if self.row_slots is None else self.row_slots

    def pages(self, slots: Int[Array, " b"] | None) -> Int[Array, "b N"] | None:
        """Return the pages of each row of a pass; None: row i has page i.

        Args:
          slots: the cache row of each batch row, for caches whose rows have one page.
        """
        if self.row_slots is None:
            return None if slots is None else slots[:, None]
        assert self.table is not None, "the program has no tables of pages"
        return self.table


def init_cache(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    cache_length: int,
    window: int | None,
    slack: int,
    dtype: DTypeLike,
    paging: Paging | None = None,
) -> KVCache:
    """Make an empty cache for `cache_length` positions. It is a ring if a ring takes fewer slots.

    Args:
      batch: how many rows there are, each with a page of its own. With `paging` it does not count.
      window: how many keys a query sees, its own included. None: all.
      slack: the most tokens that one pass writes before it reads.
      paging: how many pages there are; None: one a row.
    """
    size, ring_slack, row_slots = cache_length, None, None
    if window is not None:
        ring = -(-(window + slack) // RING_MULTIPLE) * RING_MULTIPLE
        if ring < cache_length:
            size, ring_slack = ring, ring - window
    shape = (batch, num_kv_heads, size, head_dim)
    if paging is not None:
        row_slots = pages_for(size) * PAGE
        pages = paging.parts * paging.num_pages(row_slots)
        shape = (pages, num_kv_heads, PAGE, head_dim)
    k, v = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    return KVCache(k, v, ring_slack=ring_slack, row_slots=row_slots)


def caches_of(tree: object) -> list[KVCache]:
    """Return all caches of a tree, such as a state."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, KVCache))
    return [x for x in leaves if isinstance(x, KVCache)]


def with_tables(tree: T, tables: Tables | None) -> T:
    """Give the caches of a tree the pages of the rows of a pass.

    Args:
      tables: one row for each batch row. None takes them away.
    """

    def one(x: object) -> object:
        if not isinstance(x, KVCache) or x.row_slots is None:
            return x
        return dataclasses.replace(x, table=None if tables is None else tables[x.row_slots])

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, KVCache))


def clear_rows(cache: KVCache, rows: Bool[Array, " R"], tables: Tables | None) -> KVCache:
    """Fill the pages of some rows with zeros.

    Args:
      tables: the pages of all rows; None where each row has one.
    """
    if cache.row_slots is not None:
        assert tables is not None
        both = CACHE_AXES, CACHE_AXES
        args = cache.k, cache.v, rows, tables[cache.row_slots]
        k, v = on_each_part(_clear_pages, args, (*both, ROWS, ROWS), both)
    else:
        where = rows[:, None, None, None]
        k, v = (jnp.where(where, jnp.zeros((), x.dtype), x) for x in (cache.k, cache.v))
    return cache.replace(k=k, v=v)


def _clear_pages(k: Array, v: Array, rows: Array, table: Array) -> tuple[Array, Array]:
    # A page past the last is dropped.
    pages = jnp.where(rows[:, None], table, k.shape[0]).reshape(-1)
    zero = jnp.zeros((), k.dtype)
    return k.at[pages].set(zero, mode="drop"), v.at[pages].set(zero, mode="drop")


def destination(
    cache: KVCache,
    tokens: int,
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> Destination:
    """Return where in the cache positions start .. start + count - 1 of each row go.

    Args:
      tokens: how many tokens each row has.
      count: how many of these tokens are written. The rest are dropped.
      slots: the cache row of each batch row. None: cache row i is batch row i.
    """
    size, page = cache.num_slots, cache.k.shape[2]
    offset = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    # A chunk longer than a ring keeps only its newest tokens. Two writes to one slot would race.
    kept = (offset < count[:, None]) & (offset >= count[:, None] - size)
    position = start[:, None] + offset
    index = position % size if cache.ring_slack is not None else position
    pages = cache.pages(slots)
    if pages is not None and cache.row_slots is None:
        pages = jnp.broadcast_to(pages, index.shape)
    elif pages is not None:
        kept &= index < size
        pages = jnp.take_along_axis(pages, jnp.minimum(index, size - 1) // page, axis=1)
        kept &= pages != NO_PAGE
        index %= page
    return Destination(cache.k, cache.v, jnp.where(kept, index, page), pages)


def write(
    cache: KVCache,
    k: Float[Array, "b K T H"],
    v: Float[Array, "b K T H"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> KVCache:
    """Write the keys and values of a pass. The write is in place if the cache is donated.

    The other arguments are as in `destination`.
    """
    both = CACHE_AXES, CACHE_AXES
    args = destination(cache, k.shape[2], start, count, slots), k, v
    k, v = on_each_part(write_kv, args, (DESTINATION_AXES, *both), both)
    return cache.replace(k=k, v=v)


def view(
    cache: KVCache, length: Int[Array, " b"], slots: Int[Array, " b"] | None = None
) -> KVSegment:
    """Return what a cache holds after positions 0 .. length - 1 of each row are written.

    Args:
      slots: the cache row of each batch row, which attention reads where it is. None: cache row i
        is batch row i.
    """
    size = cache.num_slots
    slot = jnp.arange(size, dtype=jnp.int32)[None, :]
    if cache.ring_slack is None:
        positions = jnp.where(slot < length[:, None], slot, -1)
    else:
        newest = length[:, None] - 1
        positions = newest - (newest - slot) % size
        positions = jnp.maximum(positions, -1)
    return KVSegment(cache.k, cache.v, positions, pages=cache.pages(slots))


def early_destination(
    cache: KVCache,
    tokens: int,
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> Destination | None:
    """Return where a pass goes if it may be written before its queries attend, otherwise None.

    A chunk longer than a ring's slack would overwrite keys that the chunk's first queries need. The
    arguments are as in `destination`.
    """
    if cache.ring_slack is not None and tokens > cache.ring_slack:
        return None
    return destination(cache, tokens, start, count, slots)


def of_parts(cache: KVCache | None, rows: Sequence[int]) -> list[KVCache]:
    """Return the cache for each part of a pass, with the pages of its rows.

    Args:
      rows: of each part. The cache has the tables of all, one part behind the other.
    """
    if cache is None:
        return []
    if cache.table is None:
        return [cache] * len(rows)
    tables = jnp.split(cache.table, np.cumsum(rows)[:-1])
    return [cache.replace(table=table) for table in tables]


def joined_destination(parts: Sequence[Destination | None]) -> Destination:
    """Return where the tokens of several parts of a pass go, as of one row.

    Raises:
      ValueError: a part must not be written before its queries attend.
    """
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        raise ValueError(
            "a part of the pass has wider rows than its rings have slots to spare; run it in a pass of its own"
        )
    index = jnp.concatenate([part.index.reshape(1, -1) for part in known], axis=1)
    pages = [part.pages for part in known if part.pages is not None]
    joined = jnp.concatenate([of.reshape(1, -1) for of in pages], axis=1) if pages else None
    return Destination(known[0].k, known[0].v, index, joined)


def segments_of_pass(
    cache: KVCache,
    into: Destination | None,
    k: Float[Array, "_ K _ H"],
    v: Float[Array, "_ K _ H"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
    *,
    lent: bool = False,
    seen_by: Bool[Array, "b T T"] | None = None,
) -> tuple[KVSegment, ...]:
    """Return the segments that the queries of a pass attend to. `keep_pass` comes after that.

    Args:
      into: the result of `early_destination`.
      k: keys. If `into` is a destination, these are the keys of the whole cache, with the pass
        already written. Otherwise they are the keys of the pass alone, which are read beside the
        old ring.
      v: values, as `k`.
      lent: whether other layers read the segments too. An old ring is overwritten before they do,
        so they get a copy of the rows in `slots`.
      seen_by: as in `pass_segment`, if `into` is None.
    """
    if into is not None:
        return (view(cache.replace(k=k, v=v), start + count, slots),)
    positions = start[:, None] + jnp.arange(k.shape[2], dtype=jnp.int32)[None, :]
    before = view(cache, start, slots)
    if lent:
        copied = SEGMENT_AXES._replace(seen_by=None, pages=None)
        before = on_each_part(gathered, (before,), (SEGMENT_AXES,), copied)
    return before, pass_segment(k, v, positions, count, seen_by)


def keep_pass(
    cache: KVCache,
    into: Destination | None,
    k: Float[Array, "_ K _ H"],
    v: Float[Array, "_ K _ H"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> KVCache:
    """Return the cache with a pass in it. The arguments are as in `segments_of_pass`."""
    if into is not None:
        return cache.replace(k=k, v=v)
    return write(cache, k, v, start, count, slots)


def pass_segment(
    k: Float[Array, "b K T H"],
    v: Float[Array, "b K T H"],
    positions: Int[Array, "b T"],
    count: Int[Array, " b"],
    seen_by: Bool[Array, "b T T"] | None = None,
) -> KVSegment:
    """Return the keys and values of a pass as a segment outside any cache.

    Args:
      count: how many tokens of each row are real.
      seen_by: which queries may see each token. None: all that the token's position allows.
    """
    real = jnp.arange(k.shape[2], dtype=jnp.int32)[None, :] < count[:, None]
    positions = jnp.where(real, positions, -1)
    return KVSegment(k, v, positions, seen_by)


def append_chosen(
    cache: KVCache,
    segment: KVSegment,
    rows: Int[Array, "b T"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> KVCache:
    """Write chosen tokens of a pass that is not in the cache yet.

    Args:
      segment: the keys and values of the pass.
      rows: the tokens of the pass that go to positions start, start + 1, ...
      count: how many of `rows` are written. The rest are dropped.
      slots: as in `destination`.
    """

    def chosen(x: Array) -> Array:
        return jnp.take_along_axis(x, rows[:, None, :, None], axis=2)

    return write(cache, chosen(segment.k), chosen(segment.v), start, count, slots)


def cache_bytes(tree: object) -> int:
    """Return the total size of the arrays in a cache tree, in bytes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
