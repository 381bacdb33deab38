"""Prefill, a decode step, a speculative step, and the loop around them. Start here.

A batch has B slots. A slot holds one sequence: its prompt and all tokens it committed are in the target's
caches up to `lengths`; its newest token, the *anchor*, is not. A step feeds the anchor (and, when
speculating, draft tokens after it) through the target, keeps the drafts the target agrees with, adds the
target's own next token as the new anchor, and moves `lengths` past what was kept:

    draft     drafter.draft      anchor, state        -> draft tokens, what they were drawn from
    verify    target             anchor + drafts      -> logits, new K/V, features
    accept    verify.verify      logits, drafts       -> accepted prefix, bonus token
    commit    drafter.absorb, `commit`                -> the next state

Plain decoding is the same step without drafts. Drafts are a chain, or a tree: then the target pass reads the
caches without writing them, and the accepted path alone is written. Everything here runs inside one compiled program; slots
that are finished write nothing. Who is in which slot is `engine`'s business.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.drafters.base import AnyDrafter, Draft, Draws, TargetView
from jaxspec.drafters.tree import ancestors
from jaxspec.models.gemma4 import Gemma4, TargetOutput, keep_rows
from jaxspec.sampling import (
    SamplingParams,
    Stream,
    TokenCounts,
    add_biases,
    fold_keys,
    logprobs_of,
    penalize,
    suppress,
)
from jaxspec.shapes import Array, Bool, Float, Int, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk
from jaxspec.verify import Verdict, synthetic_verify, tree_verify, verify

COMPILER_OPTIONS = {
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_cpu_prefer_vector_width": 512,
}
"""What the programs here are compiled with. By default XLA joins the weights of products that share an
input into one matrix, and does so again in every step: a DFlash drafter's keys and values of all layers.
And in a CUDA graph it puts one kernel after the other, also where neither needs the other: 26B-A4B's experts
and its dense MLP, several norms of one residual (a plain step of one row on an H200: 3.3 ms instead of 3.8).
On a CPU it makes matrix-vector loops for vectors of 256 bits, also where there are wider ones (bundled
target, jax 0.10.2 on 2 cores with AVX-512: a plain step takes 2.28 ms instead of 2.59)."""


def prefill(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    chunk: PrefillChunk,
) -> DecodeState:
    """Feed one chunk of prompts; slots whose prompt ends here get their first token and become active."""
    target, drafter = _bind(spec, target_params, drafter_params)
    output = target(
        chunk.tokens,
        chunk.start,
        chunk.count,
        state.caches,
        slots=chunk.slots,
        feature_layers=_feature_layers(drafter),
        logit_rows=jnp.maximum(chunk.count - 1, 0)[:, None],
    )
    if drafter is not None:
        drafter_state = drafter.absorb(state.drafter, output, chunk.start, chunk.count, chunk.slots)
        state = dataclasses.replace(state, drafter=drafter_state)
    counts = state.counts
    if counts is not None:
        fed = jnp.arange(chunk.tokens.shape[1])[None, :] < chunk.count[:, None]
        fed = jnp.where(fed, chunk.tokens, counts.prompt.shape[1])  # else dropped
        prompt = counts.prompt.at[chunk.slots[:, None], fed].set(True, mode="drop")
        counts = dataclasses.replace(counts, prompt=prompt)
    rows = (state.sampling, state.keys, state.stop_ids, counts)
    sampling, keys, stop_ids, row_counts = jax.tree.map(lambda x: x[chunk.slots], rows)
    sampling = sampling.only(chunk.is_last)
    no_draft = jnp.zeros((chunk.slots.shape[0], 0), jnp.int32)
    next_position = (chunk.start + chunk.count)[:, None]
    follows = jnp.zeros((1, 1, 0), bool)
    logits = _adjusted(spec, output.logits, sampling, row_counts, next_position, no_draft, follows)
    # Prefill's draw is step 0; the loop's steps count from 1.
    first = verify(logits, no_draft, sampling, keys, jnp.zeros_like(chunk.start)).bonus
    stopped = jnp.any(first[:, None] == stop_ids, axis=-1)
    ends = jnp.where(chunk.is_last, chunk.slots, state.active.shape[0])  # else dropped

    def put(name: str, value: Array | int) -> Array:
        return getattr(state, name).at[ends].set(value, mode="drop")

    logprobs = state.logprobs
    if logprobs is not None:
        new = logprobs_of(
            first[:, None], output.logits, logits, sampling, top=spec.extras.top_logprobs
        )
        logprobs = jax.tree.map(
            lambda old, value: old.at[ends, 0].set(value[:, 0], mode="drop"), logprobs, new
        )
    if counts is not None:
        output_counts = counts.output.at[ends, first].add(1, mode="drop")
        counts = dataclasses.replace(counts, output=output_counts)
    return dataclasses.replace(
        state,
        caches=output.caches,
        logprobs=logprobs,
        counts=counts,
        lengths=put("lengths", chunk.start + chunk.count),
        anchors=put("anchors", first),
        tokens=state.tokens.at[ends, 0].set(first, mode="drop"),
        num_tokens=put("num_tokens", 1),
        stopped=put("stopped", stopped),
        active=put("active", ~stopped & (state.max_new_tokens[chunk.slots] > 1)),
    )


def decode_step(target: Gemma4, spec: DecodeSpec, state: DecodeState) -> DecodeState:
    """Add one token to every active row: the reference that speculation must equal."""
    no_draft = jnp.zeros((state.anchors.shape[0], 0), jnp.int32)
    output, adjusted, verdict = _target_step(target, spec, state, Draft(no_draft), ())
    state = dataclasses.replace(state, caches=output.caches)
    return commit(spec, state, output.logits, adjusted, no_draft, verdict)


def propose(target: Gemma4, drafter: AnyDrafter, spec: DecodeSpec, state: DecodeState) -> Draft:
    """Let the drafter propose tokens after every row's anchor.

    Raises:
      ValueError: the spec wants draws, and the drafter does not tell its distribution.
    """
    view = TargetView(target.embedder, state.caches, target.config, spec.suppress_tokens)
    draws = None
    if spec.drafting.draft_sampling:
        shape = state.anchors.shape[0], spec.num_draft_tokens
        slots = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        keys = fold_keys(state.keys, state.num_steps + 1, slots, Stream.DRAFT)
        draws = Draws(state.sampling.only(state.active), keys)
    draft = drafter.draft(
        state.drafter,
        view,
        state.anchors,
        state.lengths,
        num_draft_tokens=spec.num_draft_tokens,
        tree=spec.tree,
        draws=draws,
    )
    if spec.drafting.draft_sampling and draft.log_q is None:
        raise ValueError(
            f"draft_sampling is on, but {type(drafter).__name__} does not tell what it draws from; leave "
            "draft_sampling out"
        )
    return draft


def speculative_step(
    target: Gemma4, drafter: AnyDrafter, spec: DecodeSpec, state: DecodeState
) -> DecodeState:
    """Draft, verify, accept and commit: adds 1 to num_draft_tokens + 1 tokens to every active row.

    Raises:
      ValueError: the state's rings have too few spare slots; it was made for fewer draft tokens.
    """
    _check_slack(spec, state)
    draft = propose(target, drafter, spec, state)
    output, adjusted, verdict = _target_step(target, spec, state, draft, drafter.feature_layers)
    kept = jnp.where(state.active, verdict.accepted + 1, 0)  # the anchor and the accepted drafts
    tokens = draft.tokens
    if verdict.path is not None:
        output = keep_rows(output, verdict.path, state.lengths, kept)
        after_anchor = jnp.maximum(verdict.path[:, 1:] - 1, 0)
        tokens = jnp.take_along_axis(tokens, after_anchor, axis=1)
        adjusted = jnp.take_along_axis(adjusted, verdict.path[:, :, None], axis=1)
    drafter_state = drafter.absorb(state.drafter, output, state.lengths, kept)
    state = dataclasses.replace(state, caches=output.caches, drafter=drafter_state)
    return commit(spec, state, output.logits, adjusted, tokens, verdict)


def decode_loop(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    max_steps: Int[Array, ""],
) -> DecodeState:
    """Run up to `max_steps` steps on the device, fewer when every row has finished."""
    target, drafter = _bind(spec, target_params, drafter_params)

    def alive(carry: tuple[Array, DecodeState]) -> Array:
        step, state = carry
        return (step < max_steps) & jnp.any(state.active)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        step, state = carry
        if drafter is None:
            return step + 1, decode_step(target, spec, state)
        return step + 1, speculative_step(target, drafter, spec, state)

    return lax.while_loop(alive, body, (jnp.int32(0), state))[1]


def _target_step(
    target: Gemma4,
    spec: DecodeSpec,
    state: DecodeState,
    draft: Draft,
    feature_layers: tuple[int, ...],
) -> tuple[TargetOutput, Float[Array, "B T V"], Verdict]:
    """Run the target over anchor + drafts, adjust its logits, and judge the drafts."""
    tokens = jnp.concatenate([state.anchors[:, None], draft.tokens], axis=1)
    sees = None if draft.parents is None else ancestors(draft.parents)
    with jax.named_scope("verify"):
        output = target(
            tokens,
            state.lengths,
            jnp.where(state.active, tokens.shape[1], 0),
            state.caches,
            feature_layers=feature_layers,
            ancestors=sees,
        )
    with jax.named_scope("accept"):
        if sees is None:
            sees = jnp.tri(tokens.shape[1], dtype=bool)[None]
        # A row that sees n rows of its block, itself included, chooses the n-th token after `lengths`.
        positions = state.lengths[:, None] + jnp.sum(sees, axis=-1)
        sampling, steps = state.sampling.only(state.active), state.num_steps + 1
        how = (sampling, state.keys, steps)
        after = draft.tokens, sees[:, :, 1:]
        logits = _adjusted(spec, output.logits, sampling, state.counts, positions, *after)
        if spec.tree is not None and draft.parents is not None:
            parents, depth = draft.parents, spec.tree.depth
            verdict = tree_verify(logits, draft.tokens, parents, *how, depth=depth)
        elif spec.drafting.synthetic_acceptance is not None:
            tau = spec.drafting.synthetic_acceptance if draft.tokens.shape[1] else 1.0
            verdict = synthetic_verify(logits, draft.tokens, tau, state.keys, steps)
        else:
            block = spec.drafting.verification == "block"
            verdict = verify(logits, draft.tokens, *how, log_q=draft.log_q, block=block)
        return output, logits, verdict


def _adjusted(
    spec: DecodeSpec,
    logits: Float[Array, "B T V"],
    sampling: SamplingParams,
    counts: TokenCounts | None,
    positions: Int[Array, "B T"],
    draft: Int[Array, "B G"],
    follows: Bool[Array, "#B T G"],
) -> Float[Array, "B T V"]:
    """Apply all that comes before temperature; `sampling` has the order.

    Args:
      positions: of the tokens that these logits choose.
      follows: which drafts of the block each row comes after.
    """
    with jax.named_scope("adjust"):
        logits = suppress(logits, spec.suppress_tokens)
        if spec.extras.num_biases:
            assert sampling.adjustments is not None
            logits = add_biases(logits, sampling.adjustments)
        if spec.extras.penalties:
            assert sampling.adjustments is not None
            assert counts is not None
            logits = penalize(logits, sampling.adjustments, counts, draft, follows)
        if spec.extras.logits_fn is not None:
            logits = spec.extras.logits_fn(logits, positions)
        return logits


def commit(
    spec: DecodeSpec,
    state: DecodeState,
    logits: Float[Array, "B T V"],
    adjusted: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    verdict: Verdict,
) -> DecodeState:
    """Write the accepted drafts and the bonus token of active rows, up to a stop id or the row's limit.

    Statistics count the whole step, cut or not. A row that stops or is full becomes inactive; its lengths
    then stand past what it emitted, which nobody reads.

    Args:
      logits: the target's, a row for each token that may be emitted: row t judged draft t.
      adjusted: the same as they were judged.
    """
    b, t = draft.shape[0], draft.shape[1] + 1
    offset = jnp.arange(t)[None, :]
    padded = jnp.concatenate([draft, jnp.zeros((b, 1), draft.dtype)], axis=1)
    new = jnp.where(offset < verdict.accepted[:, None], padded, verdict.bonus[:, None])
    valid = (offset <= verdict.accepted[:, None]) & state.active[:, None]
    is_stop = jnp.any(new[:, :, None] == state.stop_ids[:, None, :], axis=-1) & valid
    stops_before = jnp.cumsum(is_stop, axis=1) - is_stop.astype(jnp.int32)
    room = (state.max_new_tokens - state.num_tokens)[:, None]
    kept = valid & (stops_before == 0) & (offset < room)
    columns = jnp.where(kept, state.num_tokens[:, None] + offset, state.tokens.shape[1])
    step_column = jnp.where(state.active, state.num_steps, state.tokens.shape[1])
    num_tokens = state.num_tokens + jnp.sum(kept, axis=1)
    logprobs = state.logprobs
    if logprobs is not None:
        logprobs = jax.tree.map(
            lambda old, value: _set_columns(old, columns, value),
            logprobs,
            logprobs_of(
                new,
                logits,
                adjusted,
                state.sampling.only(state.active),
                top=spec.extras.top_logprobs,
            ),
        )
    counts = state.counts
    if counts is not None:
        emitted = jnp.where(kept, new, counts.output.shape[1])  # else dropped
        output = jax.vmap(lambda row, ids: row.at[ids].add(1, mode="drop"))(counts.output, emitted)
        counts = dataclasses.replace(counts, output=output)
    stopped = state.stopped | jnp.any(is_stop & kept, axis=1)
    return dataclasses.replace(
        state,
        lengths=state.lengths + jnp.where(state.active, verdict.accepted + 1, 0),
        anchors=jnp.where(state.active, verdict.bonus, state.anchors),
        tokens=_set_columns(state.tokens, columns, new),
        logprobs=logprobs,
        counts=counts,
        num_tokens=num_tokens,
        num_steps=state.num_steps + state.active.astype(jnp.int32),
        acceptance_lengths=_set_columns(
            state.acceptance_lengths, step_column[:, None], verdict.accepted[:, None] + 1
        ),
        stopped=stopped,
        active=state.active & ~stopped & (num_tokens < state.max_new_tokens),
    )


def _set_columns(old: Array, columns: Int[Array, "B T"], values: Array) -> Array:
    """Write each row by itself, so that none is sent to another device; columns past the last are dropped."""
    return jax.vmap(lambda row, at, value: row.at[at].set(value, mode="drop"))(old, columns, values)


def _check_slack(spec: DecodeSpec, state: DecodeState) -> None:
    """Rejected tokens of a chain stand in a ring's spare slots; without enough they would hide live keys."""
    slack = [c.ring_slack for c in state.caches if c is not None and c.ring_slack is not None]
    if spec.tree is None and slack and spec.step_tokens > min(slack):
        raise ValueError(
            f"num_draft_tokens is {spec.num_draft_tokens}, a step of {spec.step_tokens} tokens, but the sliding "
            f"caches were made for {min(slack)}: pass at most num_draft_tokens={min(slack) - 1}, or make the "
            "state with this spec"
        )


def _bind(
    spec: DecodeSpec, target_params: Params, drafter_params: Params | None
) -> tuple[Gemma4, AnyDrafter | None]:
    target = spec.target.bind(target_params)
    if spec.drafter is None:
        return target, None
    assert drafter_params is not None
    return target, spec.drafter.bind(drafter_params)


def _feature_layers(drafter: AnyDrafter | None) -> tuple[int, ...]:
    return () if drafter is None else drafter.feature_layers
