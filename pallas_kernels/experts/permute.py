"""Copy tokens to the rows of their pairs, and add up the results of the pairs of a token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.triton import load, store
from pallas_kernels.experts.routing import Placed

COLUMNS = 1024  # of a program


def places(k: Array) -> Array:
    """Return which number of a token is the k-th of a row.

    Codes of 8 bits come into registers of wgmma by four neighbours of 16. A thread hands the first
    two to it for the first 8 inputs, and the others for the last 8. So the fourth and the second
    bit of a place change.
    """
    return (k & ~10) | (k & 8) >> 2 | (k & 2) << 2


def _spread(row_ref, real_ref, x_ref, out_ref, *, top_k: int, in_order: bool) -> None:
    """Write a token to the rows of its pairs. Padding has none."""
    token = pl.program_id(0)
    k = pl.program_id(1) * COLUMNS + lax.iota(jnp.int32, COLUMNS)
    inside = k < x_ref.shape[1]

    @pl.when(real_ref[token] > 0)
    def _():
        of = k if in_order else places(k)
        x = load(x_ref, token, jnp.where(inside, of, 0), mask=inside)
        for i in range(top_k):
            at = row_ref[token * top_k + i]
            here = inside & (at < out_ref.shape[0])  # else the pair is another device's
            store(out_ref, jnp.where(here, at, out_ref.shape[0]), k, value=x, mask=here)


def _add_up(row_ref, real_ref, weight_ref, x_ref, out_ref, *, top_k: int) -> None:
    """Write the weighted sum of the rows of the pairs of a token; 0 for padding."""
    token = pl.program_id(0)
    k = pl.program_id(1) * COLUMNS + lax.iota(jnp.int32, COLUMNS)
    real, total = real_ref[token] > 0, jnp.zeros((COLUMNS,), jnp.float32)
    inside = (k < x_ref.shape[1]) & real
    for i in range(top_k):
        # Nothing was written for pairs of padding.
        row, weight = (jnp.where(real, ref[token * top_k + i], 0) for ref in (row_ref, weight_ref))
        here = inside & (row < x_ref.shape[0])  # else the pair is another device's
        row = jnp.where(row < x_ref.shape[0], row, 0)
        total += weight * load(x_ref, row, k, mask=here).astype(jnp.float32)
    store(out_ref, token, k, value=total, mask=k < x_ref.shape[1])


def spread(
    x: Float[Array, "T D"],
    placed: Placed,
    real: Int[Array, " T"],
    padded: int,
    *,
    in_order: bool = False,
    interpret: bool = False,
) -> Float[Array, "padded D"]:
    """Return rows with the tokens of their pairs; the others are undefined.

    Args:
      in_order: whether numbers keep their order. Else it is that of `places`.
      real: 1 for a token that is no padding, else 0.
      padded: rows that the pairs of all experts need at most.
    """
    out = jax.ShapeDtypeStruct((padded, x.shape[1]), x.dtype)
    kernel = functools.partial(_spread, in_order=in_order)
    call = _by_token(kernel, "experts_spread", x, placed, out, interpret)
    return call(placed.row, real, x)


def add_up(
    rows: Float[Array, "padded D"],
    placed: Placed,
    real: Int[Array, " T"],
    *,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Return the weighted sum of the rows of each token, and 0 for padding."""
    out = jax.ShapeDtypeStruct((real.size, rows.shape[1]), rows.dtype)
    call = _by_token(_add_up, "experts_add_up", out, placed, out, interpret)
    return call(placed.row, real, placed.weight, rows)


def _by_token(kernel: Any, name: str, of: Any, placed: Placed, out: Any, interpret: bool) -> Any:
    tokens, width = of.shape
    return pl.pallas_call(
        functools.partial(kernel, top_k=placed.weight.size // tokens),
        out_shape=out,
        grid=(tokens, pl.cdiv(width, COLUMNS)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )
