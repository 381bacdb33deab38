"""The report of a check: numbers and findings, as JSON and for the terminal.

Read `Report`. `find` derives the findings: each names what is wrong and how to fix it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text as Line

from jaxspec.commands.check.hypotheses import Convention
from jaxspec.commands.check.reference import (
    Oddity,
    Reference,
    ReferenceComparison,
    as_sentence,
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
from jaxspec.engine.request import Completion
from jaxspec.registry import Conventions

_BAR_WIDTH = 32

USEFUL = 0.1
"""Least share of the tokens per step that trained numbers lose when they are reordered. Those of
the bundled assistant lose a third."""


NEAR_TIE_GAP = 1e-4  # float32: closer logits may swap when a pass has another shape
NEAR_TIE_ULPS = 4  # bfloat16: likewise, in units of the last place of the larger logit


@dataclass(frozen=True)
class Difference:
    """The first token of a row in which speculative decoding differs from plain decoding.

    Attributes:
      position: of the token in its row.
      gap: between the target's logits of the two tokens, when it reads the row again.
      gap_ulps: the same in units of bfloat16's last place.
    """

    row: int
    position: int
    plain_token: int
    speculative_token: int
    plain_logit: float
    speculative_logit: float
    gap: float
    gap_ulps: float
    near_tie: bool

    @classmethod
    def of(
        cls, row: int, position: int, tokens: tuple[int, int], logits: np.ndarray, dtype: str
    ) -> Difference:
        plain, speculative = (float(logits[token]) for token in tokens)
        gap = abs(plain - speculative)
        largest = max(abs(plain), abs(speculative), float(jnp.finfo(jnp.bfloat16).tiny))
        ulps = gap / 2.0 ** (math.floor(math.log2(largest)) - jnp.finfo(jnp.bfloat16).nmant)
        near = gap < NEAR_TIE_GAP if dtype == "float32" else ulps <= NEAR_TIE_ULPS
        return cls(row, position, *tokens, plain, speculative, gap, ulps, near)


def first_differences(
    plain: Sequence[Completion], speculative: Sequence[Completion]
) -> dict[int, int]:
    """Return, for each row that differs, the number of tokens that agree before it does."""
    differences = {}
    for row, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            differences[row] = next(i for i, (a, b) in enumerate(pairs) if a != b)
    return differences


@dataclass(frozen=True)
class Finding:
    """A finding of a check, in whole sentences.

    Attributes:
      kind: its source: the floor of first drafts, deeper drafts, another convention, a look at the
        weights, the record of the drafter's maker, or the comparison with plain decoding.
      harmless: it is worth knowing, but no reason to reject the pair.
    """

    kind: Literal["floor", "depth", "convention", "weights", "reference", "lossless"]
    text: str
    harmless: bool = dataclasses.field(default=False, metadata={"json": "sound"})


def _hidden(name: str = "") -> Any:
    """Declare a field that JSON does not have, or has under another name."""
    return dataclasses.field(metadata={"json": name})


@dataclass(frozen=True, kw_only=True)
class Report:
    """The numbers of a check, in the order of the JSON.

    Attributes:
      replay_bytes: of K/V and features of a batch while replaying.
      by_position: share of anchors whose drafts 1 to j were all accepted, for j = 1, 2, ...
      accepted: drafts accepted per anchor; every position of the text is one.
      acceptance_length: tokens per verify step in decoding, over all steps.
      measured: the record that `--record` writes.
      depths: of the hypothesis in force.
      fallen: the depth from which on hardly any draft is accepted; None if there is none.
      comparison: with the maker's record; None without one.
      best_first: share of first drafts accepted after all changes of the search.
      family: the conventions of the drafter's family; None if it has none.
      recorded: the file that the measurement was written to; None for none.
    """

    target: str
    drafter: str
    batch_size: int
    replay_bytes: int
    conventions: list[Convention]
    by_position: list[Estimate]
    accepted: Estimate
    acceptance_length: float
    measured: Reference
    depths: Sequence[Depth] = _hidden("by_depth")
    fallen: Depth | None
    oddities: Sequence[Oddity]
    comparison: ReferenceComparison | None = _hidden("reference")
    differing: Sequence[Difference]
    floor: float
    best_first: float = _hidden()
    search: SearchResult = _hidden()
    family: Conventions | None = _hidden()
    recorded: str | None = None

    @property
    def rounds(self) -> list[Round]:
        """The rounds of the search."""
        return self.search.rounds

    @property
    def tried(self) -> int:
        """The number of other conventions compared with the one in force."""
        return len(self.rounds[0].comparisons)

    @functools.cached_property
    def findings(self) -> list[Finding]:
        """The problems and their fixes, then what is worth knowing."""
        return sorted(find(self), key=lambda finding: finding.harmless)

    @property
    def problems(self) -> list[str]:
        """The problems; empty if the pair fits."""
        return [f.text for f in self.findings if not f.harmless]

    @property
    def conclusion(self) -> str:
        """The result of the check."""
        if self.problems:
            return " ".join(("Not sound.", *self.problems))
        return (
            f"Sound: {self.by_position[0].mean:.0%} of first drafts are accepted, and a step makes "
            f"{self.acceptance_length:.2f} tokens. No other convention does better ({self.tried} "
            "were tried). The output is that of plain decoding."
        )

    def to_json(self) -> dict[str, Any]:
        """Return all values and their conditions as JSON values."""
        m = self.measured
        values = _as_json(self) | {
            "rounds": self.rounds,
            "findings": self.findings,
            "dtype": m.dtype,
            "device": m.device,
            "text": m.text,
            "rows": m.rows,
            "anchors": m.positions,
            "new_tokens": m.new_tokens,
            "num_draft_tokens": m.num_draft_tokens,
            "tried": self.tried,
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
        names = {f.name: f.metadata.get("json", f.name) for f in dataclasses.fields(value)}
        return {name: _as_json(getattr(value, field)) for field, name in names.items() if name}
    if isinstance(value, Mapping):
        return {key: _as_json(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- findings ------------------------------------------------------------------------------------


def find(r: Report) -> Iterator[Finding]:
    """Yield the problems of a pair with their fixes, and what is worth knowing."""
    changes = r.search.changes if r.best_first >= min(r.depths[0].share.mean, r.floor) else []
    comparison, leads = r.comparison, _record_leads(r, changes)
    lost = comparison is not None and comparison.result == "worse"
    yield from (Finding("weights", as_sentence(o.text), not o.wrong) for o in r.oddities)
    about = []
    if comparison is not None:
        harmless = not lost and not (leads and changes)
        about = [Finding("reference", describe_comparison(comparison), harmless)]
    if leads:
        yield from about
    first = r.depths[0].share.mean
    if first < r.floor:
        text = f"{first:.0%} of first drafts are accepted, below the floor of {r.floor:.0%}."
        yield Finding("floor", text)
    if r.fallen is not None:
        yield Finding("depth", _fall(r, r.fallen))
    useless = [] if leads else list(_useless(r))
    yield from useless
    for change, round_ in zip(changes, r.rounds, strict=False):
        symptom = leads and not _was_changed(r, change.field)
        yield Finding("convention", _change(change, round_, symptom=symptom), symptom)
    low = first < r.floor or r.fallen is not None
    if low and not (useless or changes or lost or any(o.wrong for o in r.oddities)):
        yield Finding("convention", _unexplained(r))
    if not leads:
        yield from about
    yield from _lossy(r.differing)
    if same := no_difference(r.rounds[0]):
        yield Finding("convention", same, harmless=True)


def _record_leads(r: Report, changes: Sequence[Comparison]) -> bool:
    """Return whether the record has a larger cause than the search.

    Something differs from the record, and so does acceptance, and what the search found does not
    bring back even half of that. Then the search has found a symptom: noise in some weights may be
    damped by other norms, and acceptance that rose by chance may rise with a longer block.
    """
    a = r.comparison
    if a is None or a.gain is None or not a.causes or a.result not in ("worse", "better"):
        return False
    now = math.log1p(a.gain.mean)
    return abs(now + sum(math.log1p(c.gain.mean) for c in changes)) > abs(now) / 2


def _was_changed(r: Report, field: str) -> bool:
    """Return whether a field of the drafter's config is another than in the record."""
    assert r.comparison is not None
    then, now = (m.drafter_config for m in (r.comparison.reference, r.measured))
    return field in then and field in now and then[field] != now[field]


