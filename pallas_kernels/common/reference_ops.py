"""Operations of the references: norm, rotary embedding, activation, rounding, float32 products.

Models import these functions through `jaxspec.models.layers`. So arithmetic that must agree to the
last bit is written once. It is here because nothing in this package may import `jaxspec`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float

gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
Activation = Literal["gelu_tanh", "silu"]
_ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "gelu_tanh": gelu_tanh,
    "silu": jax.nn.silu,
}


def gated(both: Float[Array, "*rows 2 F"], activation: Activation) -> Float[Array, "*rows F"]:
    """Return activation(gate) * up, of gate and up side by side."""
    return _ACTIVATIONS[activation](both[..., 0, :]) * both[..., 1, :]


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"] | None, eps: float
) -> Float[Array, "... D"]:
    """Return x / sqrt(mean(x²) + eps) * scale over the last axis.

    The arithmetic is float32. The result is rounded once, to the dtype of x.

    Args:
      x: rows to norm.
      scale: the weight of the norm, used as it is (not as 1 + scale). None means no weight.
      eps: added to the mean square.
    """
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if scale is not None:
        y = y * scale.astype(jnp.float32)
    return y.astype(x.dtype)


def rotate(
    x: Float[Array, "B T *heads H"], cos: Float[Array, "B T H2"], sin: Float[Array, "B T H2"]
) -> Float[Array, "B T *heads H"]:
    """Rotate the pair (x_j, x_{j + H/2}) of each head by the j-th angle of its token, in float32.

    Args:
      x: heads of each token.
      cos: cosines of the H/2 angles of each token.
      sin: sines of the same angles.
    """
    of_token = (*cos.shape[:2], *(1,) * (x.ndim - 3), cos.shape[2])
    cos, sin = cos.reshape(of_token), sin.reshape(of_token)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(x.dtype)


def stored_as(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Round to the dtype of a cache. Numbers beyond the range of fp8 (e4m3) become its largest.

    A plain conversion makes NaN of them.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if dtype == jnp.float8_e4m3fn:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.minimum(jnp.maximum(x, -largest), largest)
    return x.astype(dtype)


def contract(spec: str, x: Array, y: Array) -> Float[Array, "..."]:
    """Contract as `jnp.einsum` does, but sum in float32 and return float32."""
    return jnp.einsum(spec, x, y, precision=precision_of(x), preferred_element_type=jnp.float32)


def precision_of(x: Array) -> lax.Precision | None:
    """Return the precision of products of x: full float32 for float32, else the default.

    On Hopper, JAX multiplies float32 operands in TF32 by default. Its errors of 1e-3 are a thousand
    times larger. They would break the promise that speculative and plain decoding agree.
    """
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
