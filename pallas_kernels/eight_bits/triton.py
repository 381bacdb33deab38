"""A product of few rows with codes of 8 bits in Pallas Triton.

A program multiplies the codes of some outputs with some rows, over a share of the inputs. The codes
are the left operand of the tensor cores, and go there through registers. Where outputs are few,
several programs share the inputs of a tile (`splits`). XLA adds their parts, in their order.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.eight_bits.decode import numbers
from pallas_kernels.triton import below, dot, load, store

WORD = 4  # codes of a word


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a product is cut.

    Attributes:
      rows, outputs: of a program.
      inputs: of a step of a program.
      splits: programs that share the inputs of a tile.
      warps, stages: of a program, and steps that it loads ahead.
      words: whether codes are read in words of four. A step then makes four products, each of every
        fourth input. The tensor cores' largest instructions (from 4 warps on) want two neighbouring
        inputs in a thread, which would be loads of 2 bytes. Rows must lie in the same order, which
        takes XLA a kernel of its own, or a part of the one before.
    """

    rows: int
    outputs: int
    inputs: int = 128
    splits: int = 1
    warps: int = 2
    stages: int = 4
    words: bool = False


def _linear(x_ref, codes_ref, scales_ref, out_ref, *, kind, cut: Cut, interpret: bool):
    """Write out[split, rows, outputs] of a tile: sums, times their scales if there is one split."""
    row = pl.program_id(0) * cut.rows + lax.iota(jnp.int32, cut.rows)
    out = pl.program_id(1) * cut.outputs + lax.iota(jnp.int32, cut.outputs)
    split, size = pl.program_id(2), cut.inputs // WORD if cut.words else cut.inputs
    in_use = below(row, x_ref.shape[-2])
    mask = None if in_use is None else in_use[:, None]

    def step(i, total):
        k = i * size + lax.iota(jnp.int32, size)
        codes = load(codes_ref, out[:, None], k[None, :])
        for byte in range(WORD) if cut.words else (None,):
            part = () if byte is None else (byte,)
            x = load(x_ref, *part, row[:, None], k[None, :], mask=mask)
            total = total + dot(numbers(codes, kind, byte, interpret=interpret), x.T)
        return total

    steps = x_ref.shape[-1] // size
    first, last = (
        (0, steps)
        if cut.splits == 1
        else (split * steps // cut.splits, (split + 1) * steps // cut.splits)
    )
    total = lax.fori_loop(first, last, step, jnp.zeros((cut.outputs, cut.rows), jnp.float32))
    if cut.splits == 1:
        total = total * load(scales_ref, out)[:, None]
    store(out_ref, split, row[:, None], out[None, :], value=total.T, mask=mask)


def linear_triton(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*out_in"],
    scales: Float[Array, "*out"],
    *,
    dtype: DTypeLike,
    cut: Cut,
    interpret: bool = False,
) -> Float[Array, "R *out"]:
    """Launch the kernel. Arguments as in `pallas_kernels.eight_bits.linear`, which checks them."""
    rows, outputs, kind, shape = x.shape[0], scales.size, codes.dtype, scales.shape
    x, scales = x.reshape(rows, -1), scales.reshape(outputs)
    codes = codes.reshape(outputs, -1)
    if cut.words:
        codes = lax.bitcast_convert_type(codes.reshape(outputs, -1, WORD), jnp.uint32)
        x = x.reshape(rows, -1, WORD).transpose(2, 0, 1)
    parts = pl.pallas_call(
        functools.partial(_linear, kind=kind, cut=cut, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct(
            (cut.splits, rows, outputs), dtype if cut.splits == 1 else jnp.float32
        ),
        # Programs that read the same codes for other rows run side by side.
        grid=(pl.cdiv(rows, cut.rows), outputs // cut.outputs, cut.splits),
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="eight_bit_linear",
    )(x, codes, scales)
    out = parts[0] if cut.splits == 1 else (jnp.sum(parts, axis=0) * scales).astype(dtype)
    return out.reshape(rows, *shape)