def _fall(r: Report, fallen: Depth) -> str:
    """Return the draft from which on hardly any is accepted, and a likely cause."""
    at, share, family = fallen.depth, fallen.share, r.family
    text = (
        f"From draft {at} on, {share.mean:.0%} are accepted ({share.low:.0%}-{share.high:.0%}) "
        "where all before them were."
    )
    if at == 2 and family is not None and family.later_only:
        text += (
            f" Only later drafts depend on {family.later_only}: get the drafter's weights again."
        )
    elif at > 2 and family is not None and family.shortened:
        text += f" The drafter was trained for blocks of {at}: set {family.shortened} to {at}."
    elif at > 2:
        text += f" Draft {at - 1} tokens at most: --num-draft-tokens {at - 1}."
    return text


def _useless(r: Report) -> Iterator[Finding]:
    """Yield a finding if the parameter of later drafts does as well with reordered numbers."""
    weight = r.family.later_only if r.family and len(r.depths) > 1 else None
    for c in r.rounds[0].comparisons:
        if c.field == weight and c.result != "worse" and c.gain.low > -USEFUL:
            text = (
                f"{c.field} carries nothing: its numbers in reverse order make "
                f"{format_gain(c.gain)} tokens a step. Get the drafter's weights again."
            )
            yield Finding("depth", text)


