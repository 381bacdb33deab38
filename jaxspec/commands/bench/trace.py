"""`jaxspec bench --trace`: a stream of requests through the engine, as its clients see it.

Read `replay`. The other cases of `bench` time steps of full batches. Here requests of different
lengths arrive, wait for slots, are prefilled and decoded. `TraceReport` has the results; `render`
and `draw` show them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table

from jaxspec.commands.bench.results import digits
from jaxspec.commands.options import UsageError, read_text
from jaxspec.commands.progress import Notify
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request

PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE = 300, 0.8, (32, 2048)
NEW_TOKENS = (64, 512)
PERCENTILES = (50, 95, 99)
BINS = 60  # of the picture's time
COMPILED = "/jax/core/compile/backend_compile_duration"
_FIELDS = {"prompt_tokens", "new_tokens", "arrival_s"}


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace: its lengths, and the seconds from the start to its arrival."""

    prompt_tokens: int
    new_tokens: int
    arrival_s: float = 0.0


def generate(count: int, seed: int, rate: float | None, max_positions: int) -> list[TraceRequest]:
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
    return [*map(TraceRequest, prompts.tolist(), new.tolist(), arrivals.tolist())]


def read(path: Path) -> list[TraceRequest]:
    """Read a trace from JSON lines.

    Raises:
      UsageError: naming the line.
    """
    trace = []
    for number, line in enumerate(read_text("--trace", path).splitlines(), 1):
        try:
            trace.append(_parse(json.loads(line)))
        except ValueError as error:
            raise UsageError(f"--trace: {path}:{number}: {error}") from None
    if not trace:
        raise UsageError(f"--trace: {path} has no requests")
    return sorted(trace, key=lambda request: request.arrival_s)


def _parse(values: Any) -> TraceRequest:
    if (
        not isinstance(values, dict)
        or not {"prompt_tokens", "new_tokens"} <= set(values) <= _FIELDS
    ):
        raise ValueError(
            f"expected an object with prompt_tokens, new_tokens and arrival_s: {values!r}"
        )
    request = TraceRequest(**values)
    for name in ("prompt_tokens", "new_tokens"):
        count = getattr(request, name)
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be a whole number from 1 on")
    if type(request.arrival_s) not in (int, float) or not 0 <= request.arrival_s < math.inf:
        raise ValueError(f"arrival_s is {request.arrival_s!r}; it must be a number from 0 on")
    return request


# --- a run ---------------------------------------------------------------------------------------


@dataclass
class RequestTiming:
    """The times of one request as its client sees them, in seconds from the start.

    Attributes:
      tokens: received so far.
      pause_s: longest time between two updates with new tokens.
    """

    request: TraceRequest
    first_s: float = math.nan
    last_s: float = math.nan
    done_s: float = math.nan
    tokens: int = 0
    pause_s: float = 0.0
    acceptance_lengths: tuple[int, ...] = ()

    def update(self, tokens: int, now: float) -> None:
        """Set the number of tokens at the time `now`."""
        if tokens == self.tokens:
            return
        if math.isnan(self.first_s):
            self.first_s = now
        else:
            self.pause_s = max(self.pause_s, now - self.last_s)
        self.tokens, self.last_s = tokens, now


@dataclass(frozen=True)
class Moment:
    """The engine after a step: seconds from the start, slots in use, waiting requests, tokens."""

    at_s: float
    running: int
    waiting: int
    tokens: int


