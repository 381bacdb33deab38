"""Inputs of kernels: random arrays, and by kernel the shapes of layers.

The numbers come from numpy. JAX compiles a program for each shape that it draws, a twentieth of a second each, and
`jnp.asarray` one for each shape that it takes from numpy; `jax.device_put` does not.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Random:
    """A stream of random arrays.

    Args:
      seed: the same arrays for the same seed.
    """

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, dtype: Any = jnp.float32, scale: float = 1.0) -> jax.Array:
        """Return normal numbers with a standard deviation of `scale`."""
        return self._array(self._rng.standard_normal(shape, np.float32) * scale, dtype)

    def uniform(self, low: float, high: float, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
        """Return numbers from low to high."""
        return self._array(self._rng.uniform(low, high, shape), dtype)

    @staticmethod
    def _array(values: np.ndarray, dtype: Any) -> jax.Array:
        return jax.device_put(values.astype(jnp.dtype(dtype)))


# Rounds to 16 bits wherever the program says so. XLA leaves roundings out that it finds needless.
compiled = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


def as_float32(x: Any) -> np.ndarray:
    """Return numbers of any dtype as float32 on the host."""
    return np.asarray(x).astype(np.float32)


def gelu(x: np.ndarray) -> np.ndarray:
    """Return the approximation by tanh."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def difference(a: Any, b: Any) -> float:
    """Return the largest difference between two arrays of numbers."""
    return float(np.max(np.abs(as_float32(a) - as_float32(b))))
