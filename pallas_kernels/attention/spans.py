"""Find which keys a tile of rows reads, and average the results of shares of the keys.

This is plain JAX that runs before and after the kernels.

A row is one query head of one token (row = token * G + head). Spans of keys are the same for all
layers of a kind, and XLA computes them once.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

UNSEEN = -(2.0**100)
"""The score of a key that a query does not see.

Minus infinity would give NaN in rows that see nothing. The score is a power of two, so that its
product with any scale is exact. A scale and a subtraction in one instruction, which rounds once,
then still give 0.
"""


def visible_span(
    lowest: Int[Array, "B R"],
    highest: Int[Array, "B R"],
    positions: Int[Array, "B S"],
    *,
    window: int | None,
    causal: bool,
) -> Int[Array, "B R 2"]:
    """Return, for each tile of rows, the span of slots that some query may see.

    A span is its first slot and the slot after its last. (S, 0) means that there is none.

    Args:
      lowest: lowest position of the queries of each tile of rows.
      highest: highest position of the queries of each tile of rows.
      positions: positions of the keys.
      window: number of positions that a query sees; None for all.
      causal: whether queries see no later keys.
    """
    useful = positions[:, None] >= 0
    if window is not None:
        useful &= positions[:, None] > lowest[:, :, None] - window
    if causal:
        useful &= positions[:, None] <= highest[:, :, None]
    return _first_and_last(jnp.broadcast_to(useful, (*lowest.shape, positions.shape[1])))


def masked_span(
    spans: Int[Array, "B R 2"],
    lowest: Int[Array, "B R"],
    highest: Int[Array, "B R"],
    positions: Int[Array, "B S"],
    *,
    window: int | None,
    causal: bool,
) -> Int[Array, "B R 2"]:
    """Return the part of each span that needs a mask, because some query does not see all of it.

    The part is its first slot and the slot after its last. (S, 0) means that no slot needs a mask.
    `spans` are the result of `visible_span`. The other arguments are as there.
    """
    unseen = positions[:, None] < 0
    if window is not None:
        unseen |= positions[:, None] <= highest[:, :, None] - window
    if causal:
        unseen |= positions[:, None] > lowest[:, :, None]
    slot = jnp.arange(positions.shape[1], dtype=jnp.int32)
    return _first_and_last(unseen & (slot >= spans[:, :, :1]) & (slot < spans[:, :, 1:]))


def _first_and_last(slots: Bool[Array, "B R S"]) -> Int[Array, "B R 2"]:
    """Return the first true slot, and the slot after the last; (S, 0) if none is true."""
    slot, size = jnp.arange(slots.shape[2], dtype=jnp.int32), slots.shape[2]
    first = jnp.min(jnp.where(slots, slot, size), axis=2)
    return jnp.stack([first, jnp.max(jnp.where(slots, slot + 1, 0), axis=2)], axis=2)


def position_range(positions: Int[Array, "B T"], groups: int, rows: int) -> tuple[Array, Array]:
    """Return the lowest and the highest position of each tile of `rows` rows, both [B, R]."""
    tokens = positions.shape[1]
    begin = np.arange(0, tokens * groups, rows)
    last = np.minimum((begin + rows - 1) // groups, tokens - 1)
    max_tokens = int(np.max(last - begin // groups)) + 1
    token = np.minimum((begin // groups)[:, None] + np.arange(max_tokens), last[:, None])
    of_tiles = positions[:, token]
    return jnp.min(of_tiles, axis=2), jnp.max(of_tiles, axis=2)


def average_shares(
    shares: Float[Array, "X *R H"], log_weights: Float[Array, "X *R"]
) -> Float[Array, "*R H"]:
    """Average the results of shares of the keys, weighted by the logs (base 2) of their weights.

    The sum is written term by term, so that XLA adds the shares in one kernel.
    """
    largest = functools.reduce(jnp.maximum, log_weights)
    weights = [jnp.exp2(one - largest) for one in log_weights]
    total = sum(weights)
    terms = [
        share.astype(jnp.float32) * (weight / total)[..., None]
        for share, weight in zip(shares, weights, strict=True)
    ]
    return functools.reduce(jnp.add, terms)
