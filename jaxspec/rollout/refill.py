"""More rows than slots: a rollout in which a slot takes the next row when its own is over, inside one program.

`rollout.generate` gives every row a slot, and so the batch waits for its longest row. Here rows take turns:

    read    prompts of a group, but for their last tokens      `rollout.read`, into a state of its own
    fork    the group's rows choose their first tokens         `rollout.fork`, likewise
    keep    what the last rows of free slots have said         in the result, at the rows' own places
    put     the group into these slots                         whole: every array of a slot is replaced
    decode  until there is room for the next group             `decode.decode_loop`

A group is an eighth of the slots. A pass reads all weights, for one row as for many, so rows do not come one by
one; and while a group is awaited, half as many slots as it has are idle on average. Groups of one size have
static shapes, and the loop over them needs no branch: XLA may copy caches that pass through one.

Rows are read beside the batch and not in its slots, for three reasons:

- The first rows and those that follow them take passes of the same shapes. A row does not depend on when it came.
- Nothing of its last row is left in a slot, neither numbers of steps nor a NaN in its caches.
- A prompt that was read waits for all of its samples, and is read once, whoever of them come into one group.

The price is memory: caches of an eighth more rows while a group is read, and with samples another eighth always.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxspec import decode
from jaxspec.rollout.batch import GenerateResult, Prompts
from jaxspec.rollout.rollout import Given, Plan, empty_state, fork, read, result_of, row_keys
from jaxspec.row_subset import take_rows
from jaxspec.shapes import Array, Bool, Int, Params
from jaxspec.state import DecodeState
from jaxspec.weights.sharding import row_parts, varying_as

Carry = tuple[DecodeState, Int[Array, " B"], GenerateResult]
"""The slots, the row that each has or R for none, and what rows have said that are over."""


def generate(
    plan: Plan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    given: Given,
) -> GenerateResult:
    """Generate rows, more than there are slots."""
    count = given.count
    assert count is not None
    rows, num_prompts = len(given.max_new_tokens), len(given.prompts.tokens)
    samples, (slots, group) = rows // num_prompts, plan.slots(row_parts())
    given = dataclasses.replace(given, seeds=row_keys(given.seeds, rows))
    models = (target_params, drafter_params)
    # Prompts of so many are read together. Their samples are whole groups, or these prompts are all there are.
    together = min(group, num_prompts)

    def read_on(turn: Array, carry: Carry) -> Carry:
        """Read some prompts, and let all samples of theirs have their turn."""
        first_prompt = turn * together
        prompts = jnp.minimum(first_prompt + _arange(together), num_prompts - 1)
        staged = read(
            plan,
            mesh,
            *models,
            dataclasses.replace(given, prompts=given.prompts.take(prompts)),
        )
        begin = first_prompt * samples
        left = jnp.minimum(count - begin, together * samples)
        run = functools.partial(admit, staged, begin)
        return lax.fori_loop(jnp.int32(0), -(-left // group), run, carry)

    def admit(staged: DecodeState, begin: Array, turn: Array, carry: Carry) -> Carry:
        """Put the next group of rows into free slots, and decode until the group after it has room."""
        numbers = begin + turn * group + _arange(group)
        real = numbers < count
        some = given.take(jnp.minimum(numbers, rows - 1))
        index = jnp.minimum((numbers - begin) // samples, together - 1)
        index = None if samples == 1 and together == group else index
        new = fork(plan, *models, staged, some, index)
        carry = _put(plan, given.prompts, carry, new, numbers, real)
        waiting = jnp.clip(count - (numbers[0] + group), 0, group)
        until = jnp.where(waiting > 0, slots - waiting, 0)
        steps = jnp.int32(plan.max_new_tokens)  # by then no row is active
        state, owners, result = carry
        state = decode.decode_loop(plan.spec, *models, state, steps, until, grammar=given.grammar)
        return state, owners, result

    state = empty_state(plan, mesh, *models, given, slots)
    owners = jnp.full(slots, rows, jnp.int32)
    start = (state, *varying_as((owners, _no_result(plan, state, rows)), *models, given))
    turns = -(-count // (together * samples))
    state, owners, result = lax.fori_loop(jnp.int32(0), turns, read_on, start)
    return _keep(plan, given.prompts, result, state, owners, _arange(slots))


def _put(
    plan: Plan,
    prompts: Prompts,
    carry: Carry,
    new: DecodeState,
    numbers: Int[Array, " b"],
    real: Bool[Array, " b"],
) -> Carry:
    """Keep what the rows of free slots have said, and give these slots to new rows.

    Args:
      new: a slot for each new row; every array of it, caches too, goes to the slot that the row gets.
      numbers: of the new rows; those that are not `real` get no slot.
    """
    state, owners, result = carry
    free_first = (state.active.astype(jnp.int32), _arange(len(owners)))
    free = lax.sort(free_first, num_keys=1, is_stable=True)[1][: len(numbers)]
    result = _keep(plan, prompts, result, state, owners, free)
    slots = jnp.where(real, free, len(owners))

    def put(old: Array, rows: Array) -> Array:
        return old.at[slots].set(rows, mode="drop")

    return jax.tree.map(put, state, new), put(owners, numbers), result


def _keep(
    plan: Plan,
    prompts: Prompts,
    result: GenerateResult,
    state: DecodeState,
    owners: Int[Array, " B"],
    slots: Int[Array, " b"],
) -> GenerateResult:
    """Write what the rows of some slots have said to the rows' places; a slot without a row writes nothing."""
    rows, past = owners[slots], prompts.past
    if past is not None:
        past = jax.tree.map(lambda x: x[jnp.minimum(rows, len(x) - 1)], past)
    said = result_of(plan, take_rows(state, slots), past)
    return jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), result, said)


def _no_result(plan: Plan, state: DecodeState, rows: int) -> GenerateResult:
    shapes = jax.eval_shape(functools.partial(result_of, plan, past=None), state)
    return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), shapes)


def _arange(n: int) -> Int[Array, " n"]:
    return jnp.arange(n, dtype=jnp.int32)
