"""Gates of a gated MLP, and the rounding of what they leave, in one Pallas Triton kernel.

A program handles one row, and reads each number once. It holds the row as pieces whose sizes are
powers of two, because arrays of Triton have such sizes: 21,504 numbers are 16,384, 4,096 and 1,024.
XLA makes one kernel that gates. Another one must then find the largest number of a row and round.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gated.reference import Activation
from pallas_kernels.rounding.reference import Rounded, Sums
from pallas_kernels.rounding.triton import codes_of, scale_of
from pallas_kernels.triton import load, store

MAX_WIDTH = 32768  # a program holds its row in registers
LEAST_PIECE = 256  # a smaller rest is one piece with some numbers left out


def pieces(width: int) -> list[tuple[int, int]]:
    """Return begin and size of the pieces of a row. Sizes are powers of two, the last may reach past it."""
    found, begin = [], 0
    while begin < width:
        left = width - begin
        size = max(LEAST_PIECE, 1 << (left.bit_length() - 1))
        found.append((begin, size))
        begin += size
    return found


def _gate(gate_up, codes_ref, scales_ref, *, activation: Activation) -> None:
    """Gate and round one row."""
    row, (_, width) = pl.program_id(0), codes_ref.shape
    of_row, parts = gate_up.rows[row], []
    for begin, size in pieces(width):
        column = begin + lax.iota(jnp.int32, size)
        inside = None if begin + size <= width else column < width
        gate, up = (
            load(gate_up.sums, row, which, column, mask=inside).astype(jnp.float32)
            * (of_row * load(gate_up.outputs, which, column, mask=inside))
            for which in (0, 1)
        )
        # Rounded as the product's reader would find it.
        hidden = (activation(gate) * up).astype(gate_up.dtype).astype(jnp.float32)
        parts.append((column, inside, hidden))
    largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(h)) for _, _, h in parts))
    scale = scale_of(largest)
    for column, inside, hidden in parts:
        store(codes_ref, row, column, value=codes_of(hidden, scale), mask=inside)
    scales_ref[row] = scale


def gated_triton(gate_up: Sums, *, activation: Activation, interpret: bool = False) -> Rounded:
    """Launch the kernel. Arguments as in `pallas_kernels.gated.gated`."""
    *shape, _, width = gate_up.shape
    flat = Sums(gate_up.sums.reshape(-1, 2, width), gate_up.rows.reshape(-1), gate_up.outputs)
    rows = flat.shape[0]
    codes, scales = pl.pallas_call(
        functools.partial(_gate, activation=activation),
        out_shape=(
            jax.ShapeDtypeStruct((rows, width), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=_num_warps(width), num_stages=1),
        interpret=interpret,
        name="gated",
    )(flat)
    return Rounded(codes, scales).reshape(*shape, width)


def _num_warps(width: int) -> int:
    return 16 if width > 8192 else 8
