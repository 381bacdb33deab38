"""How sure the numbers of a check are: intervals, and readings of a drafter held against each other.

Whole rows, not positions, are what is counted: neighbouring positions are no independent evidence.

Readings are compared by the logarithm of the tokens of a step, row by row: rows differ five times in their drafts,
and their ratios much less, so that fewer rows decide. On the bundled pair this is worth as much as twice the rows.

What the first text leaves open is measured on a second one, which no choice was made on (`search`).

How often a sound pair is called unsound: at most 1 of 40 checks finds another reading better than it is. The
intervals of all readings on the first text hold together at `FIRST_LEVEL`, those of the few on the second text at
`SECOND_LEVEL`. They are wrong on the upper side half as often: 1/50 and 1/200 of all checks. What is found must also
be `MATERIAL`. The same rate holds, each by itself, for a collapse at some depth (`collapse`, `fallen`) and for a
loss against a record (`reference.compared`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxspec.commands.check.conventions import Reading

LEVEL = 0.95  # of confidence, of both texts together
FIRST_LEVEL = 0.96  # for all comparisons of a round on the first text
SECOND_LEVEL = 0.99  # for those of a round on the second text

MATERIAL = 0.03
"""What another convention must add to the tokens of a step, as a share, before it is called better."""


@dataclass(frozen=True)
class Estimate:
    """A mean over rows, with the interval that holds it at some level of confidence."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, rows: np.ndarray, level: float = LEVEL) -> Estimate:
        """Estimate from one number a row, by Student's t."""
        mean = float(rows.mean())
        error = float(rows.std(ddof=1)) / math.sqrt(len(rows))
        reach = student_t(level, len(rows) - 1) * error
        return cls(mean, mean - reach, mean + reach)

    def within(self, low: float, high: float) -> Estimate:
        """Cut the interval to what is possible."""
        return Estimate(self.mean, max(self.low, low), min(self.high, high))


@functools.cache  # a round asks for one level and one number of rows, again and again
def student_t(level: float, degrees: int) -> float:
    """Return t such that this share of Student's distribution lies between -t and t."""
    low, high = 0.0, 1e3
    while high - low > 1e-4:
        t = (low + high) / 2
        outside = float(jax.scipy.special.betainc(degrees / 2, 0.5, degrees / (degrees + t * t)))
        low, high = (low, t) if 1 - outside > level else (t, high)
    return high


