"""Helpers of Triton kernels: loads and stores by indices of several shapes, masks, products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.common.reference_ops import precision_of


def load(ref: Any, *index: Any, mask: Array | None = None) -> Array:
    """Load the elements at these indices, broadcast together; 0 where the mask is false."""
    at, shape = _at(ref, index)
    if mask is None:
        return plgpu.load(at)
    # Pallas makes no fp8 of a whole number.
    zero = 0.0 if ref.dtype == jnp.float8_e4m3fn else 0
    return plgpu.load(at, mask=jnp.broadcast_to(mask, shape), other=zero)


def store(ref: Any, *index: Any, value: Array, mask: Array | None = None) -> None:
    """Store a value at these indices, broadcast together, where the mask is true.

    The value is rounded to the dtype of the array.
    """
    at, shape = _at(ref, index)
    mask = None if mask is None else jnp.broadcast_to(mask, shape)
    plgpu.store(at, value.astype(ref.dtype), mask=mask)


def _at(ref: Any, index: tuple[Any, ...]) -> tuple[Any, tuple[int, ...]]:
    # Pallas takes index arrays of one shape only. Scalars stay as they are.
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    return ref.at[tuple(jnp.broadcast_to(i, shape) if jnp.ndim(i) else i for i in index)], shape


def below(index: Array, size: int) -> Array | None:
    """Return a mask of the indices below size, or None where such blocks divide the axis evenly."""
    return None if size % index.size == 0 else index < size


def dot(x: Array, y: Array) -> Array:
    """Multiply two matrices, summing in float32."""
    return jnp.dot(x, y, precision=precision_of(x), preferred_element_type=jnp.float32)
