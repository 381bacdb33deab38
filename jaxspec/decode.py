"""Prefill, a decode step, a speculative step, and the loop around them. Start here.

A batch has B slots, and a slot holds one sequence. The target's caches hold its prompt and its
committed tokens, up to `lengths`, but not its newest token, the *anchor*. A step feeds the anchor
and the draft tokens after it through the target. It keeps the longest prefix of the drafts that the
target agrees with, adds the target's own next token as the new anchor, and moves `lengths` on:

    draft      `propose`                   anchor, drafter's state -> draft tokens
    choose     `survival.choose_width`     confidences             -> drafts to verify (optional)
    constrain  `Constraint.apply`          drafts, grammars        -> drafts, allowed tokens
    verify     `target_pass`               anchor + drafts         -> logits, new K/V, features
    accept     `accept`                    logits, drafts          -> accepted prefix, bonus token
    commit     `state.commit`, `absorb`    kept tokens             -> the next state

`verify_step` is all but the first line. Plain decoding is `verify_step` without drafts. Prefill
ends in its second half, `accept_and_commit`: the last prompt token is the anchor. Drafts are a
chain or a tree. The pass over a tree writes no caches; later its accepted path alone is written.
All of this runs inside one compiled program. Finished slots write nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import survival
from jaxspec.cache import Tables
from jaxspec.constraint import Allowed, Constraint, constraint_of_prefill, constraint_of_steps
from jaxspec.drafters.base import AnyDrafter, Draft, Draws, Kept, TargetView
from jaxspec.drafters.tree import ancestors, visible_rows
from jaxspec.models.target import Target, TargetOutput, keep_rows
from jaxspec.models.xla import run_if
from jaxspec.row_subset import put_rows, rows_of, take_rows
from jaxspec.sampling import Stream, adjust, fold_keys
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk, commit
from jaxspec.text.grammars.automaton import Automaton
from jaxspec.text.grammars.masking import masked
from jaxspec.verify import AcceptResult, synthetic_verify, tree_verify, verify

Carry = tuple[Array, DecodeState]
"""The carry of a loop: the number of steps taken, and the state."""

PLAIN_STEPS = 16
"""The most plain steps whose tokens a drafter absorbs at once."""


def prefill(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    chunk: PrefillChunk,
    grammar: Automaton | None = None,
    tables: Tables | None = None,
) -> DecodeState:
    """Feed one chunk of prompts. Slots whose prompt ends get a first token and become active.

    Args:
      tables: the pages of all slots, where a slot has several.
    """
    target, drafter = spec.bind(target_params, drafter_params)
    state = state.with_tables(rows_of(tables, chunk.slots))
    output = target(
        chunk.tokens,
        chunk.start,
        chunk.count,
        state.caches,
        slots=chunk.slots,
        feature_layers=() if drafter is None else drafter.feature_layers,
        logit_rows=jnp.maximum(chunk.count - 1, 0)[:, None],
        only_logit_rows=drafter is None or drafter.reads_last_hidden_only,
        images=chunk.images,
    )
    state = dataclasses.replace(state, caches=output.caches)
    if drafter is not None:
        kept = Kept.of(chunk.tokens, output, chunk.start, chunk.count, chunk.slots)
        state = dataclasses.replace(state, drafter=drafter.absorb(state.drafter, kept))
    if state.counts is not None:
        counts = state.counts.with_prompt(chunk.tokens, chunk.count, chunk.slots)
        state = dataclasses.replace(state, counts=counts)
    # A step without drafts for the rows whose prompt ends: its anchor is the last prompt token.
    rows, lengths = take_rows(state, chunk.slots), chunk.start + chunk.count - 1
    rows = dataclasses.replace(rows, lengths=lengths, active=chunk.is_last)
    constraint = constraint_of_prefill(grammar, chunk.masks)
    no_draft, allowed = constraint.apply(rows, Draft.none(chunk.slots.shape[0]))
    rows, _ = accept_and_commit(spec, rows, no_draft, output.logits, constraint, allowed)
    ends = jnp.where(chunk.is_last, chunk.slots, state.active.shape[0])  # other rows are dropped
    return put_rows(state, dataclasses.replace(rows, slots=ends)).without_tables()


def decode_step(
    target: Target, spec: DecodeSpec, state: DecodeState, constraint: Constraint
) -> DecodeState:
    """Add one token to every active row. This is the reference that speculation must equal."""
    no_draft = Draft.none(state.anchors.shape[0])
    return verify_step(target, spec, state, no_draft, constraint)[0]


def speculative_step(
    target: Target,
    drafter: AnyDrafter,
    spec: DecodeSpec,
    state: DecodeState,
    constraint: Constraint,
) -> DecodeState:
    """Draft, verify, accept and commit. Every active row gets 1 to num_verified + 1 tokens.

    Raises:
      ValueError: the state's rings have too few spare slots; it was made for fewer draft tokens.
    """
    spec.check_slack(state)
    draft = propose(target, drafter, spec, state)
    state, kept = verify_step(target, spec, state, draft, constraint, drafter.feature_layers)
    return dataclasses.replace(state, drafter=drafter.absorb(state.drafter, kept))


def survival_step(
    target: Target,
    drafter: AnyDrafter,
    spec: DecodeSpec,
    state: DecodeState,
    constraint: Constraint,
    costs: Float[Array, " W"],
) -> DecodeState:
    """Draft, choose how many drafts are worth verifying, and go on as `speculative_step`.

    Args:
      costs: seconds of a step of each of `spec.widths`.
    """
    spec.check_slack(state)
    draft, before = propose(target, drafter, spec, state), state.survival
    assert before is not None
    confidence = draft.confidence
    if confidence is None:
        confidence = jnp.full(draft.tokens.shape, survival.UNKNOWN, jnp.float32)
    confidence = jnp.where(jnp.isfinite(confidence), confidence, survival.UNKNOWN)
    with jax.named_scope("choose"):
        chances, means = survival.calibrated(before, confidence)
        index = survival.choose_width(
            chances, means, state.active, costs, spec.widths, drawn=draft.log_q is not None
        )

    def verifying(width: int) -> Callable[[DecodeState], DecodeState]:
        def run(state: DecodeState) -> DecodeState:
            first = draft.first(width)
            after, kept = verify_step(
                target, spec, state, first, constraint, drafter.feature_layers
            )
            assert after.survival is not None
            counts = after.survival.counting(confidence, kept.count - 1, state.active, width)
            absorbed = drafter.absorb(state.drafter, kept)
            return dataclasses.replace(after, drafter=absorbed, survival=counts)

        return run

    for i, width in enumerate(spec.widths):
        state = run_if(index == i, verifying(width), state)
    return state


def plain_steps(
    target: Target,
    drafter: AnyDrafter,
    spec: DecodeSpec,
    begin: Carry,
    alive: Callable[[Carry], Array],
    constraint: Constraint,
) -> Carry:
    """Take up to `PLAIN_STEPS` steps without drafts, then let the drafter absorb their tokens.

    A later call can then draft again. Absorbing many tokens at once is quicker than one by one.

    Args:
      alive: returns whether to take another step.
    """
    no_draft, start = Draft.none(begin[1].anchors.shape[0]), begin[1]

    def run(state: DecodeState) -> tuple[DecodeState, Kept]:
        return verify_step(target, spec, state, no_draft, constraint, drafter.feature_layers)

    def buffer(of_step: jax.ShapeDtypeStruct) -> Array:
        return jnp.zeros((of_step.shape[0], PLAIN_STEPS, *of_step.shape[2:]), of_step.dtype)

    like = jax.eval_shape(lambda state: run(state)[1], start)
    tokens, hidden, features = jax.tree.map(buffer, (like.tokens, like.hidden, like.features))
    count = jnp.zeros_like(start.lengths)
    empty = Kept(tokens, hidden, features, start.lengths, count, start.slots)

    def more(carry: tuple[Array, Carry, Kept]) -> Array:
        return (carry[0] < PLAIN_STEPS) & alive(carry[1])

    def body(carry: tuple[Array, Carry, Kept]) -> tuple[Array, Carry, Kept]:
        taken, (step, state), kept = carry

        def put(into: Array, of_step: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(into, of_step, taken, axis=1)

        after, of_step = run(state)
        kept = kept.replace(
            tokens=put(kept.tokens, state.anchors[:, None]),
            hidden=put(kept.hidden, of_step.hidden),
            features=jax.tree.map(put, kept.features, of_step.features),
            count=kept.count + state.active.astype(jnp.int32),  # an ended row stays inactive
        )
        return taken + 1, (step + 1, after), kept

    _, (step, state), kept = lax.while_loop(more, body, (jnp.int32(0), begin, empty))
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
    tables: Tables | None = None,
    costs: Float[Array, " W"] | None = None,
) -> DecodeState:
    """Run up to `max_steps` steps on the device, fewer when at most `until_active` rows are active.

    Args:
      tables: the pages of all slots, where a slot has several.
      slots: the only rows to compute, each at most once. None: all.
      grammar: the tables that the rows' `automaton` states belong to.
      costs: seconds of a step of each of `spec.widths`, by which each step chooses one; None: every
        step verifies `spec.num_verified` drafts.
    """
    target, drafter = spec.bind(target_params, drafter_params)
    constraint = constraint_of_steps(spec, grammar)
    rows = state if slots is None else take_rows(state, slots)
    tables = rows_of(tables, slots)

    def alive(carry: Carry) -> Array:
        return (carry[0] < max_steps) & (jnp.sum(carry[1].active, dtype=jnp.int32) > until_active)

    def body(carry: Carry) -> Carry:
        step, rows = carry[0], carry[1].with_tables(tables)
        if drafter is None:
            step, rows = step + 1, decode_step(target, spec, rows, constraint)
        elif not spec.num_verified:
            step, rows = plain_steps(target, drafter, spec, (step, rows), alive, constraint)
        elif costs is not None:
            step, rows = step + 1, survival_step(target, drafter, spec, rows, constraint, costs)
        else:
            step, rows = step + 1, speculative_step(target, drafter, spec, rows, constraint)
        return step, rows.without_tables()

    rows = lax.while_loop(alive, body, (jnp.int32(0), rows))[1]
    return rows if slots is None else put_rows(state, rows)


# --- the parts of a step --------------------------------------------------------------------------


def propose(target: Target, drafter: AnyDrafter, spec: DecodeSpec, state: DecodeState) -> Draft:
    """Let the drafter propose tokens after every row's anchor. Return those to verify.

    Raises:
      ValueError: the spec has `draft_sampling`, and the drafter returns no distribution.
    """
    draws = None
    if spec.drafting.draft_sampling:
        shape = state.anchors.shape[0], spec.num_draft_tokens
        slots = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        keys = fold_keys(state.keys, state.num_steps + 1, slots, Stream.DRAFT)
        draws = Draws(state.sampling.only(state.active), keys)
    draft = drafter.draft(
        state.drafter,
        TargetView(
            target,
            state.caches,
            spec.suppress_tokens,
            spec.verify_length,
            state.slots,
            wants_confidence=bool(spec.widths) and spec.verify_length is None,
        ),
        state.anchors,
        state.active_lengths,
        num_draft_tokens=spec.num_draft_tokens,
        tree=spec.tree,
        draws=draws,
    )
    if spec.drafting.draft_sampling and draft.log_q is None:
        raise ValueError(
            f"draft_sampling is on, but {type(drafter).__name__} does not tell what it draws from; "
            "leave draft_sampling out"
        )
    return draft if spec.verify_length is None else draft.first(spec.verify_length)


def verify_step(
    target: Target,
    spec: DecodeSpec,
    state: DecodeState,
    draft: Draft,
    constraint: Constraint,
    feature_layers: tuple[int, ...] = (),
) -> tuple[DecodeState, Kept]:
    """Constrain and verify a draft, accept a prefix or path of it, and commit the kept tokens.

    Returns:
      The next state, with the drafter's state unchanged; and the tokens for the drafter to absorb.
    """
    draft, allowed = constraint.apply(state, draft)
    output = target_pass(target, state, draft, feature_layers)
    after, result = accept_and_commit(spec, state, draft, output.logits, constraint, allowed)
    count = jnp.where(state.active, result.accepted + 1, 0)  # the anchor and the accepted drafts
    if result.path is not None:
        output = keep_rows(output, result.path, state.lengths, count, state.slots)
    block = jnp.concatenate([state.anchors[:, None], draft.along(result.path)], axis=1)
    kept = Kept.of(block, output, state.lengths, count, state.slots)
    return dataclasses.replace(after, caches=output.caches), kept


def target_pass(
    target: Target, state: DecodeState, draft: Draft, feature_layers: tuple[int, ...] = ()
) -> TargetOutput:
    """Run the target over every row's anchor and drafts. Finished rows read and write nothing."""
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


