"""The results of a case: quantities, derived from observations, and tables of them.

Read `CaseResult`. A new quantity is one field there: it goes into the JSON, and into the tables if
it has columns. A new observation is a field of `Observed`, which `measure` fills.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table

from jaxspec.commands.bench.floor import (
    Ceiling,
    StepCost,
    share_of_group,
    step_cost,
    step_costs,
    step_floor_s,
)
from jaxspec.commands.bench.pair import ModelPair
from jaxspec.commands.bench.profile import LoopCounts, loop_counts
from jaxspec.models.xla import COMPILER_OPTIONS, MESH_LOOP_OPTIONS
from jaxspec.runtime import memory
from jaxspec.runtime.programs import options_of_loops


def digits(value: float, count: int = 3) -> str:
    """Return a number with `count` significant digits, and never with an exponent."""
    if round(abs(value)) >= 10**count:
        return f"{value:,.0f}"
    text = f"{value:.{count}g}"
    return f"{value:.{count + 3}f}" if "e" in text else text


@dataclass(frozen=True)
class Spread:
    """Median and range of repeats."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Spread:
        """Return the median and range of values, each times `scale`."""
        return cls(statistics.median(values) * scale, min(values) * scale, max(values) * scale)

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.min)}-{digits(self.max)})"


@dataclass
class Observed:
    """The observations of a case.

    Attributes:
      context: tokens that the caches were filled with at random; None if prompts were prefilled.
      rows: of the devices of one model axis; `ceiling` is of these devices together.
      middle: committed tokens of a row in the middle of the run; the floor is for these.
      loop: the compiled decode loop.
      steps: of the longest row.
      prefill_s, step_s, token_s, tokens_per_s, lengths: a number per repeat: seconds of prefill, of
        a step and of a row's token, tokens per second of all rows, mean acceptance length.
      draft_s, verify_s: seconds of each model by itself; no draft in plain decoding.
        Both are empty if whole steps alone are timed.
      experts: used by one target pass, per layer; None for models without experts.
    """

    pair: ModelPair
    batch: int
    context: int | None
    cache_length: int
    rows: int
    ceiling: Ceiling
    middle: int
    loop: Any
    prefill_compile_s: float
    decode_compile_s: float
    steps: int = 0
    prefill_s: list[float] = dataclasses.field(default_factory=list)
    step_s: list[float] = dataclasses.field(default_factory=list)
    token_s: list[float] = dataclasses.field(default_factory=list)
    tokens_per_s: list[float] = dataclasses.field(default_factory=list)
    lengths: list[float] = dataclasses.field(default_factory=list)
    draft_s: list[float] = dataclasses.field(default_factory=list)
    verify_s: list[float] = dataclasses.field(default_factory=list)
    experts: np.ndarray | None = None

    @property
    def cost(self) -> StepCost:
        """The least bytes and operations of a step."""
        return step_cost(self.pair.spec, self.rows, self.middle)

    @functools.cached_property
    def loop_counts(self) -> LoopCounts:
        """The kernels and round trips of a step."""
        return loop_counts(self.loop.as_text(), sampled=self.pair.sampling.temperature > 0)

    @property
    def rest_s(self) -> float | None:
        """Seconds of a step beyond its two models; None if these were not timed."""
        if not self.verify_s:
            return None
        parts = (s for s in (self.draft_s, self.verify_s) if s)
        return statistics.median(self.step_s) - sum(map(statistics.median, parts))

    @property
    def is_plain(self) -> bool:
        """True without a drafter."""
        return self.pair.spec.drafter is None


# --- declarations --------------------------------------------------------------------------------


SPEED, PARTS, EXCHANGES, DETAILS = range(4)
"""The tables: results, parts of a step, what devices of a mesh exchange in one, resources."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      show: returns the cell of a value, given its case and plain decoding in the same case.
      meaning: its explanation in the caption; "" for none.
    """

    table: int
    heading: str
    show: Callable[[Any, CaseResult, CaseResult], str]
    meaning: str = ""


