"""Store keys and values in caches of fixed shape, which are written in place.

Each array of a cache is [B, K, S, H]. Heads come before positions, because XLA transposes the other
order at the edge of the decode loop. The cache of a full layer holds every position. The cache of a
sliding layer is a ring of R slots, in which position p is in slot p mod R. Nothing is ever erased.
The number of written positions tells which position a slot holds. Rejected
tokens are rolled back by a length that does not count them.

A ring has at least `slack` more slots than its window. A pass may therefore write up to `slack`
tokens before it reads, and any of these tokens may be rejected. No write hides a key that a later
query still sees.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.shapes import Array, Bool, DTypeLike, Float, Int
from pallas_kernels.attention import KVSegment, gathered
from pallas_kernels.qkv import Destination, write_kv

RING_MULTIPLE = 64  # ring sizes are rounded up to a multiple of this, so that kernels can tile them


class KVCache(struct.PyTreeNode):
    """The keys and values of one layer.

    Attributes:
      ring_slack: the slots that a ring has beyond its window. None: slot s holds position s.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    ring_slack: int | None = struct.field(pytree_node=False, default=None)


def init_cache(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    cache_length: int,
    window: int | None,
    slack: int,
    dtype: DTypeLike,
) -> KVCache:
    """Make an empty cache for `cache_length` positions. It is a ring if a ring takes fewer slots.

    Args:
      window: how many keys a query sees, its own included. None: all.
      slack: the most tokens that one pass writes before it reads.
    """
    size, ring_slack = cache_length, None
    if window is not None:
        ring = -(-(window + slack) // RING_MULTIPLE) * RING_MULTIPLE
        if ring < cache_length:
            size, ring_slack = ring, ring - window
    shape = (batch, num_kv_heads, size, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), ring_slack)


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
    size = cache.k.shape[2]
    offset = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    # A chunk longer than a ring keeps only its newest tokens. Two writes to one slot would race.
    kept = (offset < count[:, None]) & (offset >= count[:, None] - size)
    position = start[:, None] + offset
    index = position % size if cache.ring_slack is not None else position
    pages = None if slots is None else jnp.broadcast_to(slots[:, None], index.shape)
    return Destination(cache.k, cache.v, jnp.where(kept, index, size), pages)


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
    k, v = write_kv(destination(cache, k.shape[2], start, count, slots), k, v)
    return cache.replace(k=k, v=v)


def view(
    cache: KVCache, length: Int[Array, " b"], slots: Int[Array, " b"] | None = None
) -> KVSegment:
    """Return what a cache holds after positions 0 .. length - 1 of each row are written.

    Args:
      slots: the cache row of each batch row, which attention reads where it is. None: cache row i
        is batch row i.
    """
    slot = jnp.arange(cache.k.shape[2], dtype=jnp.int32)[None, :]
    if cache.ring_slack is None:
        positions = jnp.where(slot < length[:, None], slot, -1)
    else:
        newest = length[:, None] - 1
        positions = newest - (newest - slot) % cache.k.shape[2]
        positions = jnp.maximum(positions, -1)
    return KVSegment(cache.k, cache.v, positions, pages=None if slots is None else slots[:, None])


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
    """
    if into is not None:
        return (view(cache.replace(k=k, v=v), start + count, slots),)
    positions = start[:, None] + jnp.arange(k.shape[2], dtype=jnp.int32)[None, :]
    before = view(cache, start, slots)
    return gathered(before) if lent else before, pass_segment(k, v, positions, count)


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
    rows: Int[Array, "B T"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> KVCache:
    """Write chosen tokens of a pass that is not in the cache yet.

    Args:
      segment: the keys and values of the pass.
      rows: the tokens of the pass that go to positions start, start + 1, ...
      count: how many of `rows` are written. The rest are dropped.
    """

    def chosen(x: Array) -> Array:
        return jnp.take_along_axis(x, rows[:, None, :, None], axis=2)

    return write(cache, chosen(segment.k), chosen(segment.v), start, count)


def cache_bytes(tree: object) -> int:
    """Return the total size of the arrays in a cache tree, in bytes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
