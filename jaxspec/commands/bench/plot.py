"""A picture of a benchmark's report: tokens a second against batch size, and against acceptance length.

It reads the report as it is written to JSON, so that an old one can be drawn again. Needs matplotlib.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".pdf", ".svg")


def check(path: Path) -> None:
    """Refuse a picture that could not be drawn in the end.

    Raises:
      ValueError: matplotlib is missing, or the path has another suffix or no directory.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path}: expected a file that ends in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no directory {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'jaxspec-decoding[plot]'")


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report of `bench.run`: measured solid, floors dashed, plain decoding dotted.

    The second panel takes a step's time as measured for every acceptance length: a step does the same work
    whatever it accepts. A case breaks even where its line crosses plain decoding's. Its point lies a little
    below the line, since rows that finish early leave the last steps to the others.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(11, 4.5), layout="constrained"
    )
    results = report["results"]
    drafted = [r for r in results if r["mode"] == "speculative"]
    panels = figure.subplots(1, 2 if drafted else 1, squeeze=False)[0]
    figure.suptitle(
        f"{report['target']} + {report['drafter'] or 'no drafter'}\n{report['dtype']} on {report['device']}",
        fontsize=9,
    )
    _against_batch(panels[0], results)
    if drafted:
        depth = report["tree"]["depth"] if report["tree"] else report["num_draft_tokens"]
        _against_acceptance(panels[1], results, drafted, depth)
    for panel in panels:
        panel.set_yscale("log")
        panel.set_ylabel("tokens a second, all rows")
        panel.grid(which="both", alpha=0.2)
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def _against_batch(panel: Any, results: Sequence[dict[str, Any]]) -> None:
    lines: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        lines.setdefault(_named(r["label"], r), []).append(r)
    for i, (name, line) in enumerate(lines.items()):
        sizes = [r["batch_size"] for r in line]
        tau = [r["acceptance_length"] or 1 for r in line]
        floors = [_tokens_per_s(r, t, r["floor_ms"]) for r, t in zip(line, tau, strict=True)]
        panel.plot(
            sizes, [r["tokens_per_s"]["median"] for r in line], f"C{i}o-", markersize=4, label=name
        )
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
        panel.axhline(
            level, color=f"C{i}", linestyle=":", label=f"{name}: plain, even at {even:.2f}"
        )
    panel.set_title(
        "solid: the measured step time; dashed: its floor; points: measured", fontsize=8
    )
    panel.set_xlabel("acceptance length: tokens a verify step")


def _tokens_per_s(result: dict[str, Any], tau: float, step_ms: float) -> float:
    return result["batch_size"] * tau / step_ms * 1e3


def _named(name: str, result: dict[str, Any]) -> str:
    context = result["context_length"]
    return name if context is None else f"{name} @ {context:,}"