def accept_and_commit(
    spec: DecodeSpec,
    state: DecodeState,
    draft: Draft,
    logits: Float[Array, "B T V"],
    constraint: Constraint,
    allowed: Allowed | None,
) -> tuple[DecodeState, AcceptResult]:
    """Accept drafts and commit them, in all but the caches and the drafter's state.

    Args:
      logits: the target's, a row for the anchor and for each draft.
      allowed: the result of `constraint.apply`.
    """
    adjusted, result = accept(spec, state, draft, logits, allowed)
    state = constraint.advance(state, allowed, result)
    return commit(spec, state, draft, logits, adjusted, result), result


def accept(
    spec: DecodeSpec,
    state: DecodeState,
    draft: Draft,
    logits: Float[Array, "B T V"],
    allowed: Allowed | None = None,
) -> tuple[Float[Array, "B T V"], AcceptResult]:
    """Decide how many drafts of each row to accept, and choose the token after them.

    A draft that a grammar forbids has probability 0, so neither it nor one behind it is accepted.

    Returns:
      The logits that decided, before temperature; and the result.
    """
    with jax.named_scope("accept"):
        sees = visible_rows(draft)
        # A row that sees n rows of its block, itself included, chooses the n-th token after
        # `lengths`.
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
        random = (sampling, state.keys, step)
        if spec.tree is not None and draft.parents is not None:
            tree = (draft.tokens, draft.parents)
            return adjusted, tree_verify(adjusted, *tree, *random, depth=spec.tree.depth)
        drafts, tau = draft.tokens.shape[1] > 0, spec.drafting.synthetic_acceptance
        if drafts and tau is not None:
            return adjusted, synthetic_verify(adjusted, draft.tokens, tau, state.keys, step)
        block = drafts and spec.drafting.verification == "block"
        return adjusted, verify(adjusted, draft.tokens, *random, log_q=draft.log_q, block=block)
