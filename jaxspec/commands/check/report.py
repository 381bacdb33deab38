"""The report of a check: numbers and findings, as JSON and for the terminal.

Read `Report`. `find` derives the findings: each names what is wrong and how to fix it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text as Line

from jaxspec.commands.check.hypotheses import Convention
from jaxspec.commands.check.lossless import Difference
from jaxspec.commands.check.reference import (
    Oddity,
    Reference,
    ReferenceComparison,
    describe_comparison,
)
from jaxspec.commands.check.search import Comparison, Round, SearchResult
from jaxspec.commands.check.statistics import (
    FIRST_LEVEL,
    LEVEL,
    MATERIAL,
    SECOND_LEVEL,
    Depth,
    Estimate,
    format_gain,
)
from jaxspec.commands.startup import versions
from jaxspec.registry import Conventions

_BAR_WIDTH = 32

USEFUL = 0.1
"""Least share of the tokens per step that trained numbers lose when they are reordered. Those of
the bundled assistant lose a third."""


@dataclass(frozen=True)
class Finding:
    """A finding of a check.

    Attributes:
      kind: its source: the floor of first drafts, deeper drafts, another convention, a look at the
        weights, the record of the drafter's maker, or the comparison with plain decoding.
      harmless: it is worth knowing, but no reason to reject the pair.
    """

    kind: Literal["floor", "depth", "convention", "weights", "reference", "lossless"]
    text: str
    harmless: bool = dataclasses.field(default=False, metadata={"json": "sound"})


@dataclass(frozen=True)
class Report:
    """The numbers of a check.

    Attributes:
      by_position: share of anchors whose drafts 1 to j were all accepted, for j = 1, 2, ...
      accepted: drafts accepted per anchor; every position of the text is one.
      acceptance_length: tokens per verify step in decoding, over all steps.
      measured: the record that `--record` writes.
      depths: of the hypothesis in force.
      fallen: the depth from which on hardly any draft is accepted; None if there is none.
      best_first: share of first drafts accepted after all changes of the search.
      comparison: with the maker's record; None without one.
      family: the conventions of the drafter's family; None if it has none.
      recorded: the file that the measurement was written to; None for none.
    """

    target: str
    drafter: str
    batch_size: int
    conventions: list[Convention]
    by_position: list[Estimate]
    accepted: Estimate
    acceptance_length: float
    measured: Reference
    depths: Sequence[Depth]
    fallen: Depth | None
    best_first: float
    search: SearchResult
    oddities: Sequence[Oddity]
    comparison: ReferenceComparison | None
    differing: Sequence[Difference]
    floor: float
    family: Conventions | None
    recorded: str | None = None

    @property
    def rounds(self) -> list[Round]:
        """The rounds of the search."""
        return self.search.rounds

    @property
    def tried(self) -> int:
        """The number of other conventions compared with the one in force."""
        return len(self.rounds[0].comparisons)

    @property
    def replay_bytes(self) -> int:
        """Bytes of K/V and features of a batch while replaying."""
        return self.search.replayed.nbytes

    @functools.cached_property
    def findings(self) -> list[Finding]:
        """The problems and their fixes, then what is worth knowing."""
        return find(self)

    @property
    def problems(self) -> list[str]:
        """The problems; empty if the pair fits."""
        return [f.text for f in self.findings if not f.harmless]

    @property
    def conclusion(self) -> str:
        """The result of the check in one sentence."""
        if self.problems:
            return f"not sound: {'; '.join(self.problems)}"
        return (
            f"sound: {self.by_position[0].mean:.0%} of first drafts are accepted, "
            f"{self.acceptance_length:.2f} tokens a step, no other convention does better "
            f"({self.tried} tried), and the output is that of plain decoding"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all values and their conditions as JSON values."""
        m = self.measured
        values = {
            "target": self.target,
            "drafter": self.drafter,
            "batch_size": self.batch_size,
            "replay_bytes": self.replay_bytes,
            "conventions": self.conventions,
            "by_position": self.by_position,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "rounds": self.rounds,
            "measured": m,
            "findings": self.findings,
            "recorded": self.recorded,
            "dtype": m.dtype,
            "device": m.device,
            "text": m.text,
            "rows": m.rows,
            "anchors": m.positions,
            "new_tokens": m.new_tokens,
            "num_draft_tokens": m.num_draft_tokens,
            "by_depth": self.depths,
            "fallen": self.fallen,
            "tried": self.tried,
            "oddities": self.oddities,
            "reference": self.comparison,
            "differing": self.differing,
            "floor": self.floor,
            "problems": self.problems,
            "confidence": LEVEL,
            "confidence_first": FIRST_LEVEL,
            "confidence_again": SECOND_LEVEL,
            "correction": "Bonferroni, over the comparisons of a round on one text",
            "material": MATERIAL,
            "sound": not self.problems,
            "verdict": self.conclusion,
            "versions": versions("jax", "jaxlib", "flax", "numpy"),
        }
        return _as_json(values)


