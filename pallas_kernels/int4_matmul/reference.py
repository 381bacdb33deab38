"""The product in plain JAX: dequantise, then multiply."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.reference_ops import precision_of
from pallas_kernels.int4_matmul.coding import Codes, Coding, dequantise


def reference(
    x: Float[Array, "R K"], weight: Codes, *, coding: Coding, inputs_first: bool, dtype: DTypeLike
) -> Float[Array, "R N"]:
    """Multiply rows by a weight. Arguments as in `pallas_kernels.int4_matmul.linear`."""
    axis = 0 if inputs_first else 1
    w = dequantise(weight, coding, axis=axis, inputs=x.shape[1]).astype(x.dtype)
    meet = ((1,), (axis,)), ((), ())
    out = lax.dot_general(x, w, meet, precision=precision_of(x), preferred_element_type=jnp.float32)
    return out.astype(dtype)
