"""What the references are made of: norm, rotary embedding, activation, products summed in float32.

Models compute the same things outside of kernels too. They take them from here, through
`jaxspec.models.layers`: arithmetic that must agree to the last bit is written once, and it is
written here because nothing in this package may import `jaxspec`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"] | None, eps: float
) -> Float[Array, "... D"]:
    """Return x / sqrt(mean(x²) + eps) * scale over the last axis, in float32, rounded once.

    Args:
      scale: used as it is (no 1 + scale); None to leave it out.
    """
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if scale is not None:
        y = y * scale.astype(jnp.float32)
    return y.astype(x.dtype)


def rotate(
    x: Float[Array, "B T *heads H"], cos: Float[Array, "B T H2"], sin: Float[Array, "B T H2"]
) -> Float[Array, "B T *heads H"]:
    """Turn the pair (x_j, x_{j + H/2}) of each head by the j-th angle of its token, in float32.

    Args:
      cos: of each token's H/2 angles.
      sin: of the same.
    """
    of_token = (*cos.shape[:2], *(1,) * (x.ndim - 3), cos.shape[2])
    cos, sin = cos.reshape(of_token), sin.reshape(of_token)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(x.dtype)


def contract(spec: str, x: Array, y: Array) -> Float[Array, "..."]:
    """Contract as `jnp.einsum` does, but sum in float32 and return float32."""
    return jnp.einsum(spec, x, y, precision=precision_of(x), preferred_element_type=jnp.float32)


def precision_of(x: Array) -> lax.Precision | None:
    """Return full float32 products for float32 operands.

    On Hopper JAX's default for them is TF32, whose errors of 1e-3 are a thousand times larger: they
    would break the promise that speculative and plain decoding agree.
    """
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