def _as_json(value: Any) -> Any:
    """Return records as objects, and non-finite numbers as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.metadata.get("json", f.name): _as_json(getattr(value, f.name)) for f in fields}
    if isinstance(value, Mapping):
        return {key: _as_json(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- findings ------------------------------------------------------------------------------------


def find(r: Report) -> list[Finding]:
    """Return the problems of a pair with their fixes, then what is worth knowing."""
    changes = r.search.changes if r.best_first >= min(r.depths[0].share.mean, r.floor) else []
    wrong = [*_floor(r), *_depth(r)]
    wrong += [Finding("weights", o.text) for o in r.oddities if o.wrong]
    wrong += _useless(r)
    lost = r.comparison is not None and r.comparison.result == "worse"
    for change, round_ in zip(changes, r.rounds, strict=False):
        wrong.append(Finding("convention", _change(change, round_)))
    if wrong and not changes and all(f.kind in ("floor", "depth") for f in wrong) and not lost:
        wrong.append(Finding("convention", _unexplained(r)))
    notes = [Finding("weights", o.text, harmless=True) for o in r.oddities if not o.wrong]
    if r.comparison is not None:
        about = Finding("reference", describe_comparison(r.comparison), not lost)
        (wrong if lost else notes).append(about)
    wrong += _lossy(r.differing)
    if same := _no_difference(r.rounds[0]):
        notes.append(Finding("convention", same, harmless=True))
    return [*wrong, *notes]


def _floor(r: Report) -> list[Finding]:
    first = r.depths[0].share.mean
    if first >= r.floor:
        return []
    text = f"{first:.0%} of first drafts are accepted, below the floor of {r.floor:.0%}"
    return [Finding("floor", text)]


def _depth(r: Report) -> list[Finding]:
    """Return the draft from which on hardly any is accepted, and a likely cause."""
    if r.fallen is None:
        return []
    at, share, family = r.fallen.depth, r.fallen.share, r.family
    text = (
        f"from draft {at} on: {share.mean:.0%} are accepted ({share.low:.0%}-{share.high:.0%}) "
        "where all before them were"
    )
    if at == 2 and family is not None and family.later_only:
        text += (
            f"; only later drafts depend on {family.later_only}: get the drafter's weights again"
        )
    elif at > 2 and family is not None and family.shortened:
        text += f"; the drafter was trained for blocks of {at}: set {family.shortened} to {at}"
    elif at > 2:
        text += f"; draft {at - 1} tokens at most: --num-draft-tokens {at - 1}"
    return [Finding("depth", text)]


def _change(change: Comparison, round_: Round) -> str:
    """Return the gain of a change, its fix, and the changes that gain as much."""
    also = [round_.comparisons[i].name for i in round_.as_good]
    as_good = [name for name in also if name != change.name]
    note = f" (as good on this text: {', '.join(as_good)})" if as_good else ""
    tokens, more = 1 + change.accepted, change.difference.mean
    return (
        f"{change.name}: {more:+.2f} drafts a step, {tokens:.2f} tokens instead of "
        f"{tokens - more:.2f}; {change.fix}{note}"
    )


def _useless(r: Report) -> list[Finding]:
    """Return a finding if the parameter of later drafts does as well with reordered numbers."""
    if r.family is None or len(r.depths) < 2:
        return []
    return [
        Finding(
            "depth",
            f"{c.field} carries nothing: its numbers in reverse order make {format_gain(c.gain)} "
            "tokens a step; get the drafter's weights again",
        )
        for c in r.rounds[0].comparisons
        if c.field == r.family.later_only and c.result != "worse" and c.gain.low > -USEFUL
    ]


def _unexplained(r: Report) -> str:
    text = (
        f"no other convention explains it ({r.tried} tried): the drafter is another target's, its "
        "weights are damaged, or it was not trained for such text (give other text with --text)"
    )
    if r.comparison is None:
        text += "; it has no record of what its maker measured (check --record writes one)"
    return text


def _no_difference(round_: Round) -> str:
    """Return the conventions that this text cannot tell from the one in force, with their gains."""
    same = [c for c in round_.comparisons if c.result == "no measurable difference"]
    if not same:
        return ""
    shown = (f"{c.name} {format_gain(c.gain)}" for c in same)
    return (
        f"no measurable difference (of {MATERIAL:.0%} of the tokens of a step): {', '.join(shown)}"
    )


def _lossy(differing: Sequence[Difference]) -> list[Finding]:
    wrong = [d for d in differing if not d.near_tie]
    if not wrong:
        return []
    d = wrong[0]
    text = (
        f"rows that differ from plain decoding by more than a near-tie: {len(wrong)}, the first at "
        f"position {d.position} of row {d.row}; this is a bug of ours or of the device, whatever "
        "the drafter; please report it"
    )
    return [Finding("lossless", text)]


# --- on the terminal -----------------------------------------------------------------------------


def render(report: Report) -> Group:
    """Return the report for a terminal of 80 columns, the conclusion last."""
    differing, m = report.differing, report.measured
    lossless = "greedy speculative decoding wrote every row as plain decoding did"
    if differing:
        lossless = f"rows that differ from plain decoding: {len(differing)}"
    return Group(
        Line(f"{report.target} + {report.drafter} · {m.dtype} on {m.device}", "bold"),
        _conventions_table(report),
        _acceptance_chart(report),
        *(_comparisons_table(r, report) for r in report.rounds),
        Line(f"{lossless} ({m.dtype})", "" if differing else "green"),
        *(Line(f"  {_difference(d)}") for d in differing),
        Line(
            f"held beside the weights while reading: {decimal(report.replay_bytes)} of K/V and "
            f"features for a batch of {min(report.batch_size, m.rows)} rows",
            "dim",
        ),
        *(Line(f"note: {f.text}") for f in report.findings if f.harmless),
        *([] if report.recorded is None else [Line(f"recorded in {report.recorded}")]),
        "",
        Line(report.conclusion, "bold red" if report.problems else "bold green"),
    )


def _conventions_table(report: Report) -> Table:
    table = Table(title="conventions in force", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("convention", "value", "set by"):
        table.add_column(name, overflow="fold", style="dim" if name == "set by" else "")
    for c in report.conventions:
        table.add_row(c.name, Line(c.shown), Line(c.origin))
    return table


def _acceptance_chart(report: Report) -> Group:
    """Return a bar per draft j: the share of anchors that accept drafts 1 to j; then draft j's."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    for share, d in zip(report.by_position, report.depths, strict=True):
        interval = f" {share.mean:4.0%}  ({share.low:.0%}-{share.high:.0%})"
        own = Line(f"{d.share.mean:4.0%}  ({d.share.low:.0%}-{d.share.high:.0%})", "dim")
        rows.add_row(f"draft {d.depth}", Line(bar(share), "green").append(interval, ""), own)
    a, m = report.accepted, report.measured
    text = (
        f"[bold]{a.mean:.2f}[/] drafts accepted a position ({a.low:.2f}-{a.high:.2f}), "
        f"[bold]{report.acceptance_length:.2f}[/] tokens a step in decoding\n"
        f"[dim]{m.text}, continued by the target: {m.rows} rows, {m.positions:,} positions; "
        f"{LEVEL:.0%} intervals over rows; floor of draft 1: {report.floor:.0%}[/]"
    )
    return Group("accepted up to this draft; [dim]this one, if all before it were[/]", rows, text)


