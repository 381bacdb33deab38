"""`jaxspec bench --trace`: a stream of requests through the engine, from the first one to the last token.

Read `replay`. The other cases of `bench` time steps of full batches. Here requests of different lengths arrive, wait
for slots, are read and decoded, and what is counted is what a client would see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.commands.options import UsageError
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request

PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE = 300, 0.8, (32, 2048)
NEW_TOKENS = (64, 512)
PERCENTILES = (50, 95, 99)
COMPILED = "/jax/core/compile/backend_compile_duration"
_FIELDS = {"prompt_tokens", "new_tokens", "arrival_s"}


@dataclass(frozen=True)
class Job:
    """A request of a trace: its lengths, and the seconds from the start to its arrival."""

    prompt_tokens: int
    new_tokens: int
    arrival_s: float = 0.0


def generated(count: int, seed: int, rate: float | None, max_positions: int) -> list[Job]:
    """Return a mixed trace: log-normal prompts, uniform numbers of new tokens, Poisson arrivals.

    Args:
      rate: requests a second; None for all at once.
      max_positions: of the model. Longer prompts are cut, so that a request fits.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.lognormal(math.log(PROMPT_MEDIAN), PROMPT_SIGMA, count)
    prompts = np.clip(prompts, *PROMPT_RANGE).astype(int)
    new = rng.integers(NEW_TOKENS[0], NEW_TOKENS[1] + 1, count)
    arrivals = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    prompts = np.minimum(prompts, max_positions - new)
    return [
        Job(*job) for job in zip(prompts.tolist(), new.tolist(), arrivals.tolist(), strict=True)
    ]


def read(path: Path) -> list[Job]:
    """Read a trace from JSON lines.

    Raises:
      UsageError: naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace: cannot read {path}: {error}") from None
    jobs = []
    for number, line in enumerate(lines, 1):
        try:
            jobs.append(_job(json.loads(line)))
        except ValueError as error:
            raise UsageError(f"--trace: {path}:{number}: {error}") from None
    if not jobs:
        raise UsageError(f"--trace: {path} has no requests")
    return sorted(jobs, key=lambda job: job.arrival_s)


def _job(values: Any) -> Job:
    if (
        not isinstance(values, dict)
        or not {"prompt_tokens", "new_tokens"} <= set(values) <= _FIELDS
    ):
        raise ValueError(
            f"expected an object with prompt_tokens, new_tokens and arrival_s: {values!r}"
        )
    job = Job(**values)
    for name in ("prompt_tokens", "new_tokens"):
        count = getattr(job, name)
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be a whole number from 1 on")
    if type(job.arrival_s) not in (int, float) or not 0 <= job.arrival_s < math.inf:
        raise ValueError(f"arrival_s is {job.arrival_s!r}; it must be a number from 0 on")
    return job


# --- a run -------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a client saw of one request: seconds from the start, and how many tokens it had when.

    Attributes:
      pause_s: the longest time between two looks that brought tokens.
    """

    job: Job
    first_s: float = math.nan
    last_s: float = math.nan
    done_s: float = math.nan
    tokens: int = 0
    pause_s: float = 0.0
    acceptance_lengths: tuple[int, ...] = ()

    def has(self, tokens: int, now: float) -> None:
        """Note that it has so many tokens now."""
        if tokens == self.tokens:
            return
        if math.isnan(self.first_s):
            self.first_s = now
        else:
            self.pause_s = max(self.pause_s, now - self.last_s)
        self.tokens, self.last_s = tokens, now


@dataclass(frozen=True)
class Moment:
    """The engine after a step: seconds from the start, slots in use, requests that wait, tokens so far."""

    at_s: float
    running: int
    waiting: int
    tokens: int


