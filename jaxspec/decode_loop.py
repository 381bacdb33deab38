"""The loop of decode steps that one call runs on the device.

Read `decode_loop`. Its steps are those of `decode`. Two kinds of steps stand here, because a loop alone
has use for them: `plain_steps` of a drafter that waits, and `survival_step`, which chooses how many
drafts to verify.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache import Tables
from jaxspec.constraint import Constraint, constraint_of_steps
from jaxspec.decode import decode_step, propose, speculative_step, verify_step
from jaxspec.drafters import survival
from jaxspec.drafters.base import AnyDrafter, Draft, Kept
from jaxspec.mesh import row_parts
from jaxspec.models.packing import UNIT
from jaxspec.models.target import Target
from jaxspec.models.xla import run_if
from jaxspec.row_subset import put_rows, rows_of, take_rows
from jaxspec.sampling import argmax
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.state import DecodeSpec, DecodeState
from jaxspec.text.grammars.automaton import Automaton

Carry = tuple[Array, DecodeState]
"""The carry of a loop: the number of steps taken, and the state."""

PLAIN_STEPS = 16
"""The most plain steps of a drafter, whose tokens it absorbs at once. A loop of such loops would be slower on a GPU."""


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

    With a drafter that verifies nothing there are at most `PLAIN_STEPS`.

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
        elif costs is not None:
            step, rows = step + 1, survival_step(target, drafter, spec, rows, constraint, costs)
        else:
            step, rows = step + 1, speculative_step(target, drafter, spec, rows, constraint)
        return step, rows.without_tables()

    begin = jnp.int32(0), rows
    if drafter is not None and not spec.num_verified:
        begin = jnp.int32(0), rows.with_tables(tables)
        rows = plain_steps(target, drafter, spec, begin, alive, constraint)[1].without_tables()
    else:
        rows = lax.while_loop(alive, body, begin)[1]
    return rows if slots is None else put_rows(state, rows)


def survival_step(
    target: Target,
    drafter: AnyDrafter,
    spec: DecodeSpec,
    state: DecodeState,
    constraint: Constraint,
    costs: Float[Array, " W"],
) -> DecodeState:
    """Draft, choose which drafts are worth verifying, and go on as `speculative_step`.

    Rows compete for the tokens of one pass. A row that is alone, and rows that are split over
    devices, verify the same number of drafts.

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
        if draft.tokens.shape[0] == 1 or row_parts() > 1:
            forms = [draft.first(width) for width in spec.widths]
            index = survival.choose_width(
                chances,
                means,
                state.active,
                costs,
                spec.widths,
                drawn=draft.log_q is not None,
            )
            recent = before.expected
        else:
            forms, index, recent = _competing(spec, state, draft, chances, means, costs)

    def verifying(draft: Draft) -> Callable[[DecodeState], DecodeState]:
        def run(state: DecodeState) -> DecodeState:
            after, kept = verify_step(
                target, spec, state, draft, constraint, drafter.feature_layers
            )
            assert after.survival is not None
            width = draft.tokens.shape[1] if draft.limit is None else draft.limit
            counts = after.survival.counting(confidence, kept.count - 1, state.active, width)
            counts = counts.replace(expected=recent)
            absorbed = drafter.absorb(state.drafter, kept)
            return dataclasses.replace(after, drafter=absorbed, survival=counts)

        return run

    for i, form in enumerate(forms):
        state = run_if(index == i, verifying(form), state)
    return state


def _competing(
    spec: DecodeSpec,
    state: DecodeState,
    draft: Draft,
    chances: Float[Array, "B G"],
    means: Float[Array, " G"],
    costs: Float[Array, " W"],
) -> tuple[list[Draft], Array, Array]:
    """Let the rows of a step compete for the units of a pass.

    Returns:
      The drafts that passes of each width verify; the index of the width to take; and the tokens that
      rows were lately expected to commit, see `SurvivalState`.
    """
    before, (rows, g), drawn = state.survival, draft.tokens.shape, draft.log_q is not None
    assert before is not None
    units = [rows * -(-(width + 1) // UNIT) for width in spec.widths]
    # The shortest passes have a unit for each row, and the longest has all drafts.
    packs = [n > rows and width < g for n, width in zip(units, spec.widths, strict=True)]
    num_active = jnp.sum(state.active, dtype=jnp.int32)
    spare = jnp.stack(
        [
            n - num_active if packed else jnp.int32(n - rows)
            for n, packed in zip(units, packs, strict=True)
        ]
    )
    first, values = survival.unit_values(chances, means, UNIT, drawn=drawn)
    rank = survival.ranks(values, state.active)
    expected = survival.expected_tokens(first, values, rank, spare)
    recent = before.expected + survival.SHARE_OF_NEW * (expected - before.expected)
    recent = jnp.where(state.active[:, None], recent, before.expected)
    tokens = jnp.where(state.active[:, None], before.expected if drawn else expected, 0.0)
    index = argmax(jnp.sum(tokens, axis=0) / costs)
    forms = []
    for i, width in enumerate(spec.widths):
        if packs[i]:
            limit = survival.limits(rank, state.active, spare[i], UNIT, g)
            forms.append(draft.replace(limit=limit, units=units[i]))
        else:
            forms.append(draft.first(width))
    return forms, index, recent


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
