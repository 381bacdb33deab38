"""A product with codes of 8 bits in Pallas Mosaic, for Hopper: TMA loads, wgmma multiplies."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LINE = 64  # inputs that one wgmma call multiplies: a line of 128 bytes of rows


@dataclasses.dataclass(frozen=True)
class MosaicCut:
    outputs: int = 128  # of each of two warpgroups
    inputs: int = 128
    splits: int = 1
    stages: int = 3


def _numbers(codes):
    """[64, 64] codes in registers, as bfloat16 in the layout of wgmma's left operand."""
    if codes.dtype == jnp.int8:
        return plgpu.layout_cast(codes.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
    layout = plgpu.Layout.WGMMA_UPCAST_2X

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.bfloat16, layout=layout),
    )
    def convert(_, codes):
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import llvm, vector
        from jax.experimental.mosaic.gpu import utils

        i32 = ir.IntegerType.get_signless(32)
        two = ir.VectorType.get((2,), i32)
        four = ir.VectorType.get((4,), ir.BF16Type.get())
        made = np.empty_like(codes.registers)
        for index, register in np.ndenumerate(codes.registers):
            word = utils.bitcast(register, i32)
            out = llvm.mlir_undef(two)
            for half, bytes_ in enumerate(("1100", "3322")):
                number = llvm.inline_asm(
                    i32,
                    [word],
                    "{ .reg .b32 y, z, c, zero; mov.b32 c, 0x7b807b80; mov.b32 zero, 0x80008000;"
                    f"prmt.b32 z, $1, 0, 0x{bytes_}; shr.u32 y, z, 4; and.b32 y, y, 0x07f007f0;"
                    "lop3.b32 y, z, 0x80008000, y, 0xea; fma.rn.bf16x2 $0, y, c, zero; }",
                    "=r,r",
                )
                out = llvm.insertelement(out, number, utils.c(half, i32))
            made[index] = vector.bitcast(four, out)
        return type(codes)(_registers=made, _layout=codes.layout, _is_signed=None)

    return plgpu.layout_cast(convert(codes), plgpu.Layout.WGMMA)


def _linear(x_ref, codes_ref, scales_ref, out_ref, ring, x_ring, result, there, free, *, cut, rows):
    split, tile = lax.axis_index("split"), lax.axis_index("tile")
    warpgroup = lax.axis_index("warpgroup")
    steps = codes_ref.shape[1] // cut.inputs
    begin, end = (lax.div((split + i) * steps, cut.splits) for i in range(2))
    lines, count, blocks = cut.inputs // LINE, end - begin, cut.outputs // 64

    def fetch(step):
        """Let TMA load what a step multiplies."""
        place, first = lax.rem(step, cut.stages), (begin + step) * cut.inputs
        own = pl.ds(tile * 2 * cut.outputs, 2 * cut.outputs)
        for line in range(lines):
            at = pl.ds(first + line * LINE, LINE)
            plgpu.copy_gmem_to_smem(codes_ref.at[own, at], ring.at[place, line], there.at[place])
            plgpu.copy_gmem_to_smem(x_ref.at[:, at], x_ring.at[place, line], there.at[place])

    @pl.when(warpgroup == 0)
    def _():
        @pl.loop(0, jnp.minimum(count, cut.stages))
        def _(step):
            fetch(step)

    def give_back(step):
        @pl.when(step >= 0)
        def _():
            plgpu.barrier_arrive(free.at[lax.rem(step, cut.stages)])

    def refill(step):
        """Load over what both have given back. One waits for the other, a step later."""

        @pl.when((step >= 0) & (step + cut.stages < count) & (warpgroup == 0))
        def _():
            plgpu.barrier_wait(free.at[lax.rem(step, cut.stages)])
            fetch(step + cut.stages)

    def multiply(*totals):
        @pl.loop(0, count)
        def _(i):
            place = lax.rem(i, cut.stages)
            plgpu.barrier_wait(there.at[place])
            for line in range(lines):
                for block in range(blocks):
                    first = warpgroup * cut.outputs + block * 64
                    codes = plgpu.load(
                        ring.at[place, line, pl.ds(first, 64)], layout=plgpu.Layout.WGMMA_UPCAST_2X
                    )
                    w = _numbers(codes)
                    plgpu.wgmma(totals[block], w, x_ring.at[place, line].transpose((1, 0)))
                    # While this is multiplied the next codes are converted.
                    plgpu.wgmma_wait(1)
                if line == 0:
                    # Nothing reads what belonged to the last step any more.
                    give_back(i - 1)
                    refill(i - 2)

        plgpu.wgmma_wait(0)
        return [total[...] for total in totals]

    totals = pl.run_scoped(multiply, *[plgpu.WGMMAAccumulatorRef((64, rows), jnp.float32)] * blocks)
    mine = result.at[warpgroup]
    for block in range(blocks):
        first = (tile * 2 + warpgroup) * cut.outputs + block * 64
        by_output = plgpu.Layout.WGMMA.reduce(1)
        scales = plgpu.load(scales_ref.at[pl.ds(first, 64)], layout=by_output, optimized=False)
        total = totals[block] * lax.broadcast_in_dim(scales, (64, rows), [0])
        total = plgpu.layout_cast(total.astype(result.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        mine.T[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, out_ref.at[split, :, pl.ds(first, 64)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.wait_smem_to_gmem(0)


def linear_mosaic(x, codes, scales, *, dtype, cut):
    rows, outputs, shape = x.shape[0], scales.size, scales.shape
    x, scales, codes = x.reshape(rows, -1), scales.reshape(outputs), codes.reshape(outputs, -1)
    part = dtype if cut.splits == 1 else jnp.float32

    def tiled(size, numbers):
        return plgpu.TilingTransform((8, numbers)), plgpu.SwizzleTransform(size)

    lines = cut.inputs // LINE
    out = plgpu.kernel(
        functools.partial(_linear, cut=cut, rows=rows),
        out_type=jax.ShapeDtypeStruct((cut.splits, rows, outputs), part),
        grid=(cut.splits, outputs // (2 * cut.outputs)),
        grid_names=("split", "tile"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM(
                (cut.stages, lines, 2 * cut.outputs, LINE), codes.dtype, transforms=tiled(64, LINE)
            ),
            plgpu.SMEM((cut.stages, lines, rows, LINE), x.dtype, transforms=tiled(128, LINE)),
            plgpu.SMEM((2, rows, 64), part, transforms=tiled(128, 128 // jnp.dtype(part).itemsize)),
            plgpu.Barrier(num_arrivals=2 * lines, num_barriers=cut.stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=cut.stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(x, codes, scales)
    out = out[0] if cut.splits == 1 else jnp.sum(out, axis=0).astype(dtype)
    return out.reshape(rows, *shape)
