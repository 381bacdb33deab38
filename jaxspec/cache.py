"""Key/value caches: fixed shapes, written in place, rolled back by a length.

A cache is [B, K, S, H] an array (heads before positions: the other order is transposed at the edge of
the decode loop). Full layers hold every position; sliding layers a ring in which position p lives in slot
p mod R. Nothing is ever erased: which positions a slot holds follows from how many were written, so
forgetting rejected tokens is keeping the old length.

A ring has `slack` more slots than its window: a pass may write up to `slack` tokens before it reads, and
of those any may be rejected, without hiding a key that some later query still sees.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.shapes import Array, Bool, DTypeLike, Float, Int

RING_MULTIPLE = 64  # ring sizes are rounded up to this, so that kernels can tile them


class KVCache(struct.PyTreeNode):
    """One layer's keys and values. `ring_slack` is None when slot s simply holds position s."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    ring_slack: int | None = struct.field(pytree_node=False, default=None)


class KVSegment(struct.PyTreeNode):
    """Keys and values with the position of each; -1 marks an empty slot, which no query sees."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    positions: Int[Array, "B S"]
    seen_by: Bool[Array, "B T S"] | None = (
        None  # queries that may see each key; None: positions tell
    )


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
    """Make an empty cache for `cache_length` positions, a ring where the window makes that smaller.

    Args:
      window: keys a query sees (itself included), or None for all.
      slack: most tokens that one pass writes before it reads.
    """
    size, ring_slack = cache_length, None
    if window is not None:
        ring = -(-(window + slack) // RING_MULTIPLE) * RING_MULTIPLE
        if ring < cache_length:
            size, ring_slack = ring, ring - window
    shape = (batch, num_kv_heads, size, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), ring_slack)


def write(
    cache: KVCache,
    k: Float[Array, "b T K H"],
    v: Float[Array, "b T K H"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> KVCache:
    """Write positions start .. start + count - 1 of each row, in place when the cache is donated.

    Args:
      count: how many of the T tokens count; the rest are dropped.
      slots: cache row of each batch row; None when they are the same.
    """
    _, t, num_heads, _ = k.shape
    size = cache.k.shape[2]
    offset = jnp.arange(t)[None, :]
    # A chunk longer than a ring keeps its newest tokens; two writes to one slot would race.
    kept = (offset < count[:, None]) & (offset >= count[:, None] - size)
    position = start[:, None] + offset
    index = position % size if cache.ring_slack is not None else position
    index = jnp.where(kept, index, size)  # out of range: dropped

    def put(old: Array, new: Array) -> Array:
        new = new.astype(old.dtype).swapaxes(1, 2)
        if slots is None:
            return _put_rows(old, new, index)
        where = (slots[:, None, None], jnp.arange(num_heads)[None, :, None], index[:, None, :])
        return old.at[where].set(new, mode="drop")

    return dataclasses.replace(cache, k=put(cache.k, k), v=put(cache.v, v))


def _put_rows(
    old: Float[Array, "B K S H"], new: Float[Array, "B K T H"], index: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
    """Write every row and head by itself, so that none is sent to another device; S as an index is dropped.

    On CPU a token that is alone goes twice. XLA makes one update of one row a slice update, makes that
    twice, and then copies the whole cache three times in every step.
    """

    def scatter(old: Array, new: Array, index: Array) -> Array:
        one_head = jax.vmap(lambda o, n, i: o.at[i].set(n, mode="drop"), in_axes=(0, 0, None))
        return jax.vmap(one_head)(old, new, index)

    def twice(old: Array, new: Array, index: Array) -> Array:
        return scatter(old, jnp.repeat(new, 2, axis=2), jnp.repeat(index, 2, axis=1))

    if new.shape[2] != 1:
        return scatter(old, new, index)
    return lax.platform_dependent(old, new, index, cpu=twice, default=scatter)


def view(
    cache: KVCache, length: Int[Array, " b"], slots: Int[Array, " b"] | None = None
) -> KVSegment:
    """Return what the cache holds once positions 0 .. length - 1 of each row have been written."""
    slot = jnp.arange(cache.k.shape[2])[None, :]
    if cache.ring_slack is None:
        positions = jnp.where(slot < length[:, None], slot, -1)
    else:
        newest = length[:, None] - 1
        positions = newest - (newest - slot) % cache.k.shape[2]
        positions = jnp.maximum(positions, -1)
    if slots is None:
        return KVSegment(cache.k, cache.v, positions)
    return KVSegment(cache.k[slots], cache.v[slots], positions)


def write_then_view(
    cache: KVCache,
    k: Float[Array, "b T K H"],
    v: Float[Array, "b T K H"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> tuple[KVCache, tuple[KVSegment, ...]]:
    """Write new tokens and return what queries at those positions may attend to.

    A pass that fits a ring's slack is written first and read back with the rest. A longer chunk would
    overwrite keys its own first queries need, so it is read beside the old ring instead.
    """
    t = k.shape[1]
    new = write(cache, k, v, start, count, slots)
    if cache.ring_slack is None or t <= cache.ring_slack:
        return new, (view(new, start + count, slots),)
    positions = start[:, None] + jnp.arange(t)[None, :]
    return new, (view(cache, start, slots), fresh(k, v, positions, count))


def fresh(
    k: Float[Array, "b T K H"],
    v: Float[Array, "b T K H"],
    positions: Int[Array, "b T"],
    count: Int[Array, " b"],
    seen_by: Bool[Array, "b T T"] | None = None,
) -> KVSegment:
    """Return this pass's own keys and values as a segment, without any cache."""
    real = jnp.arange(k.shape[1])[None, :] < count[:, None]
    positions = jnp.where(real, positions, -1)
    return KVSegment(k.swapaxes(1, 2), v.swapaxes(1, 2), positions, seen_by)


def keep(
    cache: KVCache,
    segment: KVSegment,
    rows: Int[Array, "B T"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> KVCache:
    """Write some tokens of a pass that has not written: the first `count` of `rows`, in that order.

    Args:
      rows: which token of the pass comes to stand at position start, start + 1, ...
    """

    def chosen(x: Array) -> Array:
        return jnp.take_along_axis(x, rows[:, None, :, None], axis=2).swapaxes(1, 2)

    return write(cache, chosen(segment.k), chosen(segment.v), start, count)


def cache_bytes(tree: object) -> int:
    """Return the bytes that all arrays of a cache tree take."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
