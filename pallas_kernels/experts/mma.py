"""The products of experts with codes for few tokens, for Hopper, by TMA and `mma.sync`.

A block of threads multiplies tile after tile, each by some outputs of its expert. One of its
warpgroups lets TMA load codes, scales and rows into a ring in shared memory, several steps ahead,
those of the next tile too. So a block waits for its first step only. The others multiply, as in
`common/mma.py`. Where the warps of a warpgroup share inputs, they add up what each has in shared
memory. No part of a sum is written to the memory of the GPU.

Up to 8 tokens are the rows of every tile, whether an expert was chosen for them or not: `mma.sync`
takes 8 rows at once. Nothing is copied then. More tokens lie in the order of their experts: see
`permute.spread`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.common.mma import Weight, add_steps, write
from pallas_kernels.common.mosaic import activated
from pallas_kernels.dispatch import processors
from pallas_kernels.experts.routing import ALIGN, Placed
from pallas_kernels.experts.tile_config import MmaConfig
from pallas_kernels.int4_matmul.coding import Codes
from pallas_kernels.int4_matmul.mma import Int4Weight
from pallas_kernels.int8_matmul.mma import Int8Weight

GROUP = 32  # inputs of a scale


def _multiply(
    expert_ref,
    used_ref,
    tiles_ref,
    start_ref,
    x_ref,
    codes_ref,
    scales_ref,
    out_ref,
    *memory,
    weight: Weight,
    blocks: int,
    same_rows: bool,
) -> None:
    """Write all outputs of the rows of all tiles: gelu_tanh(gate) * up, or sums."""
    *rings, x_ring, _, full, empty = memory
    config: MmaConfig = weight.config
    block, warpgroup = (lax.axis_index(axis) for axis in ("block", "warpgroup"))
    outputs, stages = out_ref.shape[1], jnp.int32(config.stages)
    columns, of_weight = jnp.int32(outputs // weight.width), (codes_ref, scales_ref)
    inputs = config.inputs
    steps = -(-x_ref.shape[1] // inputs)
    # Blocks at work at the same time have neighbouring outputs, most of them of one expert.
    own = lax.div(tiles_ref[0] * columns - block + blocks - 1, jnp.int32(blocks))

    def tile_and_column(i: Array) -> tuple[Array, Array]:
        """Return the i-th tile of this block, and its column of outputs."""
        at = block + i * blocks
        return lax.div(at, columns), lax.rem(at, columns)

    def by_rows(used: Array, do: Any) -> None:
        """Do something with as many rows as a tile needs."""
        for less, rows in zip((0, *config.rows), config.rows, strict=False):
            pl.when((used > less) & (used <= rows))(functools.partial(do, rows))

    def aligned(start: Array) -> Array:
        return lax.div(start, jnp.int32(ALIGN)) * ALIGN  # so that Mosaic sees that it is a multiple

    def load_all() -> None:
        def about(i: Array) -> tuple[Array, ...]:
            tile, _ = tile_and_column(jnp.minimum(i, own - 1))
            return expert_ref[tile], used_ref[tile], start_ref[tile]

        def load(i: Array, now: tuple[Array, ...]) -> tuple[Array, ...]:
            # Memory takes long to answer, so the next tile is asked for while this one is loaded.
            then, (expert, used, start), (_, column) = about(i + 1), now, tile_and_column(i)
            row = 0 if same_rows else aligned(start)

            def load_steps(rows: int) -> None:
                @pl.loop(0, steps)
                def _(step):
                    done = i * steps + step
                    slot = lax.rem(done, stages)
                    pl.when(done >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    x = x_ref.at[pl.ds(row, rows), pl.ds(step * inputs, inputs)]
                    of_x = x, x_ring.at[slot, pl.ds(0, rows)]
                    where = (expert,), column, step, slot
                    for of, to in (of_x, *weight.copies(of_weight, tuple(rings), *where)):
                        plgpu.copy_gmem_to_smem(of, to, full.at[slot])

            by_rows(used, load_steps)
            return then

        @pl.when(own > 0)
        def _():
            lax.fori_loop(0, own, load, about(jnp.int32(0)))

    def multiply_all() -> None:
        @pl.loop(0, own)
        def _(i):
            tile, column = tile_and_column(i)
            used, start = used_ref[tile], start_ref[tile]

            def multiply(rows: int) -> None:
                where = (expert_ref[tile],), column, warpgroup
                factors = weight.factors(of_weight, *where, rows)

                def x_of(slot: Array) -> Any:
                    return x_ring.at[slot, pl.ds(0, rows)]

                totals = add_steps(weight, memory, x_of, i * steps, steps, rows, warpgroup)
                # As in the reference, gate and up are rounded before the activation.
                both = zip(totals, factors, strict=True)
                totals = [(total * by).astype(out_ref.dtype) for total, by in both]
                results = [activated(totals, "gelu_tanh")] if weight.gated else totals
                for piece, result in enumerate(results):
                    mine = weight.outputs(column, warpgroup, piece)
                    for row in range(0, rows, ALIGN):

                        @pl.when(used > row)
                        def _(row=row, result=result, mine=mine):
                            to = out_ref.at[pl.ds(aligned(start) + row, ALIGN), mine]
                            write(result, to, row, outputs, shared=config.shared)

            by_rows(used, multiply)

    pl.when(warpgroup == config.groups)(load_all)
    pl.when(warpgroup < config.groups)(multiply_all)


def _launch(
    placed: Placed,
    x: Float[Array, "R K"],
    weight: Codes,
    config: MmaConfig,
    *,
    gated: bool,
    same_rows: bool,
) -> Float[Array, "P N"]:
    """Multiply the rows of all tiles by one of both weights.

    Raises:
      ValueError: the config does not fit.
    """
    rows, outputs = config.rows[-1], weight.codes.shape[-2]  # outputs of a matrix
    if weight.scales is not None:
        own = Int4Weight.of(weight, config, GROUP, experts=True, gated=gated)
    else:
        assert weight.factors is not None
        own = Int8Weight(config, gated, weight.codes, weight.factors)
    own.check(outputs)
    blocks = processors() * config.per_processor

    def body(*refs: Any) -> None:
        _multiply(*refs, weight=own, blocks=blocks, same_rows=same_rows)

    body.__name__ = "experts_gate_up" if gated else "experts_down"
    all_rows = ALIGN * placed.expert.size if same_rows else x.shape[0]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((all_rows, outputs), x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.groups + 1,
        thread_name="warpgroup",
        scratch_types=own.memory(rows, rows),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(
        placed.expert,
        placed.used,
        placed.tiles,
        placed.start,
        x,
        *own.arrays,
    )


def multiply(
    placed: Placed,
    rows: Float[Array, "R D"],
    gate_up: Codes,
    down: Codes,
    configs: tuple[MmaConfig, MmaConfig],
    *,
    same_rows: bool,
) -> Float[Array, "P D"]:
    """Run the experts of all tiles on their rows. Rows not in use are undefined.

    Args:
      same_rows: whether all tiles have the same rows: tokens, of which there are `ALIGN` at most.
        In the result tile i has those from `ALIGN` * i on.
    """
    hidden = _launch(placed, rows, gate_up, configs[0], gated=True, same_rows=same_rows)
    return _launch(placed, hidden, down, configs[1], gated=False, same_rows=False)