def replay(
    engine: Engine,
    trace: Sequence[TraceRequest],
    requests: Sequence[Request],
    notify: Notify = lambda _: None,
) -> tuple[list[RequestTiming], list[Moment], float]:
    """Send a trace through an engine.

    Args:
      requests: one for each of the trace, with its index as id.

    Returns:
      The timing of each request, the engine after each step, and the idle seconds.
    """
    timings = [RequestTiming(request) for request in trace]
    moments: list[Moment] = []
    coming, done, idle_s, total = 0, 0, 0.0, 0
    begin = time.perf_counter()
    while done < len(trace):
        now = time.perf_counter() - begin
        while coming < len(trace) and trace[coming].arrival_s <= now:
            engine.add(requests[coming])
            coming += 1
        if engine.is_idle:
            time.sleep(wait := trace[coming].arrival_s - now)
            idle_s += wait
            continue
        events = engine.step()
        now = time.perf_counter() - begin
        for event in events:
            timing = timings[event.id]  # type: ignore[index]
            total += len(event.token_ids) - timing.tokens
            timing.update(len(event.token_ids), now)
            if isinstance(event, Completion):
                timing.done_s, timing.acceptance_lengths = now, event.acceptance_lengths
                done += 1
        moments.append(Moment(now, engine.num_running, coming - done - engine.num_running, total))
        notify(f"{done} of {len(trace)} requests done, {total / now:,.0f} tokens a second")
    return timings, moments, idle_s


