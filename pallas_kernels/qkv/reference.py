"""The operation in plain JAX: norms, rotations, writes. Tests compare the kernel with it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.reference_ops import rms_norm, rotate, stored_as
from pallas_kernels.common.single_row import repeat_if_single
from pallas_kernels.rounding.reference import Sums, values_of


class Destination(NamedTuple):
    """Caches, and the slots in them to which a pass writes its keys and values.

    Attributes:
      k: the cache of keys, C pages of S slots.
      v: the cache of values.
      index: the slot of each token in its page. A token with slot S is dropped. No two tokens have
        the same slot of the same page.
      pages: the page of each token. None: the tokens of row b have page b.
    """

    k: Float[Array, "C K S H"]
    v: Float[Array, "C K S H"]
    index: Int[Array, "B T"]
    pages: Int[Array, "B T"] | None = None


class QKV(NamedTuple):
    """The result of `qkv`.

    Attributes:
      q: the queries; None where there are none.
      k: the keys of the pass, or the cache to which they were written; None where there are none.
      v: the values, likewise.
    """

    q: Float[Array, "B T K G H"] | None
    k: Float[Array, "C K S H"] | None
    v: Float[Array, "C K S H"] | None


def reference(
    projected: Float[Array, "B T K X H"] | Sums,
    q_scale: Float[Array, " H"] | None,
    k_scale: Float[Array, " H"] | None,
    cos: Float[Array, "B T H2"],
    sin: Float[Array, "B T H2"],
    into: Destination | None,
    *,
    groups: int,
    eps: float,
    norm_values: bool,
    kv_dtype: jnp.dtype,
    value_factor: float,
) -> QKV:
    """Cut out queries, keys and values; norm and rotate them; write keys and values.

    Arguments as in `pallas_kernels.qkv.qkv`.
    """
    projected = values_of(projected)
    q = k = v = None
    if q_scale is not None:
        q = rotate(rms_norm(projected[:, :, :, :groups], q_scale, eps), cos, sin)
    if k_scale is not None:
        raw_k, v = projected[:, :, :, groups], projected[:, :, :, -1]  # the same row where k = v
        k = rotate(rms_norm(raw_k, k_scale, eps), cos, sin)
        v = rms_norm(v, None, eps) if norm_values else v
        if value_factor != 1:
            v = (v.astype(jnp.float32) * value_factor).astype(v.dtype)
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        if into is not None:
            k, v = write_kv(into, k, v)
        elif kv_dtype != projected.dtype:
            # XLA may leave out a rounding whose result is converted back at once.
            k, v = lax.optimization_barrier((stored_as(k, kv_dtype), stored_as(v, kv_dtype)))
    return QKV(q, k, v)


def write_kv(
    into: Destination, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"]
) -> tuple[Float[Array, "C K S H"], Float[Array, "C K S H"]]:
    """Write keys and values to their slots. The write is in place when the caches are donated."""

    def one(old: Array, new: Array) -> Array:
        new = stored_as(new, old.dtype)
        if into.pages is None:
            return _write_rows(old, new, into.index)
        heads = jnp.arange(new.shape[1], dtype=jnp.int32)[None, :, None]
        where = (into.pages[:, None, :], heads, into.index[:, None, :])
        return old.at[where].set(new, mode="drop")

    return one(into.k, k), one(into.v, v)


def _write_rows(
    old: Float[Array, "B K S H"], new: Float[Array, "B K T H"], index: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
    """Write every row and head separately, so that none is sent to another device."""

    def scatter(old: Array, new: Array, index: Array) -> Array:
        one_head = jax.vmap(lambda o, n, i: o.at[i].set(n, mode="drop"), in_axes=(0, 0, None))
        return jax.vmap(one_head)(old, new, index)

    return repeat_if_single(
        scatter,
        old,
        new,
        index,
        single=new.shape[2] == 1,
        repeat=lambda old, new, i: (old, jnp.repeat(new, 2, axis=2), jnp.repeat(i, 2, axis=1)),
        first=lambda written: written,
        platform="cpu",
    )
