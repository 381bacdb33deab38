"""A step of rows that decode, and a chunk of prompts, in one pass of the target.

Apart, each reads the target's weights. `mixed_step` does what `decode.speculative_step` or `decode.decode_step` does
to some rows, and then what `decode.prefill` does to others.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.cache import Tables, with_tables
from jaxspec.constraint import constraint_of_steps
from jaxspec.decode import commit_pass, finish_chunk, propose
from jaxspec.drafters.base import Draft
from jaxspec.models.mixed_pass import PassPart, mixed_pass
from jaxspec.row_subset import put_rows, rows_of, take_rows
from jaxspec.shapes import Array, Int, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk
from jaxspec.text.grammars.automaton import Automaton


def mixed_step(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    chunk: PrefillChunk,
    slots: Int[Array, " R"],
    grammar: Automaton | None = None,
    tables: Tables | None = None,
) -> DecodeState:
    """Take one step of the rows in `slots`, and feed one chunk of prompts of other slots.

    Drafts are chains, and no chunk has images.

    Args:
      grammar: as in `decode.prefill`; no row in `slots` has one.
      tables: the pages of all slots, where a slot has several.
    """
    target, drafter = spec.bind(target_params, drafter_params)
    constraint = constraint_of_steps(spec, None)
    feature_layers = () if drafter is None else drafter.feature_layers
    rows = take_rows(state, slots).with_tables(rows_of(tables, slots))
    draft = Draft.none(slots.shape[0])
    if drafter is not None:
        spec.check_slack(state)
        draft = propose(target, drafter, spec, rows)
    draft, allowed = constraint.apply(rows, draft)
    block = jnp.concatenate([rows.anchors[:, None], draft.tokens], axis=1)
    count = jnp.where(rows.active, jnp.int32(block.shape[1]), 0)
    both = jnp.concatenate([slots, chunk.slots])
    prompts = PassPart(
        chunk.tokens,
        chunk.start,
        chunk.count,
        chunk.slots,
        logit_rows=jnp.maximum(chunk.count - 1, 0)[:, None],
        only_logit_rows=drafter is None or drafter.reads_last_hidden_only,
    )
    with jax.named_scope("verify"):
        verified, read = mixed_pass(
            target,
            [PassPart(block, rows.active_lengths, count, slots), prompts],
            with_tables(rows.caches, rows_of(tables, both)),
            feature_layers=feature_layers,
        )
    verified = verified.replace(caches=with_tables(verified.caches, rows_of(tables, slots)))
    rows, kept = commit_pass(spec, rows, draft, verified, constraint, allowed)
    if drafter is not None:
        rows = dataclasses.replace(rows, drafter=drafter.absorb(rows.drafter, kept))
    state = put_rows(state, rows.without_tables()).with_tables(rows_of(tables, chunk.slots))
    read = read.replace(caches=state.caches)
    return finish_chunk(spec, drafter, state, chunk, read, grammar).without_tables()
