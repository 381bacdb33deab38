"""The operation in plain JAX: norms and sums, each rounded. Tests compare the kernel with it."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.reference_ops import rms_norm
from pallas_kernels.rounding.reference import Rounded, Sums, values_of
from pallas_kernels.rounding.reference import reference as rounded


class RouterScale(NamedTuple):
    """Marks the norm for a router of experts.

    Such a norm has no weight. Its result is multiplied by `scale` and by D^-1/2.
    """

    scale: Float[Array, " D"]


class RoundedNorm(NamedTuple):
    """Marks the norm for a product of rounded rows: its weight is `scale`, its result `Rounded`."""

    scale: Float[Array, " D"]


NextNorm = Float[Array, " D"] | RouterScale | RoundedNorm
"""What a part that reads the sum says of its norm."""


class Branch(NamedTuple):
    """The output `x` of one of several branches of a layer, and the weight `scale` of its norm."""

    x: Float[Array, "*rows D"] | Sums
    scale: Float[Array, " D"]


def branches_of(
    h: Array | Sums | tuple[Branch, ...],
) -> tuple[tuple[Array | Sums, Array | None], ...]:
    """Return the outputs of all branches and the weights of their norms; one alone has none."""
    return h if isinstance(h, tuple) and not isinstance(h, Sums) else ((h, None),)


def reference(
    x: Float[Array, "*rows D"],
    h: Float[Array, "*rows D"] | Sums | tuple[Branch, ...],
    scale: Float[Array, " D"],
    next_norms: tuple[NextNorm, ...],
    factor: Float[Array, " 1"] | None,
    *,
    eps: float,
) -> tuple[Float[Array, "*rows D"], tuple[Float[Array, "*rows D"] | Rounded, ...]]:
    """Norm h, add it to x, multiply by the factor, and norm the sum for each reader.

    Arguments as in `pallas_kernels.norms.add_norm`.
    """
    parts = [(values_of(part), own) for part, own in branches_of(h)]
    normed = (part if own is None else rms_norm(part, own, eps) for part, own in parts)
    x = x + rms_norm(functools.reduce(operator.add, normed), scale, eps)
    if factor is not None:
        x = x * factor
    return x, tuple(next_norm(x, s, eps) for s in next_norms)


def next_norm(
    x: Float[Array, "... D"], scale: NextNorm, eps: float
) -> Float[Array, "... D"] | Rounded:
    """Return x normed as its reader says."""
    if isinstance(scale, RouterScale):
        return router_norm(x, *scale, eps)
    if isinstance(scale, RoundedNorm):
        return rounded(rms_norm(x, *scale, eps))
    return rms_norm(x, scale, eps)


def router_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "... D"]:
    """Return what a router reads: rms_norm(x) * scale * D^-1/2, rounded after each product."""
    y = rms_norm(x, None, eps) * scale
    return (y.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype)
