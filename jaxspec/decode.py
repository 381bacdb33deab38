"""Prefill, a decode step, a speculative step, and the loop around them. Start here.

A batch has B slots. A slot holds one sequence. Its prompt and all tokens it committed are in the target's
caches, up to `lengths`; its newest token, the *anchor*, is not. A step feeds the anchor and the draft tokens
after it through the target, keeps the drafts that the target agrees with, adds the target's own next token as
the new anchor, and moves `lengths` past what was kept:

    draft     `propose`                      anchor, drafter's state -> draft tokens
    constrain `constrain`                    drafts, grammars        -> drafts, what each position may choose
    verify    `target_pass`                  anchor + drafts         -> logits, new K/V, features
    accept    `judge`                        logits, drafts          -> accepted prefix, bonus token
    commit    `Drafter.absorb`, `commit`     what was kept           -> the next state

Plain decoding is the same step without drafts. Prefill ends in it too: the last prompt token is the anchor.
Drafts are a chain, or a tree. The target pass over a tree reads the caches without writing them, and the
accepted path alone is written. All of this runs inside one compiled program; slots that are finished write
nothing. `state` says what a slot holds, and `engine` who is in which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.drafters.base import AnyDrafter, Draft, Draws, Kept, TargetView
from jaxspec.drafters.tree import ancestors
from jaxspec.models.target import Target, TargetOutput, keep_rows
from jaxspec.row_subset import narrowed, put_rows, take_rows, widened
from jaxspec.sampling import NO_TOKEN, Stream, adjust, fold_keys, logprobs_of
from jaxspec.shapes import Array, Bool, Float, Int, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk
from jaxspec.text.grammars.automaton import FREE, Automaton, advance, masks_of, offered
from jaxspec.text.grammars.guides import NOBODY
from jaxspec.text.grammars.masking import Allowed, ask_guides, masked
from jaxspec.verify import Verdict, synthetic_verify, tree_verify, verify

Carry = tuple[Array, DecodeState]
"""What a loop carries: steps that were taken, and the state."""

PLAIN_STEPS = 16
"""Most plain steps whose tokens a drafter absorbs at once."""


def prefill(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    chunk: PrefillChunk,
    grammar: Automaton | None = None,
) -> DecodeState:
    """Feed one chunk of prompts; slots whose prompt ends here get their first token and become active."""
    target, drafter = spec.bind(target_params, drafter_params)
    output = target(
        chunk.tokens,
        chunk.start,
        chunk.count,
        state.caches,
        slots=chunk.slots,
        feature_layers=() if drafter is None else drafter.feature_layers,
        logit_rows=jnp.maximum(chunk.count - 1, 0)[:, None],
        only_logit_rows=drafter is None or drafter.reads_last_hidden_only,
    )
    state = dataclasses.replace(state, caches=output.caches)
    if drafter is not None:
        kept = Kept.of(chunk.tokens, output, chunk.start, chunk.count, chunk.slots)
        state = dataclasses.replace(state, drafter=drafter.absorb(state.drafter, kept))
    if state.counts is not None:
        state = dataclasses.replace(
            state, counts=state.counts.with_prompt(chunk.tokens, chunk.count, chunk.slots)
        )
    # A step without drafts for the rows whose prompt ends: its anchor is the last prompt token.
    rows = take_rows(state, chunk.slots)
    anchor_at = chunk.start + chunk.count - 1
    rows = dataclasses.replace(rows, lengths=anchor_at, active=chunk.is_last)
    no_draft = Draft.none(chunk.slots.shape[0])
    allowed = None if chunk.masks is None else Allowed(chunk.masks[:, None])
    if grammar is not None:
        _, allowed = follow(grammar, rows, no_draft)
    adjusted, verdict = judge(spec, rows, no_draft, output.logits, allowed)
    rows = move_on(grammar, rows, allowed, verdict)
    rows = commit(spec, rows, output.logits, adjusted, no_draft.tokens, verdict)
    ends = jnp.where(chunk.is_last, chunk.slots, state.active.shape[0])  # the others are dropped
    return put_rows(state, rows, ends)


def decode_step(
    target: Target, spec: DecodeSpec, state: DecodeState, grammar: Automaton | None = None
) -> DecodeState:
    """Add one token to every active row: the reference that speculation must equal."""
    no_draft, allowed = constrain(spec, state, Draft.none(state.anchors.shape[0]), grammar)
    output = target_pass(target, state, no_draft)
    adjusted, verdict = judge(spec, state, no_draft, output.logits, allowed)
    state = dataclasses.replace(state, caches=output.caches)
    state = move_on(grammar, state, allowed, verdict)
    return commit(spec, state, output.logits, adjusted, no_draft.tokens, verdict)


def speculative_step(
    target: Target,
    drafter: AnyDrafter,
    spec: DecodeSpec,
    state: DecodeState,
    grammar: Automaton | None = None,
) -> DecodeState:
    """Draft, verify, accept and commit: adds 1 to num_verified + 1 tokens to every active row.

    Raises:
      ValueError: the state's rings have too few spare slots; it was made for fewer draft tokens.
    """
    spec.check_slack(state)
    draft, allowed = constrain(spec, state, propose(target, drafter, spec, state), grammar)
    output = target_pass(target, state, draft, drafter.feature_layers)
    adjusted, verdict = judge(spec, state, draft, output.logits, allowed)
    state = move_on(grammar, state, allowed, verdict)
    count = jnp.where(state.active, verdict.accepted + 1, 0)  # the anchor and the accepted drafts
    tokens = draft.tokens
    if verdict.path is not None:
        output = keep_rows(output, verdict.path, state.lengths, count)
        after_anchor = jnp.maximum(verdict.path[:, 1:] - 1, 0)
        tokens = jnp.take_along_axis(tokens, after_anchor, axis=1)
        adjusted = jnp.take_along_axis(adjusted, verdict.path[:, :, None], axis=1)
    block = jnp.concatenate([state.anchors[:, None], tokens], axis=1)
    kept = Kept.of(block, output, state.lengths, count, state.slots)
    drafter_state = drafter.absorb(state.drafter, kept)
    state = dataclasses.replace(state, caches=output.caches, drafter=drafter_state)
    return commit(spec, state, output.logits, adjusted, tokens, verdict)


def plain_steps(
    target: Target,
    drafter: AnyDrafter,
    spec: DecodeSpec,
    begin: Carry,
    alive: Callable[[Carry], Array],
    grammar: Automaton | None = None,
) -> Carry:
    """Take up to `PLAIN_STEPS` steps without drafts, then let the drafter absorb their tokens all at once.

    So a later call can draft again. A drafter absorbs many tokens in less time than one after the other.

    Args:
      begin: steps that were taken before, and the state.
      alive: tells whether to take another step.
    """
    no_draft = Draft.none(begin[1].anchors.shape[0])

    def run(state: DecodeState) -> TargetOutput:
        return target_pass(target, state, no_draft, drafter.feature_layers)

    def room(of_step: Any) -> Array:
        return jnp.zeros((of_step.shape[0], PLAIN_STEPS, *of_step.shape[2:]), of_step.dtype)

    state, like = begin[1], jax.eval_shape(run, begin[1])
    none = Kept(
        jnp.zeros((state.anchors.shape[0], PLAIN_STEPS), state.anchors.dtype),
        room(like.hidden),
        tuple(room(x) for x in like.features),
        *(state.lengths, jnp.zeros_like(state.lengths), state.slots),
    )

    def more(carry: tuple[Array, Carry, Kept]) -> Array:
        return (carry[0] < PLAIN_STEPS) & alive(carry[1])

    def body(carry: tuple[Array, Carry, Kept]) -> tuple[Array, Carry, Kept]:
        taken, (step, state), kept = carry

        def put(into: Array, of_step: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(into, of_step, taken, axis=1)

        _, allowed = constrain(spec, state, no_draft, grammar)
        output = run(state)
        kept = kept.replace(
            tokens=put(kept.tokens, state.anchors[:, None]),
            hidden=put(kept.hidden, output.hidden),
            features=tuple(put(*x) for x in zip(kept.features, output.features, strict=True)),
            # A row that ended is not active again.
            count=kept.count + state.active.astype(jnp.int32),
        )
        adjusted, verdict = judge(spec, state, no_draft, output.logits, allowed)
        state = dataclasses.replace(state, caches=output.caches)
        state = move_on(grammar, state, allowed, verdict)
        state = commit(spec, state, output.logits, adjusted, no_draft.tokens, verdict)
        return taken + 1, (step + 1, state), kept

    _, (step, state), kept = lax.while_loop(more, body, (jnp.int32(0), begin, none))
    return step, dataclasses.replace(state, drafter=drafter.absorb(state.drafter, kept))


def decode_loop(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    max_steps: Int[Array, ""],
    until_active: Int[Array, ""] | int = 0,
    slots: Int[Array, " R"] | None = None,
    grammar: Automaton | None = None,
) -> DecodeState:
    """Run up to `max_steps` steps on the device, fewer when no more than `until_active` rows are active.

    Args:
      slots: the only rows that are computed; no other may be active. None: all.
      grammar: of which rows have a state.
    """
    target, drafter = spec.bind(target_params, drafter_params)
    some = state if slots is None else narrowed(state, slots)

    def alive(carry: Carry) -> Array:
        step, state = carry
        return (step < max_steps) & (jnp.sum(state.active, dtype=jnp.int32) > until_active)

    def body(carry: Carry) -> Carry:
        step, state = carry
        if drafter is None:
            return step + 1, decode_step(target, spec, state, grammar)
        if not spec.num_verified:
            return plain_steps(target, drafter, spec, carry, alive, grammar)
        return step + 1, speculative_step(target, drafter, spec, state, grammar)

    some = lax.while_loop(alive, body, (jnp.int32(0), some))[1]
    return some if slots is None else widened(state, some)


# --- the parts of a step -----------------------------------------------------------------------------


def propose(target: Target, drafter: AnyDrafter, spec: DecodeSpec, state: DecodeState) -> Draft:
    """Let the drafter propose tokens after every row's anchor, and return those that are verified.

    Raises:
      ValueError: the spec wants draws, and the drafter does not tell its distribution.
    """
    draws = None
    if spec.drafting.draft_sampling:
        shape = state.anchors.shape[0], spec.num_draft_tokens
        slots = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        keys = fold_keys(state.keys, state.num_steps + 1, slots, Stream.DRAFT)
        draws = Draws(state.sampling.only(state.active), keys)
    draft = drafter.draft(
        state.drafter,
        TargetView(target, state.caches, spec.suppress_tokens, spec.verify_length, state.slots),
        state.anchors,
        state.active_lengths,
        num_draft_tokens=spec.num_draft_tokens,
        tree=spec.tree,
        draws=draws,
    )
    if spec.drafting.draft_sampling and draft.log_q is None:
        raise ValueError(
            f"draft_sampling is on, but {type(drafter).__name__} does not tell what it draws from; leave "
            "draft_sampling out"
        )
    return draft if spec.verify_length is None else draft.first(spec.verify_length)


def constrain(
    spec: DecodeSpec, state: DecodeState, draft: Draft, grammar: Automaton | None = None
) -> tuple[Draft, Allowed | None]:
    """Ask what the grammars of rows allow before and after each draft: of the host, or of tables on the device.

    Returns:
      The drafts, and what each row of the block may choose; None where nobody is asked. Where a grammar forces the text and a draft differs, it is replaced: the target can choose nothing else. Drafts that
      were drawn stay as they are, for they are judged by what they were drawn from.
    """
    if grammar is not None:
        return follow(grammar, state, draft)
    if not spec.guided:
        return draft, None
    assert state.guides is not None
    tokens, masks = ask_guides(
        jnp.where(state.active, state.guides, NOBODY),
        state.tokens,
        state.num_tokens,
        draft.tokens,
        vocab_size=spec.target.config.vocab_size,
        most_new=spec.depth + 1,
        force=draft.log_q is None,
    )
    return dataclasses.replace(draft, tokens=tokens), Allowed(masks)


def follow(grammar: Automaton, state: DecodeState, draft: Draft) -> tuple[Draft, Allowed]:
    """Return what `constrain` does, by an automaton on the device."""
    assert state.automaton is not None
    replace = draft.log_q is None and draft.parents is None
    with jax.named_scope("grammar"):
        begin = jnp.where(state.active, state.automaton, FREE)
        tokens, states = offered(grammar, begin, draft.tokens, draft.parents, replace=replace)
        return dataclasses.replace(draft, tokens=tokens), Allowed(masks_of(grammar, states), states)


def move_on(
    grammar: Automaton | None, state: DecodeState, allowed: Allowed | None, verdict: Verdict
) -> DecodeState:
    """Bring the automaton's state of active rows behind the bonus token. Without an automaton, do nothing."""
    if grammar is None:
        return state
    assert allowed is not None
    assert allowed.states is not None
    assert state.automaton is not None
    row = verdict.accepted[:, None]
    if verdict.path is not None:
        row = jnp.take_along_axis(verdict.path, row, axis=1)
    before = jnp.take_along_axis(allowed.states, row, axis=1)[:, 0]
    after = advance(grammar, before, jnp.maximum(verdict.bonus, 0))
    return dataclasses.replace(state, automaton=jnp.where(state.active, after, state.automaton))