def bar(share: Estimate) -> str:
    """Return a bar: full up to the low end of the interval, shaded up to the high end."""
    low, high = round(share.low * _BAR_WIDTH), round(share.high * _BAR_WIDTH)
    return "█" * low + "▒" * (high - low) + "·" * (_BAR_WIDTH - high)


def _comparisons_table(r: Round, report: Report) -> Table:
    better = [c.name for c in r.better.values()]
    worse = [c for c in r.comparisons if c.result == "worse"]
    lines = [
        (f"better: {', '.join(better)}" if better else "no other convention does better")
        + f"; {len(r.comparisons)} tried. Drafts accepted a position; intervals are paired over "
        f"{report.measured.rows} rows and hold together at {FIRST_LEVEL:.0%} (Bonferroni: "
        f"{r.level:.2%} each); better: all above 0, and {MATERIAL:.0%} more tokens a step.",
        f"worse, and not shown: {len(worse)}",
        *(f"left out: {reason}" for reason in r.left_out),
    ]
    table = Table(
        title=Line(f"other conventions, against: {r.in_force}"),
        caption=Line("\n".join(lines)),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("convention", "accepted", "tokens a step", "interval", ""):
        table.add_column(name, justify="right" if name in ("accepted", "tokens a step") else "left")
    again = [dataclasses.replace(c, name=f"{c.name}, on more text") for c in r.again]
    for c in (*(c for c in r.comparisons if c not in worse), *again):
        g = c.gain
        style = "bold red" if c.better else ""
        values = (f"{c.accepted:.2f}", f"{g.mean:+.1%}", f"{g.low:+.1%} to {g.high:+.1%}", c.result)
        table.add_row(Line(c.name), *values, style=style)
    return table


def _difference(d: Difference) -> str:
    return (
        f"row {d.row}, position {d.position}: token {d.plain_token} (logit {d.plain_logit:.5g}) "
        f"became {d.speculative_token} ({d.speculative_logit:.5g}), {d.gap_ulps:.2g} bf16 ulps "
        f"apart: {'a near-tie' if d.near_tie else 'NO near-tie'}"
    )
