"""Products of very few rows with codes in Pallas Mosaic, for Hopper, without split sums.

`mma.py` shows the products of a warp. The warps of a warpgroup have the same 16 outputs, and a
quarter of the inputs of a step each. So a block of threads has few outputs, blocks are many, and
each sums over all inputs. No part of a sum goes through the memory of the GPU. Of gate and up a
warpgroup has the same 16 outputs, so it computes their activation too.

A block multiplies one column of outputs after the other. One of its warpgroups lets TMA load
several steps ahead, those of the next column too. The rows are loaded again for each column, which
costs little for up to 16 rows and too much for more. `docs/weight-format-speed.md` has the times.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.mma import Weight, add_steps, write
from pallas_kernels.common.mosaic import activated
from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.common.tiles import BLOCK, MMA_ROWS, SmallMConfig, padded
from pallas_kernels.dispatch import processors


def multiply(
    name: str,
    x: Float[Array, "R K"],
    weight: Weight,
    *,
    outputs: int,
    dtype: DTypeLike,
    activation: Activation | None = None,
) -> Float[Array, "R N"]:
    """Return the product of rows with a weight, or activation(x @ gate) * (x @ up).

    Args:
      name: what profiles call the kernel.
      weight: with a `SmallMConfig`: a matrix; or gate and up, `gated`.
      outputs: of a matrix.
      dtype: of the result. Gate and up are rounded to it before the activation.
      activation: for gate and up; None for a matrix.

    Raises:
      ValueError: the config does not fit.
    """
    config: SmallMConfig = weight.config
    assert weight.gated == (activation is not None)
    weight.check(outputs)
    (count, inputs), rows = x.shape, padded(x.shape[0], MMA_ROWS)
    few_rows = count < MMA_ROWS
    steps, columns = -(-inputs // config.inputs), outputs // weight.width
    blocks = min(processors() * config.per_processor, columns)
    if few_rows:
        x = x.reshape(count, -1, BLOCK)
    elif count < rows:
        x = jnp.pad(x, ((0, rows - count), (0, 0)))
    of_weight = weight.arrays

    def kernel(x_ref: Any, *refs: Any) -> None:
        weight_refs, (out_ref, *memory) = refs[: len(of_weight)], refs[len(of_weight) :]
        *rings, x_ring, _, full, empty = memory
        block, warpgroup = (lax.axis_index(axis) for axis in ("block", "warpgroup"))
        own = lax.div(columns - block + blocks - 1, jnp.int32(blocks))  # number of columns
        stages = jnp.int32(config.stages)

        def load_all() -> None:
            @pl.loop(0, own)
            def _(i):
                @pl.loop(0, steps)
                def _(step):
                    done = i * steps + step
                    slot = lax.rem(done, stages)
                    pl.when(done >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    size = config.blocks if few_rows else config.inputs
                    of_x = x_ref.at[:, pl.ds(step * size, size)], x_ring.at[slot]
                    where = block + i * blocks, step, slot
                    for of, to in (of_x, *weight.copies(weight_refs, tuple(rings), (), *where)):
                        plgpu.copy_gmem_to_smem(of, to, full.at[slot])

        def multiply_all() -> None:
            @pl.loop(0, own)
            def _(i):
                column = block + i * blocks
                factors = weight.factors(weight_refs, (), column, warpgroup, rows)

                def x_of(slot: Array) -> Any:
                    return x_ring.at[slot]

                before = i * steps
                totals = add_steps(weight, tuple(memory), x_of, before, steps, rows, warpgroup)
                both = zip(totals, factors, strict=True)
                totals = [(total * by).astype(out_ref.dtype) for total, by in both]
                (result,) = [activated(totals, activation)] if activation else totals
                for row in range(0, count, MMA_ROWS):
                    to = out_ref.at[pl.ds(row, 1), weight.outputs(column, warpgroup, 0)]
                    write(result, to, row, outputs, shared=True, rows=count - row)

        pl.when(warpgroup == config.groups)(load_all)
        pl.when(warpgroup < config.groups)(multiply_all)

    kernel.__name__ = name
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((count, outputs), dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.groups + 1,
        thread_name="warpgroup",
        scratch_types=weight.memory(count if few_rows else rows, rows),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(x, *of_weight)