def quantity(of: Callable[[Observed], Any], *columns: Column) -> Any:
    """Declare a field of `CaseResult`.

    Args:
      of: returns its value, given the observations; None is not shown.
      columns: in the tables.
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
    return "" if result.mode == plain.mode else f"{rate.median / plain.tokens_per_s.median:.2f}x"


def _tau(length: float, result: CaseResult, _: CaseResult) -> str:
    return f"{'set ' if result.acceptance == 'synthetic' else ''}{length:.2f}"


def _compiling(decode_s: float, result: CaseResult, _: CaseResult) -> str:
    return f"{result.prefill_compile_s:.1f} + {decode_s:.1f}"


def _memory(footprint: memory.Footprint, result: CaseResult, _: CaseResult) -> str:
    peak = "" if result.peak_bytes is None else f" ({digits(result.peak_bytes / 1e9)})"
    return digits(footprint.total / 1e9) + peak


# --- the quantities ------------------------------------------------------------------------------


def _acceptance(o: Observed) -> str | None:
    if o.is_plain:
        return None
    return "real" if o.pair.spec.drafting.synthetic_acceptance is None else "synthetic"


def _host_round_trips(o: Observed) -> int | None:
    if o.pair.mesh.devices.flat[0].platform != "gpu":
        return None
    if options_of_loops(o.pair.mesh) not in (COMPILER_OPTIONS, MESH_LOOP_OPTIONS):  # one CUDA graph
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
    """The results of one case: a batch size, with or without the drafter.

    Attributes:
      mode: "plain" or "speculative".
      label: drafter and draft tokens, such as "mtp 7".
      context_length: as `Observed.context`.
      cost, floor_ms: least cost and time of a step; `draft_floor_ms` is the drafter's part.
      steps: of the longest row.
      step_ms: decode time of the batch per step.
      tokens_per_s: returned tokens of all rows after prefill's, over decode time.
      acceptance: "real" or "synthetic"; None for plain decoding.
      acceptance_length: mean over all verify steps of all rows; None for plain decoding.
      draft_ms: of drafting and absorbing alone; None for plain decoding and `--steps-only`.
      verify_ms: of the target's pass alone, with the choice of its best tokens; None with
        `--steps-only`, as `rest_ms`.
      rest_ms: `step_ms` less those two, of medians: acceptance, bookkeeping, the loop. Slightly
        below zero if the parts overlap.
      tpot_ms: decode time over a row's mean tokens.
      kernels_per_step, host_round_trips_per_step: see `profile.LoopCounts`; a CPU has no separate
        host, and the host of one GPU waits for the whole loop.
      collectives_per_step, collective_bytes_per_step: see `profile.LoopCounts`; None on one device.
      ttft_ms: prefill of the whole batch; None if nothing was prefilled.
      footprint: bytes that a device holds, by the configs.
      temporary_bytes: of the compiled loop beside that; None if the compiler does not report them.
      peak_bytes: of the process so far; None if the device does not count them.
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
    verify_ms: Spread | None = quantity(
        lambda o: Spread.of(o.verify_s, 1e3) if o.verify_s else None,
        Column(PARTS, "verify ms", _median, "the target by itself"),
    )
    rest_ms: float | None = quantity(
        lambda o: None if o.rest_s is None else o.rest_s * 1e3,
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
    collectives_per_step: int | None = quantity(
        lambda o: o.loop_counts.collectives if o.pair.mesh.size > 1 else None,
        Column(EXCHANGES, "collectives", _whole, "exchanges between devices in a step"),
    )
    collective_bytes_per_step: int | None = quantity(
        lambda o: o.loop_counts.collective_bytes if o.pair.mesh.size > 1 else None,
        Column(EXCHANGES, "MB", lambda v, *_: digits(v / 1e6), "of their results, on one device"),
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
        """Derive every quantity from the observations."""
        return cls(**{f.name: f.metadata["of"](observed) for f in dataclasses.fields(cls)})

    @property
    def case(self) -> str:
        """The case without its mode: the batch size, and the context if it was set."""
        if self.context_length is None:
            return str(self.batch_size)
        return f"{self.batch_size} @ {self.context_length:,}"


# --- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A case to measure: batch size, committed tokens of a row at the start, models."""

    batch: int
    start: int
    pair: ModelPair


def floor_table(cases: Sequence[Case], new_tokens: int, ceiling: Ceiling) -> Table:
    """Return the floors of cases, in the middle of the run."""
    title = (
        f"floor of a step, at {digits(ceiling.bytes_per_s / 1e9)} GB/s read and "
        f"{digits(ceiling.flops_per_s / 1e12)} TFLOP/s, measured just now"
    )
    meanings = {
        "context": "tokens of a row, in the middle of the run",
        **dict.fromkeys(("weights MB", "K/V MB", "GFLOP", "floor ms"), ""),
        "drafting": "the drafter's part of the floor",
    }
    table = _table(title, meanings)
    for case in cases:
        spec, middle = case.pair.spec, case.start + new_tokens // 2
        count, together = share_of_group(case.pair.mesh, case.batch, ceiling)
        cost, draft = step_cost(spec, count, middle), step_costs(spec, count, middle)[1]
        table.add_row(
            str(case.batch),
            case.pair.label,
            f"{middle:,}",
            f"{cost.weight_bytes / 1e6:,.1f}",
            f"{cost.kv_bytes / 1e6:,.1f}",
            digits(cost.flops / 1e9),
            digits(step_floor_s(spec, count, middle, together) * 1e3),
            "" if spec.drafter is None else digits(draft.floor_s(together) * 1e3),
        )
    return table


def result_tables(cases: Sequence[CaseResult], repeats: int) -> list[Table]:
    """Return the tables of measured cases. Without several devices there is none of exchanges."""
    # With whole steps alone there is no plain decoding beside a drafter: each stands for itself.
    plain = {r.case: r for r in sorted(cases, key=lambda r: r.mode == "plain")}
    tables = []
    for number in (SPEED, PARTS, EXCHANGES, DETAILS):
        columns = {
            column: cells
            for field in dataclasses.fields(CaseResult)
            for column in field.metadata["columns"]
            if column.table == number
            if any(cells := [_cell(column, field.name, r, plain[r.case]) for r in cases])
        }
        if not columns:
            continue
        title = f"measured: median (min-max) of {repeats}, warm-up and compilation excluded"
        table = _table(title if number == SPEED else "", {c.heading: c.meaning for c in columns})
        for r, *cells in zip(cases, *columns.values(), strict=True):
            table.add_row(r.case, r.label, *cells)
        tables.append(table)
    return tables


def _cell(column: Column, name: str, result: CaseResult, plain: CaseResult) -> str:
    value = getattr(result, name)
    return "" if value is None else column.show(value, result, plain)


def _table(title: str, meanings: Mapping[str, str]) -> Table:
    """Return an empty table of cases, whose columns have these headings and explanations."""
    explained = (f"{heading}: {meaning}." for heading, meaning in meanings.items() if meaning)
    table = Table(
        title=title or None,
        caption=" ".join(explained) or None,
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("batch", justify="right", overflow="fold")
    table.add_column("mode", no_wrap=True)
    for heading in meanings:  # of a number and its range, the range may go to the next line
        table.add_column(heading, justify="right", overflow="fold", min_width=len(heading))
    return table
