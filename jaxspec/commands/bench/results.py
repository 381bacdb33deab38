"""What is found out about a case: every quantity, how it follows from the observations, and where it is shown.

Read `CaseResult`. A new quantity is one field there: it goes into the JSON, and into the tables where it has columns.
A quantity that needs another observation adds that to `Observed`, and `measure` makes it.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxspec.commands.bench.floor import Ceiling, StepCost, step_cost, step_costs, step_floor_s
from jaxspec.commands.bench.pair import Pair
from jaxspec.commands.bench.profile import LoopCounts, loop_counts
from jaxspec.models.xla import COMPILER_OPTIONS
from jaxspec.runtime import memory
from jaxspec.runtime.programs import options_of_loops


def digits(value: float, count: int = 3) -> str:
    """Write a number with so many digits that count, and never with an exponent."""
    if round(abs(value)) >= 10**count:
        return f"{value:,.0f}"
    text = f"{value:.{count}g}"
    return f"{value:.{count + 3}f}" if "e" in text else text


@dataclass(frozen=True)
class Spread:
    """Median of some repeats, with the range they lie in."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Spread:
        """Take the median and the range of values, each times `scale`."""
        return cls(statistics.median(values) * scale, min(values) * scale, max(values) * scale)

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.min)}-{digits(self.max)})"


@dataclass(frozen=True)
class Observed:
    """What the runs of a case left.

    Attributes:
      context: tokens that the caches only seemed to hold at the start; None where prompts were prefilled.
      rows: that devices of the model axis share; `ceiling` is what these devices can do together.
      middle: committed tokens of a row in the middle of the run, for which the floor is.
      steps: of the longest row.
      prefill_s, step_s, token_s, tokens_per_s, lengths: a number a repeat; seconds of prefill, of a step and of
        a row's token, tokens of all rows a second, and the mean acceptance length.
      draft_s, verify_s: of the two models by themselves; nothing drafts in plain decoding.
      loop: the compiled decode loop.
      experts: that one target pass used, a layer; None for models without.
    """

    pair: Pair
    batch: int
    context: int | None
    cache_length: int
    rows: int
    ceiling: Ceiling
    middle: int
    steps: int
    prefill_s: Sequence[float]
    step_s: Sequence[float]
    token_s: Sequence[float]
    tokens_per_s: Sequence[float]
    lengths: Sequence[float]
    draft_s: Sequence[float]
    verify_s: Sequence[float]
    loop: Any
    prefill_compile_s: float
    decode_compile_s: float
    experts: np.ndarray | None

    @property
    def cost(self) -> StepCost:
        """What a step moves and computes at the least."""
        return step_cost(self.pair.spec, self.rows, self.middle)

    @functools.cached_property
    def loop_counts(self) -> LoopCounts:
        """What a step starts."""
        return loop_counts(self.loop.as_text(), sampled=self.pair.sampling.temperature > 0)

    @property
    def rest_s(self) -> float:
        """What a step takes beyond its two models."""
        parts = (s for s in (self.draft_s, self.verify_s) if s)
        return statistics.median(self.step_s) - sum(map(statistics.median, parts))

    @property
    def is_plain(self) -> bool:
        """Tell whether there was no drafter."""
        return self.pair.spec.drafter is None


# --- how a quantity is declared ----------------------------------------------------------------------


SPEED, PARTS, DETAILS = range(3)
"""The tables: what came out, where a step's time goes, what it took."""


@dataclass(frozen=True)
class Column:
    """Where a quantity stands in the tables.

    Attributes:
      show: what stands there for a value, in its case, beside plain decoding in the same case.
      meaning: what the caption says of it; "" where the heading says it all.
    """

    table: int
    heading: str
    show: Callable[[Any, CaseResult, CaseResult], str]
    meaning: str = ""


def quantity(of: Callable[[Observed], Any], *columns: Column) -> Any:
    """Declare a field of `CaseResult`.

    Args:
      of: makes its value of what was observed; a value of None is shown nowhere.
      columns: where it stands in the tables, if anywhere.
    """
    return dataclasses.field(metadata=dict(of=of, columns=columns))


