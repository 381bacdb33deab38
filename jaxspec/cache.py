"""Key/value caches: fixed shapes, written in place, rolled back by a length.

A cache is [B, K, S, H] an array (heads before positions: the other order is transposed at the edge
of the decode loop). Full layers hold every position; sliding layers a ring in which position p
lives in slot p mod R. Nothing is ever erased: which positions a slot holds follows from how many
were written, so forgetting rejected tokens is keeping the old length.

A ring has `slack` more slots than its window: a pass may write up to `slack` tokens before it
reads, and of those any may be rejected, without hiding a key that some later query still sees.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.shapes import Array, Bool, DTypeLike, Float, Int
from pallas_kernels.attention import KVSegment
from pallas_kernels.qkv import Destination, write_kv

RING_MULTIPLE = 64  # ring sizes are rounded up to this, so that kernels can tile them


class KVCache(struct.PyTreeNode):
    """One layer's keys and values. `ring_slack` is None when slot s simply holds position s."""

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


def destination(
    cache: KVCache,
    tokens: int,
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> Destination:
    """Return where positions start .. start + count - 1 of each row go.

    Args:
      tokens: how many tokens each row has.
      count: how many of them count; the rest are dropped.
      slots: cache row of each batch row; None when they are the same.
    """
    size = cache.k.shape[2]
    offset = jnp.arange(tokens)[None, :]
    # A chunk longer than a ring keeps its newest tokens; two writes to one slot would race.
    kept = (offset < count[:, None]) & (offset >= count[:, None] - size)
    position = start[:, None] + offset
    index = position % size if cache.ring_slack is not None else position
    return Destination(cache.k, cache.v, jnp.where(kept, index, size), slots)


def write(
    cache: KVCache,
    k: Float[Array, "b K T H"],
    v: Float[Array, "b K T H"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> KVCache:
    """Write a pass, in place when the cache is donated. Arguments as in `destination`."""
    k, v = write_kv(destination(cache, k.shape[2], start, count, slots), k, v)
    return cache.replace(k=k, v=v)


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


def early_destination(
    cache: KVCache,
    tokens: int,
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> Destination | None:
    """Return where a pass goes if it may be written before its queries attend, else None.

    A chunk longer than a ring's slack would overwrite keys that its own first queries need.
    Arguments as in `destination`.
    """
    if cache.ring_slack is not None and tokens > cache.ring_slack:
        return None
    return destination(cache, tokens, start, count, slots)


def append_pass(
    cache: KVCache,
    into: Destination | None,
    k: Float[Array, "_ K _ H"],
    v: Float[Array, "_ K _ H"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    slots: Int[Array, " b"] | None = None,
) -> tuple[KVCache, tuple[KVSegment, ...]]:
    """Return the cache with a pass in it, and what the queries of that pass attend to.

    Args:
      into: what `early_destination` returned. If that was a destination, k and v are the arrays of
        the cache, written. Otherwise they are the pass's own, which are read beside the old ring.
    """
    if into is not None:
        new = cache.replace(k=k, v=v)
        return new, (view(new, start + count, slots),)
    positions = start[:, None] + jnp.arange(k.shape[2])[None, :]
    segments = view(cache, start, slots), pass_segment(k, v, positions, count)
    return write(cache, k, v, start, count, slots), segments


def pass_segment(
    k: Float[Array, "b K T H"],
    v: Float[Array, "b K T H"],
    positions: Int[Array, "b T"],
    count: Int[Array, " b"],
    seen_by: Bool[Array, "b T T"] | None = None,
) -> KVSegment:
    """Return a pass's own keys and values as a segment, which is in no cache.

    Args:
      count: how many tokens of each row are real.
      seen_by: which queries may see each token; None: all that its position allows.
    """
    real = jnp.arange(k.shape[2])[None, :] < count[:, None]
    positions = jnp.where(real, positions, -1)
    return KVSegment(k, v, positions, seen_by)


def append_chosen(
    cache: KVCache,
    segment: KVSegment,
    rows: Int[Array, "B T"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> KVCache:
    """Write some tokens of a pass that was not written yet: the first `count` of `rows`.

    Args:
      segment: the pass.
      rows: which token of the pass comes to stand at position start, start + 1, ...
    """

    def chosen(x: Array) -> Array:
        return jnp.take_along_axis(x, rows[:, None, :, None], axis=2)

    return write(cache, chosen(segment.k), chosen(segment.v), start, count)


def cache_bytes(tree: object) -> int:
    """Return the bytes that all arrays of a cache tree take."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