def replay(
    engine: Engine,
    jobs: Sequence[Job],
    requests: Sequence[Request],
    say: Callable[[str], None] = lambda message: None,
) -> tuple[list[Seen], list[Moment], float]:
    """Send a trace through an engine.

    Args:
      requests: one for each job, with its place as id.
      say: is told how far it is.

    Returns:
      What was seen of each request, the engine after each step, and the seconds without anything to do.
    """
    seen = [Seen(job) for job in jobs]
    moments: list[Moment] = []
    coming, done, idle_s, total = 0, 0, 0.0, 0
    begin = time.perf_counter()
    while done < len(jobs):
        now = time.perf_counter() - begin
        while coming < len(jobs) and jobs[coming].arrival_s <= now:
            engine.add(requests[coming])
            coming += 1
        if engine.is_idle:
            time.sleep(wait := jobs[coming].arrival_s - now)
            idle_s += wait
            continue
        events = engine.step()
        now = time.perf_counter() - begin
        for event in events:
            of = seen[event.id]  # type: ignore[index]
            total += len(event.token_ids) - of.tokens
            of.has(len(event.token_ids), now)
            if isinstance(event, Completion):
                of.done_s, of.acceptance_lengths = now, event.acceptance_lengths
                done += 1
        moments.append(Moment(now, engine.num_running, coming - done - engine.num_running, total))
        say(f"{done} of {len(jobs)} requests done, {total / now:,.0f} tokens a second")
    return seen, moments, idle_s


# --- what it comes to --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceReport:
    """What a trace took.

    Attributes:
      tokens_per_s: new tokens from the first arrival to the last token.
      prefill_s, decode_s: waited for the device; `idle_s`: nothing to do; `host_s`: all else.
      ttft_ms, tpot_ms: milliseconds from arrival to first token, and from then on for each further token:
        the 50th, 95th and 99th percentile of all requests, and the most.
      longest_pause_ms: between two looks that brought tokens, of any request.
      slots_in_use: mean over time.
      acceptance_length: mean tokens a verify step; None without a drafter.
      lengths: by how many drafts were verified: steps of the batch, and milliseconds of one with all slots
        active. Empty where all drafts always were.
      programs, compile_s: of the engine, all compiled in the warm-up.
      late_compilations: what JAX compiled after it, small programs of the host included.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    wall_s: float
    tokens_per_s: float
    prefill_s: float
    decode_s: float
    host_s: float
    idle_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    longest_pause_ms: float
    slots: int
    slots_in_use: float
    acceptance_length: float | None
    lengths: dict[int, dict[str, float | int | None]]
    programs: int
    compile_s: float
    late_compilations: int


def run(
    engine: Engine,
    jobs: Sequence[Job],
    requests: Sequence[Request],
    say: Callable[[str], None] = lambda message: None,
) -> tuple[TraceReport, list[Moment]]:
    """Compile all programs, send a trace through an engine, and add up what came of it."""
    say("compiling")
    engine.warm_up()
    programs, timings = engine.num_compilations, dataclasses.replace(engine.timings)
    with compilations() as late:
        seen, moments, idle_s = replay(engine, jobs, requests, say)
    wall_s = moments[-1].at_s
    prefill_s = engine.timings.prefill_s - timings.prefill_s
    decode_s = engine.timings.decode_s - timings.decode_s
    spans = itertools.pairwise([Moment(0.0, 0, 0, 0), *moments])
    in_use = sum(after.running * (after.at_s - before.at_s) for before, after in spans)
    lengths = [length for s in seen for length in s.acceptance_lengths]
    report = TraceReport(
        requests=len(jobs),
        prompt_tokens=sum(job.prompt_tokens for job in jobs),
        new_tokens=moments[-1].tokens,
        wall_s=wall_s,
        tokens_per_s=moments[-1].tokens / wall_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        host_s=wall_s - prefill_s - decode_s - idle_s,
        idle_s=idle_s,
        ttft_ms=_percentiles([s.first_s - s.job.arrival_s for s in seen]),
        tpot_ms=_percentiles(
            [(s.done_s - s.first_s) / (s.tokens - 1) for s in seen if s.tokens > 1]
        ),
        longest_pause_ms=max(s.pause_s for s in seen) * 1e3,
        slots=engine.batch_size,
        slots_in_use=in_use / wall_s,
        acceptance_length=float(np.mean(lengths)) if engine.drafter and lengths else None,
        lengths={
            v: dict(steps=use.steps, step_ms=None if use.step_s is None else use.step_s * 1e3)
            for v, use in engine.chosen_length.used.items()
        },
        programs=programs,
        compile_s=timings.compile_s,
        late_compilations=len(late),
    )
    return report, moments


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Collect the seconds of each compilation that JAX reports, whoever asked for it."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = np.percentile(np.asarray(seconds) * 1e3, (*PERCENTILES, 100)).tolist()
    return dict(zip((*(f"p{p}" for p in PERCENTILES), "max"), found, strict=True))
