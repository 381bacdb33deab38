"""The product in plain JAX: convert the codes, multiply, and scale the sums.

XLA makes the conversion part of the product that reads the codes, and writes nothing out in 16
bits.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.common.reference_ops import precision_of


def reference(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*out_in"],
    scales: Float[Array, "*out"],
    *,
    dtype: DTypeLike,
) -> Float[Array, "R *out"]:
    """Multiply rows by a weight. Arguments as in `pallas_kernels.int8_matmul.linear`.

    The weight keeps its axes, because a mesh may split one of them.
    """
    last = tuple(range(scales.ndim, codes.ndim))
    return (sums(x, codes.astype(x.dtype), last) * scales).astype(dtype)


def sums(
    rows: Float[Array, "R *in"],
    numbers: Float[Array, "..."],
    axes: tuple[int, ...],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "R *out"]:
    """Sum products over all axes of rows but the first, and these of numbers, in float32.

    Args:
      dtype: of the result. The sums are rounded to it.
    """
    return lax.dot_general(
        rows,
        numbers,
        ((tuple(range(1, rows.ndim)), axes), ((), ())),
        precision=precision_of(rows),
        preferred_element_type=dtype,
    )
