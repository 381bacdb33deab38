"""Accepting a draft: pure arrays, no model.

Row t of `logits` is the target's distribution of the token after block slot t. In a chain it judges draft
token t (slot t + 1), and the row after the last accepted draft gives the bonus token. With p the target's
distribution and q the one that a draft was drawn from, what is emitted follows p exactly:

    standard   draft d is accepted with probability min(1, p(d) / q(d)), after all drafts before it; the
               first rejection draws from max(0, p - q), normalised
    block      drafts are accepted together, which keeps more of them; see `block_verify`

A draft that is a certain choice has a one-hot q, and nobody needs to write that down: p(d) decides, and a
rejection draws from p without d. For trees, whose drafts are such choices, see `tree_verify`.
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
    *,
    log_q: Float[Array, "B G V"] | None = None,
    block: bool = False,
) -> Verdict:
    """Judge G = T - 1 draft tokens a row; with G = 0 this is plain decoding's choice of the next token.

    Rows of temperature 0 compare with the argmax; a batch of such rows alone computes nothing else.

    Args:
      logits: the target's with all that comes before temperature.
      log_q: log of the distribution that each draft was drawn from; None when drafts are certain choices.
      block: accept by `block_verify` instead of `rejection_verify`.
    """
    greedy = greedy_verify(logits, draft)

    def mixed() -> Verdict:
        judge = block_verify if block else rejection_verify
        sampled = judge(logits, draft, sampling, keys, steps, log_q)
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
    log_q: Float[Array, "B G V"] | None = None,
) -> Verdict:
    """Accept drafts one after the other, until one is rejected. Source: Leviathan et al. 2023, section 2.3."""
    log_p = jax.nn.log_softmax(shape_logits(logits, sampling))
    ratios = jnp.exp(_log_ratios(log_p, draft, log_q))
    accepted = _leading(_uniform(keys, steps, draft) < ratios)
    log_scale = jnp.zeros(accepted.shape, jnp.float32)
    return _with_bonus(accepted, log_scale, log_p, draft, log_q, keys, steps)


def block_verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    sampling: SamplingParams,
    keys: Array,
    steps: Int[Array, " B"],
    log_q: Float[Array, "B G V"] | None = None,
) -> Verdict:
    """Accept the longest prefix of the draft, of one token or more, that passes a draw of its own.

    The weight w of a prefix is that of the one before times p(d) / q(d), at most 1. It is the probability
    that this prefix or a longer one is accepted, so that what one draft lacks another can make up. With m
    the mass of max(0, w p - q) after the prefix, it passes with probability m / (m + 1 - w), the whole
    draft with w; the next token then comes from max(0, w p - q). No lossless rule accepts more on average.
    With certain choices this accepts as many as `rejection_verify`.

    Source: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2.
    """
    b, g = draft.shape
    log_p = jax.nn.log_softmax(shape_logits(logits, sampling))
    ratios = jnp.exp(_log_ratios(log_p, draft, log_q))
    weights = [jnp.ones(b, jnp.float32)]
    for i in range(g):
        weights.append(jnp.minimum(weights[-1] * ratios[:, i], 1.0))
    weight = jnp.stack(weights, axis=1)  # of no draft, one draft, ...
    inner = weight[:, 1:-1]  # what follows is a draft, so there is a q
    if log_q is None:
        mass = inner * (1.0 - jnp.minimum(ratios[:, 1:], 1.0))
    else:
        excess = inner[:, :, None] * jnp.exp(log_p[:, 1:-1]) - jnp.exp(log_q[:, 1:])
        mass = jnp.sum(jnp.maximum(excess, 0.0), axis=-1)
    whole = mass + 1.0 - inner
    # Nothing to stop for: w is 1 and p is q. Then more was accepted, or rounding alone refused it.
    passes = jnp.where(whole > 0, mass / jnp.where(whole > 0, whole, 1.0), 1.0)
    passes = jnp.concatenate([passes, weight[:, -1:]], axis=1)
    hits = _uniform(keys, steps, draft) < passes
    lengths = jnp.where(hits, jnp.arange(1, g + 1), 0)
    accepted = jnp.max(lengths, axis=1)
    log_scale = jnp.log(jnp.take_along_axis(weight, accepted[:, None], axis=1)[:, 0])
    return _with_bonus(accepted, log_scale, log_p, draft, log_q, keys, steps)


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


def _log_ratios(
    log_p: Float[Array, "B T V"], draft: Int[Array, "B G"], log_q: Float[Array, "B G V"] | None
) -> Float[Array, "B G"]:
    """Return log p(d) - log q(d) of each draft."""

    def of(x: Float[Array, "B G V"]) -> Float[Array, "B G"]:
        return jnp.take_along_axis(x, draft[:, :, None], axis=-1)[:, :, 0]

    return of(log_p[:, :-1]) - (0.0 if log_q is None else of(log_q))


def _uniform(keys: Array, steps: Int[Array, " B"], draft: Int[Array, "B G"]) -> Float[Array, "B G"]:
    slots = jnp.broadcast_to(jnp.arange(draft.shape[1]), draft.shape)
    uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, ())))
    return uniform(fold_keys(keys, steps, slots, Stream.ACCEPT))


def _with_bonus(
    accepted: Int[Array, " B"],
    log_scale: Float[Array, " B"],
    log_p: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    log_q: Float[Array, "B G V"] | None,
    keys: Array,
    steps: Int[Array, " B"],
) -> Verdict:
    """Draw the token after the accepted drafts: from max(0, scale p - q), or from p when all were accepted."""
    p = jnp.take_along_axis(log_p, accepted[:, None, None], axis=1)[:, 0]
    p += log_scale[:, None]
    if draft.shape[1]:  # else nothing was rejected
        p = _residual(p, accepted, draft, log_q)
    token_keys = fold_keys(keys, steps, accepted[:, None], Stream.TOKEN)[:, 0]
    return Verdict(accepted, sample(p, token_keys))


def _residual(
    p: Float[Array, "B V"],
    accepted: Int[Array, " B"],
    draft: Int[Array, "B G"],
    log_q: Float[Array, "B G V"] | None,
) -> Float[Array, "B V"]:
    """Return the log of max(0, p - q), with the q of the draft that was rejected, or p where none was."""
    b, g = draft.shape
    if log_q is None:
        padded = jnp.concatenate([draft, jnp.full((b, 1), -1, draft.dtype)], axis=1)
        rejected = jnp.take_along_axis(padded, accepted[:, None], axis=1)  # -1: nothing was
        q = jnp.where(jnp.arange(p.shape[-1])[None, :] == rejected, 0.0, -jnp.inf)
    else:
        row = jnp.minimum(accepted, g - 1)[:, None, None]
        q = jnp.take_along_axis(log_q, row, axis=1)[:, 0]
        q = jnp.where(accepted[:, None] < g, q, -jnp.inf)
    # log(p - q) without leaving logs: nothing underflows, and without a q it is p to the bit.
    larger = p > q
    gap = jnp.where(larger, q - p, -jnp.inf)
    residual = jnp.where(larger, p + jnp.log1p(-jnp.exp(gap)), -jnp.inf)
    # Rounding may leave nothing, where p is q or is all on the draft. Then p itself is right.
    return jnp.where(jnp.any(residual > -jnp.inf, axis=-1, keepdims=True), residual, p)
