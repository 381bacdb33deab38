"""Prefill, a decode step and a speculative step. Start here.

A batch has B slots, and a slot holds one sequence. The target's caches hold its prompt and its
committed tokens, up to `lengths`, but not its newest token, the *anchor*. A step feeds the anchor
and the draft tokens after it through the target. It keeps the longest prefix of the drafts that the
target agrees with, adds the target's own next token as the new anchor, and moves `lengths` on:

    draft      `propose`                   anchor, drafter's state -> draft tokens
    constrain  `Constraint.apply`          drafts, grammars        -> drafts, allowed tokens
    verify     `target_pass`               anchor + drafts         -> logits, new K/V, features
    accept     `accept`                    logits, drafts          -> accepted prefix, bonus token
    commit     `state.commit`, `absorb`    kept tokens             -> the next state

`verify_step` is all but the first line. Plain decoding is `verify_step` without drafts. Prefill
ends in its second half, `accept_and_commit`: the last prompt token is the anchor. Drafts are a
chain or a tree. The pass over a tree writes no caches; later its accepted path alone is written.
All of this runs inside one compiled program: `decode_loop` repeats steps. Finished slots write
nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import _deprecated
from jaxspec.cache import Tables
from jaxspec.constraint import Allowed, Constraint, constraint_of_prefill
from jaxspec.drafters.base import AnyDrafter, Draft, Draws, Kept, TargetView
from jaxspec.drafters.tree import ancestors, visible_rows
from jaxspec.mesh import on_each_part
from jaxspec.models.packing import packed_pass
from jaxspec.models.target import Target, TargetOutput, keep_rows
from jaxspec.row_subset import put_rows, rows_of, take_rows
from jaxspec.sampling import Stream, TokenCounts, adjust, fold_keys
from jaxspec.shapes import Array, Float, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk, commit
from jaxspec.text.grammars.automaton import Automaton
from jaxspec.text.grammars.masking import masked
from jaxspec.verify import AcceptResult, synthetic_verify, tree_verify, verify


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
    return finish_chunk(spec, drafter, state, chunk, output, grammar).without_tables()


def finish_chunk(
    spec: DecodeSpec,
    drafter: AnyDrafter | None,
    state: DecodeState,
    chunk: PrefillChunk,
    output: TargetOutput,
    grammar: Automaton | None,
) -> DecodeState:
    """Do what comes after the target's pass over a chunk of prompts."""
    state = dataclasses.replace(state, caches=output.caches)
    if drafter is not None:
        kept = Kept.of(chunk.tokens, output, chunk.start, chunk.count, chunk.slots)
        state = dataclasses.replace(state, drafter=drafter.absorb(state.drafter, kept))
    if state.counts is not None:
        args = state.counts, chunk.tokens, chunk.count, chunk.slots
        counts = on_each_part(TokenCounts.with_prompt, args)
        state = dataclasses.replace(state, counts=counts)
    # A step without drafts for the rows whose prompt ends: its anchor is the last prompt token.
    rows, lengths = take_rows(state, chunk.slots), chunk.start + chunk.count - 1
    rows = dataclasses.replace(rows, lengths=lengths, active=chunk.is_last)
    constraint = constraint_of_prefill(grammar, chunk.masks)
    no_draft, allowed = constraint.apply(rows, Draft.none(chunk.slots.shape[0]))
    rows, _ = accept_and_commit(spec, rows, no_draft, output.logits, constraint, allowed)
    ends = jnp.where(chunk.is_last, chunk.slots, state.active.shape[0])  # other rows are dropped
    return put_rows(state, dataclasses.replace(rows, slots=ends))


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
    return commit_pass(spec, state, draft, output, constraint, allowed)


def commit_pass(
    spec: DecodeSpec,
    state: DecodeState,
    draft: Draft,
    output: TargetOutput,
    constraint: Constraint,
    allowed: Allowed | None,
) -> tuple[DecodeState, Kept]:
    """Accept drafts after the target's pass over them. The result is that of `verify_step`."""
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
        if draft.limit is not None:
            count = jnp.where(state.active, draft.limit + 1, 0)
            return packed_pass(
                target,
                tokens,
                state.active_lengths,
                count,
                state.caches,
                units=draft.units,
                slots=state.slots,
                feature_layers=feature_layers,
            )
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
            result = synthetic_verify(adjusted, draft.tokens, tau, state.keys, step)
            if draft.limit is not None:
                result = result.replace(accepted=jnp.minimum(result.accepted, draft.limit))
            return adjusted, result
        block = drafts and spec.drafting.verification == "block"
        tokens, log_q, limit = draft.tokens, draft.log_q, draft.limit
        return adjusted, verify(adjusted, tokens, *random, log_q=log_q, limit=limit, block=block)


def __getattr__(name: str) -> Any:
    """Forward names that are in `decode_loop` now."""
    return _deprecated.forward(__name__, name)
