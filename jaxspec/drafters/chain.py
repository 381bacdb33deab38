"""Draft a chain token by token, for drafters whose next token depends on the one before it.

Read `walk`. `tree.grow` does the same for trees, with `expand_of` the same step. Everything here works
on arrays, without a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp

from jaxspec.drafters.base import Draft, Draws
from jaxspec.drafters.tree import Children, Expand, best_children
from jaxspec.sampling import argmax, draw_drafts
from jaxspec.shapes import Array, Float, Int

CarryT = TypeVar("CarryT")


class Choices(NamedTuple):
    """The tokens that may come next.

    Attributes:
      tokens: the token of each logit, for each node or for all nodes alike; None when the logits are of
        all tokens, in order.
    """

    logits: Float[Array, "B F C"]
    tokens: Int[Array, "B F C"] | Int[Array, " C"] | None


Step = Callable[[CarryT, Int[Array, "B F"], Int[Array, "B F"]], tuple[CarryT, Choices]]
"""`step(carry, tokens, origins)` returns the next carry and what may follow each of some nodes.

Node f has token `tokens[:, f]`. Its parent is node `origins[:, f]` of the step before, in whose order
`carry` is. The first node is the anchor alone.
"""


def walk(
    step: Step[Any],
    carry: Any,
    anchors: Int[Array, " B"],
    *,
    num_draft_tokens: int,
    vocab_size: int,
    draws: Draws | None = None,
) -> Draft:
    """Take one token after the other, each the likeliest or drawn.

    Args:
      vocab_size: of the target, over which the draft's distributions are.
      draws: how to draw; None takes the likeliest token each time.
    """
    tokens, origins = anchors[:, None], jnp.zeros((anchors.shape[0], 1), jnp.int32)
    drafts, log_qs = [], []
    for i in range(num_draft_tokens):
        carry, choices = step(carry, tokens, origins)
        if draws is None:
            index = argmax(choices.logits)
        else:
            index, log_q = draw_drafts(choices.logits, draws.sampling, draws.keys[:, i, None])
            log_qs.append(over_vocabulary(choices, log_q, vocab_size))
        tokens = tokens_of(choices, index)
        drafts.append(tokens)
    return Draft(
        jnp.concatenate(drafts, axis=1),
        log_q=jnp.concatenate(log_qs, axis=1) if log_qs else None,
    )


def expand_of(step: Step[CarryT]) -> Expand[CarryT]:
    """Return what `tree.grow` calls, of a step."""

    def expand(carry: CarryT, tokens: Array, origins: Array, topk: int) -> tuple[CarryT, Children]:
        carry, choices = step(carry, tokens, origins)
        best = best_children(choices.logits, topk)
        best = best._replace(tokens=tokens_of(choices, best.tokens))
        wide = (*tokens.shape, topk)
        return carry, Children(*(jnp.broadcast_to(x, wide) for x in best))

    return expand


def tokens_of(choices: Choices, index: Int[Array, "B F *K"]) -> Int[Array, "B F *K"]:
    """Return the tokens of some logits, one or several of each node."""
    if choices.tokens is None:
        return index
    if choices.tokens.ndim == 1:
        return choices.tokens[index]
    flat = index.reshape(*index.shape[:2], -1)
    return jnp.take_along_axis(choices.tokens, flat, axis=-1).reshape(index.shape)


def over_vocabulary(
    choices: Choices, log_q: Float[Array, "B F C"], vocab_size: int
) -> Float[Array, "B F V"]:
    """Return log-probabilities of the whole vocabulary, -inf for tokens outside of `choices`."""
    if choices.tokens is None:
        return log_q
    b, f, _ = log_q.shape
    nothing = jnp.full((b, f, vocab_size), -jnp.inf, log_q.dtype)
    if choices.tokens.ndim == 1:
        return nothing.at[:, :, choices.tokens].set(log_q)
    rows = jnp.arange(b, dtype=jnp.int32)[:, None, None]
    nodes = jnp.arange(f, dtype=jnp.int32)[None, :, None]
    return nothing.at[rows, nodes, choices.tokens].set(log_q)
