"""Shapes and inputs of `attention`, with caches as in decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.attention.reference import KVSegment
from tests.pallas_kernels.inputs import Random


@dataclasses.dataclass(frozen=True)
class Shape:
    """The heads of one layer, and which keys its queries see."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    causal: bool = True


FULL_31B = Shape(32, 4, 512)


def cached(
    shape: Shape,
    lengths: Sequence[int],
    size: int,
    dtype: jnp.dtype,
    *,
    ring: bool = False,
    empty: float = 0.0,
    seed: int = 0,
) -> KVSegment:
    """Return a cache of `size` slots that holds positions below each row's length.

    Args:
      shape: heads of the layer.
      lengths: number of positions that were written to each row.
      size: number of slots.
      dtype: dtype of keys and values.
      ring: whether position p is in slot p mod size. A slot then holds its newest position.
      empty: the value in empty slots.
      seed: seed of the other values.
    """
    slot, length = np.arange(size)[None, :], np.asarray(lengths)[:, None]
    positions = np.where(slot < length, slot, -1)
    if ring:
        positions = np.maximum(length - 1 - (length - 1 - slot) % size, -1)
    full = (len(lengths), shape.kv_heads, size, shape.head_dim)
    random, exists = Random(seed), positions[:, None, :, None] >= 0
    k, v = (np.where(exists, random.normal(*full, dtype=dtype), dtype.type(empty)) for _ in "kv")
    return KVSegment(
        jax.device_put(k), jax.device_put(v), jax.device_put(positions.astype(np.int32))
    )


def in_pages(
    segment: KVSegment,
    pages: Sequence[Sequence[int]] | np.ndarray,
    num_pages: int,
    *,
    unread: float = float("nan"),
) -> KVSegment:
    """Return a segment that is spread over some pages of a larger cache.

    Args:
      segment: keys and values of as many rows as the batch has.
      pages: the pages of each row, which divide its slots evenly. Slots of a page past the last are
        dropped, and nobody may see their keys.
      num_pages: number of pages of the cache.
      unread: the value in all other pages.
    """
    which = np.asarray(pages, np.int32)
    is_page = which < num_pages

    def spread(x: Array) -> Array:
        b, k, _, h = x.shape
        cut = np.asarray(x).reshape(b, k, which.shape[1], -1, h).swapaxes(1, 2)
        full = np.full((num_pages, *cut.shape[2:]), x.dtype.type(unread))
        full[which[is_page]] = cut[is_page]
        return jax.device_put(full)

    return segment._replace(k=spread(segment.k), v=spread(segment.v), pages=jax.device_put(which))


def queries(
    shape: Shape, lengths: Sequence[int], tokens: int, dtype: jnp.dtype, seed: int = 1
) -> tuple[Array, Array]:
    """Return queries at the last `tokens` positions before each length, and these positions."""
    groups = shape.heads // shape.kv_heads
    q_shape = (len(lengths), tokens, shape.kv_heads, groups, shape.head_dim)
    q = Random(seed).normal(*q_shape, dtype=dtype)
    positions = np.asarray(lengths)[:, None] - tokens + np.arange(tokens)
    return q, jax.device_put(np.maximum(positions, 0).astype(np.int32))


def fresh(
    shape: Shape, positions: Array, dtype: jnp.dtype, *, tree: bool = False, seed: int = 2
) -> KVSegment:
    """Return the keys of the queries themselves.

    With `tree`, each token has a random parent, and each query sees its own key and those of its
    ancestors.
    """
    b, t = positions.shape
    random = Random(seed)
    k, v = (random.normal(b, shape.kv_heads, t, shape.head_dim, dtype=dtype) for _ in "kv")
    if not tree:
        return KVSegment(k, v, positions)
    rng, seen = np.random.default_rng(seed), np.zeros((b, t, t), bool)
    for row in range(b):
        seen[row, 0, 0] = True
        for i in range(1, t):
            seen[row, i] = seen[row, rng.integers(i)]
            seen[row, i, i] = True
    return KVSegment(k, v, positions, jax.device_put(seen))
