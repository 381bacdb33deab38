"""Accepting a draft: pure arrays, no model.

Row t of `logits` is the target's distribution of the token after block slot t. In a chain it judges draft
token t (slot t + 1), and the row after the last accepted draft gives the bonus token. Drafts here are
certain choices (a one-hot draft distribution): a draft d is accepted with probability p(d), and a rejection
draws from p without d. What is emitted then follows p exactly. Source: Leviathan et al. 2023, section 2.3,
with a one-hot q. For trees see `tree_verify`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.sampling import SamplingParams, Stream, argmax, fold_keys, sample, shape_logits
from jaxspec.shapes import Array, Bool, Float, Int


class Verdict(struct.PyTreeNode):
    """What a verify step decided for each row."""

    accepted: Int[Array, " B"]  # draft tokens kept, 0 to G
    bonus: Int[Array, " B"]  # the token after them, from the target
    path: Int[Array, "B T"] | None = None  # trees: block rows that stay, the anchor first


def verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    sampling: SamplingParams,
    keys: Array,
    steps: Int[Array, " B"],
) -> Verdict:
    """Judge G = T - 1 draft tokens a row; with G = 0 this is plain decoding's choice of the next token.

    Rows of temperature 0 compare with the argmax; a batch of such rows alone computes nothing else.
    """
    greedy = greedy_verify(logits, draft)

    def mixed() -> Verdict:
        sampled = rejection_verify(logits, draft, sampling, keys, steps)
        return jax.tree.map(lambda g, s: jnp.where(sampling.temperature > 0, s, g), greedy, sampled)

    return lax.cond(jnp.any(sampling.temperature > 0), mixed, lambda: greedy)


def greedy_verify(logits: Float[Array, "B T V"], draft: Int[Array, "B G"]) -> Verdict:
    """Keep the drafts that equal the target's own choice, up to the first that does not."""
    choice = argmax(logits)
    accepted = _leading(draft == choice[:, :-1])
    return Verdict(accepted, jnp.take_along_axis(choice, accepted[:, None], axis=1)[:, 0])


def rejection_verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    sampling: SamplingParams,
    keys: Array,
    steps: Int[Array, " B"],
) -> Verdict:
    """Accept draft d with probability p(d); after a rejection sample p without d, else p itself."""
    b, t, vocab = logits.shape
    logits = shape_logits(logits, sampling)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    draft_logits = jnp.take_along_axis(logits[:, :-1], draft[:, :, None], axis=-1)[:, :, 0]
    draft_probs = jnp.exp(draft_logits - log_z[:, :-1])
    slots = jnp.broadcast_to(jnp.arange(t - 1), (b, t - 1))
    uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, ())))
    accepted = _leading(uniform(fold_keys(keys, steps, slots, Stream.ACCEPT)) < draft_probs)

    row = jnp.take_along_axis(logits, accepted[:, None, None], axis=1)[:, 0]
    padded = jnp.concatenate([draft, jnp.full((b, 1), -1, draft.dtype)], axis=1)
    rejected = jnp.take_along_axis(padded, accepted[:, None], axis=1)  # -1: nothing was rejected
    residual = jnp.where(jnp.arange(vocab)[None, :] == rejected, -jnp.inf, row)
    # p(d) may round to just under 1 with nothing else left; then d stands.
    row = jnp.where(jnp.any(residual > -jnp.inf, axis=-1, keepdims=True), residual, row)
    token_keys = fold_keys(keys, steps, accepted[:, None], Stream.TOKEN)[:, 0]
    return Verdict(accepted, sample(row, token_keys))


def tree_verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    parents: Int[Array, "B G"],
    sampling: SamplingParams,
    keys: Array,
    steps: Int[Array, " B"],
    *,
    depth: int,
) -> Verdict:
    """Follow the target's own choices through a draft tree, as deep as it has them.

    The target chooses a token after every row of the block: its best, or a draw from its distribution. From
    the anchor on, a child that is the chosen token is accepted, and the choice after it is next; the first
    choice that no child has is the bonus token. Every emitted token is thus the target's own choice after
    what precedes it, and the draw at a row does not depend on how the row was reached: what is emitted
    follows the target exactly, whatever the tree. A child d is accepted with probability p(d), the most
    that any lossless rule allows for drafts that are certain choices.

    Args:
      depth: most drafts that follow each other.
    """
    b, t, _ = logits.shape
    greedy = argmax(logits)

    def mixed() -> Int[Array, "B T"]:
        token_keys = fold_keys(keys, steps, jnp.broadcast_to(jnp.arange(t), (b, t)), Stream.TOKEN)
        drawn = jax.vmap(sample, in_axes=1, out_axes=1)(shape_logits(logits, sampling), token_keys)
        return jnp.where(sampling.temperature[:, None] > 0, drawn, greedy)

    choice = lax.cond(jnp.any(sampling.temperature > 0), mixed, lambda: greedy)
    row, accepted = jnp.zeros(b, jnp.int32), jnp.zeros(b, jnp.int32)
    path = [row]
    for _ in range(depth):
        wanted = jnp.take_along_axis(choice, row[:, None], axis=1)
        hit = (parents == row[:, None]) & (draft == wanted)
        found = jnp.any(hit, axis=1)  # where not, the row stays: nothing is below it that fits
        row = jnp.where(found, jnp.argmax(hit, axis=1).astype(jnp.int32) + 1, row)
        accepted += found.astype(jnp.int32)
        path.append(row)
    bonus = jnp.take_along_axis(choice, row[:, None], axis=1)[:, 0]
    path += [row] * (t - len(path))
    return Verdict(accepted, bonus, jnp.stack(path, axis=1))


def synthetic_verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    acceptance_length: float,
    keys: Array,
    steps: Int[Array, " B"],
) -> Verdict:
    """Do greedy verification's work, then decide by chance: benchmarks only, the output is meaningless.

    Args:
      acceptance_length: mean tokens committed a step, in [1, G + 1].
    """
    greedy = greedy_verify(logits, draft)
    whole = int(acceptance_length)
    slot = jnp.zeros((draft.shape[0], 1), jnp.int32)
    key = fold_keys(keys, steps, slot, Stream.ACCEPT)[:, 0]
    extra = jax.vmap(lambda k: jax.random.uniform(k, ()))(key) < acceptance_length - whole
    # The real verdict stays in the data flow, so that none of its work is optimised away.
    real = jnp.minimum(greedy.accepted, 0)
    return Verdict(whole - 1 + extra.astype(jnp.int32) + real, greedy.bonus)


def _leading(hits: Bool[Array, "B G"]) -> Int[Array, " B"]:
    return jnp.sum(jnp.cumprod(hits.astype(jnp.int32), axis=-1), axis=-1)
