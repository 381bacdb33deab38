"""A product of many rows with four-bit codes in Pallas Mosaic, for Hopper: TMA loads, wgmma multiplies.

A block of threads has two or four warpgroups. Each multiplies 64 outputs with all rows, over a share of the
inputs. TMA loads codes, scales and rows into a ring in shared memory, several steps ahead. A
warpgroup takes 64 x 64 codes into registers, makes numbers of them, and hands these to wgmma as its
left operand. While these are multiplied the other warpgroups make theirs.

Numbers are multiplied by their scales in bfloat16, before the product. So they are the same ones as
in the Triton kernel with its cuts.

Where outputs are few, several blocks share the inputs of a tile (`splits`). XLA adds their parts, in
their order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Float

from pallas_kernels.grouped.coding import BLOCK, HALF, Codes
from pallas_kernels.grouped.decode import INT4_PAIRS
from pallas_kernels.grouped.tuning import ROWS, MosaicCut
from pallas_kernels.mosaic import Steps, multiply_tiles, swizzled
from pallas_kernels.tiles import TILE, padded


def _steps(
    x_ref, codes_ref, scales_ref, ring, x_ring, scale_ring, *, group: int, cut: MosaicCut
) -> Steps:
    """Return how a block of inputs is multiplied.

    Args:
      group: inputs that share a scale.
    """
    mine = pl.ds(lax.axis_index("warpgroup") * TILE, TILE)

    def load(tile, block, place, there):
        own = pl.ds(tile * cut.outputs, cut.outputs)
        groups = pl.ds(lax.div(block * BLOCK, group), scale_ring.shape[1])
        plgpu.copy_gmem_to_smem(codes_ref.at[block, own], ring.at[place], there)
        plgpu.copy_gmem_to_smem(scales_ref.at[groups, own], scale_ring.at[place], there)
        rows = x_ref.at[:, pl.ds(block * BLOCK, BLOCK)]
        plgpu.copy_gmem_to_smem(rows, x_ring.at[place], there)

    def multiply(total, place):
        codes, halves = _codes(ring.at[place, mine]), []
        for half in range(2):
            scales = scale_ring.at[place, half * HALF // group, mine]
            halves.append(_numbers(codes, half) * _by_output(scales, HALF))
        plgpu.wgmma(total, _side_by_side(*halves), x_ring.at[place].transpose((1, 0)))

    return Steps(load, multiply)


def _by_output(ref: Any, inputs: int) -> Array:
    """Return a value of each output [64] in shared memory, for numbers [64, inputs]."""
    values = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)  # pyright: ignore[reportCallIssue]
    return lax.broadcast_in_dim(values, (TILE, inputs), [0])


def _codes(ref: Any) -> Array:
    """Return bytes [64, 32] in shared memory, each where wgmma takes what is made of it.

    A thread loads four neighbours, and swaps two of them with the next thread.
    """
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    codes = plgpu.load(ref, layout=layout)  # pyright: ignore[reportCallIssue]
    return plgpu.layout_cast(codes, plgpu.Layout.WGMMA)


def _numbers(codes: Array, half: int) -> Array:
    """Return the low (0) or high (1) halves of bytes as bfloat16."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.bfloat16, layout=layout),
    )
    def convert(_, codes):
        # A register has two bytes. Four of them are converted together.
        word, two = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        made = np.empty_like(codes.registers)
        for first in range(0, made.shape[1], 2):
            for rest in np.ndindex(made.shape[2:]):
                at = [(0, first + i, *rest) for i in range(2)]
                four = utils.bitcast(utils.vector_concat([codes.registers[i] for i in at]), word)
                for i, code in zip(at, INT4_PAIRS[half], strict=True):
                    pair: Any = llvm.inline_asm(word, [four], code, "=r,r")
                    made[i] = utils.bitcast(pair, two)
        return type(codes)(_registers=made, _layout=codes.layout, _is_signed=None)

    numbers: Any = convert
    return numbers(codes)


def _side_by_side(first: Array, second: Array) -> Array:
    """Return two arrays [64, 32] as one. No register moves."""
    layout, shape = plgpu.Layout.WGMMA, (first.shape[0], 2 * first.shape[1])

    @plgpu.inline_mgpu(
        arg_types=(layout, layout),
        return_type=plgpu.ShapeDtypeStruct(shape, first.dtype, layout=layout),
    )
    def join(_, first, second):
        registers = np.concatenate([first.registers, second.registers], axis=1)
        return type(first)(_registers=registers, _layout=first.layout, _is_signed=None)

    joined: Any = join
    return joined(first, second)


def linear_mosaic(
    x: Float[Array, "R K"], weight: Codes, *, group: int, dtype: DTypeLike, cut: MosaicCut
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.grouped.linear`, which checks them."""
    assert weight.scales is not None
    count, outputs = x.shape[0], weight.codes.shape[1]
    x = jnp.pad(x, ((0, padded(count, ROWS) - count), (0, 0)))
    rows = x.shape[0]
    out = multiply_tiles(
        "grouped_linear",
        functools.partial(_steps, group=group, cut=cut),
        (x, weight.codes, weight.scales),
        outputs=outputs,
        steps=weight.codes.shape[0],
        cut=cut,
        dtype=dtype,
        rings=(
            swizzled(cut.stages, cut.outputs, HALF, dtype=jnp.uint8),
            swizzled(cut.stages, rows, BLOCK, dtype=x.dtype),
            plgpu.SMEM((cut.stages, max(1, BLOCK // group), cut.outputs), jnp.bfloat16),
        ),
        loads=3,
    )
    return out[:count]
