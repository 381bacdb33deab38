"""A product of few rows with codes in Pallas Triton.

A program multiplies a tile of outputs and rows, over a share of the inputs. `operand.py` reads and
multiplies a block of inputs. Where outputs are few, several programs share the
inputs of a tile (`splits`). XLA adds their parts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.triton import below, launch_split, load, store
from pallas_kernels.int4_matmul.coding import BLOCK, Codes, Coding
from pallas_kernels.int4_matmul.operand import Int4Operand, multiply_blocks


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Tile sizes of the kernel.

    Attributes:
      rows, outputs: of a program.
      splits: programs that share the inputs of a tile.
      unroll: blocks of inputs that a step of a program reads.
      warps, stages: of a program, and steps that it loads ahead.
      early: whether scales are multiplied before the product, see `operand.Int4Operand`.
    """

    rows: int
    outputs: int
    splits: int = 1
    unroll: int = 1
    warps: int = 2
    stages: int = 4
    early: bool = False

    def dividing(
        self, outputs: int, blocks: int, *, last_may_reach_past: bool = False
    ) -> TileConfig:
        """Return a config whose outputs, splits and steps divide these outputs and blocks of inputs.

        Args:
          last_may_reach_past: whether the last step may reach past the inputs. Then splits divide the
            number of steps, and steps need not divide the blocks.
        """
        if last_may_reach_past:
            steps = TileConfig.dividing(self, outputs, -(-blocks // self.unroll))
            return dataclasses.replace(steps, unroll=self.unroll)
        splits = max(s for s in range(1, self.splits + 1) if blocks % s == 0)
        unroll = max(u for u in range(1, self.unroll + 1) if blocks // splits % u == 0)
        tile = min(self.outputs, outputs & -outputs)
        return dataclasses.replace(self, outputs=tile, splits=splits, unroll=unroll)


def _linear(
    x_ref, codes_ref, *refs, coding: Coding, inputs_first: bool, config: TileConfig, interpret: bool
):
    """Write out[split, rows, outputs] of a tile.

    `refs` are scales, zeros and factors, as far as there are any, and the output.
    """
    *arrays, out_ref = refs
    *per_group, factors = arrays if len(arrays[-1].shape) == 1 else (*arrays, None)
    share = x_ref.shape[1] // BLOCK // config.splits
    out = pl.program_id(0) * config.outputs + lax.iota(jnp.int32, config.outputs)
    row = pl.program_id(1) * config.rows + lax.iota(jnp.int32, config.rows)
    in_use = below(row, x_ref.shape[0])
    mask = None if in_use is None else in_use[:, None]
    scales, zeros = (*per_group, None)[:2]
    before_after = ((), (out,)) if inputs_first else ((out,), ())
    options = config.early, config.warps, interpret
    operand = Int4Operand(coding, codes_ref, scales, zeros, *before_after, *options)

    def x_block(block):
        def x(first, size):
            k = block * BLOCK + first + lax.iota(jnp.int32, size)
            return load(x_ref, row[:, None], k[None, :], mask=mask).T

        return x

    start, shape = pl.program_id(2) * share, (config.outputs, config.rows)
    (total,) = multiply_blocks((operand,), shape, x_block, start, share, config.unroll)
    if factors is not None:
        total = total * load(factors, out)[:, None]
    store(out_ref, pl.program_id(2), row[:, None], out[None, :], value=total.T, mask=mask)


def linear_triton(
    x: Float[Array, "R K"],
    weight: Codes,
    *,
    coding: Coding,
    inputs_first: bool,
    dtype: DTypeLike,
    config: TileConfig,
    interpret: bool = False,
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.int4_matmul.linear`, which checks them."""
    outputs = weight.codes.shape[1 if inputs_first else 0]
    arrays = [array for array in weight if array is not None]
    kernel = functools.partial(
        _linear, coding=coding, inputs_first=inputs_first, config=config, interpret=interpret
    )
    sizes: Any = dict(config=config, outputs=outputs, dtype=dtype)
    parts = launch_split(kernel, x, *arrays, name="grouped_linear", **sizes, interpret=interpret)
    return parts[0] if config.splits == 1 else jnp.sum(parts, axis=0).astype(dtype)
