"""A rollout: pure functions from weights and prompts to results.

Read `generate`. Its parts are `prefill_heads`, which prefills every prompt once; `fork`, where the
samples of a prompt part; and `result_of`. A `RolloutPlan` has all that is static. `refill` has
fewer slots than rows, `arguments` makes the inputs of the functions, and `programs` compiles them.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxspec import decode
from jaxspec import state as states
from jaxspec.decode_loop import decode_loop
from jaxspec.mesh import row_numbers, varying_as
from jaxspec.rollout.batch import FinishReason, GenerateResult, Past, Prompts
from jaxspec.runtime.prefill import prefill_prompts
from jaxspec.runtime.runtime import cache_length_for
from jaxspec.sampling import SamplingParams, make_key
from jaxspec.shapes import Array, Int, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk
from jaxspec.text.grammars.automaton import FREE, Automaton, state_after


@dataclass(frozen=True)
class RolloutPlan:
    """The static part of a rollout."""

    spec: DecodeSpec
    max_new_tokens: int
    num_samples: int
    batch_size: int | None = None

    @property
    def max_positions(self) -> int:
        """Positions of the model."""
        return self.spec.target.config.max_positions

    def rows(self, prompts: Prompts) -> int:
        """Return the number of rows of a call. Prompts with a past are samples already."""
        return len(prompts.tokens) * (1 if prompts.past is not None else self.num_samples)

    def is_refilled(self, prompts: Prompts) -> bool:
        """Return whether a call has more rows than slots."""
        return self.batch_size is not None and self.rows(prompts) > self.batch_size

    def slots(self, parts: int) -> tuple[int, int]:
        """Return the number of slots, and how many of them are refilled at a time.

        Args:
          parts: of a mesh's data axis; each has as many slots as the others.
        """
        assert self.batch_size is not None
        each = -(-self.batch_size // parts)
        group = max(1, each // 8)
        # On a CPU the rows of a pass round alike up to 16 rows, and in multiples of 8.
        return each * parts, parts * (group if group <= 16 else group // 8 * 8)

    def cache_length(self, width: int) -> int:
        """Return the length of caches for prompts of a width, in multiples of 8, as kernels need.

        It never exceeds the model's positions, since a row may be shorter than its padding.
        """
        positions = min(width + self.max_new_tokens, self.max_positions)
        return cache_length_for(self.spec, positions, multiple=8)


class RolloutInputs(struct.PyTreeNode):
    """Inputs of a call beside weights, in the form that programs take.

    Attributes:
      seeds: uint32 or typed PRNG keys, one for all rows or one for each, see `row_keys`.
      count: number of rows without padding, if there are more rows than slots; None: every row has
        a slot.
      starts: the first grammar state of each row, if there is a grammar.
      grammar: of all rows.
    """

    prompts: Prompts
    sampling: SamplingParams
    seeds: Array
    max_new_tokens: Int[Array, " R"]
    stop_ids: Int[Array, "R I"]
    count: Int[Array, ""] | None = None
    starts: Int[Array, " R"] | None = None
    grammar: Automaton | None = None

    def take(self, rows: Int[Array, " r"]) -> RolloutInputs:
        """Return the inputs of some rows, with a prompt for each. Every row must have its own seed."""
        samples = len(self.max_new_tokens) // len(self.prompts.tokens)
        own = (self.sampling, self.seeds, self.max_new_tokens, self.stop_ids)
        prompts = self.prompts.take(rows // samples)
        values = jax.tree.map(lambda x: x[rows], (*own, None, self.starts))
        return RolloutInputs(prompts, *values, grammar=self.grammar)


# --- functions ---------------------------------------------------------------------------------------


def generate(
    plan: RolloutPlan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    inputs: RolloutInputs,
) -> GenerateResult:
    """Generate rows: prefill, and decode until all have finished."""
    state = prefill(plan, mesh, target_params, drafter_params, inputs)
    steps = jnp.int32(plan.max_new_tokens)
    state = decode_loop(
        plan.spec, target_params, drafter_params, state, steps, grammar=inputs.grammar
    )
    return result_of(plan, state, inputs.prompts.past)


def prefill(
    plan: RolloutPlan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    inputs: RolloutInputs,
) -> DecodeState:
    """Prefill every prompt once, and choose the first token of each sample."""
    b, rows = len(inputs.prompts.tokens), plan.rows(inputs.prompts)
    inputs = dataclasses.replace(inputs, seeds=row_keys(inputs.seeds, rows))
    state = prefill_heads(plan, mesh, target_params, drafter_params, inputs)
    index = None
    if rows > b:
        index = jnp.repeat(jnp.arange(b, dtype=jnp.int32), rows // b)
        inputs = dataclasses.replace(inputs, prompts=inputs.prompts.take(index))
    return fork(plan, target_params, drafter_params, state, inputs, index)


def prefill_heads(
    plan: RolloutPlan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    inputs: RolloutInputs,
) -> DecodeState:
    """Prefill prompts without their last tokens. The state has a slot for each prompt, and no row is active."""
    prompts = inputs.prompts
    empty = empty_state(plan, mesh, target_params, drafter_params, inputs, len(prompts.tokens))
    tokens, head = prompts.tokens[:, :-1], prompts.lengths - 1
    images = jax.tree.map(lambda x: x[:, :-1], prompts.images)
    return prefill_prompts(plan.spec, target_params, drafter_params, empty, tokens, head, images)


def fork(
    plan: RolloutPlan,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    inputs: RolloutInputs,
    index: Int[Array, " R"] | None,
) -> DecodeState:
    """Prefill the last token of each row's prompt, and choose the first new one.

    Args:
      inputs: a prompt and a key for each row.
      index: the slot in which each row's prompt was prefilled; None: row i's in slot i.
    """
    prompts, rows = inputs.prompts, len(inputs.max_new_tokens)
    if index is not None:
        state = jax.tree.map(lambda x: x[index], state)
    state = dataclasses.replace(
        state,
        sampling=inputs.sampling,
        keys=inputs.seeds,
        max_new_tokens=inputs.max_new_tokens,
        stop_ids=inputs.stop_ids,
        automaton=inputs.starts,
    )
    goes_on = jnp.ones(rows, bool)
    if (past := prompts.past) is not None:
        # The next draw gets the number that it would get in one long call.
        state = dataclasses.replace(state, num_steps=past.steps - 1)
        goes_on = past.finished == FinishReason.UNFINISHED
        column = jnp.arange(prompts.tokens.shape[1], dtype=jnp.int32)
        generated = past.generated & (column < prompts.lengths[:, None])
        if state.counts is not None:
            counts = state.counts.with_output(prompts.tokens, generated)
            state = dataclasses.replace(state, counts=counts)
        if inputs.grammar is not None:
            assert inputs.starts is not None
            at = state_after(inputs.grammar, inputs.starts, prompts.tokens, generated)
            state = dataclasses.replace(state, automaton=at)
    head = prompts.lengths - 1
    last = PrefillChunk(
        slots=row_numbers(rows),
        tokens=jnp.take_along_axis(prompts.tokens, head[:, None], axis=1),
        start=head,
        count=jnp.ones(rows, jnp.int32),
        is_last=goes_on,
    )
    return decode.prefill(plan.spec, target_params, drafter_params, state, last, inputs.grammar)


def result_of(plan: RolloutPlan, state: DecodeState, past: Past | None) -> GenerateResult:
    """Return the result of a state whose rows have this past."""
    m = plan.max_new_tokens
    reasons = jnp.where(state.stopped, jnp.int32(FinishReason.STOP), FinishReason.LENGTH)
    reasons = jnp.where(state.failed, FinishReason.ERROR, reasons)
    reasons = jnp.where(state.active, FinishReason.UNFINISHED, reasons)
    num_steps, column = state.num_steps, jnp.arange(m, dtype=jnp.int32)
    accepted = state.acceptance_lengths[:, :m]
    if past is not None:
        reasons = jnp.where(past.finished > 0, past.finished, reasons)
        num_steps = jnp.maximum(num_steps - past.steps, 0)
        columns = (past.steps[:, None] + column) % state.acceptance_lengths.shape[1]
        accepted = jnp.take_along_axis(state.acceptance_lengths, columns, axis=1)
    result = GenerateResult(
        tokens=state.tokens[:, :m],
        lengths=state.num_tokens,
        finish_reasons=reasons,
        logprobs=jax.tree.map(lambda x: x[:, :m], state.logprobs),
        num_steps=num_steps,
        acceptance_lengths=jnp.where(column < num_steps[:, None], accepted, 0),
        depth=plan.spec.depth,
    )
    return result.cut(state.num_tokens)


def empty_state(
    plan: RolloutPlan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    inputs: RolloutInputs,
    slots: int,
) -> DecodeState:
    """Return a state of empty slots for these inputs."""
    state = states.init_state(
        plan.spec,
        slots,
        cache_length=plan.cache_length(inputs.prompts.tokens.shape[1]),
        num_stop_ids=inputs.stop_ids.shape[1],
        cache_dtype=plan.spec.target.cache_dtype,
        mesh=mesh,
    )
    if inputs.grammar is not None:
        state = dataclasses.replace(state, automaton=jnp.full_like(state.lengths, FREE))
    return varying_as(state, target_params, drafter_params, inputs)


@functools.partial(jax.jit, static_argnums=1)
def row_keys(seeds: Array, rows: int) -> Array:
    """Return the key of each row, from its own seed, or from its number and one seed for all.

    It is a separate program, so that the large ones are not compiled for each kind of seeds. Keys
    of rows are returned unchanged.
    """
    is_key = jnp.issubdtype(seeds.dtype, jax.dtypes.prng_key)
    if seeds.ndim:
        return seeds if is_key else jax.vmap(make_key)(seeds)
    key = seeds if is_key else make_key(seeds)
    numbers = jnp.arange(rows, dtype=jnp.int32)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(numbers)
