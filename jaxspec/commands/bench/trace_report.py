"""What `bench --trace` shows: a table for the terminal, and a picture over time."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table

from jaxspec.commands.bench.results import digits
from jaxspec.commands.bench.trace import Moment, TraceReport

BINS = 60  # of the picture's time


def shown(report: TraceReport) -> Group:
    """Return a report for the terminal, whole at 80 columns."""
    speed = Table(
        box=box.SIMPLE_HEAD, title="from the first arrival to the last token", title_justify="left"
    )
    for heading in (
        "tok/s",
        "seconds",
        "prefill",
        "decode",
        "host",
        "idle",
        "slots in use",
        "tok/step",
    ):
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
        f"{report.requests} requests, {report.prompt_tokens:,} prompt tokens, {report.new_tokens:,} new ones; "
        f"the longest pause of a row: {digits(report.longest_pause_ms)} ms",
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
    """Draw slots in use, requests that wait, and tokens a second, over time. Needs matplotlib."""
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