def target_pass(
    target: Target, state: DecodeState, draft: Draft, feature_layers: tuple[int, ...] = ()
) -> TargetOutput:
    """Run the target over every row's anchor and drafts. Rows that are finished write and read nothing."""
    tokens = jnp.concatenate([state.anchors[:, None], draft.tokens], axis=1)
    with jax.named_scope("verify"):
        return target(
            tokens,
            state.active_lengths,
            jnp.where(state.active, jnp.int32(tokens.shape[1]), 0),
            state.caches,
            slots=state.slots,
            feature_layers=feature_layers,
            ancestors=None if draft.parents is None else ancestors(draft.parents),
        )


def judge(
    spec: DecodeSpec,
    state: DecodeState,
    draft: Draft,
    logits: Float[Array, "B T V"],
    allowed: Allowed | None = None,
) -> tuple[Float[Array, "B T V"], Verdict]:
    """Decide how many drafts of each row stay, and which token follows them.

    A draft that a grammar forbids has probability 0, and so is never accepted, nor is any behind it.

    Args:
      logits: the target's, a row for the anchor and for each draft.
      allowed: what grammars allow; None: everything.

    Returns:
      The logits as they were judged, before temperature; and the verdict.
    """
    with jax.named_scope("accept"):
        sees = _sees(draft)
        # A row that sees n rows of its block, itself included, chooses the n-th token after `lengths`.
        positions = state.lengths[:, None] + jnp.sum(sees, axis=-1, dtype=jnp.int32)
        sampling, step = state.sampling.only(state.active), state.num_steps + 1
        adjusted = adjust(
            logits,
            sampling,
            state.counts,
            positions,
            draft.tokens,
            sees[:, :, 1:],
            suppress_tokens=spec.suppress_tokens,
            program_features=spec.program_features,
        )
        if allowed is not None:
            adjusted = masked(adjusted, allowed.masks)
        if spec.tree is not None and draft.parents is not None:
            how = (draft.parents, sampling, state.keys, step)
            return adjusted, tree_verify(adjusted, draft.tokens, *how, depth=spec.tree.depth)
        drafts, tau = draft.tokens.shape[1] > 0, spec.drafting.synthetic_acceptance
        if drafts and tau is not None:
            return adjusted, synthetic_verify(adjusted, draft.tokens, tau, state.keys, step)
        how = (sampling, state.keys, step)
        block = drafts and spec.drafting.verification == "block"
        return adjusted, verify(adjusted, draft.tokens, *how, log_q=draft.log_q, block=block)


