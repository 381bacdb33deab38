"""Norms, rotations and writes of queries, keys and values in one Pallas Triton kernel.

A program handles one kv head of one token: its queries, its key and its value. It reads each once,
as two halves, which the rotation mixes. It writes keys and values into the caches, in place. It
writes queries as rows of one matrix per kv head, which is the layout that attention reads.

The kernel rounds wherever the reference rounds. XLA on GPUs leaves out one of these roundings, the
one between norm and rotation of queries.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.common.reference_ops import stored_as
from pallas_kernels.common.triton import load, store
from pallas_kernels.qkv.reference import QKV, Destination
from pallas_kernels.rounding.reference import Sums

Halves = tuple[Array, Array]
NUMBERS_OF_A_WARP = 512  # how many numbers of the queries a warp handles


def _split(
    projected_ref,
    q_scale_ref,
    k_scale_ref,
    cos_ref,
    sin_ref,
    into,
    q_ref,
    k_ref,
    v_ref,
    *,
    eps: float,
    norm_values: bool,
    value_factor: float,
):
    """Norm, rotate and write the queries, the key and the value of one kv head of one token."""
    head, token, b = (pl.program_id(i) for i in range(3))
    half, dtype = cos_ref.shape[2], projected_ref.dtype
    columns = (lax.iota(jnp.int32, half), half + lax.iota(jnp.int32, half))
    cos, sin = (load(ref, b, token, columns[0]) for ref in (cos_ref, sin_ref))
    turn: Halves = cos, sin
    groups = 0
    if q_ref is not None:
        groups = q_ref.shape[2]
        group = lax.iota(jnp.int32, pl.next_power_of_2(groups))[:, None]
        real = jnp.broadcast_to(group < groups, (group.size, half))
        x = _load_heads(projected_ref, b, token, head, group, columns=columns, mask=real)
        q = _rotate(_norm(x, _load_halves(q_scale_ref, columns=columns), eps, dtype), turn)
        _store_halves(q_ref, b, head, group, token, columns=columns, value=q, mask=real)
    if k_ref is not None:
        x = _load_heads(projected_ref, b, token, head, groups, columns=columns)
        k = _rotate(_norm(x, _load_halves(k_scale_ref, columns=columns), eps, dtype), turn)
        if projected_ref.shape[3] > groups + 1:
            x = _load_heads(projected_ref, b, token, head, groups + 1, columns=columns)
        v = _norm(x, None, eps, dtype) if norm_values else x
        if value_factor != 1:
            v = v[0] * value_factor, v[1] * value_factor
        if k_ref.dtype != dtype:  # both are rounded to the dtype of the projection first
            k, v = _rounded(k, dtype), _rounded(v, dtype)
        page, slot = b, token
        if into is not None:
            page = b if into.pages is None else load(into.pages, b, token)
            slot = load(into.index, b, token)
        kept = jnp.broadcast_to(slot < k_ref.shape[2], (half,))
        _store_halves(k_ref, page, head, slot, columns=columns, value=k, mask=kept)
        _store_halves(v_ref, page, head, slot, columns=columns, value=v, mask=kept)


def _load_heads(
    ref, b, token, head, which, *, columns: Halves, mask: Array | None = None
) -> Halves:
    """Load heads of a product, or of its sums, multiplied with their scales and rounded."""
    if not isinstance(ref, Sums):
        return _load_halves(ref, b, token, head, which, columns=columns, mask=mask)
    sums = _load_halves(ref.sums, b, token, head, which, columns=columns, mask=mask)
    outputs = _load_halves(ref.outputs, head, which, columns=columns, mask=mask)
    row = load(ref.rows, b, token)
    first, second = (x * (row * of) for x, of in zip(sums, outputs, strict=True))
    return _rounded((first, second), ref.dtype)


def _load_halves(ref, *index, columns: Halves, mask: Array | None = None) -> Halves:
    first, second = (load(ref, *index, c, mask=mask) for c in columns)
    return first.astype(jnp.float32), second.astype(jnp.float32)


def _store_halves(ref, *index, columns: Halves, value: Halves, mask: Array) -> None:
    for column, half in zip(columns, value, strict=True):
        store(ref, *index, column, value=stored_as(half, ref.dtype), mask=mask)


def _rounded(x: Halves, dtype: jnp.dtype) -> Halves:
    first, second = (half.astype(dtype).astype(jnp.float32) for half in x)
    return first, second


def _norm(x: Halves, scale: Halves | None, eps: float, dtype: jnp.dtype) -> Halves:
    """Norm heads, and round to `dtype`, as the reference does between norm and rotation."""
    first, second = x
    squares = jnp.sum(first * first, axis=-1, keepdims=True)
    squares += jnp.sum(second * second, axis=-1, keepdims=True)
    factor = lax.rsqrt(squares / (2 * first.shape[-1]) + eps)
    first, second = first * factor, second * factor
    if scale is not None:
        first, second = first * scale[0], second * scale[1]
    return _rounded((first, second), dtype)


def _rotate(x: Halves, turn: Halves) -> Halves:
    (first, second), (cos, sin) = x, turn
    return first * cos - second * sin, second * cos + first * sin


def qkv_triton(
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
    interpret: bool = False,
) -> QKV:
    """Launch the kernel. Arguments as in `pallas_kernels.qkv.qkv`, which checks them."""
    (b, t, kv_heads, _, h), dtype = projected.shape, projected.dtype
    q = k = v = None
    aliases = {}
    if q_scale is not None:
        # In this order, the transposition below and the one in attention cancel out.
        q = jax.ShapeDtypeStruct((b, kv_heads, groups, t, h), dtype)
    if into is not None:
        k, v = (jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (into.k, into.v))
        before = len(jax.tree.leaves((projected, q_scale, k_scale, cos, sin)))
        queries = int(q is not None)
        aliases = {before: queries, before + 1: queries + 1}
    elif k_scale is not None:
        k = v = jax.ShapeDtypeStruct((b, kv_heads, t, h), kv_dtype)
    q, k, v = pl.pallas_call(
        functools.partial(_split, eps=eps, norm_values=norm_values, value_factor=value_factor),
        out_shape=(q, k, v),
        grid=(kv_heads, t, b),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(
            num_warps=max(1, min(8, groups * h // NUMBERS_OF_A_WARP)), num_stages=1
        ),
        interpret=interpret,
        name="qkv",
    )(projected, q_scale, k_scale, cos, sin, into)
    return QKV(None if q is None else q.transpose(0, 3, 1, 2, 4), k, v)
