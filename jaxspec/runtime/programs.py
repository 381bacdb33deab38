"""Compiled programs, each for arguments of certain shapes, kept to be used again.

Read `Programs.get`. `runtime` and the pool of the prefix cache have the programs' functions.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec import state as states
from jaxspec.models.xla import COMPILER_OPTIONS, LOOP_OPTIONS, MESH_LOOP_OPTIONS
from jaxspec.runtime import memory
from jaxspec.runtime.jax_settings import check_jax_settings
from jaxspec.runtime.step_output import OutputSizes, PackedOutput, pack
from jaxspec.state import DecodeSpec, DecodeState
from jaxspec.weights.model_def import ModelDef

jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
"""`jax.jit` with the options that all programs with models are compiled with."""


def options_of_loops(mesh: Mesh) -> dict[str, Any]:
    """Return the options that compile a loop of steps."""
    return LOOP_OPTIONS if mesh.size == 1 else MESH_LOOP_OPTIONS


THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads that compile programs at once. XLA compiles a program mainly in one thread."""


class Compiler:
    """Compiles programs in threads. On a GPU XLA times the kernels of one program at a time.

    Python does not wait for the threads at exit, so a server that is stopped while it loads ends at once.
    """

    def __init__(self, threads: int = THREADS) -> None:
        """Start so many threads."""
        self._threads = threads
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._compile, name="jaxspec-compiler", daemon=True).start()

    def submit(self, compiling: Callable[[], Any]) -> Future[Any]:
        """Return the future of a program."""
        future: Future[Any] = Future()
        self._queue.put((future, compiling))
        return future

    def close(self) -> None:
        """End the threads when their queue is empty."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _compile(self) -> None:
        while (job := self._queue.get()) is not None:
            future, compiling = job
            try:
                future.set_result(compiling())
            except BaseException as error:
                future.set_exception(error)


class Programs:
    """Compiled programs by everything that shapes them. Engines that share one compile nothing twice."""

    def __init__(self) -> None:
        self.compiled: dict[Any, Any] = {}
        self.pending: dict[Any, Future[Any]] = {}  # that a `Compiler` compiles
        self.state_makers: dict[Any, Any] = {}

    def new_state(self, *sizes: Any) -> DecodeState:
        """Return an empty state; arguments as in `state.state_maker`."""
        return self._state_maker(*sizes)()

    def state_shapes(self, *sizes: Any) -> DecodeState:
        """Return the shapes and shardings of such a state, for which programs can be compiled."""
        return self._state_maker(*sizes).eval_shape()

    def _state_maker(self, *sizes: Any) -> Any:
        if sizes not in self.state_makers:
            self.state_makers[sizes] = states.state_maker(*sizes)
        return self.state_makers[sizes]

    def wait(self) -> None:
        """Wait until all programs that a `Compiler` has are compiled. `get` raises their errors."""
        for program in self.pending.values():
            program.exception()

    def get(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        donate: int | None,
        mesh: Mesh,
        spec: DecodeSpec | ModelDef | None = None,
        sizes: OutputSizes | None = None,
        loops: bool = False,
        compiler: Compiler | None = None,
    ) -> Any:
        """Return the program of a function for arguments of these shapes, compiled if it is new.

        Args:
          function: takes a state and returns the next one, which gets the old one's memory.
          donate: the index of the state in `args`; None: no argument is donated.
          spec: the function's first argument, before `args`; None: it takes none.
          sizes: of the output that the program returns beside the state. Then `OutputRequest.known`
            is the last argument, and the function does not take it. None: the program returns the
            state alone.
          loops: whether the function is a loop of steps without a callback to the host.
          compiler: compiles a new program; a later call returns it. None: this call compiles it.

        Returns:
          The program; a `Future` of it with a `compiler` that is not done.
        """
        leaves, tree = jax.tree.flatten(args)
        shapes = tuple((x.shape, str(x.dtype), x.sharding) for x in leaves)
        key = (function, spec, sizes, donate, tree, shapes)
        if key not in self.compiled:
            if key not in self.pending:
                bound = function if spec is None else _with_spec(function, spec)
                bound = bound if sizes is None else _with_output(bound, sizes)
                compiling = _lower(
                    bound, args, donate, mesh, has_output=sizes is not None, loops=loops
                ).compile
                if compiler is None:
                    program = compiling()
                    memory.check_compiled(program, mesh)
                    self.compiled[key] = program
                    return program
                self.pending[key] = compiler.submit(compiling)
            if compiler is not None:
                return self.pending[key]
            program = self.pending.pop(key).result()
            memory.check_compiled(program, mesh)
            self.compiled[key] = program
        return self.compiled[key]


def _lower(
    function: Any,
    args: tuple[Any, ...],
    donate: int | None,
    mesh: Mesh,
    *,
    has_output: bool,
    loops: bool,
) -> jax.stages.Lowered:
    """Trace a function. Python takes about as long for that as XLA for the compilation."""
    check_jax_settings()
    placed = None if donate is None else jax.tree.map(lambda x: x.sharding, args[donate])
    jitted = jax.jit(
        function,
        donate_argnums=() if donate is None else donate,
        out_shardings=(placed, None) if has_output else placed,
        compiler_options=options_of_loops(mesh) if loops else COMPILER_OPTIONS,
    )
    with jax.set_mesh(mesh):
        return jitted.lower(*args)


def _with_spec(function: Any, spec: DecodeSpec | ModelDef) -> Any:
    def bound(*args: Any) -> Any:
        return function(spec, *args)

    bound.__name__ = function.__name__
    return bound


def _with_output(function: Any, sizes: OutputSizes) -> Any:
    def bound(*args: Any) -> tuple[DecodeState, PackedOutput]:
        *inputs, known = args
        state = function(*inputs)
        return state, pack(state, known, sizes)

    bound.__name__ = function.__name__
    return bound
