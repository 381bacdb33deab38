"""Attention over cached and fresh keys: the plain reference that every kernel is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.cache import KVSegment
from jaxspec.models.layers import contract
from jaxspec.shapes import Array, Bool, Float, Int
from jaxspec.sharding import constrain

# How axes are named in `sharding.RULES`.
QUERY_AXES = ("batch", None, "kv_heads", "query_groups", None)  # B T K G H
KV_AXES = ("batch", None, "kv_heads", None)  # B T K H
Q_WEIGHT_AXES = ("inputs", "kv_heads", "query_groups", None)  # D K G H
KV_WEIGHT_AXES = (
    "inputs",
    "kv_heads",
    None,
    None,
)  # D K X H: keys and values, queries beside them or not
OUT_WEIGHT_AXES = ("kv_heads", "query_groups", "inputs", None)  # K G H D


def attend(
    q: Float[Array, "B T K G H"],
    q_positions: Int[Array, "B T"],
    segments: tuple[KVSegment, ...],
    *,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> Float[Array, "B T K G H"]:
    """Attend from each query to every key its position allows, over all segments at once.

    A key at position k is seen from q when it exists (k >= 0), k > q - window, if causal k <= q, and if the
    segment says which queries see it, it is one of them (branches of a draft tree do not see each other).
    Scores and softmax are float32. A query that sees nothing (padding) gives finite rubbish.

    Args:
      window: keys a query sees, itself included; None for all.
      segments: their keys need not be in order, and no position may stand in two of them.
    """
    q = constrain(q, *QUERY_AXES)
    b, t, k, g, h = q.shape
    # Query heads of one kv head become rows beside the tokens (R = G * T): both products are then plain
    # batched ones in the caches' own layout. Any other order makes XLA transpose whole caches.
    rows = q.transpose(0, 2, 3, 1, 4).reshape(b, k, g * t, h)
    scores = []
    for s in segments:
        visible = _visible(q_positions, s.positions, window, causal)
        if s.seen_by is not None:
            visible &= s.seen_by
        visible = jnp.broadcast_to(visible[:, None, None], (b, 1, g, t, visible.shape[-1]))
        score = contract("bkrh,bksh->bkrs", rows, s.k) * scale
        visible = visible.reshape(b, 1, g * t, -1)
        scores.append(jnp.where(visible, score, jnp.finfo(jnp.float32).min))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    out, begin = jnp.zeros((), jnp.float32), 0
    for s in segments:
        end = begin + s.k.shape[2]
        out += contract("bkrs,bksh->bkrh", weights[..., begin:end], s.v)
        begin = end
    out = out.reshape(b, k, g, t, h).transpose(0, 3, 1, 2, 4).astype(q.dtype)
    return constrain(out, *QUERY_AXES)


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
