"""How sure the numbers of a check are: intervals, and readings of a drafter held against each other.

Whole rows, not positions, are what is counted: neighbouring positions are no independent evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxspec.commands.check.conventions import Reading
from jaxspec.params import Graph

LEVEL = 0.95  # of confidence, for all comparisons of a round together

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


# --- readings against each other ---------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Another reading against the one in force, on the same rows.

    Attributes:
      accepted: drafts a step under it.
      difference: of these, to the reading in force.
      better: the difference is above zero for sure, and large enough to matter.
    """

    name: str
    field: str
    fix: str
    accepted: float
    first_accepted: float
    difference: Estimate
    better: bool


@dataclass(frozen=True)
class Round:
    """One reading against its alternatives; a second round starts from the best of the first."""

    in_force: str
    comparisons: list[Comparison]
    left_out: list[str]
    level: float  # of each interval, so that all of them hold at `LEVEL`
    material: float  # drafts a step that a better one must add

    @property
    def best(self) -> int | None:
        """The best of the better ones; of near-equals the first, which is the most usual."""
        better = {i: c.difference.mean for i, c in enumerate(self.comparisons) if c.better}
        enough = max(better.values(), default=0.0) - self.material
        return next((i for i, gain in better.items() if gain >= enough), None)


def compare(
    reading: Reading,
    others: Sequence[Reading],
    accepted: Mapping[tuple[Graph, int], np.ndarray],
    anchors: np.ndarray,
    left_out: list[str],
) -> Round:
    """Hold other readings against one, row by row."""
    level = 1 - (1 - LEVEL) / max(len(others), 1)
    here = row_means(accepted[reading.key], anchors)
    material = float(MATERIAL * (1 + here.mean()))
    comparisons = []
    for other in others:
        drafts = accepted[other.key]
        there = row_means(drafts, anchors)
        difference = Estimate.of(there - here, level)
        comparisons.append(
            Comparison(
                other.name,
                other.field,
                other.fix,
                float(there.mean()),
                float(row_means(drafts >= 1, anchors).mean()),
                difference,
                better=difference.low > 0 and difference.mean >= material,
            )
        )
    return Round(reading.name, comparisons, left_out, level, material)
