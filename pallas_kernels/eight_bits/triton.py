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

from pallas_kernels.eight_bits.decode import numbers, numbers_of_words
from pallas_kernels.triton import below, dot, load, store


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a product is cut.

    Attributes:
      rows, outputs: of a program.
      inputs: of a step of a program.
      splits: programs that share the inputs of a tile.
      warps, stages: of a program, and steps that it loads ahead.
    """

    rows: int
    outputs: int
    inputs: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4
    words: bool = False


def _linear(x_ref, codes_ref, scales_ref, out_ref, *, cut: Cut, kind, interpret: bool):
    """Write out[split, rows, outputs] of a tile: sums, times their scales if there is one split."""
    blocks = (x_ref.shape[-1] * (4 if cut.words else 1)) // cut.inputs
    out = pl.program_id(1) * cut.outputs + lax.iota(jnp.int32, cut.outputs)
    row = pl.program_id(0) * cut.rows + lax.iota(jnp.int32, cut.rows)
    split = pl.program_id(2)
    start, end = (0, blocks) if cut.splits == 1 else (
        (split + i) * blocks // cut.splits for i in range(2)
    )
    in_use = below(row, x_ref.shape[-2])
    mask = None if in_use is None else in_use[:, None]

    def step(i, total):
        k = i * cut.inputs + lax.iota(jnp.int32, cut.inputs)
        w = numbers(load(codes_ref, out[:, None], k[None, :]), interpret=interpret)
        x = load(x_ref, row[:, None], k[None, :], mask=mask)
        return total + dot(w, x.T)

    def step_of_words(i, total):
        size = cut.inputs // 4
        k = i * size + lax.iota(jnp.int32, size)
        words = load(codes_ref, out[:, None], k[None, :])
        for b in range(4):
            x = load(x_ref, b, row[:, None], k[None, :], mask=mask)
            total = total + dot(numbers_of_words(words, kind, b, interpret=interpret), x.T)
        return total

    step = step_of_words if cut.words else step
    total = lax.fori_loop(start, end, step, jnp.zeros((cut.outputs, cut.rows), jnp.float32))
    if cut.splits == 1:
        total = total * load(scales_ref, out)[:, None]
    store(out_ref, split, row[:, None], out[None, :], value=total.T, mask=mask)


def linear_triton(
    x: Float[Array, "R K"],
    codes: Shaped[Array, "N K"],
    scales: Float[Array, " N"],
    *,
    dtype: DTypeLike,
    cut: Cut,
    interpret: bool = False,
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.eight_bits.linear`, which checks them."""
    rows, outputs = x.shape[0], codes.shape[0]
    kind = codes.dtype
    if cut.words:
        codes = lax.bitcast_convert_type(codes.reshape(outputs, -1, 4), jnp.uint32)
        x = x.reshape(rows, -1, 4).transpose(2, 0, 1)
    parts = pl.pallas_call(
        functools.partial(_linear, cut=cut, kind=kind, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct(
            (cut.splits, rows, outputs), dtype if cut.splits == 1 else jnp.float32
        ),
        grid=(pl.cdiv(rows, cut.rows), outputs // cut.outputs, cut.splits),
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="eight_bit_linear",
    )(x, codes, scales)
    return parts[0] if cut.splits == 1 else (jnp.sum(parts, axis=0) * scales).astype(dtype)
