"""Storage of keys and values: the dtype of a target's caches, and the scales of fp8.

An fp8 number (e4m3) has four significant bits from 2^-6 to 448. Below 2^-6 it loses bits, and nothing is
above 448. So keys and values are divided by a scale before they are stored. Keys are multiplied by
it in the queries that meet them, and values in the result of attention:

    stored = fp8(x / scale),    read = stored * scale

Where keys and values are normed, weights bound them, and no text has to be read to find a scale:

    |k| <= sqrt(H) * max|k_norm|    because a rotation keeps the length of a head
    |v| <= sqrt(H)                  because the norm of values has no weight

The scale is the least power of two that brings this bound to 448 or below. A power of two changes
no bit of a number but its exponent. The scale of keys is computed from the weights in every
program, so it follows weights that are trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.shapes import Array, Float
from pallas_kernels.common.reference_ops import stored_as

FP8 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = float(jnp.finfo(FP8).max)  # 448
LEAST_CAPABILITY = 8.9  # of NVIDIA GPUs that convert fp8 in hardware: Ada, Hopper

DTYPES = {"bfloat16": jnp.dtype(jnp.bfloat16), "float32": jnp.dtype(jnp.float32), "fp8": FP8}
"""The names of `kv_dtype`."""


@dataclass(frozen=True)
class KVFormat:
    """The format in which a target stores keys and values.

    Attributes:
      name: one of `DTYPES`.
      scales: of keys and of values for each layer, from the checkpoint; None to derive them.
    """

    name: str
    scales: tuple[tuple[float, float], ...] | None = None

    @property
    def dtype(self) -> jnp.dtype:
        return DTYPES[self.name]

    def of_layer(
        self, layer: int, k_norm: Float[Array, " H"], compute: jnp.dtype
    ) -> KVStorage | None:
        """Return the storage of one layer's keys and values; None for the compute dtype.

        Args:
          layer: a layer that owns its keys and values.
          k_norm: the weight of the norm of its keys.
          compute: the dtype that keys and values are computed in.
        """
        if self.dtype == compute:
            return None
        if self.dtype != FP8:
            return KVStorage(None, 1.0, self.dtype)
        if self.scales is not None:
            k, v = self.scales[layer]
            return KVStorage(jnp.asarray(k, jnp.float32), v, FP8)
        longest = math.sqrt(k_norm.shape[0])
        bound = longest * jnp.max(jnp.abs(k_norm.astype(jnp.float32)))
        v = 2.0 ** math.ceil(math.log2(longest / LARGEST))
        return KVStorage(power_of_two_above(bound / LARGEST), v, FP8)


class KVStorage(struct.PyTreeNode):
    """The storage of keys and values of one layer, where it differs from the compute dtype.

    Attributes:
      k_scale: what keys are divided by; None for 1.
      v_scale: what values are divided by.
    """

    k_scale: Float[Array, ""] | None
    v_scale: float = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)

    def q_norm(self, weight: Float[Array, " H"]) -> Float[Array, " H"]:
        """Return the weight of the norm of queries that meet stored keys."""
        if self.k_scale is None:
            return weight
        return weight.astype(jnp.float32) * self.k_scale

    def k_norm(self, weight: Float[Array, " H"]) -> Float[Array, " H"]:
        """Return the weight of the norm of keys that are to be stored."""
        if self.k_scale is None:
            return weight
        return weight.astype(jnp.float32) / self.k_scale

    def rounded(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Round as storing would, in the dtype of x. Derivatives are those of no rounding."""

        @jax.custom_jvp
        def of(x: Array) -> Array:
            # XLA may leave out a rounding whose result is converted back at once.
            return lax.optimization_barrier(stored_as(x, self.dtype)).astype(x.dtype)

        of.defjvp(lambda primals, tangents: (of(*primals), *tangents))
        return of(x)


def power_of_two_above(x: Float[Array, ""]) -> Float[Array, ""]:
    """Return the least power of two that is not below x, a positive float32."""
    bits = lax.bitcast_convert_type(jnp.maximum(x, 2.0**-100), jnp.uint32)
    # One carries into the exponent, unless the mantissa is 0 already.
    bits = (bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000)
    return lax.bitcast_convert_type(bits, jnp.float32)
