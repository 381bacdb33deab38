"""The choice of an implementation: by name, by preference, or the reference."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import Candidate, dispatch, processors, shared_bytes


def times(factor: float, x: jax.Array) -> jax.Array:
    return x * factor


def call(implementation: str, **changes: Any) -> float:
    """Return 1 if the reference ran, 2 for the first candidate, 3 for the second."""
    first, second = (
        Candidate(name, functools.partial(times, factor), reason=None, **changes.get(name, {}))
        for name, factor in (("fast", 2.0), ("simple", 3.0))
    )
    return float(
        dispatch(implementation, [first, second], functools.partial(times, 1.0), jnp.ones(()))
    )


@pytest.mark.parametrize(("name", "ran"), [("reference", 1), ("fast", 2), ("simple", 3)])
def test_what_is_named_runs(name: str, ran: float) -> None:
    assert call(name) == ran
    unwanted = {"fast": {"worth_it": False}, "simple": {"worth_it": False}}
    assert call(name, **unwanted) == ran  # that counts for "auto" alone


def kernels_in(candidates: list[Candidate[Any]]) -> list[str]:
    """Return which kernel a program for an NVIDIA GPU has, by the factor that it multiplies with."""
    run = functools.partial(dispatch, "auto", candidates, functools.partial(times, 1.0))
    lowered = jax.jit(run).trace(jnp.ones(())).lower(lowering_platforms=("cuda",))
    return [f for f in ("2.0", "3.0") if f"dense<{f}" in lowered.as_text()]


def test_auto_takes_the_first_that_can_and_should() -> None:
    fast, simple = functools.partial(times, 2.0), functools.partial(times, 3.0)
    first, second = Candidate("fast", fast, None), Candidate("simple", simple, None)
    assert kernels_in([first, second]) == ["2.0"]
    assert kernels_in([Candidate("fast", fast, "no such GPU"), second]) == ["3.0"]
    assert kernels_in([Candidate("fast", fast, None, worth_it=False), second]) == ["3.0"]
    assert kernels_in([Candidate("fast", fast, "no such GPU")]) == []
    if jax.default_backend() == "cpu":
        assert call("auto") == 1


def test_derivatives_are_those_of_the_reference() -> None:
    candidates = [Candidate("fast", functools.partial(times, 2.0), None)]
    run = functools.partial(dispatch, "auto", candidates, functools.partial(times, 1.0))
    lowered = jax.jit(jax.grad(run)).trace(jnp.ones(())).lower(lowering_platforms=("cuda",))
    assert "dense<2.0" not in lowered.as_text()
    assert float(jax.grad(run)(jnp.ones(()))) == 1


def test_a_choice_that_cannot_run_says_why_and_the_way_out() -> None:
    plain = functools.partial(times, 1.0)
    broken = Candidate("fast", functools.partial(times, 2.0), "the fast kernel needs a moon")
    with pytest.raises(NotImplementedError, match=r"needs a moon; pass implementation='auto' or"):
        dispatch("fast", [broken], plain, jnp.ones(()))


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="'quick'; pass auto, reference, simple or fast"):
        call("quick")


@pytest.mark.parametrize(
    ("found", "kib"),
    [(8.0, 163), (8.6, 99), (8.9, 99), (9.0, 227), (12.0, 99), (13.7, 99), (None, 227)],
)
def test_shared_memory_is_what_the_gpu_has(monkeypatch, found: float | None, kib: int) -> None:
    """An unknown GPU has as little as any; on a machine without one, programs are for Hopper."""
    monkeypatch.setattr("pallas_kernels.dispatch.capability", lambda: found)
    assert shared_bytes() == kib << 10


def test_processors_are_those_of_the_gpu(monkeypatch) -> None:
    """On a machine without one, programs are for an H200."""
    assert processors() == 132
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for said, count in (114, 114), (None, 132):
        gpu = types.SimpleNamespace(core_count=said)
        monkeypatch.setattr(jax, "devices", lambda gpu=gpu: [gpu])
        assert processors() == count
