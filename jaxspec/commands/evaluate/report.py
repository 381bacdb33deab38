"""The report of `jaxspec eval`: tables on a terminal, and a picture, which needs matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.commands.evaluate.measure import Interval
from jaxspec.commands.evaluate.run import Evaluation


def render(e: Evaluation, console: Console) -> None:
    """Print the report."""
    s = e.summary
    for line in _conditions(e):
        console.print(line, markup=False, soft_wrap=True)
    if e.taken_over:
        console.print(
            f"{e.taken_over:,} responses are of earlier runs, and so are their seconds.",
            markup=False,
        )
    table = _table("acceptance length, the bonus token included", "", "mean", "95%")
    table.add_row("micro: all tokens by all steps", *_interval(s.micro))
    table.add_row("macro: mean over responses", *_interval(s.macro))
    console.print(table)
    if e.published:
        console.print(_published(e))
    table = _table("accepted", "draft", "of all steps", "of those that came so far")
    for i, (share, conditional) in enumerate(zip(s.positions, s.conditional, strict=True), 1):
        table.add_row(str(i), f"{share:.0%}", f"{conditional:.0%}")
    console.print(table)
    for title, groups in (("context", s.by_context), ("category", s.by_category)):
        if not groups:
            continue
        table = _table(f"by {title}", title, "steps", "acceptance length")
        for group in groups:
            table.add_row(group.name, str(group.steps), f"{group.micro:.2f}")
        console.print(table)
    speeds = [("with drafts", e.drafted)] + ([("plain", e.plain)] if e.plain else [])
    is_scored = e.drafted.right is not None
    scored = ["right replies"] if is_scored else []
    table = _table("speed, prefill included", "", "tokens a second", "tokens", "seconds", *scored)
    for name, speed in speeds:
        right = [f"{speed.right} of {e.prompts}"] if is_scored else []
        figures = f"{speed.tokens_per_s:.1f}", str(speed.tokens), f"{speed.seconds:.1f}", *right
        table.add_row(name, *figures)
    console.print(table)
    if e.plain is not None:
        times = e.drafted.tokens_per_s / e.plain.tokens_per_s
        console.print(f"Drafts make it {times:.2f} times as fast.", markup=False)


def draw(e: Evaluation, path: Path) -> None:
    """Draw acceptance by draft, and by length of context or by category."""
    s = e.summary
    groups = [g for g in (s.by_context, s.by_category) if g]
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(4.5 * (1 + len(groups)), 4.5), layout="constrained"
    )
    figure.suptitle("\n".join(_conditions(e)), fontsize=8)
    first, *others = figure.subplots(1, 1 + len(groups))
    drafts = np.arange(1, len(s.positions) + 1)
    first.bar(drafts, s.positions, color="C0", label="of all steps")
    first.plot(drafts, s.conditional, "C1o-", label="of those that came so far")
    first.set_ylim(0, 1)
    first.set_xticks(drafts)
    first.set_xlabel("draft")
    first.set_ylabel("share of steps that accepted it")
    first.legend(fontsize=7)
    for panel, group, words in zip(
        others, groups, ("tokens before a step", "category"), strict=False
    ):
        panel.bar(range(len(group)), [g.micro for g in group], color="C0")
        panel.axhline(s.micro.value, color="C1", label=f"all steps: {s.micro.value:.2f}")
        panel.axhspan(s.micro.low, s.micro.high, color="C1", alpha=0.2, label="its 95 % interval")
        names = [f"{g.name}\n{g.steps:,} steps" for g in group]
        panel.set_xticks(range(len(group)), names, rotation=45, ha="right", fontsize=7)
        panel.set_xlabel(words)
        panel.set_ylabel("tokens a verify step")
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def _conditions(e: Evaluation) -> tuple[str, str]:
    words = "chat template" if e.chat else "no chat template"
    thinking = ", thinking" if e.thinking else ""
    turns = f" with {e.turns} turns" if e.turns > e.prompts else ""
    return (
        f"{e.task}: {e.prompts} prompts{turns} ({e.digest}), {words}{thinking}, protocol {e.protocol}: "
        f"temperature {e.temperature:g}, at most {e.max_new_tokens} new tokens",
        f"{e.target} with {e.drafter}, {e.num_draft_tokens} drafts, {e.dtypes}, {e.device}, "
        f"{e.batch_size} rows at a time",
    )


def _published(e: Evaluation) -> Table:
    """Return the figures of others, which hold under their own conditions only."""
    title = "published for this pair and task"
    table = _table(title, "source", "acceptance length", "temperature", "drafts", "conditions")
    for known in e.published:
        temperature = "unknown" if known.temperature is None else f"{known.temperature:g}"
        figures = f"{known.acceptance_length:.2f}", temperature, str(known.num_draft_tokens)
        table.add_row(known.source, *figures, known.conditions)
    return table


def _interval(x: Interval) -> tuple[str, str]:
    return f"{x.value:.3f}", f"{x.low:.3f}-{x.high:.3f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    return table
