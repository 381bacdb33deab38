"""What every test runs under: shapes and types checked, no silent mixing of dtypes."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from unittest import mock

import jax
import jaxtyping
import pytest
from beartype import BeartypeConf, beartype
from flax import struct

# Most of the suite's time is compiling: skip LLVM's optimisations, which change no result beyond rounding.
# Up to jax 0.10, the older emitters of fusions compile a third faster. XLA reads this when its first
# computation runs.
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if jax.__version_info__ < (0, 11):
    FAST_COMPILE += " --xla_cpu_use_fusion_emitters=false"
# The user's own, for what is to run as users run it; workers of xdist inherit ours with them.
XLA_FLAGS = os.environ.get("XLA_FLAGS", "").replace(FAST_COMPILE, "").strip()
os.environ["XLA_FLAGS"] = f"{FAST_COMPILE} {XLA_FLAGS}"
# Threads of torch wait for each other's few numbers longer than one takes for all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As static checkers do, take an int where a float is asked for.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))

# JAX rebuilds pytrees with leaves that are no arrays (tracing, vmap axes, shardings), so the fields of
# one cannot be checked whenever it is made. The functions that take and return them are.
struct.PyTreeNode.__no_type_check__ = True  # pyright: ignore[reportAttributeAccessIssue]
jaxtyping.install_import_hook(["jaxspec", "pallas_kernels"], "tests.conftest.check")

# Rank promotion stays allowed: a norm's scale meets activations of any rank.
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest first, or one worker is done minutes before the other."""
    items.sort(key=lambda item: item.path.stem not in ("test_examples", "test_sharding"))


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Undo what a test leaves in it: a command that ran in this process sets NPROC, which others would inherit."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def all_drafts_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no slow machine make a test's engine choose other verify lengths, unless it is warmed up."""
    from jaxspec import verify_length

    monkeypatch.setattr(verify_length, "LEAST_S", math.inf)


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Drop compiled programs between files.

    Every one of them holds memory maps. Those of the whole suite come near the 65,530 that Linux gives a
    process, and then the compiler aborts it.
    """
    yield
    from jaxspec import rollout
    from tests.decode import cases

    rollout.programs_of.cache_clear()
    cases.PROGRAMS.compiled.clear()
    cases.PROGRAMS.state_makers.clear()
    jax.clear_caches()
    gc.collect()
