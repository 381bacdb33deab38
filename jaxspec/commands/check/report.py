"""What a check found, as JSON and on the terminal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text as Line

from jaxspec.commands.check.conventions import Convention
from jaxspec.commands.check.lossless import Differing
from jaxspec.commands.check.statistics import LEVEL, MATERIAL, Estimate, Round
from jaxspec.commands.startup import versions

_BAR_WIDTH = 32


@dataclass(frozen=True)
class Findings:
    """Everything that was found.

    Attributes:
      by_position: share of anchors whose drafts 1 to j were all accepted, for j = 1, 2, ...
      accepted: drafts accepted an anchor, each position of the text being one.
      acceptance_length: tokens a verify step of decoding itself, over all steps.
      problems: what is wrong and what to change; none when the pair is sound.
    """

    target: str
    drafter: str
    dtype: str
    device: str
    text: str
    rows: int
    anchors: int
    new_tokens: int
    num_draft_tokens: int
    batch_size: int
    replay_bytes: int
    conventions: list[Convention]
    by_position: list[Estimate]
    accepted: Estimate
    acceptance_length: float
    rounds: list[Round]
    differing: list[Differing]
    floor: float
    problems: list[str]

    @property
    def verdict(self) -> str:
        if self.problems:
            return f"not sound: {'; '.join(self.problems)}"
        return (
            f"sound: {self.by_position[0].mean:.0%} of first drafts are accepted, "
            f"{self.acceptance_length:.2f} tokens a step, no other convention does better, and the output "
            "is that of plain decoding"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all values, and what they depend on."""
        return {
            **dataclasses.asdict(self),
            "confidence": LEVEL,
            "correction": "Bonferroni, over the comparisons of a round",
            "material": MATERIAL,
            "sound": not self.problems,
            "verdict": self.verdict,
            "versions": versions("jax", "jaxlib", "flax", "numpy"),
        }


# --- on the terminal ---------------------------------------------------------------------------------


def shown(found: Findings) -> Group:
    """Return the report for a terminal, 80 columns wide, the verdict last."""
    lossless = "greedy speculative decoding wrote every row as plain decoding did"
    if found.differing:
        lossless = f"rows that differ from plain decoding: {len(found.differing)}"
    verdict = Line(found.verdict, "bold red" if found.problems else "bold green")
    return Group(
        Line(f"{found.target} + {found.drafter} · {found.dtype} on {found.device}", "bold"),
        _conventions_table(found),
        _acceptance_chart(found),
        *(_comparisons_table(r, found) for r in found.rounds),
        Line(f"{lossless} ({found.dtype})", "" if found.differing else "green"),
        *(Line(f"  {_difference(d)}") for d in found.differing),
        Line(
            f"held beside the weights while reading: {decimal(found.replay_bytes)} of K/V and features for "
            f"a batch of {min(found.batch_size, found.rows)} rows",
            "dim",
        ),
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
    """Draw the share of anchors at which drafts 1 to j were all accepted, for each j."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    for j, share in enumerate(found.by_position, 1):
        interval = f" {share.mean:4.0%}  ({share.low:.0%}-{share.high:.0%})"
        rows.add_row(f"draft {j}", Line(bar(share), "green").append(interval, ""))
    a = found.accepted
    text = (
        f"[bold]{a.mean:.2f}[/] drafts accepted a position ({a.low:.2f}-{a.high:.2f}), "
        f"[bold]{found.acceptance_length:.2f}[/] tokens a step in decoding\n"
        f"[dim]{found.text}, continued by the target: {found.rows} rows, {found.anchors:,} positions; "
        f"{LEVEL:.0%} intervals over rows; floor of draft 1: {found.floor:.0%}[/]"
    )
    return Group("accepted up to this draft", rows, text)


def bar(share: Estimate) -> str:
    """Draw a share: full up to the low end of its interval, shaded up to the high end."""
    low, high = round(share.low * _BAR_WIDTH), round(share.high * _BAR_WIDTH)
    return "█" * low + "▒" * (high - low) + "·" * (_BAR_WIDTH - high)


def _comparisons_table(r: Round, found: Findings) -> Table:
    better = [c.name for c in r.comparisons if c.better]
    lines = [
        (f"better: {', '.join(better)}" if better else "no other convention does better")
        + f". Drafts accepted a position; intervals are paired over {found.rows} rows and hold together "
        f"at {LEVEL:.0%} (Bonferroni: {r.level:.1%} each); better: all above 0, and {MATERIAL:.0%} more "
        "tokens a step.",
        *(f"left out: {reason}" for reason in r.left_out),
    ]
    table = Table(
        title=Line(f"other conventions, against: {r.in_force}"),
        caption=Line("\n".join(lines)),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("convention", "accepted", "difference", "interval", ""):
        table.add_column(name, justify="right" if name in ("accepted", "difference") else "left")
    for c in r.comparisons:
        d = c.difference
        word = "better" if c.better else "worse" if d.high < 0 else "no difference"
        word = "higher" if d.low > 0 and not c.better else word
        style = {"better": "bold red", "worse": "dim"}.get(word, "")
        values = (f"{c.accepted:.2f}", f"{d.mean:+.3f}", f"{d.low:+.3f} to {d.high:+.3f}", word)
        table.add_row(Line(c.name), *values, style=style)
    return table


def _difference(d: Differing) -> str:
    return (
        f"row {d.row}, position {d.position}: token {d.plain_token} (logit {d.plain_logit:.5g}) became "
        f"{d.speculative_token} ({d.speculative_logit:.5g}), {d.gap_ulps:.2g} bf16 ulps apart: "
        f"{'a near-tie' if d.near_tie else 'NO near-tie'}"
    )
