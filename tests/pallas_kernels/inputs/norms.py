"""Shapes and inputs of `add_norm`."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from jaxtyping import Array, DTypeLike

from pallas_kernels.norms.reference import Branch, NextNorm, RouterScale
from pallas_kernels.rounding.reference import Sums
from tests.pallas_kernels.inputs import Random


@dataclasses.dataclass(frozen=True)
class Shape:
    """The width of a row, and what is done with it.

    Attributes:
      width: numbers in a row.
      parts: branches of the layer. Several branches are normed one by one before they are added up.
      next_norms: norms of the sum, without the norm of a router.
      router: whether a router also reads the sum.
      factor: whether the sum is multiplied by a factor.
    """

    width: int
    parts: int = 1
    next_norms: int = 1
    router: bool = False
    factor: bool = False


class Inputs(NamedTuple):
    """Arguments of `add_norm`."""

    x: Array
    h: Array | Sums | tuple[Branch, ...]
    scale: Array
    next_norms: tuple[NextNorm, ...]
    factor: Array | None


def inputs(shape: Shape, rows: tuple[int, ...], dtype: DTypeLike, seed: int = 0) -> Inputs:
    """Return random arguments of `add_norm`."""
    normal, d = functools.partial(Random(seed).normal, dtype=dtype), shape.width
    parts = tuple(Branch(normal(*rows, d, scale=3), normal(d)) for _ in range(shape.parts))
    norms = tuple(normal(d) for _ in range(shape.next_norms))
    return Inputs(
        normal(*rows, d),
        parts if shape.parts > 1 else parts[0].x,
        normal(d),
        (*norms, RouterScale(normal(d))) if shape.router else norms,
        normal(1) if shape.factor else None,
    )
