"""What a sampler runs: prompts to results, as pure functions; and the programs that they are compiled to.

Read `generate`. A `Plan` is all that is static, so samplers of one plan share their programs. `arguments`
makes what the functions are given, and `sampler` calls them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, SingleDeviceSharding

from jaxspec import decode
from jaxspec import state as states
from jaxspec.prefill import read_prompts
from jaxspec.rows import FinishReason, GenerateResult, Prompts
from jaxspec.runtime import cache_length_for, jit
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Array, Int, Params
from jaxspec.sharding import constrain_params, left_to_xla, varying_as
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk


@dataclass(frozen=True)
class Plan:
    """All that is static about a sampler."""

    spec: DecodeSpec
    max_new_tokens: int
    num_samples: int

    @property
    def most_positions(self) -> int:
        """Positions that the model has."""
        return self.spec.target.config.max_positions

    def rows(self, prompts: Prompts) -> int:
        """Return how many rows a call has: rows that go on are samples already."""
        return len(prompts.tokens) * (1 if prompts.past is not None else self.num_samples)

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
    """

    prompts: Prompts
    sampling: SamplingParams
    seeds: Array
    max_new_tokens: Int[Array, " R"]
    stop_ids: Int[Array, "R I"]


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
    state = decode.decode_loop(plan.spec, target_params, drafter_params, state, steps)
    return result_of(plan, state, given)


