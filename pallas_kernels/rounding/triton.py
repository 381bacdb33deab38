"""Rounding of rows in one Pallas Triton kernel.

A program handles one row. It reads each number once. XLA makes two kernels: one finds the largest
magnitudes, the other reads the row again, and computes again what the row was computed from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.common.triton import below, load, store
from pallas_kernels.rounding.reference import LARGEST, Rounded, factor_of

MAX_WIDTH = 32768  # a program holds its row in registers


def _round(x_ref, codes_ref, scales_ref) -> None:
    """Round one row."""
    row, d = pl.program_id(0), x_ref.shape[1]
    column = lax.iota(jnp.int32, pl.next_power_of_2(d))
    inside = below(column, d)
    x = load(x_ref, row, column, mask=inside).astype(jnp.float32)
    largest = jnp.max(jnp.abs(x))
    store(codes_ref, row, column, value=x * factor_of(largest), mask=inside)
    scales_ref[row] = largest / LARGEST


def round_rows_triton(x: Float[Array, "R D"], *, interpret: bool = False) -> Rounded:
    """Launch the kernel. Arguments as in `pallas_kernels.rounding.round_rows`."""
    rows, d = x.shape
    codes, scales = pl.pallas_call(
        _round,
        out_shape=(
            jax.ShapeDtypeStruct((rows, d), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=16 if d > 8192 else 8, num_stages=1),
        interpret=interpret,
        name="round_rows",
    )(x)
    return Rounded(codes, scales)
