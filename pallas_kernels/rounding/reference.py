"""Rounding in plain JAX. Tests compare the kernel with it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

LARGEST = 448.0  # of e4m3


def reference(x: Float[Array, "R D"]) -> tuple[Float[Array, "R D"], Float[Array, " R"]]:
    """Return codes and scales. Arguments as in `pallas_kernels.rounding.round_rows`."""
    numbers = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(numbers), axis=1) / np.float32(LARGEST)
    numbers = numbers / jnp.where(scales > 0, scales, 1)[:, None]
    # A quotient may exceed the largest code by a rounding error, which e4m3 makes NaN.
    return jnp.clip(numbers, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), scales
