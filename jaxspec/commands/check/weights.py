"""A look at weights alone: what is zero, not finite, or of another size than in other layers; and marks to know them by.

Read `look_at`. Two numbers a tensor, its root mean square and a weighted sum, tell later whether it is the same.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.shapes import Array, Params
from jaxspec.weights.sharding import fetch

SIBLING_RATIO = 10.0
"""How many times larger or smaller than in other layers a tensor must be to be mentioned."""

SAME = 0.006
"""Largest difference of two marks of one tensor, in units of its root mean square. Rounding float32 weights to
bfloat16 moves a mark by 0.0009 (one standard deviation); noise of 30 % moves it by 0.3."""


@dataclass(frozen=True)
class Look:
    """What is known of a tensor at a glance.

    Attributes:
      rms: root mean square.
      mark: sum of all numbers, each times a fixed weight of its place, over the root of their count. It moves
        when numbers change place.
    """

    rms: float
    mark: float
    finite: bool = True

    def is_same(self, other: Look) -> bool:
        """Tell whether two looks are of the same numbers, but for rounding."""
        if not (self.finite and other.finite):
            return self.finite == other.finite
        size = max(self.rms, other.rms)
        return max(abs(self.rms - other.rms), abs(self.mark - other.mark)) <= SAME * size


def look_at(params: Params) -> dict[str, Look]:
    """Look at all weights, each read once, where they are."""
    if not params:
        return {}
    patterns = {name: [_pattern(n, i) for i, n in enumerate(x.shape)] for name, x in params.items()}
    found = fetch(_numbers(dict(params), patterns))
    return {
        name: Look(float(rms), float(mark), bool(finite))
        for name, (rms, mark, finite) in found.items()
    }


@jax.jit
def _numbers(
    params: Params, patterns: Mapping[str, Sequence[Array]]
) -> dict[str, tuple[Array, Array, Array]]:
    found = {}
    for name, x in params.items():
        values, weights = x.astype(jnp.float32), jnp.float32(1)
        for axis, pattern in enumerate(patterns[name]):
            shape = [1] * x.ndim
            shape[axis] = -1
            weights = weights * pattern.reshape(shape) if axis else pattern.reshape(shape)
        rms = jnp.sqrt(jnp.mean(jnp.square(values)))
        mark = jnp.sum(values * weights) / math.sqrt(x.size)
        found[name] = rms, mark, jnp.all(jnp.isfinite(values))
    return found


@functools.cache
def _pattern(size: int, axis: int) -> np.ndarray:
    """Return a weight of each place along an axis: of size 1 in the mean square, in no order, and fixed."""
    angles = (1 + np.arange(size)) * (0.6180339887 + 0.1 * axis) * 2 * math.pi
    return (math.sqrt(2) * np.cos(angles)).astype(np.float32)


# --- what is wrong at a glance -----------------------------------------------------------------------


@dataclass(frozen=True)
class Oddity:
    """Something about a tensor that stands out.

    Attributes:
      wrong: no trained model has it. Otherwise it is only unusual.
    """

    text: str
    wrong: bool


def oddities(looks: Mapping[str, Look]) -> list[Oddity]:
    """Name tensors that are zero, not finite, or far from those of other layers in size."""
    zero = [name for name, x in looks.items() if x.finite and x.rms == 0]
    broken = [name for name, x in looks.items() if not x.finite]
    found = []
    if broken:
        found.append(Oddity(f"{listed(broken)}: some numbers are not finite", wrong=True))
    if zero:
        found.append(Oddity(f"{listed(zero)}: all zero", wrong=True))
    siblings: dict[str, dict[str, float]] = {}
    for name, x in looks.items():
        if name not in zero and name not in broken:
            siblings.setdefault(re.sub(r"\d+", "*", name), {})[name] = x.rms
    for sizes in siblings.values():
        if len(sizes) < 3:
            continue
        usual = statistics.median(sizes.values())
        for name, size in sizes.items():
            if not 1 / SIBLING_RATIO < size / usual < SIBLING_RATIO:
                text = f"{name}: root mean square {size:.3g}, in other layers about {usual:.3g}"
                found.append(Oddity(text, wrong=False))
    return found


def listed(names: Sequence[str], most: int = 6) -> str:
    """Join names, at most so many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
