"""Confidence intervals for the numbers of a check, over rows.

Rows are counted, not positions: neighbouring positions are not independent.

Hypotheses are compared by the logarithm of tokens per step, row by row. Rows differ fivefold in
accepted drafts but far less in this ratio, so fewer rows decide: on the bundled pair the ratio is
worth twice the rows.

False alarms: at most 1 in 40 checks of a good pair finds another hypothesis better. All intervals
on the first text hold together at `FIRST_LEVEL`, those on the second text at `SECOND_LEVEL`. They
fail on the upper side half as often: in 1/50 and 1/200 of all checks. A gain must also be
`MATERIAL`. The same rate holds for each of these by itself: a collapse at a depth (`collapse`,
`fallen`), and a loss against a record (`reference.compare_with`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95  # of confidence, of both texts together
FIRST_LEVEL = 0.96  # for all comparisons of a round on the first text
SECOND_LEVEL = 0.99  # for those of a round on the second text

MATERIAL = 0.03
"""Least gain in tokens per step, as a share, for a convention to be called better."""

MIN_POSITIONS = 20  # that must reach a depth before it counts

FALL = 2 / 3
"""Drafts fall at a depth whose acceptance is less than this share of the acceptance one depth
before. In the bundled pairs a trained depth has 0.9 of the one before it, and the first untrained
depth 0.4."""


@dataclass(frozen=True)
class Estimate:
    """A mean over rows and its confidence interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, rows: np.ndarray, level: float = LEVEL) -> Estimate:
        """Estimate from one number per row, by Student's t."""
        error = float(rows.std(ddof=1)) / math.sqrt(len(rows))
        return cls.around(float(rows.mean()), student_t(level, len(rows) - 1) * error)

    @classmethod
    def around(cls, mean: float, reach: float) -> Estimate:
        """Return an interval of `reach` to either side."""
        return cls(mean, mean - reach, mean + reach)

    def within(self, low: float, high: float) -> Estimate:
        """Clip the interval to possible values."""
        return Estimate(self.mean, max(self.low, low), min(self.high, high))


def student_t(level: float, degrees: int) -> float:
    """Return t such that a share `level` of Student's distribution lies between -t and t."""
    return float(stdtrit(degrees, (1 + level) / 2))


def row_means(values: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Return the mean of each row over its anchors."""
    return (values * anchors).sum(axis=1) / anchors.sum(axis=1)


# --- depths --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Depth:
    """Acceptance at one depth, where all earlier drafts were accepted.

    Attributes:
      positions, rows: number of positions of the text, and of its rows, that reached this depth.
    """

    depth: int
    positions: int
    rows: int
    share: Estimate


def _reached(accepted: np.ndarray, anchors: np.ndarray, depth: int) -> np.ndarray:
    """Return for each row the number of anchors with so many accepted drafts."""
    return ((accepted >= depth) & anchors).sum(axis=1)


def _reach(errors: np.ndarray, rows: int, level: float) -> float:
    """Return half of the interval of a ratio of sums over rows, given each row's error."""
    scatter = float(np.square(errors).sum()) * rows / (rows - 1)
    return student_t(level, rows - 1) * math.sqrt(scatter)


def conditional(accepted: np.ndarray, anchors: np.ndarray, depth: int, level: float) -> Depth:
    """Estimate the share of drafts at a depth that are accepted where all before them were.

    This is the ratio of two sums over rows, since rows reach a depth unequally often. Its error
    comes from each row's distance from the common ratio.

    Args:
      accepted: drafts accepted at each anchor, [R, A].
      depth: 1 for first drafts.
    """
    reached, passed = (_reached(accepted, anchors, d) for d in (depth - 1, depth))
    rows, total = int((reached > 0).sum()), int(reached.sum())
    share = float(passed.sum()) / max(total, 1)
    if rows < 2:
        return Depth(depth, total, rows, Estimate(share, 0.0, 1.0))
    reach = _reach((passed - share * reached) / total, rows, level)
    return Depth(depth, total, rows, Estimate.around(share, reach).within(0, 1))


def by_depth(accepted: np.ndarray, anchors: np.ndarray, num_draft_tokens: int) -> list[Depth]:
    """Estimate every depth; all intervals hold together at `FIRST_LEVEL`."""
    level = 1 - (1 - FIRST_LEVEL) / num_draft_tokens
    depths = range(1, num_draft_tokens + 1)
    return [conditional(accepted, anchors, depth, level) for depth in depths]


def collapse(depths: Sequence[Depth], floor: float) -> Depth | None:
    """Return the first depth past 1 that is certainly below the floor and half of depth 1."""
    limit = min(floor, depths[0].share.mean / 2)
    low = (d for d in depths[1:] if d.positions >= MIN_POSITIONS and d.share.high < limit)
    return next(low, None)


def doubtful(depths: Sequence[Depth]) -> int | None:
    """Return the first depth past 1 where drafts seem to fall; a second text must confirm it."""
    for before, d in itertools.pairwise(depths):
        if d.positions >= MIN_POSITIONS and d.share.mean < FALL * before.share.mean:
            return d.depth
    return None


def fallen(accepted: np.ndarray, anchors: np.ndarray, depth: int, level: float) -> Depth | None:
    """Return a depth past 1 if drafts certainly fall there, else None.

    Both shares are ratios of sums over rows, as in `conditional`. A row adds its distance from both
    to the error of their difference.

    Args:
      accepted: drafts accepted at each anchor, [R, A], of a text that did not choose the depth.
    """
    at_depth = conditional(accepted, anchors, depth, level)
    if at_depth.rows < 2 or at_depth.positions < MIN_POSITIONS:
        return None
    twice, once, reached = (_reached(accepted, anchors, depth - n) for n in range(3))
    share, before = twice.sum() / once.sum(), once.sum() / reached.sum()
    errors = (twice - share * once) / once.sum() - FALL * (once - before * reached) / reached.sum()
    certain = share - FALL * before + _reach(errors, at_depth.rows, level) < 0
    return at_depth if certain else None


# --- gains ---------------------------------------------------------------------------------------


def gained(before: np.ndarray, after: np.ndarray, level: float = LEVEL) -> Estimate:
    """Estimate the gain in tokens per step, as a share, from the accepted drafts of each row."""
    logs = Estimate.of(np.log1p(after) - np.log1p(before), level)
    return Estimate(*(math.expm1(x) for x in (logs.mean, logs.low, logs.high)))


def classify(gain: Estimate) -> str:
    """Return what a gain amounts to, one of the words of `search.Comparison.result`."""
    if gain.low > 0 and gain.mean >= MATERIAL:
        return "better"
    if gain.low > 0:
        return "higher"
    if gain.high < 0:
        return "worse" if gain.mean <= -MATERIAL else "lower"
    return "no measurable difference" if abs(gain.mean) < MATERIAL else "undecided"


def format_gain(gain: Estimate) -> str:
    """Return a gain and its interval as text."""
    return f"{gain.mean:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"
