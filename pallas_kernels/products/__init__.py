"""Products of few rows with a matrix that has to be read for them, and the norms and sums that follow.

Read `reference.py` for what is computed, `triton.py` for how kernels are saved, `tuning.py` for tile sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.platform import on_cuda
from pallas_kernels.products import reference
from pallas_kernels.products.reference import over_rows as over_rows
from pallas_kernels.products.triton import (
    ROWS,
    Tiling,
    product_add_norm_triton,
    product_triton,
)
from pallas_kernels.products.tuning import tiling_for

T = TypeVar("T")
Implementation = Literal["auto", "reference", "triton"]


def product(
    x: Float[Array, "R *D"],
    w: Float[Array, "*DN"],
    *,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "R *N"]:
    """Return x @ w, summed in float32 and rounded to the rows' dtype.

    Args:
        x: Rows.
        w: A weight whose leading axes are those of a row; the others are those of a row of the result.
        implementation: "triton" needs an NVIDIA GPU of compute capability 8.0 or newer (or `interpret`),
            16-bit weights and at most 16 rows; "auto" takes it where it can run and is faster, and
            "reference" elsewhere.
        tiling: Tile sizes of the kernel, instead of the table's.
        interpret: Run the kernel on any device, slowly, to test it.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        NotImplementedError: If implementation is "triton" and it cannot run.
    """
    inputs, columns = _check(x, w)
    tiling = tiling or tiling_for(inputs, columns)

    def kernel(x: Array, w: Array) -> Array:
        flat = x.reshape(-1, inputs), w.reshape(inputs, columns)
        out = product_triton(*flat, tiling=tiling, interpret=interpret)
        return out.reshape(x.shape[0], *w.shape[x.ndim - 1 :])

    return _run(kernel, reference.product, implementation, interpret, x, w)


def product_add_norm(
    x: Float[Array, "R *D"],
    w: Float[Array, "*D N"],
    residual: Float[Array, "R N"],
    scale: Float[Array, " N"],
    factor: Float[Array, " 1"] | None = None,
    then: tuple[Float[Array, " N"], ...] = (),
    *,
    eps: float,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "R N"], ...]:
    """Return y = (residual + rms_norm(x @ w) * scale) * factor, and y normed with each weight of `then`.

    Every step is rounded to the rows' dtype, norms are float32 inside.

    Args:
        x: Rows.
        w: A weight whose leading axes are those of a row.
        residual: What is added to the normed product.
        scale: The weight of its norm.
        factor: What the sum is multiplied by; None for nothing.
        then: Weights of the norms of the sum.
        eps: Of all norms.
        implementation, tiling, interpret: As in `product`. Errors are the same, too.
    """
    inputs, columns = _check(x, w)
    if w.ndim != x.ndim or residual.shape != (x.shape[0], columns) or residual.dtype != x.dtype:
        raise ValueError(
            f"for rows {x.dtype} {x.shape} and a weight {w.shape}, the residual must be {x.dtype} "
            f"{(x.shape[0], columns)}; it is {residual.dtype} {residual.shape}"
        )
    tiling = tiling or tiling_for(inputs, columns)

    def kernel(x: Array, w: Array, *others: Any) -> tuple[Array, ...]:
        flat = x.reshape(-1, inputs), w.reshape(inputs, columns)
        return product_add_norm_triton(*flat, *others, eps=eps, tiling=tiling, interpret=interpret)

    plain = functools.partial(reference.product_add_norm, eps=eps)
    return _run(kernel, plain, implementation, interpret, x, w, residual, scale, factor, then)


def _check(x: Array, w: Array) -> tuple[int, int]:
    """Return how many inputs and columns there are."""
    axes = x.ndim - 1
    if w.shape[:axes] != x.shape[1:] or x.dtype != w.dtype:
        raise ValueError(
            f"for rows {x.dtype} {x.shape}, a weight must have their dtype and its first axes must be "
            f"{x.shape[1:]}; it is {w.dtype} {w.shape}"
        )
    return math.prod(x.shape[1:]), math.prod(w.shape[axes:])


def _run(
    kernel: Callable[..., T],
    plain: Callable[..., T],
    implementation: str,
    interpret: bool,
    *args: Any,
) -> T:
    if implementation not in ("auto", "reference", "triton"):
        raise ValueError(f"implementation is {implementation!r}; pass auto, reference or triton")
    if implementation == "reference":
        return plain(*args)
    reason = _why_not(args[0], args[1], interpret)
    if reason and implementation == "triton":
        raise NotImplementedError(f"{reason}; pass implementation='auto' or 'reference'")
    if reason:
        return plain(*args)
    return kernel(*args) if implementation == "triton" else on_cuda(kernel, plain, *args)


def _why_not(x: Array, w: Array, interpret: bool) -> str | None:
    """Say why the kernel cannot run for these rows on this machine's GPU, if it has one."""
    if x.shape[0] > ROWS:
        return f"the Triton kernel is cut for {ROWS} rows at most, not {x.shape[0]}"
    if not interpret and w.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the Triton kernel is cut for bfloat16 and float16 weights, not {w.dtype}"
    if w.size >= 2**31:
        return f"the Triton kernel's offsets are 32 bits, and the weight has {w.size} numbers"
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and not mesh.are_all_axes_manual:
        return f"the Triton kernel runs on one device, not on a mesh of {mesh.size}"
    if not interpret and jax.default_backend() == "gpu":
        device = jax.devices()[0]
        capability = str(getattr(device, "compute_capability", "0"))
        if device.platform == "gpu" and float(capability) < 8.0:
            return f"the Triton kernel needs compute capability 8.0; {device.device_kind} has {capability}"
    return None
