"""The speed of plain decoding with a run's batch and cache length, from a few steps after the run.

Read `measure`. It prefills the first prompts of the run again, times a few speculative steps, drops
the drafter's state and times a few plain steps on the same rows. Only the plain loop must be
compiled. No result depends on this.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.runtime.runtime import Runtime, make_spec
from jaxspec.state import DecodeState
from jaxspec.weights.sharding import fetch, own_context

LONG_ENOUGH_S = 10.0
"""Least seconds of decoding of a run that is measured. Measuring takes about one (bundled pair)."""
TIMES_COMPILING = 2
"""Least decoding of such a run, in multiples of its compilation, which is slow for large models."""
ROUNDS = 4  # the first one warms up, the quickest counts
STEPS = 4  # of a round


@dataclass(frozen=True)
class PlainSpeed:
    """The speed of plain decoding.

    Attributes:
      ratio: of its tokens per second to those of the run.
      measured_s: duration of the measurement, with compilation.
    """

    ratio: float
    measured_s: float


def is_worth_it(engine: Engine) -> bool:
    """Return whether a run was long enough for this, and has no plain steps of its own."""
    timings = engine.timings
    least = max(LONG_ENOUGH_S, TIMES_COMPILING * timings.compile_s)
    if engine.drafter is None or timings.decode_s < least or jax.process_count() > 1:
        return False
    plain = engine.draft_length.used.get(0)
    return plain is None or not plain.steps


def measure(
    engine: Engine, requests: Sequence[Request], acceptance_length: float
) -> PlainSpeed | None:
    """Compare plain steps with the run's own; return None if the cache is too short for them.

    Args:
      engine: of the run, idle now. It shares its programs, and is not changed.
      requests: decoded by the run.
      acceptance_length: tokens per step of the run.
    """
    begin = time.perf_counter()
    spec, batch, length = engine.spec, engine.batch_size, engine.cache_length
    sizes: Any = dict(batch_size=batch, cache_length=length)
    weights = engine.target_params
    fast = Runtime(spec, weights, engine.drafter_params, **sizes, programs=engine.runtime.programs)
    plain_spec = make_spec(engine.target, None, program_features=spec.program_features)
    plain = Runtime(plain_spec, weights, None, **sizes, programs=engine.runtime.programs)
    rows = list(itertools.islice(itertools.cycle(requests), batch))
    with own_context(engine.mesh):
        state = fast.init_state(engine.num_stop_ids)
        admission = fast.admission(
            range(batch),
            [length - spec.step_tokens - len(row.prompt_ids) for row in rows],
            np.full((batch, engine.num_stop_ids), -1, np.int32),  # none stops
            [row.sampling for row in rows],
            np.zeros((batch, 2), np.uint32),
        )
        state = fast.admit(state, admission)
        prompts = {slot: row.prompt_ids for slot, row in enumerate(rows)}
        state = fast.prefill(state, prompts, fast.output_request(0))
        max_steps = engine.steps_per_return
        state, speculative_s = _step_seconds(fast, state, max_steps)
        state, plain_s = _step_seconds(plain, dataclasses.replace(state, drafter=None), max_steps)
    if speculative_s is None or plain_s is None:
        return None
    ratio = speculative_s / (plain_s * acceptance_length)
    return PlainSpeed(ratio, time.perf_counter() - begin)


def _step_seconds(
    runtime: Runtime, state: DecodeState, max_steps: int
) -> tuple[DecodeState, float | None]:
    """Return the state, and the least seconds of a step; None if rows ended too early.

    Args:
      max_steps: steps of the run's decode calls, whose program is used.
    """
    seconds, output = [], runtime.output_request(max_steps)
    for _ in range(ROUNDS):
        before, call = int(fetch(state.num_steps).max()), runtime.bind_decode(state, output, STEPS)
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(call(state))
        taken_s = time.perf_counter() - begin
        if int(fetch(state.num_steps).max()) - before == STEPS:
            seconds.append(taken_s / STEPS)
    return state, min(seconds[1:], default=None)
