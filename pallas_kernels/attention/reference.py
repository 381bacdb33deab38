"""The operation in plain JAX: all scores, one softmax. Tests compare the kernels with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.reference_ops import contract


class KVSegment(NamedTuple):
    """Keys and values in pages, and the position of each key.

    Attributes:
      k: keys, C pages of as many slots each.
      v: values.
      positions: of the S slots of each row; -1 marks an empty slot, which no query sees.
      seen_by: which queries may see each key; None: all queries that its position allows.
      pages: the pages of each row. Their slots in this order are the row's slots. None: row b has
        one page, page b.
    """

    k: Float[Array, "C K page H"]
    v: Float[Array, "C K page H"]
    positions: Int[Array, "B S"]
    seen_by: Bool[Array, "B T S"] | None = None
    pages: Int[Array, "B N"] | None = None


def gathered(segment: KVSegment) -> KVSegment:
    """Return a segment with a copy of the pages that the batch reads, one long page for each row.

    A page past the last one becomes the last one, as `jax.numpy` has it and the kernels too.
    """
    pages = segment.pages
    if pages is None:
        return segment

    def one(x: Array) -> Array:
        rows = x[pages].swapaxes(1, 2)
        return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])

    return segment._replace(k=one(segment.k), v=one(segment.v), pages=None)


def reference(
    q: Float[Array, "B T K G H"],
    q_positions: Int[Array, "B T"],
    segments: tuple[KVSegment, ...],
    *,
    scale: float,
    window: int | None,
    causal: bool,
    value_scale: float = 1.0,
) -> Float[Array, "B T K G H"]:
    """Score every key of every segment, and mask the keys that a query does not see.

    Scores and softmax are float32. Arguments as in `pallas_kernels.attention.attention`.
    """
    segments = tuple(gathered(s) for s in segments)
    b, t, k, g, h = q.shape
    # Query heads of one kv head and tokens become rows (R = G * T). Both products are then plain
    # batched products in the layout of the caches. Any other order makes XLA transpose whole
    # caches.
    rows = q.transpose(0, 2, 3, 1, 4).reshape(b, k, g * t, h)
    scores = []
    for s in segments:
        visible = _visible(q_positions, s.positions, window, causal)
        if s.seen_by is not None:
            visible &= s.seen_by
        visible = jnp.broadcast_to(visible[:, None, None], (b, 1, g, t, visible.shape[-1]))
        score = contract("bkrh,bksh->bkrs", rows, s.k.astype(q.dtype)) * scale
        visible = visible.reshape(b, 1, g * t, -1)
        scores.append(jnp.where(visible, score, jnp.finfo(jnp.float32).min))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    out, begin = jnp.zeros((), jnp.float32), 0
    for s in segments:
        end = begin + s.k.shape[2]
        out += contract("bkrs,bksh->bkrh", weights[..., begin:end], s.v.astype(q.dtype))
        begin = end
    if value_scale != 1:
        out *= value_scale
    return out.reshape(b, k, g, t, h).transpose(0, 3, 1, 2, 4).astype(q.dtype)


def reference_in_blocks(
    q: Float[Array, "B T K G H"],
    q_positions: Int[Array, "B T"],
    segments: tuple[KVSegment, ...],
    *,
    score_bytes: int,
    **options: Any,
) -> Float[Array, "B T K G H"]:
    """Run the reference for a block of queries after the other.

    The scores of a block take at most `score_bytes`, or those of one query of each row.
    """
    b, t, k, g, _ = q.shape
    keys = sum(s.positions.shape[1] for s in segments)
    blocks = min(t, -(-4 * b * t * k * g * keys // score_bytes))
    if blocks <= 1:
        return reference(q, q_positions, segments, **options)
    size = -(-t // blocks)
    blocks = -(-t // size)

    def cut(x: Array) -> Array:
        """Return x with a new first axis, of blocks."""
        pads = [(0, blocks * size - t if axis == 1 else 0) for axis in range(x.ndim)]
        return jnp.moveaxis(jnp.pad(x, pads).reshape(b, blocks, size, *x.shape[2:]), 1, 0)

    def one(block: tuple[Array, Array, tuple[Array | None, ...]]) -> Array:
        queries, positions, seen = block
        parts = tuple(s._replace(seen_by=x) for s, x in zip(segments, seen, strict=True))
        return reference(queries, positions, parts, **options)

    seen = tuple(None if s.seen_by is None else cut(s.seen_by) for s in segments)
    segments = tuple(gathered(s) for s in segments)
    out = jnp.moveaxis(lax.map(one, (cut(q), cut(q_positions), seen)), 0, 1)
    return out.reshape(b, blocks * size, *out.shape[3:])[:, :t]


def _visible(
    q: Int[Array, "B T"], k: Int[Array, "B S"], window: int | None, causal: bool
) -> Bool[Array, "B T S"]:
    q, k = q[:, :, None], k[:, None, :]
    visible = jnp.broadcast_to(k >= 0, jnp.broadcast_shapes(q.shape, k.shape))
    if window is not None:
        visible &= k > q - window
    if causal:
        visible &= k <= q
    return visible
