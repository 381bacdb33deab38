"""The Mosaic kernel of products with codes. Import it late: older versions of jax lack its parts.

`multiply_tiles` is one kernel. A block of threads multiplies its tiles one after the other. TMA
loads all of them into one ring in shared memory, so only the first tile waits for its first step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.common.tile_schedule import (
    TileSchedule,
    WorkTile,
    schedule_for,
    tile_position,
    whole_tiles,
)
from pallas_kernels.common.tiles import PIECE, TILE, padded, results_are_apart
from pallas_kernels.dispatch import processors

LEFT = plgpu.Layout.WGMMA
"""Layout of wgmma's left operand in registers, and of its sums."""
BY_OUTPUT = LEFT.reduce(1)
"""Layout of one number for each output, beside `LEFT`."""


def load_as(ref: Any, layout: Any, *, optimized: bool = True) -> Array:
    """Load numbers from memory in a layout."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def swizzled(*shape: int, dtype: DTypeLike, line: int | None = None) -> Any:
    """Return shared memory for TMA and wgmma.

    Args:
      line: numbers that are swizzled together; None for those of the last axis.
    """
    line = shape[-1] if line is None else line
    return plgpu.SMEM(shape, dtype, transforms=swizzle(line, dtype))


def swizzle(line: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """Return the transforms of memory in which lines of so many numbers are swizzled."""
    line_bytes = line * jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line_bytes)


# An activation of x is x * sigmoid(inner(x)).
_INNER: dict[Activation, Callable[[Array], Array]] = {
    "gelu_tanh": lambda x: 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)),
    "silu": lambda x: x,
}


def activated(both: Sequence[Array], activation: Activation) -> Array:
    """Return activation(gate) * up, of the same dtype."""
    gate, _ = both
    x, y = (a.astype(jnp.float32) for a in both)
    return (x * y / (1 + jnp.exp(-_INNER[activation](x)))).astype(gate.dtype)


Sums = Literal["together", "apart", "carried"]
"""Home of the sums of a tile.

- "together": in the tensor cores, from step to step.
- "apart": in the tensor cores for one step. Each step is then added to the others in float32,
  because sums of 8-bit floats have few bits in the tensor cores.