def row_means(values: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Return the mean of each row over its anchors."""
    return (values * anchors).sum(axis=1) / anchors.sum(axis=1)


def conditional(accepted: np.ndarray, anchors: np.ndarray, depth: int, level: float) -> Depth:
    """Estimate the share of drafts at a depth that are accepted where all before them were.

    Rows reach a depth unequally often, so this is the ratio of two sums over rows; its error is that
    of each row's distance from the common ratio.

    Args:
      accepted: drafts accepted at each anchor, [R, A].
      depth: 1 for first drafts.
    """
    reached = ((accepted >= depth - 1) & anchors).sum(axis=1)
    passed = ((accepted >= depth) & anchors).sum(axis=1)
    rows, total = int((reached > 0).sum()), int(reached.sum())
    if rows < 2:
        return Depth(depth, total, rows, Estimate(passed.sum() / max(total, 1), 0.0, 1.0))
    share = float(passed.sum() / total)
    scatter = float(np.square(passed - share * reached).sum()) * rows / (rows - 1)
    reach = student_t(level, rows - 1) * math.sqrt(scatter) / total
    return Depth(depth, total, rows, Estimate(share, share - reach, share + reach).within(0, 1))


@dataclass(frozen=True)
class Depth:
    """How drafts fare at one depth, where all drafts before them were accepted.

    Attributes:
      positions, rows: how many positions of the text, and rows of it, reached this depth.
    """

    depth: int
    positions: int
    rows: int
    share: Estimate


def by_depth(accepted: np.ndarray, anchors: np.ndarray, num_draft_tokens: int) -> list[Depth]:
    """Estimate every depth; all intervals hold together at `FIRST_LEVEL`."""
    level = 1 - (1 - FIRST_LEVEL) / num_draft_tokens
    depths = range(1, num_draft_tokens + 1)
    return [conditional(accepted, anchors, depth, level) for depth in depths]


FEWEST_POSITIONS = 20  # that must reach a depth before anything is said of it


def collapse(depths: Sequence[Depth], floor: float) -> Depth | None:
    """Return the first depth past 1 at which drafts are below the floor for sure, and far below the first."""
    first = depths[0].share.mean
    for d in depths[1:]:
        if d.positions >= FEWEST_POSITIONS and d.share.high < min(floor, first / 2):
            return d
    return None


FALL = 2 / 3
"""Drafts fall at a depth if less than this share as many are accepted as at the depth before it, where all drafts
before them were. In the bundled pairs a depth that was trained has 0.9 of the one before, and the first that was not
has 0.4."""


def doubtful(depths: Sequence[Depth]) -> int | None:
    """Return the first depth past 1 where drafts seem to fall; a second text has to say whether they do."""
    for before, d in itertools.pairwise(depths):
        if d.positions >= FEWEST_POSITIONS and d.share.mean < FALL * before.share.mean:
            return d.depth
    return None


def fallen(accepted: np.ndarray, anchors: np.ndarray, depth: int, level: float) -> Depth | None:
    """Return a depth past 1 if drafts fall there for sure, else None.

    Both shares are ratios of sums over rows, as in `conditional`. A row's part in the error of their difference is
    its distance from both.

    Args:
      accepted: drafts accepted at each anchor, [R, A], of a text on which the depth was not chosen.
      level: of confidence, for this one question.
    """
    found = conditional(accepted, anchors, depth, level)
    if found.rows < 2 or found.positions < FEWEST_POSITIONS:
        return None
    twice, once, reached = (
        ((accepted >= d) & anchors).sum(axis=1) for d in (depth, depth - 1, depth - 2)
    )
    share, before = twice.sum() / once.sum(), once.sum() / reached.sum()
    errors = (twice - share * once) / once.sum() - FALL * (once - before * reached) / reached.sum()
    scatter = float(np.square(errors).sum()) * found.rows / (found.rows - 1)
    reach = student_t(level, found.rows - 1) * math.sqrt(scatter)
    return found if share - FALL * before + reach < 0 else None


# --- readings against each other ---------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Another reading against the one in force, on the same rows.

    Attributes:
      accepted: drafts a step under it.
      difference: of these, to the reading in force.
      gain: of the tokens of a step, as a share; it decides.
      rows: how many both were replayed on.
      better: the gain is above zero for sure, and large enough to matter.
      found: "better"; "higher" or "lower", but not enough to matter; "worse"; "no measurable difference": the interval
        holds 0, and the gain is less than what matters; "undecided": it is more, and 0 is possible.
    """

    name: str
    field: str
    fix: str
    accepted: float
    first_accepted: float
    difference: Estimate
    gain: Estimate
    rows: int
    better: bool
    found: str


@dataclass(frozen=True)
class Round:
    """One reading against its alternatives; a second round starts from the best of the first.

    Attributes:
      level: of each interval, so that all of them hold at `FIRST_LEVEL`.
      again: the comparisons that are `open`, on the second text; empty without one.
    """

    in_force: str
    comparisons: list[Comparison]
    left_out: list[str]
    level: float
    again: list[Comparison] = dataclasses.field(default_factory=list)

    @property
    def open(self) -> list[int]:
        """What the first text leaves open: which of several is best, or whether one is better at all."""
        if any(c.better for c in self.comparisons):
            better = _near_best({i: c for i, c in enumerate(self.comparisons) if c.better})
            return better if len(better) > 1 else []
        return [
            i
            for i, c in enumerate(self.comparisons)
            if c.found == "undecided" and c.gain.mean >= MATERIAL
        ]

    @property
    def better(self) -> dict[int, Comparison]:
        """The better ones, each with the comparison that says so."""
        first = {i: c for i, c in enumerate(self.comparisons) if c.better}
        second = dict(zip(self.open, self.again, strict=True)) if self.again else {}
        if first:  # what a second text says of them is which is best
            return second or first
        return {i: c for i, c in second.items() if c.better}

    @property
    def as_good(self) -> list[int]:
        """The better ones that are as good as the best, the most usual first."""
        return _near_best(self.better)


def _near_best(better: Mapping[int, Comparison]) -> list[int]:
    tokens = {i: 1 + c.gain.mean for i, c in better.items()}
    enough = (1 - MATERIAL) * max(tokens.values(), default=0.0)
    return [i for i, of in tokens.items() if of >= enough]


def compare(
    reading: Reading,
    others: Sequence[Reading],
    accepted: Mapping[Any, np.ndarray],
    masks: Sequence[np.ndarray],
    level: float,
) -> list[Comparison]:
    """Hold other readings against one, row by row.

    Args:
      accepted: of each reading, drafts accepted at each anchor, [R, A]; of a hopeless one, of the first rows.
      masks: the anchors that each of the others can be compared at.
      level: of each interval.
    """
    comparisons = []
    for other, mask in zip(others, masks, strict=True):
        drafts, base = accepted[other.key], accepted[reading.key]
        count = min(len(drafts), len(base))
        hopeless = count < len(mask)
        rows = mask[:count].any(axis=1)
        drafts, base, at = drafts[:count][rows], base[:count][rows], mask[:count][rows]
        there, here = row_means(drafts, at), row_means(base, at)
        gain = gained(here, there, level)
        comparisons.append(
            Comparison(
                other.name,
                other.field,
                other.fix,
                float(there.mean()),
                float(row_means(drafts >= 1, at).mean()),
                Estimate.of(there - here, level),
                gain,
                len(there),
                better=not hopeless and worded(gain) == "better",
                found="worse" if hopeless else worded(gain),
            )
        )
    return comparisons


def gained(here: np.ndarray, there: np.ndarray, level: float = LEVEL) -> Estimate:
    """Estimate how many more tokens a step has there, as a share, from each row's accepted drafts."""
    logs = Estimate.of(np.log1p(there) - np.log1p(here), level)
    return Estimate(*(math.expm1(x) for x in (logs.mean, logs.low, logs.high)))


def worded(gain: Estimate) -> str:
    """Put a gain into words; see `Comparison.found`."""
    if gain.low > 0 and gain.mean >= MATERIAL:
        return "better"
    if gain.low > 0:
        return "higher"
    if gain.high < 0:
        return "worse" if gain.mean <= -MATERIAL else "lower"
    return "no measurable difference" if abs(gain.mean) < MATERIAL else "undecided"


def figures(gain: Estimate) -> str:
    """Show a gain and its interval."""
    return f"{gain.mean:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"
