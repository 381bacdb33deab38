"""Compiled programs, each for arguments of certain shapes, kept to be used again.

Read `Programs.get`. Which programs there are is `runtime`'s and `prefixes.pool`'s business.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec import state as states
from jaxspec.models.xla import COMPILER_OPTIONS, LOOP_OPTIONS
from jaxspec.runtime.step_output import Most, Packed, pack
from jaxspec.state import DecodeSpec, DecodeState

jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
"""`jax.jit` with the options that all programs with models are compiled with."""


def options_of_loops(mesh: Mesh) -> dict[str, Any]:
    """Return the options that a loop of steps is compiled with. Several devices talk between kernels of a step."""
    return LOOP_OPTIONS if mesh.size == 1 else COMPILER_OPTIONS


class Compiler:
    """Compiles what it is given, one program after the other, since on a GPU programs are tuned by timing them.

    Its thread is one that the end of Python does not wait for: a server that is stopped while it loads ends at once.
    """

    def __init__(self) -> None:
        """Start its thread."""
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._compile, name="jaxspec-compiler", daemon=True).start()

    def submit(self, compiling: Callable[[], Any]) -> Future[Any]:
        """Return what will be the program."""
        future: Future[Any] = Future()
        self._asked.put((future, compiling))
        return future

    def close(self) -> None:
        """End the thread when it has compiled what it was given."""
        self._asked.put(None)

    def _compile(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, compiling = asked
            try:
                future.set_result(compiling())
            except BaseException as error:
                future.set_exception(error)


class Programs:
    """Compiled programs, by everything that shapes them: pass one on, and nothing is compiled twice."""

    def __init__(self) -> None:
        self.compiled: dict[Any, Any] = {}
        self.coming: dict[Any, Future[Any]] = {}  # another thread compiles them
        self.state_makers: dict[Any, Callable[[], DecodeState]] = {}

    def new_state(self, *sizes: Any) -> DecodeState:
        """Return an empty state; arguments as in `state.state_maker`."""
        if sizes not in self.state_makers:
            self.state_makers[sizes] = states.state_maker(*sizes)
        return self.state_makers[sizes]()

    def get(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        donate: int | None,
        mesh: Mesh,
        spec: DecodeSpec | None = None,
        most: Most | None = None,
        loops: bool = False,
        compiler: Compiler | None = None,
    ) -> Any:
        """Return the program of a function for arguments of these shapes, compiled if it is new.

        Args:
          function: takes a state and returns the next one, which gets the old one's memory.
          donate: the place of the state in `args`; None where no argument gives its memory.
          spec: the function's first argument, before `args`; None where it takes none.
          most: sizes of the news that the program returns beside the state. Then `Ask.known` is the last argument,
            and the function does not take it. None: it returns the state alone.
          loops: whether the function is a loop of steps that never asks the host.
          compiler: who compiles what is new; the program comes with a later call. None: this call does, and waits.

        Returns:
          The program; a `Future` of it with a `compiler` that is not done.
        """
        leaves, tree = jax.tree.flatten(args)
        shapes = tuple((x.shape, str(x.dtype), x.sharding) for x in leaves)
        key = (function, spec, most, donate, tree, shapes)
        if key not in self.compiled:
            if key not in self.coming:
                bound = function if spec is None else _with_spec(function, spec)
                bound = bound if most is None else _with_news(bound, most)
                how: dict[str, Any] = {"tells": most is not None, "loops": loops}
                compiling = _traced(bound, args, donate, mesh, **how).compile
                if compiler is None:
                    self.compiled[key] = compiling()
                    return self.compiled[key]
                self.coming[key] = compiler.submit(compiling)
            if compiler is not None:
                return self.coming[key]
            self.compiled[key] = self.coming.pop(key).result()
        return self.compiled[key]


def _traced(
    function: Any,
    args: tuple[Any, ...],
    donate: int | None,
    mesh: Mesh,
    *,
    tells: bool,
    loops: bool,
) -> jax.stages.Lowered:
    """Trace a function. Python does that, for as long as XLA takes to compile what comes of it."""
    placed = None if donate is None else jax.tree.map(lambda x: x.sharding, args[donate])
    jitted = jax.jit(
        function,
        donate_argnums=() if donate is None else donate,
        out_shardings=(placed, None) if tells else placed,
        compiler_options=options_of_loops(mesh) if loops else COMPILER_OPTIONS,
    )
    with jax.set_mesh(mesh):
        return jitted.lower(*args)


def _with_spec(function: Any, spec: DecodeSpec) -> Any:
    def bound(*args: Any) -> Any:
        return function(spec, *args)

    bound.__name__ = function.__name__
    return bound


def _with_news(function: Any, most: Most) -> Any:
    def telling(*args: Any) -> tuple[DecodeState, Packed]:
        *given, known = args
        state = function(*given)
        return state, pack(state, known, most)

    telling.__name__ = function.__name__
    return telling
