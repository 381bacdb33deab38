"""What follows from the numbers of a check: findings, each with what is wrong and what mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxspec.commands.check.lossless import Differing
from jaxspec.commands.check.reference import Against, said
from jaxspec.commands.check.search import Found
from jaxspec.commands.check.statistics import MATERIAL, Comparison, Depth, Round, figures
from jaxspec.commands.check.weights import Oddity
from jaxspec.registry import Conventions

Kind = Literal["floor", "depth", "convention", "weights", "reference", "lossless"]


USEFUL = 0.1
"""Share of the tokens of a step that trained numbers lose at least when they are put in another order. Those of the
bundled assistant lose a third."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
      kind: what found it: the floor of first drafts, deeper drafts, another convention, a look at the
        weights, the record of the drafter's maker, or the comparison with plain decoding.
      sound: it is worth knowing, and no reason to call the pair unsound.
    """

    kind: Kind
    text: str
    sound: bool = False


@dataclass(frozen=True)
class Evidence:
    """All that a verdict rests on.

    Attributes:
      depths: of the reading in force.
      fallen: the depth from which on hardly any draft is accepted; None if there is none.
      best_first: share of first drafts that are accepted after all changes that were found.
      against: None where the drafter has no record.
    """

    depths: Sequence[Depth]
    fallen: Depth | None
    best_first: float
    found: Found
    oddities: Sequence[Oddity]
    against: Against | None
    differing: Sequence[Differing]
    floor: float

    @property
    def tried(self) -> int:
        """How many other conventions were held against the one in force."""
        return len(self.found.rounds[0].comparisons)


def findings(e: Evidence, conventions: Conventions | None) -> list[Finding]:
    """Say what is wrong with a pair, and what to do; then what is worth knowing."""
    changes = e.found.changes if e.best_first >= min(e.depths[0].share.mean, e.floor) else []
    wrong = [*_floor(e), *_depth(e.fallen, conventions)]
    wrong += [Finding("weights", o.text) for o in e.oddities if o.wrong]
    wrong += _useless(e, conventions)
    lost = e.against is not None and e.against.found == "worse"
    for change, round_ in zip(changes, e.found.rounds, strict=False):
        wrong.append(Finding("convention", _change(change, round_)))
    if wrong and not changes and all(f.kind in ("floor", "depth") for f in wrong) and not lost:
        wrong.append(Finding("convention", _unexplained(e)))
    notes = [Finding("weights", o.text, sound=True) for o in e.oddities if not o.wrong]
    if e.against is not None:
        about = Finding("reference", said(e.against), not lost)
        (wrong if lost else notes).append(about)
    wrong += _lossless(e.differing)
    if same := no_difference(e.found.rounds[0]):
        notes.append(Finding("convention", same, sound=True))
    return [*wrong, *notes]


def _floor(e: Evidence) -> list[Finding]:
    first = e.depths[0].share.mean
    if first >= e.floor:
        return []
    text = f"{first:.0%} of first drafts are accepted, below the floor of {e.floor:.0%}"
    return [Finding("floor", text)]


def _depth(fallen: Depth | None, conventions: Conventions | None) -> list[Finding]:
    """Say from which draft on hardly any is accepted, and what that may be."""
    if fallen is None:
        return []
    at, share = fallen.depth, fallen.share
    text = (
        f"from draft {at} on: {share.mean:.0%} are accepted ({share.low:.0%}-{share.high:.0%}) where all before "
        "them were"
    )
    if at == 2 and conventions is not None and conventions.later_only:
        text += f"; only later drafts depend on {conventions.later_only}: get the drafter's weights again"
    elif at > 2 and conventions is not None and conventions.shortened:
        field = conventions.shortened
        text += f"; the drafter was trained for blocks of {at}: set {field} to {at}"
    elif at > 2:
        text += f"; draft {at - 1} tokens at most: --num-draft-tokens {at - 1}"
    return [Finding("depth", text)]


def _change(change: Comparison, round_: Round) -> str:
    """Say what a change brings, how to make it, and which others bring as much."""
    also = [round_.comparisons[i].name for i in round_.as_good]
    as_good = [name for name in also if name != change.name]
    note = f" (as good on this text: {', '.join(as_good)})" if as_good else ""
    there, more = 1 + change.accepted, change.difference.mean
    return (
        f"{change.name}: {more:+.2f} drafts a step, {there:.2f} tokens instead of {there - more:.2f}; "
        f"{change.fix}{note}"
    )


def _useless(e: Evidence, conventions: Conventions | None) -> list[Finding]:
    """Say that the parameter that later drafts depend on does as well with its numbers in another order."""
    if conventions is None or len(e.depths) < 2:
        return []
    return [
        Finding(
            "depth",
            f"{c.field} carries nothing: its numbers in reverse order make {figures(c.gain)} tokens a step; get "
            "the drafter's weights again",
        )
        for c in e.found.rounds[0].comparisons
        if c.field == conventions.later_only and c.found != "worse" and c.gain.low > -USEFUL
    ]


def _unexplained(e: Evidence) -> str:
    text = (
        f"no other convention explains it ({e.tried} tried): the drafter is another target's, its weights are "
        "damaged, or it was not trained for such text (give other text with --text)"
    )
    if e.against is None:
        text += "; it has no record of what its maker measured (check --record writes one)"
    return text


def no_difference(round_: Round) -> str:
    """Name the conventions that this text cannot tell from the one in force, with figures."""
    same = [c for c in round_.comparisons if c.found == "no measurable difference"]
    if not same:
        return ""
    shown = (f"{c.name} {figures(c.gain)}" for c in same)
    return (
        f"no measurable difference (of {MATERIAL:.0%} of the tokens of a step): {', '.join(shown)}"
    )


def _lossless(differing: Sequence[Differing]) -> list[Finding]:
    wrong = [d for d in differing if not d.near_tie]
    if not wrong:
        return []
    d = wrong[0]
    text = (
        f"rows that differ from plain decoding by more than a near-tie: {len(wrong)}, the first at "
        f"position {d.position} of row {d.row}; this is a bug of ours or of the device, whatever the drafter; "
        "please report it"
    )
    return [Finding("lossless", text)]
