"""The floor of a decode step: bytes and operations, and the rates of the device it runs on.

Read `step_costs`; what a model costs is counted in `families.costs`. Nothing is timed here but the device's
ceiling.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.registry import family_of
from jaxspec.registry.costs import NOTHING, Ceiling, StepCost, target_cost
from jaxspec.state import DecodeSpec


def step_costs(spec: DecodeSpec, batch: int, context: int) -> tuple[StepCost, StepCost]:
    """Return the costs of verifying and of drafting in one step (nothing, without a drafter).

    Each waits for what the other made, so a step takes at least the sum of their floors.

    Args:
      context: committed tokens of each row.
    """
    verify = target_cost(spec.target, batch, spec.step_tokens, context)
    if spec.drafter is None:
        return verify, NOTHING
    cost = family_of(spec.drafter.config).cost
    return verify, NOTHING if cost is None else cost(spec, batch, context)


def step_cost(spec: DecodeSpec, batch: int, context: int) -> StepCost:
    """Return all that one step moves and computes."""
    verify, draft = step_costs(spec, batch, context)
    return verify + draft


def step_floor_s(spec: DecodeSpec, batch: int, context: int, ceiling: Ceiling) -> float:
    """Return the seconds below which no step can go."""
    return sum(cost.floor_s(ceiling) for cost in step_costs(spec, batch, context))


def measure_ceiling(dtype: str, nbytes: float) -> Ceiling:
    """Measure how fast the device reads memory, and its rate in a square product.

    A step reads weights and writes next to nothing, so the bytes are those of a sum, not of a copy: caches of
    a CPU read and write at the same time (a core of an AVX-512 machine took as long to negate 12.5 MB in
    place as to sum them), and no step could read at the sum of both rates.

    Args:
      nbytes: what a step reads; as much is contracting_axes (up to 2 GiB), so that a model which fits a cache is
        held against that cache.
    """
    size = int(min(max(nbytes, 1 << 20), 1 << 31)) // 4
    numbers = jax.random.normal(jax.random.key(0), (size,), jnp.float32)
    total = jax.jit(jnp.sum)
    read_s = _median_seconds(lambda: total(numbers))
    n = 1024 if jax.default_backend() == "cpu" else 8192
    a = jax.random.normal(jax.random.key(1), (n, n), jnp.dtype(dtype))
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    return Ceiling(4 * size / read_s, 2 * n**3 / _median_seconds(lambda: product(a, a)))


def _median_seconds(call: Callable[[], Any], repeats: int = 5, chain: int = 16) -> float:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(chain):  # so that starting a call hides behind the one before
            last = call()
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - begin) / chain)
    return statistics.median(seconds)