def prefill(
    plan: Plan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    given: Given,
) -> DecodeState:
    """Read every prompt once, and let each sample choose its first token."""
    prompts = given.prompts
    (b, t), rows = prompts.tokens.shape, plan.rows(prompts)
    state = states.init_state(
        plan.spec,
        b,
        cache_length=plan.cache_length(t),
        num_stop_ids=given.stop_ids.shape[1],
        cache_dtype=jnp.dtype(plan.spec.target.dtype),
        mesh=mesh,
    )
    state = varying_as(state, target_params, drafter_params, given)
    models = (plan.spec, target_params, drafter_params)
    head = prompts.lengths - 1  # all but the last token
    state = read_prompts(*models, state, prompts.tokens[:, : t - 1], head)
    index = jnp.repeat(jnp.arange(b, dtype=jnp.int32), rows // b)
    if rows > b:
        state = jax.tree.map(lambda x: x[index], state)
    state = dataclasses.replace(
        state,
        sampling=given.sampling,
        keys=row_keys(given.seeds, rows),
        max_new_tokens=given.max_new_tokens,
        stop_ids=given.stop_ids,
    )
    goes_on = jnp.ones(rows, bool)
    if (past := prompts.past) is not None:
        # The next draw has the number that it would have had in the call before.
        state = dataclasses.replace(state, num_steps=past.steps - 1)
        goes_on = past.finished == FinishReason.UNFINISHED
        if state.counts is not None:
            real = jnp.arange(t, dtype=jnp.int32) < prompts.lengths[:, None]
            counts = state.counts.with_output(prompts.tokens, past.generated & real)
            state = dataclasses.replace(state, counts=counts)
    last = PrefillChunk(
        slots=jnp.arange(rows, dtype=jnp.int32),
        tokens=jnp.take_along_axis(prompts.tokens, head[:, None], axis=1)[index],
        start=head[index],
        count=jnp.ones(rows, jnp.int32),
        is_last=goes_on,
    )
    return decode.prefill(*models, state, last)


def result_of(plan: Plan, state: DecodeState, given: Given) -> GenerateResult:
    """Return what a state has generated."""
    m, past = plan.max_new_tokens, given.prompts.past
    reasons = jnp.where(state.stopped, jnp.int32(FinishReason.STOP), FinishReason.LENGTH)
    reasons = jnp.where(state.failed, FinishReason.ERROR, reasons)
    reasons = jnp.where(state.active, FinishReason.UNFINISHED, reasons)
    num_steps, column = state.num_steps, jnp.arange(m, dtype=jnp.int32)
    accepted = state.acceptance_lengths[:, :m]
    if past is not None:
        reasons = jnp.where(past.finished > 0, past.finished, reasons)
        num_steps = jnp.maximum(num_steps - past.steps, 0)
        columns = past.steps[:, None] + column
        accepted = jnp.take_along_axis(state.acceptance_lengths, columns, axis=1, mode="clip")
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


# --- inside a program of the caller's ----------------------------------------------------------------


def inside(
    plan: Plan, target_params: Params, drafter_params: Params | None, given: Given
) -> GenerateResult:
    """Generate inside a function that JAX traces, such as the caller's jitted one."""
    given = jax.tree.map(jnp.asarray, given)
    run = functools.partial(_without_gradient, plan)
    return left_to_xla(run, target_params, drafter_params, given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_gradient(
    plan: Plan, target_params: Params, drafter_params: Params | None, given: Given
) -> GenerateResult:
    target_params = constrain_params(target_params, plan.spec.target)
    if drafter_params is not None:
        drafter_params = constrain_params(drafter_params, plan.spec.drafter)
    return generate(plan, None, target_params, drafter_params, given)


def _forward(plan: Plan, *args: Any) -> tuple[GenerateResult, None]:
    return _without_gradient(plan, *args), None


def _backward(plan: Plan, kept: None, cotangent: Any) -> Any:
    """Refuse: which token is drawn is no smooth function of the weights. Tokens alone never get here."""
    del plan, kept, cotangent
    raise ValueError(
        "a sampler's result has no gradient: recompute its log-probabilities with "
        "jaxspec.score(params, sequences, sampling), which has one, or use jax.lax.stop_gradient(result)"
    )


_without_gradient.defvjp(_forward, _backward)


# --- programs ----------------------------------------------------------------------------------------


class PlanPrograms:
    """Compiled programs of a plan, by the shapes of what they are given.

    They are compiled for shapes and places of weights, and not for weights. So arrays that are committed to
    their device, such as a restored checkpoint's, share the programs of those that are not.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.compiled: dict[Any, Any] = {}

    @property
    def num_generate(self) -> int:
        """How many of the programs are whole calls."""
        return sum(name == "generate" for name, *_ in self.compiled)

    def get(self, name: str, mesh: Mesh, weights: tuple[Any, ...], *given: Any) -> Any:
        """Return the program of a function of `_FUNCTIONS`, compiled if it is new.

        Args:
          mesh: the devices. Where it is the default device alone, results are uncommitted, as what JAX
            places by itself: were they committed, programs of the caller would compile twice, the second
            time for weights that an update had made committed.
        """
        alone = mesh.size == 1
        leaves, tree = jax.tree.flatten(given)
        places = None if alone else tuple(x.sharding for x in leaves)
        key = (name, mesh, tree, tuple((x.shape, x.dtype) for x in leaves), places)
        if key not in self.compiled:
            (device,) = mesh.devices.flat if alone else (None,)
            is_default = alone and device == _default_device()

            def shape_of(x: Any) -> jax.ShapeDtypeStruct:
                place = getattr(x, "sharding", None)
                if alone:
                    place = None if is_default else SingleDeviceSharding(device)
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

            function, donate = _FUNCTIONS[name]
            static = (self.plan,) if name == "advance" else (self.plan, None if alone else mesh)
            bound = jit(functools.partial(function, *static), donate_argnums=donate)
            with on(mesh):
                shapes = jax.tree.map(shape_of, (*weights, *given))
                self.compiled[key] = bound.lower(*shapes).compile()
        return self.compiled[key]


def advance(
    plan: Plan,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    steps: Array,
) -> DecodeState:
    """Decode on for some steps."""
    return decode.decode_loop(plan.spec, target_params, drafter_params, state, steps)


_FUNCTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "generate": (generate, ()),
    "prefill": (prefill, ()),
    "advance": (advance, (2,)),
}
"""What programs are made of, and which arguments are donated."""

retire = jax.jit(states.retire, donate_argnums=0)
look = jax.jit(result_of, static_argnums=0)


@functools.partial(jax.jit, static_argnums=1)
def first_rows(result: GenerateResult, rows: int) -> GenerateResult:
    """Return the first rows of a result: what follows was padding."""
    return jax.tree.map(lambda x: x[:rows], result)


programs_of = functools.lru_cache(maxsize=32)(PlanPrograms)
"""`programs_of(plan)` returns the programs of a plan: one object for all samplers of that plan."""


def on(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return the context to run in: one device needs none, unless the caller set another mesh."""
    if mesh.size == 1 and jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def _default_device() -> Any:
    return jnp.zeros(()).devices().pop()
