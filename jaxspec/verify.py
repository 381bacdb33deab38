"""Decide which draft tokens to accept. Everything here works on arrays alone, without a model.

Row t of `logits` is the target's distribution of the token after block slot t. In a chain, row t
decides on draft token t, which is in slot t + 1. The row after the last accepted draft gives the
bonus token. Let p be the target's distribution, and q the distribution that a draft was drawn from.
The emitted tokens follow p exactly under both rules:

    standard   Draft d is accepted with probability min(1, p(d) / q(d)), if all drafts before it
               were accepted. After the first rejection, the bonus token is drawn from
               max(0, p - q), normalised.
    block      Drafts are accepted jointly, which keeps more of them. See `block_verify`.

A deterministic draft, such as an argmax, has a one-hot q, which callers do not pass. Such a draft
is accepted with probability p(d), and a rejection draws from p without d. The drafts of a tree are
always deterministic. See `tree_verify`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.sampling import (
    NO_TOKEN,
    SamplingParams,
    Stream,
    choose,
    fold_keys,
    in_groups,
    sample,
    shape_logits,
)
from jaxspec.shapes import Array, Bool, Float, Int


class AcceptResult(struct.PyTreeNode):
    """The decision of a verify step for each row.

    Attributes:
      accepted: draft tokens accepted, 0 to G. The logits that accepted them are finite.
      bonus: the token after them, from the target. `NO_TOKEN` where its logits are not finite.
      path: for trees, the block rows kept, the anchor first.
      finite: whether all logits of the block are finite, of rejected drafts too. See
        `sampling.choose`.
    """

    accepted: Int[Array, " B"]
    bonus: Int[Array, " B"]
    path: Int[Array, "B T"] | None = None
    finite: Bool[Array, " B"] | None = None


def verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    sampling: SamplingParams,
    keys: Array,
    steps: Int[Array, " B"],
    *,
    log_q: Float[Array, "B G V"] | None = None,
    limit: Int[Array, " B"] | None = None,
    block: bool = False,
) -> AcceptResult:
    """Decide how many of the G = T - 1 drafts of each row to accept, and choose the bonus token.

    With G = 0, this chooses the next token as plain decoding does. Rows of temperature 0 compare
    their drafts with the argmax. A batch of only such rows computes nothing else.

    Args:
      logits: the target's logits after `sampling.adjust`, before temperature.
      log_q: log of the distribution that each draft was drawn from. None: drafts are deterministic.
      limit: the drafts of each row, of which the others are none; None: G. The row of logits after
        the last one is then the last that counts.
      block: accept by `block_verify` instead of `rejection_verify`.
    """
    choice = choose(logits)
    if limit is not None:
        draft = jnp.where(_slots(draft) < limit[:, None], draft, NO_TOKEN - 1)
    greedy = _follow(choice, draft)

    def mixed() -> AcceptResult:
        rule = block_verify if block else rejection_verify
        sampled = in_groups(rule, logits, draft, sampling, keys, steps, log_q, limit)
        accepted = jnp.minimum(sampled.accepted, _leading(choice != NO_TOKEN))
        bonus = jnp.where(_at(choice, accepted) != NO_TOKEN, sampled.bonus, NO_TOKEN)
        sampled = AcceptResult(accepted, bonus, finite=greedy.finite)
        return jax.tree.map(lambda g, s: jnp.where(sampling.temperature > 0, s, g), greedy, sampled)

    return lax.cond(jnp.any(sampling.temperature > 0), mixed, lambda: greedy)


def greedy_verify(logits: Float[Array, "B T V"], draft: Int[Array, "B G"]) -> AcceptResult:
    """Accept drafts up to the first one that differs from the target's argmax."""
    return _follow(choose(logits), draft)


def _follow(choice: Int[Array, "B T"], draft: Int[Array, "B G"]) -> AcceptResult:
    accepted = _leading(draft == choice[:, :-1])  # no draft is NO_TOKEN
    return AcceptResult(accepted, _at(choice, accepted), finite=jnp.all(choice != NO_TOKEN, axis=1))


