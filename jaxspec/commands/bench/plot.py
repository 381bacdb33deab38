"""A picture of a benchmark's report: the step's parts, and tokens per second.

With several batch sizes the first panel has tokens a second against them; with one, a step's parts.
The report is read as it is written to JSON, so that an old one can be drawn again. Needs
matplotlib.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FLOORS = (
    "floor: the least time that a step can take, which is that of reading its bytes or of its "
    "operations,\nwhichever is longer, at the rates that were measured on this device"
)
_BELOW: dict[str, Any] = dict(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16))
_COLORS = {"verify": "C0", "draft": "C1", "rest": "C7"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report of `run.run`.

    The first panel has curves where there are several batch sizes. One batch size makes no curve:
    its panel shows what a step's time is made of, beside the floor.
    """
    results = report["results"]
    drafted = [r for r in results if r["mode"] == "speculative"]
    curves = len({r["batch_size"] for r in results}) > 1
    height = 5.4 if curves else max(4.9, 1.6 + 0.75 * len(results))
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(11, height), layout="constrained"
    )
    panels = figure.subplots(1, 2 if drafted else 1, squeeze=False)[0]
    drafter = report["drafter"] or "no drafter"
    conditions = f"{report['target']} + {drafter}\n{report['dtype']} on {report['device']}"
    figure.suptitle(conditions, fontsize=9)
    figure.supxlabel(FLOORS, fontsize=7)
    if curves:
        _against_batch(panels[0], results)
    else:
        _parts(panels[0], results)
    if drafted:
        depth = report["tree"]["depth"] if report["tree"] else report["num_draft_tokens"]
        _against_acceptance(panels[1], results, drafted, depth)
    for panel in panels[0 if curves else 1 :]:
        panel.set_yscale("log")
        ticker = importlib.import_module("matplotlib.ticker")
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        panel.set_ylabel("tokens a second, all rows")
        panel.grid(which="both", alpha=0.2)
        panel.legend(**_BELOW, ncols=2)
    figure.savefig(path, dpi=150)


def _parts(panel: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draw two bars a case: the measured step in its parts, and its floor."""
    longest = 0.0
    for i, r in enumerate(results):
        draft_ms = r["draft_ms"]["median"] if r["draft_ms"] else 0.0
        verify_ms, rest_ms = r["verify_ms"]["median"], max(r["rest_ms"], 0.0)
        measured = {"verify": verify_ms, "draft": draft_ms, "rest": rest_ms}
        draft_floor_ms = r["draft_floor_ms"]
        least = {"verify": r["floor_ms"] - draft_floor_ms, "draft": draft_floor_ms}
        rate = f"{r['tokens_per_s']['median']:,.0f} tok/s"
        if r["acceptance_length"] is not None:
            rate += f", tau {r['acceptance_length']:.2f}"
        step_ms = r["step_ms"]["median"]
        _bar(panel, i - 0.18, measured, f"{step_ms:.3g} ms: {rate}", first=i == 0, floor=False)
        words = f"floor {r['floor_ms']:.3g} ms"
        longest = max(longest, sum(measured.values()), sum(least.values()))
        _bar(panel, i + 0.18, least, words, first=i == 0, floor=True)
    panel.set_yticks(range(len(results)), [_named(r["label"], r) for r in results])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.55 * longest)  # the words beside the longest bar
    panel.set_xlabel("milliseconds a step")
    panel.set_title(f"a step of batch {results[0]['batch_size']}, in its parts", fontsize=8)
    panel.grid(axis="x", alpha=0.2)
    panel.legend(**_BELOW, ncols=5)


def _bar(
    panel: Any, at: float, parts: dict[str, float], words: str, *, first: bool, floor: bool
) -> None:
    left = 0.0
    style: dict[str, Any] = dict(alpha=0.35, hatch="//", edgecolor="white") if floor else {}
    for name, value in parts.items():
        label = (f"floor of {name}" if floor else name) if first else None
        panel.barh(at, value, 0.34, left=left, color=_COLORS[name], label=label, **style)
        left += value
    panel.text(left, at, f" {words}", va="center", fontsize=7)


def _against_batch(panel: Any, results: Sequence[dict[str, Any]]) -> None:
    lines: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        lines.setdefault(_named(r["label"], r), []).append(r)
    for i, (name, line) in enumerate(lines.items()):
        sizes = [r["batch_size"] for r in line]
        tau = [r["acceptance_length"] or 1 for r in line]
        floors = [_tokens_per_s(r, t, r["floor_ms"]) for r, t in zip(line, tau, strict=True)]
        rates = [r["tokens_per_s"]["median"] for r in line]
        panel.plot(sizes, rates, f"C{i}o-", markersize=4, label=name)
        panel.plot(sizes, floors, f"C{i}--", label=f"{name}: floor")
    panel.set_xscale("log", base=2)
    sizes = sorted({r["batch_size"] for r in results})
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.set_xlabel("batch size")


def _against_acceptance(
    panel: Any,
    results: Sequence[dict[str, Any]],
    drafted: Sequence[dict[str, Any]],
    depth: int,
) -> None:
    """Draw what the step time of each case makes of every acceptance length, and its floor.

    A step does the same work whatever it accepts, so its time is taken as measured. A case breaks
    even where its line crosses plain decoding's, or never, if that is more than a step can commit.
    Its point lies a little below the line, since rows that finish early leave the last steps to the
    others.
    """
    case = ("batch_size", "context_length")
    plain = {tuple(r[k] for k in case): r for r in results if r["mode"] == "plain"}
    for i, r in enumerate(drafted):
        tau = [1 + depth * n / 50 for n in range(51)]
        name = _named(f"batch {r['batch_size']}", r)
        step_ms, before = r["step_ms"]["median"], plain[tuple(r[k] for k in case)]
        panel.plot(tau, [_tokens_per_s(r, t, step_ms) for t in tau], f"C{i}-", label=name)
        panel.plot(tau, [_tokens_per_s(r, t, r["floor_ms"]) for t in tau], f"C{i}--")
        panel.plot([r["acceptance_length"]], [r["tokens_per_s"]["median"]], f"C{i}o", markersize=5)
        level = before["tokens_per_s"]["median"]
        even = step_ms / before["step_ms"]["median"]
        pays = f"even at {even:.2f}" if even <= 1 + depth else "never even"
        panel.axhline(level, color=f"C{i}", linestyle=":", label=f"{name}: plain, {pays}")
    panel.set_title(
        "solid: the measured step time; dashed: its floor; points: measured", fontsize=8
    )
    panel.set_xlabel("acceptance length: tokens a verify step")


def _tokens_per_s(result: dict[str, Any], tau: float, step_ms: float) -> float:
    return result["batch_size"] * tau / step_ms * 1e3


def _named(name: str, result: dict[str, Any]) -> str:
    context = result["context_length"]
    return name if context is None else f"{name} @ {context:,}"