- "carried": in registers. `StepOps.multiply` adds to them, and one more warpgroup loads.
"""


class StepOps(NamedTuple):
    """Functions that load, multiply and finish a step of inputs.

    Attributes:
      load: from a tile of outputs, one of rows, a step, a slot of the rings and its barrier, let
        TMA load the operands.
      multiply: from sums and a slot, hand the operands to wgmma. Where sums are carried, return
        them instead: a tuple of [64, rows] for each piece of a warpgroup.
      finish: from sums [64 outputs, rows] and the first of these outputs, return the result.
    """

    load: Callable[[Array, Array | int, Array, Array, Any], None]
    multiply: Callable[[Any, Array], Any]
    finish: Callable[[Array, Array], Array] = lambda total, first: total


def multiply_tiles(
    name: str,
    steps_of: Callable[..., StepOps],
    args: tuple[Array, ...],
    *,
    outputs: int,
    steps: int,
    config: Any,
    multiple: int,
    dtype: DTypeLike,
    rings: Callable[[int], tuple[Any, ...]],
    loads: int,
    sums: Sums = "together",
    write: Callable[[Array, Any, Array], None] | None = None,
) -> Float[Array, "R N"]:
    """Return a product of rows with all tiles of outputs.

    Args:
      name: what profiles call the kernel.
      steps_of: from references to `args` and to `rings` to `StepOps`.
      args: arrays, of which the first one is the rows.
      steps: of a tile.
      config: has `groups`, `outputs`, `row_tiles`, `splits`, `stages` and `whole`, as in
        `tiles.MosaicConfig`.
      multiple: of rows that a tile has. Rows are padded to it.
      dtype: of the result. Parts are float32.
      rings: from the rows of a tile, shared memory with `config.stages` slots.
      loads: copies of a step.
      sums: see `Sums`.
      write: write a result to memory [rows, outputs], from an output on. None lets TMA do that, by
        way of shared memory.

    Raises:
      ValueError: the config puts whole tiles before splits that are too short for it, or divides
        rows among tiles, of which `write` does not know.
    """
    x, *others = args
    if write and config.row_tiles > 1:
        raise ValueError(f"{config} divides rows among tiles, and this kernel writes those of one")
    count, tiles = x.shape[0], outputs // config.outputs * config.row_tiles
    all_rows = padded(count, multiple * config.row_tiles)
    args = jnp.pad(x, ((0, all_rows - count), (0, 0))), *others
    written_rows = count if write else all_rows
    rows, whole = all_rows // config.row_tiles, whole_tiles(config, tiles)
    own_rings = rings(rows)
    pieces = config.outputs // (config.groups * TILE)  # of a warpgroup
    if not results_are_apart(config, steps):
        raise ValueError(
            f"{config} gives a split {steps // config.splits} of {steps} steps; where whole tiles come "
            "first, a split needs more steps than there are stages"
        )
    rest, dtype = tiles - whole, jnp.dtype(dtype)
    blocks = min(processors(), whole + rest * config.splits)
    shapes = []
    if whole:
        shape = 1, written_rows, whole // config.row_tiles * config.outputs
        shapes.append(jax.ShapeDtypeStruct(shape, dtype))
    if rest:
        parts = config.splits, written_rows, rest // config.row_tiles * config.outputs
        shapes.append(jax.ShapeDtypeStruct(parts, jnp.float32))

    def kernel(*refs: Any) -> None:
        arg_refs, refs = refs[: len(args)], refs[len(args) :]
        out_refs, refs = refs[: len(shapes)], refs[len(shapes) :]
        own, (*staged, full, empty) = refs[: len(own_rings)], refs[len(own_rings) :]
        block, warpgroup = (lax.axis_index(axis) for axis in ("block", "warpgroup"))

        def load(tile: Array, step: Array, slot: Array) -> None:
            of_step.load(*tile_position(tile, config), step, slot, full.at[slot])

        def write_share(share: WorkTile, total: Array, piece: int) -> None:
            mine = warpgroup * pieces + piece
            tile, row_tile = tile_position(share.tile, config)
            before = whole // config.row_tiles if share.out else 0

            @pl.when(share.count > 0)
            def _():
                result = of_step.finish(total, tile * config.outputs + mine * TILE)
                first = (tile - before) * config.outputs + mine * TILE
                to = out_refs[share.out].at[share.split]
                if write:
                    return write(result.astype(to.dtype), to, first)
                memory = staged[0][share.out].at[warpgroup]
                _write_sums(result, memory, to, row_tile * rows, first)

        of_step = steps_of(*arg_refs, *own)
        schedule = schedule_for(block, blocks, tiles, steps, config)
        ring = Ring(full, empty, load, of_step.multiply, write_share)
        _in_ring(schedule, config, rows, ring, sums, pieces)

    kernel.__name__ = name
    result_shape = config.groups, min(rows, PIECE), TILE
    line = 128  # bytes that are swizzled together
    of_results = (
        swizzled(*result_shape, dtype=s.dtype, line=line // s.dtype.itemsize) for s in shapes
    )
    results = plgpu.kernel(
        kernel,
        out_type=tuple(shapes),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.groups + (sums == "carried"),
        thread_name="warpgroup",
        scratch_types=(
            *own_rings,
            *(() if write else (plgpu.RefUnion(*of_results),)),
            plgpu.Barrier(num_arrivals=loads, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=config.groups, num_barriers=config.stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(*args)
    added = [out[0] if out.shape[0] == 1 else jnp.sum(out, axis=0).astype(dtype) for out in results]
    out = added[0] if len(added) == 1 else jnp.concatenate(added, axis=1)
    return out[:count]


class Ring(NamedTuple):
    """Shared memory that TMA fills several steps ahead.

    Attributes:
      full, empty: barriers of each slot: its loads are done; all warpgroups have read it.
      load: a step of a tile into a slot.
      multiply: as in `StepOps`.
      write: the sums of a share, those of a piece of its outputs.
    """

    full: Any
    empty: Any
    load: Callable[[Array, Array, Array], None]
    multiply: Callable[[Any, Array], Any]
    write: Callable[[WorkTile, Array, int], None]


def _in_ring(
    schedule: TileSchedule, config: Any, rows: int, ring: Ring, sums: Sums, pieces: int
) -> None:
    """Multiply the tiles of a block of threads.

    Its warpgroups take turns with loading. Where sums are carried, they load the first slots only,
    and the last warpgroup loads the rest.
    """
    warpgroup, stages = lax.axis_index("warpgroup"), config.stages
    assert stages >= 3  # slots are filled again a step after they are given back
    begins = schedule.begins
    count = begins[-1]
    accumulator = plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32)
    zeros = functools.partial(jnp.zeros, (TILE, rows), jnp.float32)

    def loads(slot):
        """Tell whether this warpgroup loads a slot of the ring. The others need not wait for it."""
        return lax.rem(slot, config.groups) == warpgroup

    @pl.loop(0, jnp.minimum(count, stages))
    def _(i):
        pl.when(loads(i))(lambda: ring.load(*schedule.at(i), i))

    def load_again(i, slot):
        """Wait until all warpgroups have given a slot back, and load step i into it."""
        plgpu.barrier_wait(ring.empty.at[slot])
        ring.load(*schedule.at(i), slot)

    def begin(i, slot, total):
        """Multiply a step, and load over the slot that all have given back meanwhile."""
        plgpu.barrier_wait(ring.full.at[slot])
        result = ring.multiply(total, slot)
        if sums != "carried":
            before = jnp.where(slot == 0, stages, slot) - 1
            there_is = (i >= 1) & (i - 1 + stages < count) & loads(before)
            pl.when(there_is)(lambda: load_again(i - 1 + stages, before))
        return result

    def end(slot):
        """Give a slot back, and return the next one."""
        plgpu.barrier_arrive(ring.empty.at[slot])
        return jnp.where(slot == stages - 1, 0, slot + 1)

    def run_together(share, first, slot):
        def steps(total):
            def step(i, slot):
                begin(i, slot, total)
                # wgmma reads its left operand until here. The next step has the same registers.
                plgpu.wgmma_wait(0)
                return end(slot)

            return lax.fori_loop(first, first + share.count, step, slot), (total[...],)

        return pl.run_scoped(steps, accumulator)

    def run_apart(share, first, slot):
        def step(i, carry):
            slot, total = carry

            def own_sums(own):
                begin(i, slot, own)
                return own[...]

            own = pl.run_scoped(own_sums, accumulator)
            return end(slot), total + own

        total = plgpu.layout_cast(zeros(), LEFT)
        slot, total = lax.fori_loop(first, first + share.count, step, (slot, total))
        return slot, (total,)

    def run_carried(share, first, slot):
        def step(i, carry):
            slot, totals = carry
            totals = begin(i, slot, totals)
            return end(slot), totals

        totals = (plgpu.layout_cast(zeros(), LEFT),) * pieces
        return lax.fori_loop(first, first + share.count, step, (slot, totals))

    run_steps = dict(together=run_together, apart=run_apart, carried=run_carried)[sums]

    def run(share, first, slot):
        """Multiply a tile whose steps begin at `first`, and return the slot of the next."""
        slot, totals = run_steps(share, first, slot)
        for piece, total in enumerate(totals):
            ring.write(share, total, piece)
        return slot

    def run_whole(i, slot):
        return run(schedule.whole(i), i * schedule.steps, slot)

    def run_all():
        slot = jnp.int32(0)
        if not schedule.one_at_most:
            slot = lax.fori_loop(0, schedule.wholes, run_whole, slot)
        elif schedule.wholes:
            slot = run_whole(0, slot)
        for first, part in zip(begins, schedule.parts, strict=False):
            slot = run(part, first, slot)

    if sums != "carried":
        return run_all()

    @pl.when(warpgroup == config.groups)
    def _():
        @pl.loop(jnp.minimum(count, stages), count)
        def _(i):
            load_again(i, lax.rem(i, jnp.int32(stages)))

    pl.when(warpgroup < config.groups)(run_all)


def _write_sums(
    total: Array, piece_ref: Any, out_ref: Any, first_row: Array | int, first: Array
) -> None:
    """Write sums [64 outputs, rows] of a warpgroup to out[rows, outputs], in pieces of rows.

    Args:
      piece_ref: shared memory of this warpgroup for a piece.
      first_row, first: row and output of the first sum.
    """
    count = total.shape[1]
    for row in range(0, count, PIECE):
        size = min(PIECE, count - row)
        own = piece_ref.at[pl.ds(0, size)]
        rows_of_piece = total[:, row : row + size].astype(piece_ref.dtype)
        own.T[...] = plgpu.layout_cast(rows_of_piece, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        to = out_ref.at[pl.ds(first_row + row, size), pl.ds(first, TILE)]
        plgpu.copy_smem_to_gmem(own, to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.wait_smem_to_gmem(0)