def _at(choice: Int[Array, "B T"], row: Int[Array, " B"]) -> Int[Array, " B"]:
    return jnp.take_along_axis(choice, row[:, None], axis=1)[:, 0]


def rejection_verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    sampling: SamplingParams,
    keys: Array,
    steps: Int[Array, " B"],
    log_q: Float[Array, "B G V"] | None = None,
    limit: Int[Array, " B"] | None = None,
) -> AcceptResult:
    """Accept drafts one after the other, until one is rejected.

    Source: Leviathan et al. 2023, section 2.3.
    """
    log_p = jax.nn.log_softmax(shape_logits(logits, sampling))
    ratios = jnp.exp(_log_ratios(log_p, draft, log_q))
    hits = _uniform(keys, steps, draft) < ratios
    if limit is not None:
        hits &= _slots(draft) < limit[:, None]
    accepted = _leading(hits)
    log_scale = jnp.zeros(accepted.shape, jnp.float32)
    return _with_bonus(accepted, log_scale, log_p, draft, log_q, keys, steps, limit)


def block_verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    sampling: SamplingParams,
    keys: Array,
    steps: Int[Array, " B"],
    log_q: Float[Array, "B G V"] | None = None,
    limit: Int[Array, " B"] | None = None,
) -> AcceptResult:
    """Accept the longest prefix of the draft that passes a random draw of its own.

    Every prefix of one token or more has its own draw. If none passes, no draft is accepted.

    The empty prefix has weight 1. The weight w of a longer prefix is the weight of the prefix one
    token shorter times p(d) / q(d), at most 1, where d is the last token of the longer prefix. w is
    the probability that this prefix or a longer one is accepted. A likely draft can therefore make
    up for an unlikely one.

    Let m be the mass of max(0, w p - q) after the prefix. The prefix passes with probability
    m / (m + 1 - w). The whole draft passes with probability w. After a shorter prefix, the bonus
    token is drawn from max(0, w p - q), normalised. After the whole draft, the bonus token is drawn
    from p.

    No lossless rule accepts more drafts on average. If drafts are deterministic, this function
    accepts as many drafts as `rejection_verify`.

    Source: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2.
    """
    b, g = draft.shape
    log_p = jax.nn.log_softmax(shape_logits(logits, sampling))
    ratios = jnp.exp(_log_ratios(log_p, draft, log_q))
    # Where p or q is NaN, no rule can decide on a draft. The prefix before it is then all there is,
    # and passes as a whole draft does.
    unknown = jnp.isnan(ratios)
    ratios = jnp.where(unknown, 0.0, ratios)
    weights = [jnp.ones(b, jnp.float32)]
    for i in range(g):
        weights.append(jnp.minimum(weights[-1] * ratios[:, i], 1.0))
    weight = jnp.stack(weights, axis=1)  # column i: the prefix of i drafts
    inner = weight[:, 1:-1]  # a draft follows these prefixes, so q is known
    if log_q is None:
        mass = inner * (1.0 - jnp.minimum(ratios[:, 1:], 1.0))
    else:
        excess = inner[:, :, None] * jnp.exp(log_p[:, 1:-1]) - jnp.exp(log_q[:, 1:])
        mass = jnp.sum(jnp.maximum(excess, 0.0), axis=-1)
    whole = mass + 1.0 - inner
    # `whole` is 0 only where w is 1 and p equals q. There a longer prefix passes too, unless
    # rounding refuses it, so this prefix passes.
    passes = jnp.where(whole > 0, mass / jnp.where(whole > 0, whole, 1.0), 1.0)
    passes = jnp.where(unknown[:, 1:], inner, passes)
    passes = jnp.concatenate([passes, weight[:, -1:]], axis=1)
    if limit is not None:  # the draft of a row is whole at its limit, and nothing comes after it
        size = _slots(draft) + 1
        passes = jnp.where(size == limit[:, None], weight[:, 1:], passes)
        passes = jnp.where(size > limit[:, None], 0.0, passes)
    hits = _uniform(keys, steps, draft) < passes
    lengths = jnp.where(hits, jnp.arange(1, g + 1, dtype=jnp.int32), 0)
    accepted = jnp.max(lengths, axis=1)
    log_scale = jnp.log(jnp.take_along_axis(weight, accepted[:, None], axis=1)[:, 0])
    return _with_bonus(accepted, log_scale, log_p, draft, log_q, keys, steps, limit)


