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
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float, Shaped

from pallas_kernels.eight_bits.decode import E4M3_PAIRS
from pallas_kernels.eight_bits.tuning import LINE, TILE, MosaicCut

ROWS = 8  # rows are a multiple of it


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
    split, tile, warpgroup = (lax.axis_index(name) for name in ("split", "tile", "warpgroup"))
    rows, steps = x_ref.shape[0], codes_ref.shape[1] // cut.inputs
    begin, end = (lax.div((split + i) * steps, splits) for i in range(2))
    lines, count, blocks = cut.inputs // LINE, end - begin, cut.outputs // TILE

    def fetch(step):
        """Let TMA load what a step multiplies."""
        place, first = lax.rem(step, cut.stages), (begin + step) * cut.inputs
        own = pl.ds((first_tile + tile) * 2 * cut.outputs, 2 * cut.outputs)
        for line in range(lines):
            at = pl.ds(first + line * LINE, LINE)
            plgpu.copy_gmem_to_smem(codes_ref.at[own, at], ring.at[place, line], there.at[place])
            plgpu.copy_gmem_to_smem(x_ref.at[:, at], x_ring.at[place, line], there.at[place])

    def give_back(step):
        @pl.when(step >= 0)
        def _():
            plgpu.barrier_arrive(free.at[lax.rem(step, cut.stages)])

    def refill(step):
        """Load over what both have given back. It was a step ago, so that none waits for the other."""

        @pl.when((step >= 0) & (step + cut.stages < count) & (warpgroup == 0))
        def _():
            plgpu.barrier_wait(free.at[lax.rem(step, cut.stages)])
            fetch(step + cut.stages)

    @pl.when(warpgroup == 0)
    def _():
        pl.loop(0, jnp.minimum(count, cut.stages))(fetch)

    def multiply(*totals):
        @pl.loop(0, count)
        def _(step):
            place = lax.rem(step, cut.stages)
            plgpu.barrier_wait(there.at[place])
            for line in range(lines):
                for block in range(blocks):
                    first = warpgroup * cut.outputs + block * TILE
                    w = _numbers(ring.at[place, line, pl.ds(first, TILE)])
                    plgpu.wgmma(totals[block], w, x_ring.at[place, line].transpose((1, 0)))
                    plgpu.wgmma_wait(1)  # for the one before this
                if line == 0:
                    give_back(step - 1)
                    refill(step - 2)

        plgpu.wgmma_wait(0)
        return [total[...] for total in totals]

    total = plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32)
    totals = pl.run_scoped(multiply, *[total] * blocks)
    mine, by_output = result.at[warpgroup], plgpu.Layout.WGMMA.reduce(1)
    for block, total in enumerate(totals):
        first = (tile * 2 + warpgroup) * cut.outputs + block * TILE
        own = pl.ds(first_tile * 2 * cut.outputs + first, TILE)
        scales = plgpu.load(scales_ref.at[own], layout=by_output, optimized=False)  # pyright: ignore[reportCallIssue]
        total = (total * lax.broadcast_in_dim(scales, (TILE, rows), [0])).astype(result.dtype)
        mine.T[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, out_ref.at[split, :, pl.ds(first, TILE)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.wait_smem_to_gmem(0)


def _numbers(codes_ref: Any) -> Array:
    """Return codes [64, 64] in shared memory as bfloat16 in registers, as wgmma takes them."""
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    codes = plgpu.load(codes_ref, layout=layout)  # pyright: ignore[reportCallIssue]
    if codes.dtype == jnp.int8:  # in 4 instructions for two codes, as in `decode`
        return plgpu.layout_cast(codes.astype(jnp.bfloat16), plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.bfloat16, layout=layout),
    )
    def convert(_, codes):
        # A register has four codes of e4m3. This Mosaic does not convert them to bfloat16.
        word = ir.IntegerType.get_signless(32)
        words, four = ir.VectorType.get((2,), word), ir.VectorType.get((4,), ir.BF16Type.get())
        made = np.empty_like(codes.registers)
        for index, register in np.ndenumerate(codes.registers):
            out = llvm.mlir_undef(words)
            for half, code in enumerate(E4M3_PAIRS):
                pair: Any = llvm.inline_asm(word, [utils.bitcast(register, word)], code, "=r,r")
                out = llvm.insertelement(out, pair, utils.c(half, word))
            made[index] = vector.bitcast(four, out)
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
    x = jnp.pad(x.reshape(count, -1), ((0, -count % ROWS), (0, 0)))
    codes, scales = codes.reshape(outputs, -1), scales.reshape(outputs)
    tiles, found = outputs // (2 * cut.outputs), []
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
    part = jnp.dtype(part)

    def memory(*shape: int, dtype: Any, line: int = LINE) -> Any:
        swizzle = plgpu.SwizzleTransform(line * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, line)), swizzle))

    return plgpu.kernel(
        functools.partial(_linear, cut=cut, first_tile=first, splits=splits),
        out_type=jax.ShapeDtypeStruct((splits, rows, tiles * 2 * cut.outputs), part),
        grid=(splits, tiles),
        grid_names=("split", "tile"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(
            memory(cut.stages, lines, 2 * cut.outputs, LINE, dtype=codes.dtype),
            memory(cut.stages, lines, rows, LINE, dtype=x.dtype),
            memory(2, rows, TILE, dtype=part, line=128 // part.itemsize),
            plgpu.Barrier(num_arrivals=2 * lines, num_barriers=cut.stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=cut.stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(x, codes, scales)
