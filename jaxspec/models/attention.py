"""Attention over cached and fresh keys: the plain reference that every kernel is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.cache import KVSegment
from jaxspec.models.layers import einsum
from jaxspec.shapes import Array, Bool, Float, Int


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

    A key at position k is seen from q when it exists (k >= 0), k > q - window, and, if causal, k <= q.
    Scores and softmax are float32. A query that sees nothing (padding) gives finite rubbish.

    Args:
      window: keys a query sees, itself included; None for all.
      segments: their keys need not be in order, and no position may stand in two of them.
    """
    scores = [
        jnp.where(
            _visible(q_positions, s.positions, window, causal)[:, None, None],
            einsum("btkgh,bksh->bkgts", q, s.k, out_dtype=jnp.float32) * scale,
            jnp.finfo(jnp.float32).min,
        )
        for s in segments
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    out, begin = jnp.zeros((), jnp.float32), 0
    for s in segments:
        size = s.k.shape[2]
        part = weights[..., begin : begin + size]
        out += einsum("bkgts,bksh->btkgh", part, s.v, out_dtype=jnp.float32)
        begin += size
    return out.astype(q.dtype)


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
