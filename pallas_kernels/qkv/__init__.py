"""The operation between a projection and its attention: norms, rotary embedding, cache writes.

`reference.py` shows what is computed. `triton.py` shows how one kernel computes it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.dispatch import (
    KV_DTYPES,
    Candidate,
    Implementation,
    dispatch,
    why_not_triton,
)
from pallas_kernels.qkv.reference import QKV, Destination, reference, write_kv
from pallas_kernels.qkv.triton import qkv_triton
from pallas_kernels.rounding.reference import Sums

__all__ = ["QKV", "Destination", "qkv", "reference", "write_kv"]


def qkv(
    projected: Float[Array, "B T K X H"] | Sums,
    q_scale: Float[Array, " H"] | None,
    k_scale: Float[Array, " H"] | None,
    cos: Float[Array, "B T H2"],
    sin: Float[Array, "B T H2"],
    into: Destination | None = None,
    *,
    groups: int,
    eps: float,
    norm_values: bool = True,
    kv_dtype: DTypeLike | None = None,
    value_factor: float = 1.0,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> QKV:
    """Norm and rotate queries and keys, norm values, and write keys and values to caches.

    Each step is computed in float32 and rounded to the dtype of `projected`.

    Args:
      projected: for each kv head its queries, then its key, then its value. Without a value, values
        are the raw keys. `Sums` are multiplied with their scales first, and rounded to their dtype.
      q_scale: the weight of the norm of queries; None where there are no queries.
      k_scale: the weight of the norm of keys; None where there are no keys.
      cos: cosines of the angles by which the pairs (j, j + H/2) of each token turn.
      sin: sines of the same angles.
      into: caches to write keys and values to. The result then has these caches instead of the keys
        and values. None writes nothing.
      groups: queries of each kv head.
      eps: added to the mean square in each norm.
      norm_values: whether values are normed. Their norm has no weight.
      kv_dtype: the dtype of the keys and values in the result; None for that of the caches, or else
        of `projected`. Keys and values are rounded to the dtype of `projected` first. Numbers
        beyond the largest of fp8 (e4m3) become that one.
      value_factor: what values are multiplied with before they are rounded to `kv_dtype`. A factor
        of keys is part of `k_scale`, which may be float32.
      implementation: "triton" needs 16-bit numbers, caches in 16 bits or fp8, and an NVIDIA GPU of
        compute capability 8.0 or newer, 8.9 for fp8 (or `interpret`). "auto" takes it where it can
        run, and takes "reference" elsewhere.
      interpret: whether to interpret the kernel. It then runs on any device, slowly. For tests.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "triton" and it cannot run.
    """
    if kv_dtype is None:
        kv_dtype = projected.dtype if into is None else into.k.dtype
    kwargs: dict[str, Any] = {"groups": groups, "eps": eps, "norm_values": norm_values}
    kwargs |= {"kv_dtype": jnp.dtype(kv_dtype), "value_factor": value_factor}
    _check(projected, q_scale, k_scale, cos, sin, into, groups, kwargs["kv_dtype"])
    triton = Candidate(
        "triton",
        functools.partial(qkv_triton, **kwargs, interpret=interpret),
        reason=_why_not(projected, into, kwargs["kv_dtype"], interpret),
    )
    plain = functools.partial(reference, **kwargs)
    return dispatch(implementation, [triton], plain, projected, q_scale, k_scale, cos, sin, into)


def _check(
    projected: Array | Sums,
    q_scale: Array | None,
    k_scale: Array | None,
    cos: Array,
    sin: Array,
    into: Destination | None,
    groups: int,
    kv_dtype: jnp.dtype,
) -> None:
    b, t, k, x, h = projected.shape
    extra = x - groups
    if (groups > 0) != (q_scale is not None) or (extra > 0) != (k_scale is not None):
        raise ValueError(
            f"{groups} of {x} rows a kv head are queries: q_scale is for queries and k_scale for keys, "
            "and each is None where there are none"
        )
    if not 0 <= extra <= 2:
        raise ValueError(
            f"behind {groups} queries stand a key and a value at most, not {extra} rows"
        )
    if not cos.shape == sin.shape == (b, t, h // 2):
        raise ValueError(
            f"for {projected.shape}, cos and sin must be {(b, t, h // 2)}; they are {cos.shape} and {sin.shape}"
        )
    if into is None:
        return
    if not extra:
        raise ValueError("there are no keys to write: pass into=None")
    if not into.k.dtype == into.v.dtype == kv_dtype:
        raise ValueError(
            f"keys and values of {kv_dtype} cannot go to caches of {into.k.dtype} and {into.v.dtype}"
        )
    size = into.k.shape[2]
    if not into.k.shape == into.v.shape == (into.k.shape[0], k, size, h):
        raise ValueError(
            f"for {projected.shape}, caches must be [C, {k}, S, {h}]; they are {into.k.shape} and "
            f"{into.v.shape}"
        )
    is_one_page_each = into.pages is None and into.k.shape[0] == b
    if into.index.shape != (b, t) or not (is_one_page_each or _shape(into.pages) == (b, t)):
        raise ValueError(
            f"for {projected.shape}, index and pages must be {(b, t)}, or pages are None for {b} pages; "
            f"they are {into.index.shape} and {_shape(into.pages)}, for {into.k.shape[0]} pages"
        )


def _shape(x: Array | None) -> tuple[int, ...] | None:
    return None if x is None else x.shape


def _why_not(
    projected: Array | Sums, into: Destination | None, kv_dtype: jnp.dtype, interpret: bool
) -> str | None:
    """Return why the kernel cannot take these heads on the GPU of this machine, or None."""
    if (h := projected.shape[4]) not in (16, 32, 64, 128, 256, 512):
        return f"the Triton kernel takes head dims that are a power of two from 16 to 512, not {h}"
    stored = jax.ShapeDtypeStruct((), kv_dtype)  # of an array, the dtype counts and the size
    caches = (stored,) if into is None else (into.k, into.v)
    numbers = projected.sums if isinstance(projected, Sums) else projected
    return why_not_triton(numbers, interpret=interpret) or why_not_triton(
        *caches, interpret=interpret, dtypes=KV_DTYPES
    )