def _whole(value: Any, *_: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _median(value: Spread, *_: Any) -> str:
    return digits(value.median)


def _in_floors(step: Spread, result: CaseResult, _: CaseResult) -> str:
    return f"{step.median / result.floor_ms:.2f}"


def _per_second(rate: Spread, *_: Any) -> str:
    return f"{rate.median:,.0f}"


def _speedup(rate: Spread, result: CaseResult, plain: CaseResult) -> str:
    return "" if result is plain else f"{rate.median / plain.tokens_per_s.median:.2f}x"


def _tau(length: float, result: CaseResult, _: CaseResult) -> str:
    return f"{'set ' if result.acceptance == 'synthetic' else ''}{length:.2f}"


def _compiling(decode_s: float, result: CaseResult, _: CaseResult) -> str:
    return f"{result.prefill_compile_s:.1f} + {decode_s:.1f}"


def _memory(footprint: memory.Footprint, result: CaseResult, _: CaseResult) -> str:
    peak = "" if result.peak_bytes is None else f" ({digits(result.peak_bytes / 1e9)})"
    return digits(footprint.total / 1e9) + peak


# --- the quantities ----------------------------------------------------------------------------------


def _acceptance(o: Observed) -> str | None:
    if o.is_plain:
        return None
    return "real" if o.pair.spec.drafting.synthetic_acceptance is None else "synthetic"


def _host_round_trips(o: Observed) -> int | None:
    if o.pair.mesh.devices.flat[0].platform != "gpu":
        return None
    if options_of_loops(o.pair.mesh) is not COMPILER_OPTIONS:  # one CUDA graph
        return 0
    return o.loop_counts.host_round_trips


def _temporary_bytes(o: Observed) -> int | None:
    analysis = o.loop.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def _experts(o: Observed) -> Spread | None:
    if o.experts is None:
        return None
    return Spread(float(o.experts.mean()), float(o.experts.min()), float(o.experts.max()))


@dataclass(frozen=True)
class CaseResult:
    """One case: a batch size, with or without the drafter.

    Attributes:
      mode: "plain" or "speculative".
      label: the case in a few words, such as "mtp 7": drafter and draft tokens.
      context_length: tokens that the caches only seemed to hold at the start; None where prompts were prefilled.
      cost, floor_ms: the least of a step; `draft_floor_ms` is the drafter's part.
      steps: of the longest row.
      step_ms: the decode time of the batch over these.
      tokens_per_s: tokens returned after prefill's, of all rows, over decode time.
      acceptance: "real" or "synthetic"; None for plain decoding.
      acceptance_length: mean over all verify steps of all rows; None for plain decoding.
      draft_ms: of the drafter alone, drafting and absorbing; None for plain decoding.
      verify_ms: of the target's pass alone, with the choice of its best tokens.
      rest_ms: medians, `step_ms` beyond those two: acceptance, bookkeeping, the loop itself. Small and below
        zero where the parts overlap.
      tpot_ms: decode time over a row's mean tokens.
      kernels_per_step, host_round_trips_per_step: see `profile.LoopCounts`; on CPUs no host is
        apart, and on one GPU it waits for the whole loop.
      ttft_ms: prefill of the whole batch; None where nothing was prefilled.
      footprint: what the configs say that a device holds.
      temporary_bytes: what the compiled loop takes beside that, where the compiler tells.
      peak_bytes: of the process so far, where the device counts them.
      distinct_experts: a layer, in one target pass at the end of the run: mean, fewest and most.
    """

    mode: str = quantity(lambda o: "plain" if o.is_plain else "speculative")
    label: str = quantity(lambda o: o.pair.label)
    batch_size: int = quantity(lambda o: o.batch)
    context_length: int | None = quantity(lambda o: o.context)
    step_tokens: int = quantity(lambda o: o.pair.spec.step_tokens)
    cache_length: int = quantity(lambda o: o.cache_length)
    cost: StepCost = quantity(lambda o: o.cost)
    floor_ms: float = quantity(
        lambda o: step_floor_s(o.pair.spec, o.rows, o.middle, o.ceiling) * 1e3
    )
    draft_floor_ms: float = quantity(
        lambda o: step_costs(o.pair.spec, o.rows, o.middle)[1].floor_s(o.ceiling) * 1e3
    )
    steps: int = quantity(lambda o: o.steps)
    step_ms: Spread = quantity(
        lambda o: Spread.of(o.step_s, 1e3),
        Column(SPEED, "step ms", _whole),
        Column(SPEED, "x floor", _in_floors, "step over floor"),
    )
    tokens_per_s: Spread = quantity(
        lambda o: Spread.of(o.tokens_per_s),
        Column(SPEED, "tok/s", _per_second, "returned, of all rows"),
        Column(SPEED, "speedup", _speedup, "over plain"),
    )
    acceptance: str | None = quantity(_acceptance)
    acceptance_length: float | None = quantity(
        lambda o: None if o.is_plain else float(np.mean(o.lengths)),
        Column(SPEED, "tau", _tau, "mean tokens a verify step; set: by --synthetic-acceptance"),
    )
    draft_ms: Spread | None = quantity(
        lambda o: Spread.of(o.draft_s, 1e3) if o.draft_s else None,
        Column(PARTS, "draft ms", _median, "the drafter by itself"),
    )
    verify_ms: Spread = quantity(
        lambda o: Spread.of(o.verify_s, 1e3),
        Column(PARTS, "verify ms", _median, "the target by itself"),
    )
    rest_ms: float = quantity(
        lambda o: o.rest_s * 1e3,
        Column(PARTS, "rest ms", lambda v, *_: digits(v, 2), "the step beyond both"),
    )
    tpot_ms: Spread = quantity(
        lambda o: Spread.of(o.token_s, 1e3),
        Column(PARTS, "TPOT ms", _median, "a token of a row"),
    )
    kernels_per_step: int = quantity(
        lambda o: o.loop_counts.kernels,
        Column(PARTS, "kernels", _whole, "started in a step"),
    )
    host_round_trips_per_step: int | None = quantity(
        _host_round_trips, Column(PARTS, "host", _whole, "round trips of a step")
    )
    ttft_ms: Spread | None = quantity(
        lambda o: Spread.of(o.prefill_s, 1e3) if o.context is None else None,
        Column(DETAILS, "TTFT ms", _whole, "prefill of the whole batch"),
    )
    achieved_bytes_per_s: float = quantity(
        lambda o: (o.cost.weight_bytes + o.cost.kv_bytes) / statistics.median(o.step_s),
        Column(
            DETAILS, "GB/s", lambda v, *_: digits(v / 1e9), "the floor's bytes over the step's time"
        ),
    )
    prefill_compile_s: float = quantity(lambda o: o.prefill_compile_s)
    decode_compile_s: float = quantity(
        lambda o: o.decode_compile_s,
        Column(DETAILS, "compile s", _compiling, "prefill + decode"),
    )
    footprint: memory.Footprint = quantity(
        lambda o: memory.footprint(o.pair.spec, o.batch, o.cache_length, o.pair.mesh),
        Column(
            DETAILS,
            "GB (peak)",
            _memory,
            "weights, caches and logits by the configs (most that the process had so far)",
        ),
    )
    temporary_bytes: int | None = quantity(_temporary_bytes)
    peak_bytes: int | None = quantity(
        lambda o: (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    )
    distinct_experts: Spread | None = quantity(
        _experts, Column(DETAILS, "experts", _whole, "distinct ones a layer, in one target pass")
    )

    @classmethod
    def of(cls, observed: Observed) -> CaseResult:
        """Make every quantity of what was observed."""
        return cls(**{f.name: f.metadata["of"](observed) for f in dataclasses.fields(cls)})

    @property
    def case(self) -> str:
        """Name the case, whatever its mode: the batch size, and the context where it was set."""
        if self.context_length is None:
            return str(self.batch_size)
        return f"{self.batch_size} @ {self.context_length:,}"