def tree_verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    parents: Int[Array, "B G"],
    sampling: SamplingParams,
    keys: Array,
    steps: Int[Array, " B"],
    *,
    depth: int,
) -> AcceptResult:
    """Accept the path through a draft tree that follows the target's own choices.

    The target chooses a token after every row of the block: the argmax in greedy rows of the batch,
    otherwise a draw from its distribution. The path starts at the anchor. If a child holds the
    chosen token, that child is accepted, and the path continues from the child. If no child holds
    the chosen token, that token is the bonus token.

    The emitted tokens follow the target exactly, whatever the tree. Every emitted token is the
    target's own choice after the tokens before it, and the draw at a row does not depend on how the
    row was reached. A child d is accepted with probability p(d). No lossless rule accepts a
    deterministic draft with a higher probability.

    Args:
      parents: the block row that each draft follows.
      depth: the most drafts on one path.
    """
    b, t, _ = logits.shape
    greedy = choose(logits)

    def mixed() -> Int[Array, "B T"]:
        token_keys = fold_keys(
            keys, steps, jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t)), Stream.TOKEN
        )
        drawn = in_groups(_draw, logits, sampling, token_keys)
        is_drawn = (sampling.temperature[:, None] > 0) & (greedy != NO_TOKEN)
        return jnp.where(is_drawn, drawn, greedy)

    choice = lax.cond(jnp.any(sampling.temperature > 0), mixed, lambda: greedy)
    row, accepted = jnp.zeros(b, jnp.int32), jnp.zeros(b, jnp.int32)
    path = [row]
    for _ in range(depth):
        wanted = jnp.take_along_axis(choice, row[:, None], axis=1)
        hit = (parents == row[:, None]) & (draft == wanted)  # no draft is NO_TOKEN
        has_child = jnp.any(hit, axis=1)  # if False, the path ends at this row
        row = jnp.where(has_child, lax.argmax(hit, 1, jnp.int32) + 1, row)
        accepted += has_child.astype(jnp.int32)
        path.append(row)
    bonus = _at(choice, row)
    path += [row] * (t - len(path))
    finite = jnp.all(choice != NO_TOKEN, axis=1)
    return AcceptResult(accepted, bonus, jnp.stack(path, axis=1), finite)


def _draw(
    logits: Float[Array, "B T V"], sampling: SamplingParams, keys: Array
) -> Int[Array, "B T"]:
    return jax.vmap(sample, in_axes=1, out_axes=1)(shape_logits(logits, sampling), keys)


def synthetic_verify(
    logits: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    acceptance_length: float,
    keys: Array,
    steps: Int[Array, " B"],
) -> AcceptResult:
    """Do the work of greedy verification, then accept a random number of drafts.

    This is for benchmarks only. The emitted tokens mean nothing.

    Args:
      acceptance_length: mean tokens committed per step, from 1 on. It may be above G + 1, the value
        for more drafts. Then at most all G are accepted.
    """
    greedy = greedy_verify(logits, draft)
    whole = int(acceptance_length)
    slot = jnp.zeros((draft.shape[0], 1), jnp.int32)
    key = fold_keys(keys, steps, slot, Stream.ACCEPT)[:, 0]
    extra = (
        jax.vmap(lambda k: jax.random.uniform(k, (), jnp.float32))(key) < acceptance_length - whole
    )
    # The real result stays in the data flow, so that XLA does not remove its work.
    real = jnp.minimum(greedy.accepted, 0)
    accepted = whole - 1 + extra.astype(jnp.int32) + real
    if acceptance_length > draft.shape[1] + 1:  # fewer drafts are verified than it counts on
        accepted = jnp.minimum(accepted, draft.shape[1])
    return dataclasses.replace(greedy, accepted=accepted)


