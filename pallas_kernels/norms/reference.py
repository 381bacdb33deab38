"""What the kernel computes, in plain JAX: norms and sums, each rounded. This is the oracle."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.elementary import rms_norm


class RouterScale(NamedTuple):
    """Marks the norm for a router of experts: without a weight, then times this and D^-1/2."""

    scale: Float[Array, " D"]


class Branch(NamedTuple):
    """What one of several branches made of the residual, and the weight of its norm."""

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
    """Norm, add, multiply, and norm again."""
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
    """Return what a router reads: each of both products is rounded."""
    y = rms_norm(x, None, eps) * scale
    return (y.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype)
