"""What a check found, as JSON and on the terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text as Line

from jaxspec.commands.check.conventions import Convention
from jaxspec.commands.check.lossless import Differing
from jaxspec.commands.check.reference import Reference
from jaxspec.commands.check.statistics import (
    FIRST_LEVEL,
    LEVEL,
    MATERIAL,
    SECOND_LEVEL,
    Estimate,
    Round,
)
from jaxspec.commands.check.verdict import Evidence, Finding
from jaxspec.commands.startup import versions

_BAR_WIDTH = 32


@dataclass(frozen=True)
class Findings:
    """Everything that was found.

    Attributes:
      by_position: share of anchors whose drafts 1 to j were all accepted, for j = 1, 2, ...
      accepted: drafts accepted an anchor, each position of the text being one.
      acceptance_length: tokens a verify step of decoding itself, over all steps.
      measured: what `--record` writes, and where it was measured.
      findings: what is wrong and what to change, then what is worth knowing.
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
    rounds: list[Round]
    evidence: Evidence
    measured: Reference
    findings: list[Finding]
    recorded: str | None = None

    @property
    def problems(self) -> list[str]:
        """What is wrong; nothing when the pair is sound."""
        return [f.text for f in self.findings if not f.sound]

    @property
    def verdict(self) -> str:
        if self.problems:
            return f"not sound: {'; '.join(self.problems)}"
        return (
            f"sound: {self.by_position[0].mean:.0%} of first drafts are accepted, "
            f"{self.acceptance_length:.2f} tokens a step, no other convention does better "
            f"({self.evidence.tried} tried), and the output is that of plain decoding"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all values, and what they depend on."""
        e, m = self.evidence, self.measured
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del own["evidence"]
        values = {
            **own,
            "dtype": m.dtype,
            "device": m.device,
            "text": m.text,
            "rows": m.rows,
            "anchors": m.positions,
            "new_tokens": m.new_tokens,
            "num_draft_tokens": m.num_draft_tokens,
            "by_depth": e.depths,
            "fallen": e.fallen,
            "tried": e.tried,
            "oddities": e.oddities,
            "reference": e.against,
            "differing": e.differing,
            "floor": e.floor,
            "problems": self.problems,
            "confidence": LEVEL,
            "confidence_first": FIRST_LEVEL,
            "confidence_again": SECOND_LEVEL,
            "correction": "Bonferroni, over the comparisons of a round on one text",
            "material": MATERIAL,
            "sound": not self.problems,
            "verdict": self.verdict,
            "versions": versions("jax", "jaxlib", "flax", "numpy"),
        }
        return _as_json(values)


def _as_json(value: Any) -> Any:
    """Return records as objects. A number that is not finite has no form in JSON, and becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _as_json(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- on the terminal ---------------------------------------------------------------------------------


def shown(found: Findings) -> Group:
    """Return the report for a terminal, 80 columns wide, the verdict last."""
    differing, m = found.evidence.differing, found.measured
    lossless = "greedy speculative decoding wrote every row as plain decoding did"
    if differing:
        lossless = f"rows that differ from plain decoding: {len(differing)}"
    verdict = Line(found.verdict, "bold red" if found.problems else "bold green")
    return Group(
        Line(f"{found.target} + {found.drafter} · {m.dtype} on {m.device}", "bold"),
        _conventions_table(found),
        _acceptance_chart(found),
        *(_comparisons_table(r, found) for r in found.rounds),
        Line(f"{lossless} ({m.dtype})", "" if differing else "green"),
        *(Line(f"  {_difference(d)}") for d in differing),
        Line(
            f"held beside the weights while reading: {decimal(found.replay_bytes)} of K/V and features for "
            f"a batch of {min(found.batch_size, m.rows)} rows",
            "dim",
        ),
        *(Line(f"note: {f.text}") for f in found.findings if f.sound),
        *([] if found.recorded is None else [Line(f"recorded in {found.recorded}")]),
        "",
        verdict,
    )


def _conventions_table(found: Findings) -> Table:
    table = Table(title="conventions in force", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("convention", "value", "set by"):
        table.add_column(name, overflow="fold", style="dim" if name == "set by" else "")
    for c in found.conventions:
        table.add_row(c.name, Line(c.shown), Line(c.origin))
    return table


def _acceptance_chart(found: Findings) -> Group:
    """Draw the share of anchors at which drafts 1 to j were all accepted, for each j; then draft j's own."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    for share, d in zip(found.by_position, found.evidence.depths, strict=True):
        interval = f" {share.mean:4.0%}  ({share.low:.0%}-{share.high:.0%})"
        own = Line(f"{d.share.mean:4.0%}  ({d.share.low:.0%}-{d.share.high:.0%})", "dim")
        rows.add_row(f"draft {d.depth}", Line(bar(share), "green").append(interval, ""), own)
    a, m = found.accepted, found.measured
    text = (
        f"[bold]{a.mean:.2f}[/] drafts accepted a position ({a.low:.2f}-{a.high:.2f}), "
        f"[bold]{found.acceptance_length:.2f}[/] tokens a step in decoding\n"
        f"[dim]{m.text}, continued by the target: {m.rows} rows, {m.positions:,} positions; "
        f"{LEVEL:.0%} intervals over rows; floor of draft 1: {found.evidence.floor:.0%}[/]"
    )
    return Group("accepted up to this draft; [dim]this one, if all before it were[/]", rows, text)


def bar(share: Estimate) -> str:
    """Draw a share: full up to the low end of its interval, shaded up to the high end."""
    low, high = round(share.low * _BAR_WIDTH), round(share.high * _BAR_WIDTH)
    return "█" * low + "▒" * (high - low) + "·" * (_BAR_WIDTH - high)


def _comparisons_table(r: Round, found: Findings) -> Table:
    better = [c.name for c in r.better.values()]
    worse = [c for c in r.comparisons if c.found == "worse"]
    lines = [
        (f"better: {', '.join(better)}" if better else "no other convention does better")
        + f"; {len(r.comparisons)} tried. Drafts accepted a position; intervals are paired over "
        f"{found.measured.rows} rows and hold together at {FIRST_LEVEL:.0%} (Bonferroni: {r.level:.2%} each); "
        f"better: all above 0, and {MATERIAL:.0%} more tokens a step.",
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
        values = (f"{c.accepted:.2f}", f"{g.mean:+.1%}", f"{g.low:+.1%} to {g.high:+.1%}", c.found)
        table.add_row(Line(c.name), *values, style=style)
    return table


def _difference(d: Differing) -> str:
    return (
        f"row {d.row}, position {d.position}: token {d.plain_token} (logit {d.plain_logit:.5g}) became "
        f"{d.speculative_token} ({d.speculative_logit:.5g}), {d.gap_ulps:.2g} bf16 ulps apart: "
        f"{'a near-tie' if d.near_tie else 'NO near-tie'}"
    )
