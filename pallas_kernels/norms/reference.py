"""The operation in plain JAX: norms and sums, each rounded. Tests compare the kernel with it."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.elementary import rms_norm


class RouterScale(NamedTuple):
    """Marks the norm for a router of experts.

    Such a norm has no weight. Its result is multiplied by `scale` and by D^-1/2.
    """

    scale: Float[Array, " D"]


class Branch(NamedTuple):
    """The output `x` of one of several branches of a layer, and the weight `scale` of its norm."""

    x: Float[Array, "*rows D"]
    scale: Float[Array, " D"]


def reference(
    x: Float[Array, "*rows D"],
    h: Float[Array, "*rows D"] | tuple[Branch, ...],
    scale: Float[Array, " D"],
    next_norms: tuple[Float[Array, " D"] | RouterScale, ...],
    factor: Float[Array, " 1"] | None,
    *,
    eps: float,
) -> tuple[Float[Array, "*rows D"], tuple[Float[Array, "*rows D"], ...]]:
    """Norm h, add it to x, multiply by the factor, and norm the sum for each reader.

    Arguments as in `pallas_kernels.norms.add_norm`.
    """
    if isinstance(h, tuple):
        h = functools.reduce(operator.add, (rms_norm(*part, eps) for part in h))
    x = x + rms_norm(h, scale, eps)
    if factor is not None:
        x = x * factor
    return x, tuple(
        router_norm(x, *s, eps) if isinstance(s, RouterScale) else rms_norm(x, s, eps)
        for s in next_norms
    )


def router_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "... D"]:
    """Return what a router reads: rms_norm(x) * scale * D^-1/2, rounded after each product."""
    y = rms_norm(x, None, eps) * scale
    return (y.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype)
