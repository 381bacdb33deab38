"""What a sampler does with prompts: pure functions from weights and prompts to results.

Read `generate`. Its parts are `read`, which reads every prompt once; `fork`, where the samples of a prompt part;
and `result_of`. A `Plan` is all that is static. `refill` has fewer slots than rows, `arguments` makes what the
functions are given, and `rollout_programs` compiles them.
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
from jaxspec.rollout.batch import FinishReason, GenerateResult, Past, Prompts
from jaxspec.runtime.prefill import read_prompts
from jaxspec.runtime.runtime import cache_length_for
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Array, Int, Params
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk
from jaxspec.text.grammars.automaton import FREE, Automaton, state_after
from jaxspec.weights.sharding import varying_as


@dataclass(frozen=True)
class Plan:
    """All that is static about a sampler."""

    spec: DecodeSpec
    max_new_tokens: int
    num_samples: int
    batch_size: int | None = None

    @property
    def most_positions(self) -> int:
        """Positions that the model has."""
        return self.spec.target.config.max_positions

    def rows(self, prompts: Prompts) -> int:
        """Return how many rows a call has: rows that go on are samples already."""
        return len(prompts.tokens) * (1 if prompts.past is not None else self.num_samples)

    def is_refilled(self, prompts: Prompts) -> bool:
        """Tell whether a call has more rows than slots."""
        return self.batch_size is not None and self.rows(prompts) > self.batch_size

    def slots(self, parts: int) -> tuple[int, int]:
        """Return how many slots rows share, and how many of these are refilled at a time.

        Args:
          parts: of a mesh's data axis; each has as many slots as the others.
        """
        assert self.batch_size is not None
        each = -(-self.batch_size // parts)
        group = max(1, each // 8)
        # On a CPU the rows of a pass round alike up to 16 rows, and in multiples of 8.
        return each * parts, parts * (group if group <= 16 else group // 8 * 8)

    def cache_length(self, width: int) -> int:
        """Return the length of caches for prompts of a width, in multiples of 8, as kernels want it.

        A row may be shorter than its padding, so that it fits where the width would not.
        """
        positions = min(width + self.max_new_tokens, self.most_positions)
        return cache_length_for(self.spec, positions, multiple=8)


class Given(struct.PyTreeNode):
    """What a call is given beside weights, in the one form that programs take.

    Attributes:
      seeds: uint32 or typed PRNG keys, one for all rows or one for each, see `row_keys`.
      count: how many rows are no padding, where there are more than slots; None: every row has a slot.
      starts: the state of a grammar that each row begins with, where there is one.
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

    def take(self, rows: Int[Array, " r"]) -> Given:
        """Return what some rows are given, and the prompt of each. All rows have seeds of their own."""
        samples = len(self.max_new_tokens) // len(self.prompts.tokens)
        own = (self.sampling, self.seeds, self.max_new_tokens, self.stop_ids)
        prompts = self.prompts.take(rows // samples)
        some = jax.tree.map(lambda x: x[rows], (*own, None, self.starts))
        return Given(prompts, *some, grammar=self.grammar)


# --- functions ---------------------------------------------------------------------------------------


def generate(
    plan: Plan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    given: Given,
) -> GenerateResult:
    """Generate rows: prefill, decode until all have finished, and say what came of it."""
    state = prefill(plan, mesh, target_params, drafter_params, given)
    steps = jnp.int32(plan.max_new_tokens)
    state = decode.decode_loop(
        plan.spec, target_params, drafter_params, state, steps, grammar=given.grammar
    )
    return result_of(plan, state, given.prompts.past)


def prefill(
    plan: Plan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    given: Given,
) -> DecodeState:
    """Read every prompt once, and let each sample choose its first token."""
    b, rows = len(given.prompts.tokens), plan.rows(given.prompts)
    given = dataclasses.replace(given, seeds=row_keys(given.seeds, rows))
    state = read(plan, mesh, target_params, drafter_params, given)
    index = None
    if rows > b:
        index = jnp.repeat(jnp.arange(b, dtype=jnp.int32), rows // b)
        given = dataclasses.replace(given, prompts=given.prompts.take(index))
    return fork(plan, target_params, drafter_params, state, given, index)


def read(
    plan: Plan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    given: Given,
) -> DecodeState:
    """Read prompts but for their last tokens. The state has a slot for each prompt, and no row is active."""
    prompts = given.prompts
    empty = empty_state(plan, mesh, target_params, drafter_params, given, len(prompts.tokens))
    tokens, head = prompts.tokens[:, :-1], prompts.lengths - 1
    return read_prompts(plan.spec, target_params, drafter_params, empty, tokens, head)


def fork(
    plan: Plan,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    given: Given,
    index: Int[Array, " R"] | None,
) -> DecodeState:
    """Go on from prompts that are read: each row reads the last token and chooses the first new one.

    Args:
      given: a prompt and a key for each row.
      index: the slot that each row's prompt was read in; None: row i's in slot i.
    """
    prompts, rows = given.prompts, len(given.max_new_tokens)
    if index is not None:
        state = jax.tree.map(lambda x: x[index], state)
    state = dataclasses.replace(
        state,
        sampling=given.sampling,
        keys=given.seeds,
        max_new_tokens=given.max_new_tokens,
        stop_ids=given.stop_ids,
        automaton=given.starts,
    )
    goes_on = jnp.ones(rows, bool)
    if (past := prompts.past) is not None:
        # The next draw has the number that it would have had in the call before.
        state = dataclasses.replace(state, num_steps=past.steps - 1)
        goes_on = past.finished == FinishReason.UNFINISHED
        column = jnp.arange(prompts.tokens.shape[1], dtype=jnp.int32)
        said = past.generated & (column < prompts.lengths[:, None])
        if state.counts is not None:
            counts = state.counts.with_output(prompts.tokens, said)
            state = dataclasses.replace(state, counts=counts)
        if given.grammar is not None:
            assert given.starts is not None
            at = state_after(given.grammar, given.starts, prompts.tokens, said)
            state = dataclasses.replace(state, automaton=at)
    head = prompts.lengths - 1
    last = PrefillChunk(
        slots=jnp.arange(rows, dtype=jnp.int32),
        tokens=jnp.take_along_axis(prompts.tokens, head[:, None], axis=1),
        start=head,
        count=jnp.ones(rows, jnp.int32),
        is_last=goes_on,
    )
    return decode.prefill(plan.spec, target_params, drafter_params, state, last, given.grammar)


def result_of(plan: Plan, state: DecodeState, past: Past | None) -> GenerateResult:
    """Return what a state has generated, of rows with such a past."""
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
    plan: Plan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    given: Given,
    slots: int,
) -> DecodeState:
    """Return slots that hold nothing, for rows of what is given."""
    state = states.init_state(
        plan.spec,
        slots,
        cache_length=plan.cache_length(given.prompts.tokens.shape[1]),
        num_stop_ids=given.stop_ids.shape[1],
        cache_dtype=plan.spec.target.cache_dtype,
        mesh=mesh,
    )
    if given.grammar is not None:
        state = dataclasses.replace(state, automaton=jnp.full_like(state.lengths, FREE))
    return varying_as(state, target_params, drafter_params, given)


@functools.partial(jax.jit, static_argnums=1)
def row_keys(seeds: Array, rows: int) -> Array:
    """Return the key of each row: of its own seed, or of its number under one seed for all.

    A program of its own, so that the large ones need not be compiled for each kind of seeds. Keys of rows
    are returned as they are.
    """
    is_key = jnp.issubdtype(seeds.dtype, jax.dtypes.prng_key)
    if seeds.ndim:
        return seeds if is_key else jax.vmap(jax.random.key)(seeds)
    key = seeds if is_key else jax.random.key(seeds)
    numbers = jnp.arange(rows, dtype=jnp.int32)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(numbers)
