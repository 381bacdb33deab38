"""Continuous batching inside one program, for rollouts of more rows than slots.

`rollout.generate` gives every row a slot, so the batch waits for its longest row. Here a free slot
takes the next row:

    prefill   prompts of a group, without their last tokens     `rollout.prefill_heads`, into a state of its own
    fork      the group's rows choose their first tokens        `rollout.fork`, likewise
    store     results of the finished rows of free slots        at the rows' indices in the result
    insert    the group into these slots                        every array of a slot is replaced
    decode    until the next group has slots                    `decode_loop`

A group is an eighth of the slots. A pass reads all weights, for one row as for many, so rows do not
come one by one. While a group waits, half of its slots are idle on average. Groups of one size have
static shapes, and the loop over them needs no branch: XLA may copy caches that pass through one.

Prompts are prefilled beside the batch and not in its slots, for three reasons:

- All rows take passes of the same shapes. A row does not depend on the time of its turn.
- Nothing of an earlier row is left in a slot, neither step numbers nor a NaN in its caches.
- A prompt is prefilled once for all of its samples, in whatever groups they are.

The price is memory: caches of an eighth more rows during a prefill, and with samples another eighth
always.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxspec.decode_loop import decode_loop
from jaxspec.mesh import row_parts, varying_as
from jaxspec.rollout.batch import GenerateResult, Prompts
from jaxspec.rollout.rollout import (
    RolloutInputs,
    RolloutPlan,
    empty_state,
    fork,
    prefill_heads,
    result_of,
    row_keys,
)
from jaxspec.shapes import Array, Bool, Int, Params
from jaxspec.state import DecodeState

Carry = tuple[DecodeState, Int[Array, " B"], GenerateResult]
"""The state of the slots, the row of each slot or R for none, and the result of finished rows."""


def generate(
    plan: RolloutPlan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    inputs: RolloutInputs,
) -> GenerateResult:
    """Generate more rows than there are slots."""
    count = inputs.count
    assert count is not None
    rows, num_prompts = len(inputs.max_new_tokens), len(inputs.prompts.tokens)
    samples, (slots, group) = rows // num_prompts, plan.slots(row_parts())
    inputs = dataclasses.replace(inputs, seeds=row_keys(inputs.seeds, rows))
    models = (target_params, drafter_params)
    # Prompts of one prefill. Their samples fill whole groups, or these are all prompts.
    together = min(group, num_prompts)

    def run_prompts(turn: Array, carry: Carry) -> Carry:
        """Prefill the next prompts, and generate all of their samples."""
        first_prompt = turn * together
        prompts = jnp.minimum(first_prompt + _arange(together), num_prompts - 1)
        staged = prefill_heads(
            plan,
            mesh,
            *models,
            dataclasses.replace(inputs, prompts=inputs.prompts.take(prompts)),
        )
        begin = first_prompt * samples
        left = jnp.minimum(count - begin, together * samples)
        run = functools.partial(admit, staged, begin)
        return lax.fori_loop(jnp.int32(0), -(-left // group), run, carry)

    def admit(staged: DecodeState, begin: Array, turn: Array, carry: Carry) -> Carry:
        """Put the next group of rows into free slots, and decode until the group after it has slots."""
        numbers = begin + turn * group + _arange(group)
        real = numbers < count
        of_group = inputs.take(jnp.minimum(numbers, rows - 1))
        index = jnp.minimum((numbers - begin) // samples, together - 1)
        index = None if samples == 1 and together == group else index
        new = fork(plan, *models, staged, of_group, index)
        carry = _insert(plan, inputs.prompts, carry, new, numbers, real)
        waiting = jnp.clip(count - (numbers[0] + group), 0, group)
        until = jnp.where(waiting > 0, slots - waiting, 0)
        steps = jnp.int32(plan.max_new_tokens)  # by then no row is active
        state, owners, result = carry
        state = decode_loop(plan.spec, *models, state, steps, until, grammar=inputs.grammar)
        return state, owners, result

    state = empty_state(plan, mesh, *models, inputs, slots)
    owners = jnp.full(slots, rows, jnp.int32)
    start = (state, *varying_as((owners, _no_result(plan, state, rows)), *models, inputs))
    turns = -(-count // (together * samples))
    state, owners, result = lax.fori_loop(jnp.int32(0), turns, run_prompts, start)
    return _store(plan, inputs.prompts, result, state, owners, _arange(slots))


def _insert(
    plan: RolloutPlan,
    prompts: Prompts,
    carry: Carry,
    new: DecodeState,
    numbers: Int[Array, " b"],
    real: Bool[Array, " b"],
) -> Carry:
    """Store the results of finished rows, and give their slots to new rows.

    Args:
      new: state of the new rows; every array, caches too, goes to the slots that the rows get.
      numbers: of the new rows; those that are not `real` get no slot.
    """
    state, owners, result = carry
    free_first = (state.active.astype(jnp.int32), _arange(len(owners)))
    free = lax.sort(free_first, num_keys=1, is_stable=True)[1][: len(numbers)]
    result = _store(plan, prompts, result, state, owners, free)
    slots = jnp.where(real, free, len(owners))

    def put(old: Array, rows: Array) -> Array:
        return old.at[slots].set(rows, mode="drop")

    return jax.tree.map(put, state, new), put(owners, numbers), result


def _store(
    plan: RolloutPlan,
    prompts: Prompts,
    result: GenerateResult,
    state: DecodeState,
    owners: Int[Array, " B"],
    slots: Int[Array, " b"],
) -> GenerateResult:
    """Write the results of the rows of some slots; a slot without a row writes nothing."""
    rows, past = owners[slots], prompts.past
    if past is not None:
        past = jax.tree.map(lambda x: x[jnp.minimum(rows, len(x) - 1)], past)
    of_slots = jax.tree.map(lambda x: x[slots], state.small)  # of any part of a mesh
    rows_result = result_of(plan, of_slots, past)
    return jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), result, rows_result)


def _no_result(plan: RolloutPlan, state: DecodeState, rows: int) -> GenerateResult:
    shapes = jax.eval_shape(functools.partial(result_of, plan, past=None), state)
    return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), shapes)


def _arange(n: int) -> Int[Array, " n"]:
    return jnp.arange(n, dtype=jnp.int32)
