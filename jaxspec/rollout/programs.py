"""The programs that a sampler runs, and a rollout inside a program of the caller's.

A `RolloutPrograms` has the programs of one plan, which samplers of that plan share.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxspec import state as states
from jaxspec.decode_loop import decode_loop
from jaxspec.mesh import left_to_xla
from jaxspec.rollout import refill, rollout
from jaxspec.rollout.batch import GenerateResult
from jaxspec.rollout.rollout import RolloutInputs, RolloutPlan
from jaxspec.runtime import memory
from jaxspec.runtime.jax_settings import check_jax_settings
from jaxspec.runtime.programs import options_of_loops
from jaxspec.shapes import Array, Params
from jaxspec.state import DecodeState
from jaxspec.text.grammars.automaton import Automaton
from jaxspec.weights.trees import constrain_params


def generate(
    plan: RolloutPlan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    inputs: RolloutInputs,
) -> GenerateResult:
    """Generate rows, each in its own slot, or with continuous batching if there are more rows than slots."""
    run = rollout.generate if inputs.count is None else refill.generate
    return run(plan, mesh, target_params, drafter_params, inputs)


# --- inside a program of the caller's ----------------------------------------------------------------


def inside(
    plan: RolloutPlan, target_params: Params, drafter_params: Params | None, inputs: RolloutInputs
) -> GenerateResult:
    """Generate inside a function that JAX traces, such as the caller's jitted one."""
    inputs = jax.tree.map(jnp.asarray, inputs)
    run = functools.partial(_without_gradient, plan)
    return left_to_xla(run, target_params, drafter_params, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_gradient(
    plan: RolloutPlan, target_params: Params, drafter_params: Params | None, inputs: RolloutInputs
) -> GenerateResult:
    target_params = constrain_params(target_params, plan.spec.target)
    if drafter_params is not None:
        assert plan.spec.drafter is not None
        drafter_params = constrain_params(drafter_params, plan.spec.drafter)
    return generate(plan, None, target_params, drafter_params, inputs)


def _forward(plan: RolloutPlan, *args: Any) -> tuple[GenerateResult, None]:
    return _without_gradient(plan, *args), None


def _backward(plan: RolloutPlan, kept: None, cotangent: Any) -> Any:
    """Refuse: which token is drawn is no smooth function of the weights. Tokens alone never get here."""
    del plan, kept, cotangent
    raise ValueError(
        "a sampler's result has no gradient: recompute its log-probabilities with "
        "jaxspec.score(sampler, params, (prompts, result), sampling), which has one, or use "
        "jax.lax.stop_gradient(result)"
    )


_without_gradient.defvjp(_forward, _backward)


# --- programs ----------------------------------------------------------------------------------------


class RolloutPrograms:
    """Compiled programs of a plan, by the shapes of their inputs.

    They are compiled for shapes and shardings of weights. So arrays that are committed to their
    device, such as a restored checkpoint's, share the programs of those that are not.
    """

    def __init__(self, plan: RolloutPlan):
        self.plan = plan
        self.compiled: dict[Any, Any] = {}

    @property
    def num_generate(self) -> int:
        """Number of programs that are whole calls."""
        return sum(name == "generate" for name, *_ in self.compiled)

    def get(
        self, name: str, mesh: Mesh, placement: Hashable, weights: tuple[Any, ...], *inputs: Any
    ) -> Any:
        """Return the program of a function of `_FUNCTIONS`, compiled if it is new.

        Args:
          mesh: the devices. If it is the default device alone, results are uncommitted, as JAX's
            own are. Committed ones would compile the caller's programs twice, the second time for
            weights that an update had made committed.
          placement: shardings of the weights on a mesh of several devices.
        """
        alone = mesh.size == 1
        leaves, tree = jax.tree.flatten(inputs)
        shardings = None if alone else (placement, *(x.sharding for x in leaves))
        key = (name, mesh, tree, tuple((x.shape, x.dtype) for x in leaves), shardings)
        if key not in self.compiled:
            check_jax_settings()
            (device,) = mesh.devices.flat if alone else (None,)
            is_default = alone and device == _default_device()

            def shape_of(x: Any) -> jax.ShapeDtypeStruct:
                sharding = getattr(x, "sharding", None)
                if alone:
                    sharding = None if is_default else SingleDeviceSharding(device)
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

            function, donate = _FUNCTIONS[name]
            static = (self.plan,) if name == "advance" else (self.plan, None if alone else mesh)
            bound = jax.jit(
                functools.partial(function, *static),
                donate_argnums=donate,
                compiler_options=options_of_loops(mesh),
            )
            with on(mesh):
                shapes = jax.tree.map(shape_of, (*weights, *inputs))
                program = bound.lower(*shapes).compile()
            memory.check_compiled(program, mesh)
            self.compiled[key] = program
        return self.compiled[key]


def advance(
    plan: RolloutPlan,
    target_params: Params,
    drafter_params: Params | None,
    state: DecodeState,
    steps: Array,
    grammar: Automaton | None,
) -> DecodeState:
    """Run some decode steps."""
    models = target_params, drafter_params
    return decode_loop(plan.spec, *models, state, steps, grammar=grammar)


_FUNCTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "generate": (generate, ()),
    "prefill": (rollout.prefill, ()),
    "advance": (advance, (2,)),
}
"""Functions of the programs, and the arguments that are donated."""

retire = jax.jit(states.retire, donate_argnums=0)
result_of = jax.jit(rollout.result_of, static_argnums=0)


@functools.partial(jax.jit, static_argnums=1)
def first_rows(result: GenerateResult, rows: int) -> GenerateResult:
    """Return the first rows of a result. The others are padding."""
    return jax.tree.map(lambda x: x[:rows], result)


programs_of = functools.lru_cache(maxsize=32)(RolloutPrograms)
"""`programs_of(plan)` returns the programs of a plan, one object for all samplers of that plan."""


def on(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return the context for calls on a mesh. One device needs none, unless the caller set another mesh."""
    if mesh.size == 1 and jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def _default_device() -> Any:
    return jnp.zeros(()).devices().pop()
