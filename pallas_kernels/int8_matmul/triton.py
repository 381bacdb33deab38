"""A product of few rows with codes of 8 bits in Pallas Triton.

A program multiplies a tile of outputs and rows, over a share of the inputs. The codes
are the left operand of the tensor cores, and go there through registers. Where outputs are few,
several programs share the inputs of a tile (`splits`). XLA adds their parts, in their order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.common.triton import below, dot, launch_split, load, store
from pallas_kernels.int8_matmul.dequantise import factor, numbers


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Tile sizes of the kernel.

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
    warps: int = 2
    stages: int = 4


def _linear(x_ref, codes_ref, scales_ref, out_ref, *, config: TileConfig, interpret: bool):
    """Write out[split, rows, outputs] of a tile: sums, times their scales if there is one split."""
    row = pl.program_id(0) * config.rows + lax.iota(jnp.int32, config.rows)
    out = pl.program_id(1) * config.outputs + lax.iota(jnp.int32, config.outputs)
    split, steps = pl.program_id(2), x_ref.shape[1] // config.inputs
    in_use = below(row, x_ref.shape[0])
    mask = None if in_use is None else in_use[:, None]

    def step(i, total):
        k = i * config.inputs + lax.iota(jnp.int32, config.inputs)
        codes = load(codes_ref, out[:, None], k[None, :])
        w = numbers(codes, codes.dtype, interpret=interpret)
        x = load(x_ref, row[:, None], k[None, :], mask=mask)
        return total + dot(w, x.T)

    first, last = (
        (0, steps)
        if config.splits == 1
        else (split * steps // config.splits, (split + 1) * steps // config.splits)
    )
    total = lax.fori_loop(first, last, step, jnp.zeros((config.outputs, config.rows), jnp.float32))
    if config.splits == 1:
        total = total * load(scales_ref, out)[:, None]
    if (by := factor(codes_ref.dtype, interpret=interpret)) != 1:
        total = total * by
    store(out_ref, split, row[:, None], out[None, :], value=total.T, mask=mask)


def linear_triton(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*out_in"],
    scales: Float[Array, "*out"],
    *,
    dtype: DTypeLike,
    config: TileConfig,
    interpret: bool = False,
) -> Float[Array, "R *out"]:
    """Launch the kernel. Arguments as in `pallas_kernels.int8_matmul.linear`, which checks them."""
    rows, outputs, shape = x.shape[0], scales.size, scales.shape
    x, codes, scales = x.reshape(rows, -1), codes.reshape(outputs, -1), scales.reshape(outputs)
    kernel = functools.partial(_linear, config=config, interpret=interpret)
    sizes: Any = dict(config=config, outputs=outputs, dtype=dtype)
    # Programs that read the same codes for other rows run side by side.
    sizes |= dict(rows_first=True, interpret=interpret)
    parts = launch_split(kernel, x, codes, scales, name="eight_bit_linear", **sizes)
    out = parts[0] if config.splits == 1 else (jnp.sum(parts, axis=0) * scales).astype(dtype)
    return out.reshape(rows, *shape)
