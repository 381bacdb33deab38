"""What the kernels compute, in plain JAX. This is the oracle, and what runs where there are many rows."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def product(x: Float[Array, "R *D"], w: Float[Array, "*DN"]) -> Float[Array, "R *N"]:
    """Return x @ w, summed in float32 and rounded to the rows' dtype.

    The weight keeps its axes, so that one which a mesh splits stays an axis of its own, and they keep
    their order: an einsum may reorder them, and then XLA copies the transposed weight in every step.
    """
    axes = x.ndim - 1
    meet = tuple(range(1, axes + 1)), tuple(range(axes))

    def of_rows(x: Array) -> Array:
        return lax.dot_general(
            x,
            w,
            (meet, ((), ())),
            # JAX's default for float32 on Hopper is TF32, whose errors are a thousand times larger.
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            # Summed in float32, written in the rows' dtype: XLA rounds the float32 result of a cuBLAS
            # product in a kernel of its own (31B, 256 rows on an H200: 1.3 ms a step).
            preferred_element_type=x.dtype,
        )

    return over_rows(of_rows, x)


def over_rows(
    product: Callable[[Array], Array], rows: Float[Array, "R *D"]
) -> Float[Array, "R *F"]:
    """Apply a product with weights to rows; on NVIDIA GPUs a row that is alone goes twice.

    XLA turns products of one row into elementwise ones and a sum. For weights of a few million elements
    it writes those down in float32, twice the size of the weight (E2B on an H200: 3.5 ms a plain step
    instead of 2.8), and batched ones are slower too (26B-A4B: 16.4 ms instead of 13.0).
    """
    if rows.shape[0] != 1:
        return product(rows)
    return lax.platform_dependent(
        rows, cuda=lambda r: product(jnp.repeat(r, 2, axis=0))[:1], default=product
    )


def product_add_norm(
    x: Float[Array, "R *D"],
    w: Float[Array, "*D N"],
    residual: Float[Array, "R N"],
    scale: Float[Array, " N"],
    factor: Float[Array, " 1"] | None,
    then: tuple[Float[Array, " N"], ...],
    *,
    eps: float,
) -> tuple[Float[Array, "R N"], ...]:
    """Return y = (residual + rms_norm(x @ w) * scale) * factor, and y normed with each weight of `then`."""
    y = residual + rms_norm(product(x, w), scale, eps)
    if factor is not None:
        y = y * factor
    return (y, *(rms_norm(y, s, eps) for s in then))


def rms_norm(x: Float[Array, "R N"], scale: Float[Array, " N"], eps: float) -> Float[Array, "R N"]:
    """Normalise rows in float32."""
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)
