"""The programs that a sampler runs, and a rollout inside a program of the caller's.

A `PlanPrograms` has the programs of one plan. So samplers of one plan share them.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxspec import decode
from jaxspec import state as states
from jaxspec.rollout import refill, rollout
from jaxspec.rollout.batch import GenerateResult
from jaxspec.rollout.rollout import Given, Plan
from jaxspec.runtime.programs import options_of_loops
from jaxspec.shapes import Array, Params
from jaxspec.state import DecodeState
from jaxspec.text.grammars.automaton import Automaton
from jaxspec.weights.sharding import left_to_xla
from jaxspec.weights.trees import constrain_params


def generate(
    plan: Plan,
    mesh: Mesh | None,
    target_params: Params,
    drafter_params: Params | None,
    given: Given,
) -> GenerateResult:
    """Generate rows, each in a slot of its own or by turns."""
    run = rollout.generate if given.count is None else refill.generate
    return run(plan, mesh, target_params, drafter_params, given)


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
        "jaxspec.score(sampler, params, (prompts, result), sampling), which has one, or use "
        "jax.lax.stop_gradient(result)"
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
            bound = jax.jit(
                functools.partial(function, *static),
                donate_argnums=donate,
                compiler_options=options_of_loops(mesh),
            )
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
    grammar: Automaton | None,
) -> DecodeState:
    """Decode on for some steps."""
    models = target_params, drafter_params
    return decode.decode_loop(plan.spec, *models, state, steps, grammar=grammar)


_FUNCTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "generate": (generate, ()),
    "prefill": (rollout.prefill, ()),
    "advance": (advance, (2,)),
}
"""What programs are made of, and which arguments are donated."""

retire = jax.jit(states.retire, donate_argnums=0)
look = jax.jit(rollout.result_of, static_argnums=0)


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