def _change(change: Comparison, round_: Round, *, symptom: bool) -> str:
    """Return the gain of a change; then its fix, and the changes that gain as much."""
    tokens, more = 1 + change.accepted, change.difference.mean
    text = (
        f"{as_sentence(change.name)[:-1]}: {more:+.2f} drafts a step, {tokens:.2f} tokens instead "
        f"of {tokens - more:.2f}"
    )
    if symptom:
        return f"{text}. That is an effect of what differs from the record, and does not mend it."
    also = [round_.comparisons[i].name for i in round_.as_good]
    as_good = ", ".join(name for name in also if name != change.name)
    note = f" As good on this text: {as_good}." if as_good else ""
    return f"{text}; {change.fix}.{note}"


def _unexplained(r: Report) -> str:
    text = (
        f"No other convention explains it ({r.tried} were tried): the drafter is another target's, "
        "its weights are damaged, or it was not trained for such text (give other text with --text)."
    )
    if r.comparison is None:
        text += " It has no record of what its maker measured (check --record writes one)."
    return text


def no_difference(round_: Round) -> str:
    """Return the conventions that this text cannot tell from the one in force, with their gains."""
    same = [c for c in round_.comparisons if c.result == "no measurable difference"]
    shown = ", ".join(f"{c.name} {format_gain(c.gain)}" for c in same)
    limit = f"no measurable difference (of {MATERIAL:.0%} of the tokens of a step)"
    return f"{limit}: {shown}" if same else ""


def _lossy(differing: Sequence[Difference]) -> Iterator[Finding]:
    wrong = [d for d in differing if not d.near_tie]
    if wrong:
        d = wrong[0]
        text = (
            f"Rows that differ from plain decoding by more than a near-tie: {len(wrong)}, the first "
            f"at position {d.position} of row {d.row}. This is a bug of ours or of the device, "
            "whatever the drafter. Please report it."
        )
        yield Finding("lossless", text)


# --- on the terminal -----------------------------------------------------------------------------


