"""Rounding in plain JAX, and the types of rounded rows and their products."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

LARGEST = 448.0  # of e4m3


class Rounded(NamedTuple):
    """Rows as 8-bit floats (e4m3) with a scale of their own: about codes * scales.

    Attributes:
      scales: float32, one for each row.
    """

    codes: Float[Array, "*rows D"]
    scales: Float[Array, "*rows"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def reshape(self, *shape: int) -> Rounded:
        """Return the same with other axes of rows."""
        return Rounded(self.codes.reshape(shape), self.scales.reshape(shape[:-1]))


class Sums(NamedTuple):
    """A product of rounded rows with codes, which is yet to be multiplied with the scales of both.

    The kernel that reads it multiplies.

    Attributes:
      rows, outputs: the scales, float32.
    """

    sums: Float[Array, "*rows_out"]
    rows: Float[Array, "*rows"]
    outputs: Float[Array, "*out"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sums.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.sums.dtype

    def values(self, dtype: DTypeLike) -> Float[Array, "*rows_out"]:
        """Return the product. Scales are multiplied in float32."""
        of_rows = self.rows.reshape(*self.rows.shape, *[1] * self.outputs.ndim)
        return (self.sums.astype(jnp.float32) * (of_rows * self.outputs)).astype(dtype)


def values_of(x: Array | Sums) -> Float[Array, "..."]:
    """Return a product as numbers of its dtype, whether it has met its scales or not."""
    return x.values(x.dtype) if isinstance(x, Sums) else x


def reference(x: Float[Array, "*rows D"]) -> Rounded:
    """Return codes and scales. Arguments as in `pallas_kernels.rounding.round_rows`."""
    numbers = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(numbers), axis=-1)
    # The largest number becomes 448, up to a last bit, which rounds to 448.
    numbers = numbers * factor_of(largest)[..., None]
    return Rounded(numbers.astype(jnp.float8_e4m3fn), largest / np.float32(LARGEST))


def factor_of(largest: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the factor from the numbers of a row to its codes, from their largest magnitude.

    A row whose largest magnitude is 0, or too small for a finite factor, has codes of zero.
    """
    least = float(jnp.finfo(jnp.float32).tiny) * LARGEST
    return jnp.where(largest >= least, LARGEST / jnp.maximum(largest, least), 0.0)