def _sees(draft: Draft) -> Bool[Array, "#B T T"]:
    """Tell which rows of its block each row follows, itself included."""
    if draft.parents is not None:
        return ancestors(draft.parents)
    rows = jnp.arange(draft.tokens.shape[1] + 1, dtype=jnp.int32)
    return (rows[:, None] >= rows)[None]


def commit(
    spec: DecodeSpec,
    state: DecodeState,
    logits: Float[Array, "B T V"],
    adjusted: Float[Array, "B T V"],
    draft: Int[Array, "B G"],
    verdict: Verdict,
) -> DecodeState:
    """Write the accepted drafts and the bonus token of active rows, up to a stop id or the row's limit.

    Statistics count the whole step, cut or not; prefill's step, number 0, is not counted. A row that stops or
    is full becomes inactive. Its lengths then stand past what it emitted, which nobody reads. So does a row
    that fails: where the target's logits are not sound, no token follows, as in plain decoding.

    Args:
      logits: the target's, a row for each token that may be emitted: row t judged draft t.
      adjusted: the same as they were judged.
    """
    b, t = draft.shape[0], draft.shape[1] + 1
    nowhere = state.tokens.shape[1]  # a column past the last, where writes are dropped
    offset = jnp.arange(t, dtype=jnp.int32)[None, :]
    padded = jnp.concatenate([draft, jnp.zeros((b, 1), draft.dtype)], axis=1)
    new = jnp.where(offset < verdict.accepted[:, None], padded, verdict.bonus[:, None])
    fails = verdict.bonus == NO_TOKEN
    num_new = verdict.accepted + (~fails).astype(jnp.int32)
    valid = (offset < num_new[:, None]) & state.active[:, None]
    is_stop = jnp.any(new[:, :, None] == state.stop_ids[:, None, :], axis=-1) & valid
    stops_before = jnp.cumsum(is_stop, axis=1, dtype=jnp.int32) - is_stop.astype(jnp.int32)
    left = (state.max_new_tokens - state.num_tokens)[:, None]
    kept = valid & (stops_before == 0) & (offset < left)
    columns = jnp.where(kept, state.num_tokens[:, None] + offset, nowhere)
    # Steps of a rollout that goes on are counted from its first call on, and may be any number.
    counted = state.active & (state.num_steps >= 0)
    step_column = jnp.where(counted, state.num_steps % nowhere, nowhere)
    num_tokens = state.num_tokens + jnp.sum(kept, axis=1, dtype=jnp.int32)
    logprobs, counts = state.logprobs, state.counts
    if logprobs is not None:
        sampling = state.sampling.only(state.active)
        of_new = logprobs_of(
            new, logits, adjusted, sampling, top=spec.program_features.top_logprobs
        )
        logprobs = jax.tree.map(lambda old, x: _set_columns(old, columns, x), logprobs, of_new)
    if counts is not None:
        counts = counts.with_output(new, kept)
    stopped = state.stopped | jnp.any(is_stop & kept, axis=1)
    assert verdict.sound is not None
    goes_on = state.active & ~stopped & (num_tokens < state.max_new_tokens)
    return dataclasses.replace(
        state,
        lengths=state.lengths + jnp.where(state.active, verdict.accepted + 1, 0),
        anchors=jnp.where(state.active & ~fails, verdict.bonus, state.anchors),
        tokens=_set_columns(state.tokens, columns, new),
        logprobs=logprobs,
        counts=counts,
        num_tokens=num_tokens,
        num_steps=state.num_steps + state.active.astype(jnp.int32),
        acceptance_lengths=_set_columns(
            state.acceptance_lengths, step_column[:, None], num_new[:, None]
        ),
        stopped=stopped,
        failed=state.failed | (goes_on & fails),
        spoilt=state.spoilt | (state.active & ~verdict.sound),
        active=goes_on & ~fails,
    )


def _set_columns(old: Array, columns: Int[Array, "B T"], values: Array) -> Array:
    """Write each row by itself, so that none is sent to another device; columns past the last are dropped."""
    return jax.vmap(lambda row, at, value: row.at[at].set(value, mode="drop"))(old, columns, values)