def render(report: Report) -> Group:
    """Return the report for a terminal of 80 columns, the conclusion last."""
    differing, m = report.differing, report.measured
    lossless = "Greedy speculative decoding wrote every row as plain decoding did"
    if differing:
        lossless = f"Rows that differ from plain decoding: {len(differing)}"
    in_table = no_difference(report.rounds[0])
    return Group(
        Line(f"{report.target} + {report.drafter} · {m.dtype} on {m.device}", "bold"),
        _conventions_table(report),
        _acceptance_chart(report),
        *(_comparisons_table(r, report) for r in report.rounds),
        Line(f"{lossless} ({m.dtype}).", "" if differing else "green"),
        *(Line(f"  {_difference(d)}") for d in differing),
        Line(
            f"Reading held {decimal(report.replay_bytes)} of K/V and features beside the weights, "
            f"for a batch of {min(report.batch_size, m.rows)} rows.",
            "dim",
        ),
        *(Line(f"note: {f.text}") for f in report.findings if f.harmless and f.text != in_table),
        *([] if report.recorded is None else [Line(f"Recorded in {report.recorded}.")]),
        "",
        Line(report.conclusion, "bold red" if report.problems else "bold green"),
    )


def _table(title: str, caption: str = "", **columns: str) -> Table:
    """Return a table with a caption below; `columns` are headings and their styles."""
    table = Table(
        title=Line(title),
        caption=Line(caption) if caption else None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name, style in columns.items():
        justify = "right" if style == "number" else "left"
        style = "" if style == "number" else style
        table.add_column(name.replace("_", " "), overflow="fold", style=style, justify=justify)
    return table


def _conventions_table(report: Report) -> Table:
    table = _table("conventions in force", convention="", value="", set_by="dim")
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
        f"[bold]{a.mean:.2f}[/] drafts are accepted a position ({a.low:.2f}-{a.high:.2f}). Decoding "
        f"makes [bold]{report.acceptance_length:.2f}[/] tokens a step.\n"
        f"[dim]The target continued {m.text}: {m.rows} rows, {m.positions:,} positions. Intervals "
        f"are over rows, at {LEVEL:.0%}. The floor of draft 1 is {report.floor:.0%}.[/]"
    )
    return Group("accepted up to this draft; [dim]this one, if all before it were[/]", rows, text)


def bar(share: Estimate) -> str:
    """Return a bar: full up to the low end of the interval, shaded up to the high end."""
    low, high = round(share.low * _BAR_WIDTH), round(share.high * _BAR_WIDTH)
    return "█" * low + "▒" * (high - low) + "·" * (_BAR_WIDTH - high)


def _comparisons_table(r: Round, report: Report) -> Table:
    better = ", ".join(c.name for c in r.better.values())
    worse = [c for c in r.comparisons if c.result == "worse"]
    lines = [
        f"{len(r.comparisons)} were tried, and "
        + (f"these are better: {better}." if better else "none is better."),
        f"{len(worse)} of them are worse, and not shown.",
        f"Accepted: drafts a position. Intervals are paired over {report.measured.rows} rows and hold together at "
        f"{FIRST_LEVEL:.0%} (Bonferroni: {r.level:.2%} each). A better convention has all of its "
        f"interval above 0, and {MATERIAL:.0%} more tokens a step.",
        *(f"Left out: {reason}." for reason in r.left_out),
    ]
    table = _table(
        f"other conventions, against: {r.in_force}",
        "\n".join(lines),
        convention="",
        accepted="number",
        tokens_a_step="",
        result="",
    )
    again = [dataclasses.replace(c, name=f"{c.name}, on more text") for c in r.again]
    for c in (*(c for c in r.comparisons if c not in worse), *again):
        result = c.result.replace("no measurable difference", "not measurable")
        values = (f"{c.accepted:.2f}", format_gain(c.gain), result)
        table.add_row(Line(c.name), *values, style="bold red" if c.better else "")
    return table


def _difference(d: Difference) -> str:
    return (
        f"row {d.row}, position {d.position}: token {d.plain_token} (logit {d.plain_logit:.5g}) "
        f"became {d.speculative_token} ({d.speculative_logit:.5g}), {d.gap_ulps:.2g} bf16 ulps "
        f"apart: {'a near-tie' if d.near_tie else 'NO near-tie'}"
    )
