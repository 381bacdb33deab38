"""Helpers of Triton kernels: loads and stores by indices of several shapes, masks, products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

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


def launch_split(
    kernel: Callable[..., None],
    *args: Array,
    name: str,
    config: Any,
    outputs: int,
    dtype: DTypeLike,
    interpret: bool,
    rows_first: bool = False,
) -> Float[Array, "X R N"]:
    """Launch a kernel of products of rows, and return the part of each split.

    Args:
      args: arrays, of which the first one is the rows.
      name: what profiles call the kernel.
      config: has `rows`, `outputs`, `splits`, `warps` and `stages`.
      dtype: of the result if there is one split. Parts are float32.
      rows_first: whether the first axis of the grid is that of rows. Else it is that of outputs.
        The programs of the first axis run side by side.
    """
    rows = args[0].shape[0]
    tiles = outputs // config.outputs, pl.cdiv(rows, config.rows)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(
            (config.splits, rows, outputs), dtype if config.splits == 1 else jnp.float32
        ),
        grid=(*(reversed(tiles) if rows_first else tiles), config.splits),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name=name,
    )(*args)


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
