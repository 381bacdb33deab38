"""A product of many rows with codes of 8 bits in Pallas Mosaic, for Hopper: TMA loads, wgmma multiplies.

A block of threads has two warpgroups. Each multiplies outputs of its own with all rows, over a share
of the inputs. TMA loads codes and rows into a ring in shared memory, several steps ahead. A warpgroup
takes 64 x 64 codes into registers, converts them, and hands them to wgmma as its left operand. While
these are multiplied it converts the next ones.

Where outputs are few, several blocks share the inputs of a tile (`splits`). XLA adds their parts, in
their order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Shaped

from pallas_kernels.eight_bits.decode import pairs
from pallas_kernels.eight_bits.tuning import (
    LINE,
    PROCESSORS,
    TILE,
    MosaicCut,
    block_of,
    first_step,
    padded,
    parts_of_tiles,
    written_rows,
)


def _linear(
    x_ref,
    codes_ref,
    scales_ref,
    out_ref,
    ring,
    x_ring,
    result,
    there,
    free,
    *,
    cut: MosaicCut,
    first_tile: int,
    splits: int,
) -> None:
    """Write out[split, rows, outputs] of a tile: sums times their scales.

    Args:
      first_tile: of the codes that `out` has.
    """
    split, warpgroup = lax.axis_index("split"), lax.axis_index("warpgroup")
    block = lax.axis_index("tile") * cut.together + lax.axis_index("neighbour")
    rows, steps, of_all = x_ref.shape[0], codes_ref.shape[1] // cut.inputs, 0
    lines, blocks = cut.inputs // LINE, cut.outputs // TILE
    together = "neighbour" if cut.together > 1 else None
    if splits:  # steps of one tile
        begin, end = (block * steps + lax.div((split + i) * steps, splits) for i in range(2))
    else:  # an equal share of the steps of all tiles
        of_all = steps * (out_ref.shape[2] // cut.tile)
        begin, end = (first_step(block + i, of_all) for i in range(2))
    count = end - begin

    def before(place, steps):
        return jnp.where(place < steps, place + cut.stages, place) - steps

    def fetch(step, place):
        """Let TMA load what a step multiplies."""
        tile = block if splits else lax.div(begin + step, steps)
        own = pl.ds((first_tile + tile) * cut.tile, cut.tile)
        for line in range(lines):
            at = pl.ds((begin + step - tile * steps) * cut.inputs + line * LINE, LINE)
            codes = codes_ref.at[own, at], ring.at[place, line], there.at[place]
            plgpu.copy_gmem_to_smem(*codes)
            x = x_ref.at[:, at], x_ring.at[place, line], there.at[place]
            plgpu.copy_gmem_to_smem(*x, collective_axes=together)

    def loads(place):
        """Tell whether this warpgroup loads a place of the ring: it alone knows when it is free."""
        return lax.rem(place, cut.groups) == warpgroup

    @pl.loop(0, jnp.minimum(count, cut.stages))
    def _(step):
        @pl.when(loads(step))
        def _():
            fetch(step, step)

    def multiply(*totals, first, last, place):
        def step(i, place):
            plgpu.barrier_wait(there.at[place])
            for line in range(lines):
                for number in range(blocks):
                    own = pl.ds(warpgroup * cut.outputs + number * TILE, TILE)
                    w = _numbers(ring.at[place, line, own], cut.narrow)
                    plgpu.wgmma(totals[number], w, x_ring.at[place, line].transpose((1, 0)))
                    plgpu.wgmma_wait(1)  # for the one before this
                if line == 0:
                    # Nobody waits for the last ones: a neighbour may be gone then.
                    @pl.when((i >= 1) & (i - 1 + cut.stages < count))
                    def _():
                        plgpu.barrier_arrive(free.at[before(place, 1)])

            # It was a step ago that this warpgroup gave it back, so that none waits for the others.
            @pl.when((i >= 2) & (i - 2 + cut.stages < count) & loads(before(place, 2)))
            def _():
                plgpu.barrier_wait(free.at[before(place, 2)])
                fetch(i - 2 + cut.stages, before(place, 2))

            return jnp.where(place == cut.stages - 1, 0, place + 1)

        place = lax.fori_loop(first, last, step, place)
        plgpu.wgmma_wait(0)
        return [total[...] for total in totals], place

    mine, by_output = result.at[warpgroup], plgpu.Layout.WGMMA.reduce(1)

    def tile(number, first, place, part):
        """Write sums of a tile from a step on. Return the place in the ring after its last."""
        last = jnp.minimum(end, (number + 1) * steps) - begin
        total = plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32)
        run = functools.partial(multiply, first=first, last=last, place=place)
        totals, place = pl.run_scoped(run, *[total] * blocks)
        for i, total in enumerate(totals):
            to = number * cut.tile + warpgroup * cut.outputs + i * TILE
            scales = scales_ref.at[pl.ds(first_tile * cut.tile + to, TILE)]
            load: Any = plgpu.load
            scales = load(scales, layout=by_output, optimized=False)
            total = total * lax.broadcast_in_dim(scales, (TILE, rows), [0])
            for row in range(0, rows, result.shape[1]):
                some = total[:, row : row + result.shape[1]].astype(result.dtype)
                mine.T[...] = plgpu.layout_cast(some, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                at = part, pl.ds(row, result.shape[1]), pl.ds(to, TILE)
                plgpu.copy_smem_to_gmem(mine, out_ref.at[at])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return last, place

    start = jnp.int32(0)
    if splits:
        tile(block, start, start, split)
    else:

        def one(number, carry):
            first, place = carry
            return tile(number, first, place, block - block_of(number * steps, of_all))

        lax.fori_loop(lax.div(begin, steps), lax.div(end - 1, steps) + 1, one, (start, start))
    plgpu.wait_smem_to_gmem(0)


def _numbers(codes_ref: Any, narrow: bool) -> Array:
    """Return codes [64, 64] in shared memory as bfloat16 in registers, as wgmma takes them.

    Args:
      narrow: whether to load two codes at once. Else a thread loads four, and hands two of them to its
        neighbour.
    """
    layout = plgpu.Layout.WGMMA if narrow else plgpu.Layout.WGMMA_UPCAST_2X
    codes = plgpu.load(codes_ref, layout=layout)  # pyright: ignore[reportCallIssue]
    if codes.dtype == jnp.int8 and not narrow:  # in 4 instructions for two codes, as in `decode`
        return plgpu.layout_cast(codes.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
    assembly = pairs(codes.dtype)[: 1 if narrow else 2]

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.bfloat16, layout=layout),
    )
    def convert(_, codes):
        # A register has two or four codes. This Mosaic does not convert e4m3 to bfloat16.
        word = ir.IntegerType.get_signless(32)
        words = ir.VectorType.get((len(assembly),), word)
        numbers = ir.VectorType.get((2 * len(assembly),), ir.BF16Type.get())
        made = np.empty_like(codes.registers)
        for index, register in np.ndenumerate(codes.registers):
            register = utils.bitcast(register, ir.IntegerType.get_signless(16 * len(assembly)))
            if narrow:
                register = arith.extui(word, register)
            out = llvm.mlir_undef(words)
            for half, code in enumerate(assembly):
                pair: Any = llvm.inline_asm(word, [register], code, "=r,r")
                out = llvm.insertelement(out, pair, utils.c(half, word))
            made[index] = vector.bitcast(numbers, out)
        return type(codes)(_registers=made, _layout=codes.layout, _is_signed=None)

    numbers: Any = convert
    return plgpu.layout_cast(numbers(codes), plgpu.Layout.WGMMA)


def linear_mosaic(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*out_in"],
    scales: Float[Array, "*out"],
    *,
    dtype: DTypeLike,
    cut: MosaicCut,
) -> Float[Array, "R *out"]:
    """Launch the kernel. Arguments as in `pallas_kernels.eight_bits.linear`, which checks them."""
    assert cut.stages >= 3  # places are filled again a step after they are given back
    count, outputs, shape = x.shape[0], scales.size, scales.shape
    x = jnp.pad(x.reshape(count, -1), ((0, padded(count) - count), (0, 0)))
    codes, scales = codes.reshape(outputs, -1), scales.reshape(outputs)
    tiles, found = outputs // cut.tile, []
    if not cut.splits:
        parts = _launch(x, codes, scales, jnp.dtype(dtype), cut, 0, tiles, 0)
        # Not every tile has every part.
        used = np.arange(len(parts))[:, None] < parts_of_tiles(tiles, codes.shape[1] // cut.inputs)
        used = np.repeat(used, cut.tile, axis=1)[:, None]
        out = jnp.sum(jnp.where(used, parts[:, :count], 0), axis=0).astype(dtype)
        return out.reshape(count, *shape)
    for first, last, splits in ((0, cut.whole, 1), (cut.whole, tiles, cut.splits)):
        if first < last:
            out = _launch(x, codes, scales, jnp.dtype(dtype), cut, first, last - first, splits)
            out = out[0] if splits == 1 else jnp.sum(out, axis=0).astype(dtype)
            found.append(out[:count])
    out = found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)
    return out.reshape(count, *shape)


def _launch(
    x: Float[Array, "R K"],
    codes: Shaped[Array, "N K"],
    scales: Float[Array, " N"],
    dtype: Any,
    cut: MosaicCut,
    first: int,
    tiles: int,
    splits: int,
) -> Float[Array, "X R M"]:
    """Multiply by some tiles of outputs, from `first` on."""
    (rows, lines), part = (x.shape[0], cut.inputs // LINE), dtype if splits == 1 else jnp.float32
    part, blocks, parts = jnp.dtype(part), tiles // cut.together, splits
    if not splits:
        blocks, parts = PROCESSORS, int(parts_of_tiles(tiles, x.shape[1] // cut.inputs).max())

    def memory(*shape: int, dtype: Any, line: int = LINE) -> Any:
        swizzle = plgpu.SwizzleTransform(line * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, line)), swizzle))

    free: Any = dict(num_arrivals=cut.groups, num_barriers=cut.stages)
    if cut.together == 1:
        free = plgpu.Barrier(**free)
    else:
        free = plgpu.ClusterBarrier(collective_axes=("neighbour",), **free)
    return plgpu.kernel(
        functools.partial(_linear, cut=cut, first_tile=first, splits=splits),
        out_type=jax.ShapeDtypeStruct((parts, rows, tiles * cut.tile), part),
        grid=(max(splits, 1), blocks),
        grid_names=("split", "tile"),
        cluster=(cut.together,),
        cluster_names=("neighbour",),
        num_threads=cut.groups,
        thread_name="warpgroup",
        scratch_types=(
            memory(cut.stages, lines, cut.tile, LINE, dtype=codes.dtype),
            memory(cut.stages, lines, rows, LINE, dtype=x.dtype),
            memory(cut.groups, written_rows(rows), TILE, dtype=part, line=128 // part.itemsize),
            plgpu.Barrier(num_arrivals=2 * lines, num_barriers=cut.stages),
            free,
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(x, codes, scales)
