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

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

LEVEL = 0.95  # of confidence, of both texts together
FIRST_LEVEL = 0.96  # for all comparisons of a round on the first text
SECOND_LEVEL = 0.99  # for those of a round on the second text

MATERIAL = 0.03
"""Least gain in tokens per step, as a share, for a convention to be called better."""


@dataclass(frozen=True)
class Estimate:
    """A mean over rows and its confidence interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, rows: np.ndarray, level: float = LEVEL) -> Estimate:
        """Estimate from one number per row, by Student's t."""
        mean = float(rows.mean())
        error = float(rows.std(ddof=1)) / math.sqrt(len(rows))
        reach = student_t(level, len(rows) - 1) * error
        return cls(mean, mean - reach, mean + reach)

    def within(self, low: float, high: float) -> Estimate:
        """Clip the interval to possible values."""
        return Estimate(self.mean, max(self.low, low), min(self.high, high))


@functools.cache  # a round repeats one level and one number of rows
def student_t(level: float, degrees: int) -> float:
    """Return t such that a share `level` of Student's distribution lies between -t and t."""
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

    This is the ratio of two sums over rows, since rows reach a depth unequally often. Its error
    comes from each row's distance from the common ratio.

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
    """Acceptance at one depth, where all earlier drafts were accepted.

    Attributes:
      positions, rows: number of positions of the text, and of its rows, that reached this depth.
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


MIN_POSITIONS = 20  # that must reach a depth before it counts


def collapse(depths: Sequence[Depth], floor: float) -> Depth | None:
    """Return the first depth past 1 that is certainly below the floor and half of depth 1."""
    first = depths[0].share.mean
    for d in depths[1:]:
        if d.positions >= MIN_POSITIONS and d.share.high < min(floor, first / 2):
            return d
    return None


FALL = 2 / 3
"""Drafts fall at a depth whose acceptance is less than this share of the acceptance one depth
before. In the bundled pairs a trained depth has 0.9 of the one before it, and the first untrained
depth 0.4."""


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
      level: of confidence.
    """
    at_depth = conditional(accepted, anchors, depth, level)
    if at_depth.rows < 2 or at_depth.positions < MIN_POSITIONS:
        return None
    twice, once, reached = (
        ((accepted >= d) & anchors).sum(axis=1) for d in (depth, depth - 1, depth - 2)
    )
    share, before = twice.sum() / once.sum(), once.sum() / reached.sum()
    errors = (twice - share * once) / once.sum() - FALL * (once - before * reached) / reached.sum()
    scatter = float(np.square(errors).sum()) * at_depth.rows / (at_depth.rows - 1)
    reach = student_t(level, at_depth.rows - 1) * math.sqrt(scatter)
    return at_depth if share - FALL * before + reach < 0 else None


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
