"""What every test runs under: shapes and types checked, no silent mixing of dtypes."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import math
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import jax
import jaxtyping
import pytest
from beartype import BeartypeConf, beartype
from flax import struct

# Most of the suite's time is compiling: skip LLVM's optimisations, which change no result beyond rounding.
# Up to jax 0.11, the older emitters of fusions compile in about half the time; jax 0.12 has the newer ones
# alone. XLA reads this when its first computation runs.
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Both workers compile at once, so parts of a program compiled side by side gain nothing: a tenth of the time.
FAST_COMPILE += " --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    FAST_COMPILE += " --xla_cpu_use_fusion_emitters=false"
elif jax.__version_info__ < (0, 12):
    FAST_COMPILE += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
# The user's own, for what is to run as users run it; workers of xdist inherit ours with them.
XLA_FLAGS = os.environ.get("XLA_FLAGS", "").replace(FAST_COMPILE, "").strip()
os.environ["XLA_FLAGS"] = f"{FAST_COMPILE} {XLA_FLAGS}"
# Threads of torch wait for each other's few numbers longer than one takes for all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tracing makes millions of objects and little garbage. Looking for it as often as Python does by itself took
# a fifteenth of the suite.
gc.set_threshold(50_000, 20, 100)

# As static checkers do, take an int where a float is asked for.
check = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=TypeError))

# JAX rebuilds pytrees with leaves that are no arrays (tracing, vmap axes, shardings), so the fields of
# one cannot be checked whenever it is made. The functions that take and return them are.
struct.PyTreeNode.__no_type_check__ = True  # pyright: ignore[reportAttributeAccessIssue]
jaxtyping.install_import_hook(["jaxspec", "pallas_kernels"], "tests.conftest.check")
with_scope = jaxtyping.jaxtyped


def names_shapes(hint: Any) -> bool:
    """Return whether a type, or a type inside it, is an array of a named shape, or one of their dtypes."""
    if isinstance(hint, list):  # what a Callable takes
        return any(map(names_shapes, hint))
    is_ours = inspect.isclass(hint) and hint.__module__.startswith("jaxtyping")
    return is_ours or any(map(names_shapes, get_args(hint)))


def jaxtyped(fn: Any = None, *, typechecker: Any) -> Any:
    """Check types, and open a scope for the names of sizes only where there are some.

    A scope takes 60 µs a call. The host's loops call thousands of functions, few of which take arrays.
    """
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if not isinstance(fn, types.FunctionType) or getattr(fn, "__no_type_check__", False):
        return with_scope(fn, typechecker=typechecker)
    words = set(re.findall(r"[A-Za-z_]\w*", " ".join(map(str, fn.__annotations__.values()))))
    if any(names_shapes(fn.__globals__.get(word)) for word in words):
        return with_scope(fn, typechecker=typechecker)
    # What cannot be looked up yet is not checked, as in jaxtyping itself.
    for name, hint in fn.__annotations__.items():
        fn.__annotations__[name] = jaxtyping._decorator._destring_annotation(hint, fn.__globals__)
    return check(fn)


# What the hook puts before every function, and what wraps the `__init__` of every dataclass.
jaxtyping.jaxtyped = jaxtyping._decorator.jaxtyped = jaxtyped

# Rank promotion stays allowed: a norm's scale meets activations of any rank.
jax.config.update("jax_numpy_dtype_promotion", "strict")


LONGEST = ("test_examples", "test_sharding", "test_docs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-case",
        action="store_true",
        help="run each test with the first of its cases alone: all tests, in less time",
    )


@pytest.hookimpl(trylast=True)  # after -m, so a first case is one that would run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest first, or one worker is done minutes before the other."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    if config.getoption("--one-case"):
        tests: set[str] = set()
        first, more = [], []
        for item in items:
            test = item.nodeid.partition("[")[0]
            (more if test in tests else first).append(item)
            tests.add(test)
        config.hook.pytest_deselected(items=more)
        items[:] = first


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Undo what a test leaves in it: a command that ran in this process sets NPROC, which others would inherit."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def all_drafts_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no slow machine make a test's engine choose other verify lengths, unless it is warmed up."""
    from jaxspec.engine import draft_length_policy

    monkeypatch.setattr(draft_length_policy, "MIN_DECODE_S", math.inf)


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use rings without a slot to spare, and prefill prompts beyond 16 tokens in pieces.

    Short sequences then reach what long ones do. `cases.target` has a number of positions of its own, so that
    no state made with other rings is reused.
    """
    from jaxspec import cache
    from jaxspec.runtime import prefill

    monkeypatch.setattr(cache, "RING_MULTIPLE", 1)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 16)


@pytest.fixture
def share_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[int]]]:
    """Return a function that lets chunks of a prompt share passes of few tokens, as on a GPU.

    Its argument is what sizes of rings are rounded up to. It returns a list. Each pass in which prompts have several
    chunks adds the number of rows beyond one a prompt.
    """
    import numpy as np

    from jaxspec import state
    from jaxspec.runtime import prefill
    from tests.cases import sharing_passes

    planned = prefill.PrefillPlanner.next_chunk

    def share(ring_multiple: int) -> list[int]:
        found: list[int] = []

        def next_chunk(
            planner: prefill.PrefillPlanner, **kwargs: Any
        ) -> tuple[state.PrefillChunk, list[int]]:
            chunk, ended = planned(planner, **kwargs)
            slots = np.asarray(chunk.slots)[np.asarray(chunk.count) > 0]
            if more := len(slots) - len(set(slots.tolist())):
                found.append(more)
            return chunk, ended

        patches.enter_context(sharing_passes(ring_multiple))
        monkeypatch.setattr(prefill.PrefillPlanner, "next_chunk", next_chunk)
        return found

    with contextlib.ExitStack() as patches:
        yield share


# Linux gives a process 65,530 memory maps, and a compiled program holds several. At the limit the compiler
# aborts the process.
MOST_MAPS = 30_000


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop compiled programs once they hold many memory maps: after a file, and after a slow test.

    Later tests trace less without it. A slow test holds up to 2,500 maps, and a file may have 70 of them.
    """
    file_ends = nextitem is None or nextitem.path != item.path
    maps = Path("/proc/self/maps")
    if not (file_ends or item.get_closest_marker("slow")) or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") < MOST_MAPS:
        return
    from jaxspec.rollout import programs
    from tests import cases

    programs.programs_of.cache_clear()
    cases.PROGRAMS.compiled.clear()
    cases.PROGRAMS.state_makers.clear()
    jax.clear_caches()
    gc.collect()