def _leading(hits: Bool[Array, "B G"]) -> Int[Array, " B"]:
    return jnp.sum(jnp.cumprod(hits.astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)


def _log_ratios(
    log_p: Float[Array, "B T V"], draft: Int[Array, "B G"], log_q: Float[Array, "B G V"] | None
) -> Float[Array, "B G"]:
    """Return log p(d) - log q(d) for each draft d."""

    def of(x: Float[Array, "B G V"]) -> Float[Array, "B G"]:
        return jnp.take_along_axis(x, draft[:, :, None], axis=-1)[:, :, 0]

    return of(log_p[:, :-1]) - (0.0 if log_q is None else of(log_q))


def _slots(draft: Int[Array, "B G"]) -> Int[Array, "B G"]:
    return jnp.broadcast_to(jnp.arange(draft.shape[1], dtype=jnp.int32), draft.shape)


def _uniform(keys: Array, steps: Int[Array, " B"], draft: Int[Array, "B G"]) -> Float[Array, "B G"]:
    slots = _slots(draft)
    uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))
    return uniform(fold_keys(keys, steps, slots, Stream.ACCEPT))


def _with_bonus(
    accepted: Int[Array, " B"],
    log_scale: Float[Array, " B"],
    log_p: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    log_q: Float[Array, "B G V"] | None,
    keys: Array,
    steps: Int[Array, " B"],
    limit: Int[Array, " B"] | None,
) -> AcceptResult:
    """Draw the bonus token: from max(0, scale p - q), or from p where all drafts were accepted."""
    p = jnp.take_along_axis(log_p, accepted[:, None, None], axis=1)[:, 0]
    whole, p = p, p + log_scale[:, None]
    if draft.shape[1]:  # without drafts, nothing was rejected
        p = _residual(p, accepted, draft, log_q)
    if limit is not None:
        p = jnp.where((accepted >= limit)[:, None], whole, p)
    token_keys = fold_keys(keys, steps, accepted[:, None], Stream.TOKEN)[:, 0]
    return AcceptResult(accepted, sample(p, token_keys))


def _residual(
    p: Float[Array, "B V"],
    accepted: Int[Array, " B"],
    draft: Int[Array, "B G"],
    log_q: Float[Array, "B G V"] | None,
) -> Float[Array, "B V"]:
    """Return log max(0, p - q), with the q of the rejected draft, or `p` where none was rejected.

    The argument `p` is a log too.
    """
    b, g = draft.shape
    if log_q is None:
        padded = jnp.concatenate([draft, jnp.full((b, 1), -1, draft.dtype)], axis=1)
        rejected = jnp.take_along_axis(padded, accepted[:, None], axis=1)  # -1: none was rejected
        ids = jnp.arange(p.shape[-1], dtype=jnp.int32)[None, :]
        q = jnp.where(ids == rejected, jnp.float32(0), -jnp.inf)
    else:
        row = jnp.minimum(accepted, g - 1)[:, None]
        q = jnp.take_along_axis(log_q, row[:, :, None], axis=1)[:, 0]
        # A draft whose own q is NaN was drawn from no distribution, whatever q is elsewhere.
        of_draft = jnp.take_along_axis(q, jnp.take_along_axis(draft, row, axis=1), axis=1)
        q = jnp.where((accepted[:, None] < g) & ~jnp.isnan(of_draft), q, -jnp.inf)
    # log(p - q) is computed from logs, so that nothing underflows. Where q is 0, the result is p to
    # the bit.
    larger = p > q
    gap = jnp.where(larger, q - p, -jnp.inf)
    residual = jnp.where(larger, p + jnp.log1p(-jnp.exp(gap)), -jnp.inf)
    # Rounding may leave no token where p equals q, or where p is all on the draft.
    # There p is right.
    return jnp.where(jnp.any(residual > -jnp.inf, axis=-1, keepdims=True), residual, p)