# --- results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceReport:
    """The results of a trace.

    Attributes:
      tokens_per_s: new tokens from the first arrival to the last token.
      prefill_s, decode_s: of waiting for the device; `idle_s`: without requests; `host_s`: the
        rest.
      ttft_ms, tpot_ms: milliseconds from arrival to first token, and for each further token: the
        50th, 95th and 99th percentile of all requests, and the largest.
      longest_pause_ms: between two updates of a request with new tokens.
      slots_in_use: mean over time.
      cache_tokens: for which the caches have room.
      preemptions: rows that gave up their pages for older ones, and went on later.
      acceptance_length: mean tokens per verify step; None without a drafter.
      lengths: by number of verified drafts: steps of the batch, and milliseconds of one with all
        slots active. Empty if all drafts are always verified.
      programs, compile_s: of the engine, all compiled in the warm-up.
      late_compilations: of JAX after the warm-up, small programs of the host included.
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
    cache_tokens: int
    preemptions: int
    acceptance_length: float | None
    lengths: dict[int, dict[str, float | int | None]]
    programs: int
    compile_s: float
    late_compilations: int


def run(
    engine: Engine,
    trace: Sequence[TraceRequest],
    requests: Sequence[Request],
    notify: Notify = lambda _: None,
) -> tuple[TraceReport, list[Moment]]:
    """Compile all programs, send a trace through an engine, and return its results."""
    notify("compiling")
    engine.warm_up([request.prompt_tokens for request in trace])
    gc.collect()
    gc.freeze()  # as the server does
    programs, before = engine.num_compilations, dataclasses.replace(engine.timings)
    with compilations() as late:
        timings, moments, idle_s = replay(engine, trace, requests, notify)
    wall_s = moments[-1].at_s
    prefill_s = engine.timings.prefill_s - before.prefill_s
    decode_s = engine.timings.decode_s - before.decode_s
    spans = itertools.pairwise([Moment(0.0, 0, 0, 0), *moments])
    in_use = sum(end.running * (end.at_s - start.at_s) for start, end in spans)
    lengths = [length for s in timings for length in s.acceptance_lengths]
    report = TraceReport(
        requests=len(trace),
        prompt_tokens=sum(request.prompt_tokens for request in trace),
        new_tokens=moments[-1].tokens,
        wall_s=wall_s,
        tokens_per_s=moments[-1].tokens / wall_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        host_s=wall_s - prefill_s - decode_s - idle_s,
        idle_s=idle_s,
        ttft_ms=_percentiles([s.first_s - s.request.arrival_s for s in timings]),
        tpot_ms=_percentiles(
            [(s.done_s - s.first_s) / (s.tokens - 1) for s in timings if s.tokens > 1]
        ),
        longest_pause_ms=max(s.pause_s for s in timings) * 1e3,
        slots=engine.batch_size,
        slots_in_use=in_use / wall_s,
        cache_tokens=engine.cache_tokens,
        preemptions=engine.num_preemptions - before.preemptions,
        acceptance_length=float(np.mean(lengths)) if engine.drafter and lengths else None,
        lengths={
            v: dict(steps=use.steps, step_ms=None if use.step_s is None else use.step_s * 1e3)
            for v, use in engine.draft_length.used.items()
        },
        programs=programs,
        compile_s=before.compile_s,
        late_compilations=len(late),
    )
    return report, moments


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Collect the seconds of each compilation that JAX reports."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.asarray(seconds) * 1e3, (*PERCENTILES, 100)).tolist()
    return dict(zip((*(f"p{p}" for p in PERCENTILES), "max"), values, strict=True))


# --- report --------------------------------------------------------------------------------------


def render(report: TraceReport) -> Group:
    """Return a report for the terminal, whole at 80 columns."""
    speed = Table(
        box=box.SIMPLE_HEAD, title="from the first arrival to the last token", title_justify="left"
    )
    headings = ("tok/s", "seconds", "prefill", "decode", "host", "idle", "slots in use", "tok/step")
    for heading in headings:
        speed.add_column(heading, justify="right", no_wrap=True)
    parts = (report.wall_s, report.prefill_s, report.decode_s, report.host_s, report.idle_s)
    length = report.acceptance_length
    speed.add_row(
        digits(report.tokens_per_s),
        *(f"{part:.2f}" for part in parts),
        f"{report.slots_in_use:.1f} of {report.slots}",
        "" if length is None else f"{length:.2f}",
    )
    waits = Table(box=box.SIMPLE_HEAD, title="milliseconds a request", title_justify="left")
    waits.add_column("")
    for heading in report.ttft_ms:
        waits.add_column(heading, justify="right")
    waits.add_row("to the first token", *map(digits, report.ttft_ms.values()))
    waits.add_row("for each further token", *map(digits, report.tpot_ms.values()))
    lines = [
        f"{report.requests} requests, {report.prompt_tokens:,} prompt tokens, "
        f"{report.new_tokens:,} new ones; caches for {report.cache_tokens:,} tokens; the longest "
        f"pause of a row: {digits(report.longest_pause_ms)} ms; {report.preemptions} preemptions",
        f"{report.programs} programs, compiled beforehand in {report.compile_s:.1f} s; "
        f"{report.late_compilations} compiled later",
    ]
    if report.lengths:
        steps = sum(use["steps"] or 0 for use in report.lengths.values())
        shares = (
            f"{v or 'none'} in {(use['steps'] or 0) / max(steps, 1):.0%}"
            + ("" if use["step_ms"] is None else f" ({digits(use['step_ms'])} ms)")
            for v, use in report.lengths.items()
        )
        lines.append(f"drafts verified: {', '.join(shares)} of {steps:,} steps")
    return Group(speed, waits, *lines)


def to_json(report: TraceReport, moments: Sequence[Moment]) -> dict[str, Any]:
    """Return a report and the engine over time as JSON values."""
    return {**dataclasses.asdict(report), "moments": [dataclasses.astuple(m) for m in moments]}


def draw(report: TraceReport, moments: Sequence[Moment], title: str, path: Path) -> None:
    """Draw slots in use, waiting requests, and tokens per second over time. Needs matplotlib."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(11, 6), layout="constrained"
    )
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(f"{title}\n{report.tokens_per_s:,.0f} tokens a second", fontsize=9)
    at = np.asarray([m.at_s for m in moments])
    upper.step(at, [m.running for m in moments], "C0", label="slots in use")
    upper.step(at, [m.waiting for m in moments], "C1", label="requests that wait")
    upper.axhline(report.slots, color="C0", linestyle=":", label="slots")
    edges = np.linspace(0, report.wall_s, BINS + 1)
    tokens = np.interp(edges, [0, *at], [0, *(m.tokens for m in moments)])
    lower.stairs(np.diff(tokens) / np.diff(edges), edges, color="C2", label="tokens a second")
    lower.set_xlabel("seconds")
    for panel in (upper, lower):
        panel.grid(alpha=0.2)
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=150)
