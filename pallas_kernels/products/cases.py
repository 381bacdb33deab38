"""Shapes that tests and benchmarks share: inputs and columns of the products of a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

PRODUCTS = {
    "e2b qkv": (1536, 2560),
    "e2b out": (2048, 1536),
    "e2b down": (6144, 1536),
    "e2b per-layer gate": (1536, 256),
    "e2b per-layer out": (256, 1536),
    "e4b down": (10240, 2560),
    "26b qkv": (2816, 8192),
    "26b out": (4096, 2816),
    "26b down": (2112, 2816),
    "26b router": (2816, 128),
    "31b qkv": (5376, 16384),
    "31b down": (21504, 5376),
}
# Small enough to be interpreted; no power of two divides the second's sizes.
SMALL = ((128, 64), (81, 43))
ROWS = (1, 3, 16)


def inputs(
    rows: int, size: int, shape: tuple[int, ...], dtype: jnp.dtype, seed: int = 0
) -> tuple[Array, Array]:
    """Return rows and a weight [size, *shape], so scaled that results are of order one."""
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (rows, size), dtype)
    return x, jax.random.normal(keys[1], (size, *shape), dtype) * jnp.asarray(size**-0.5, dtype)
