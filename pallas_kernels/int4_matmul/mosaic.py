"""A product of many rows with 4-bit codes in Pallas Mosaic, for Hopper, by TMA and wgmma.

A block of threads has two or four warpgroups. Each multiplies 64 outputs with a tile of rows, over
a share of the inputs. Up to 128 rows are one tile. More are one or several, of up to 256. TMA loads
codes, scales and rows into a ring in shared memory, several steps ahead. It loads lines of 128
bytes, which are codes of 4 outputs. A warpgroup takes 64 x 64 codes into registers, makes numbers
of them, and hands these to wgmma as its left operand. While these are multiplied it makes the next
ones, and the other warpgroups make theirs. With up to 128 rows a step has two such blocks: with
one, lines of 32 bytes, and nothing made meanwhile, a thread ran five instructions a code where it
ran three.

Numbers are multiplied by their scales in bfloat16, before the product, as in the other kernels.

Where outputs are few, several blocks share the inputs of a tile (`splits`). XLA adds their parts,
in their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float

from pallas_kernels.common.mosaic import (
    BY_OUTPUT,
    LEFT,
    StepOps,
    Sums,
    load_as,
    multiply_tiles,
    swizzled,
)
from pallas_kernels.common.registers import at, i32, word, words
from pallas_kernels.common.tiles import TILE
from pallas_kernels.int4_matmul import dequantise_mosaic
from pallas_kernels.int4_matmul.coding import BLOCK, HALF, Codes
from pallas_kernels.int4_matmul.dequantise import SHIFT
from pallas_kernels.int4_matmul.tuning import ROWS, MosaicConfig

EXCHANGE = "prmt.b32 $0, $1, $2, $3;"
LINE = 128  # bytes that TMA loads side by side: it is slow with fewer


def _steps(
    x_ref, codes_ref, scales_ref, ring, x_ring, scale_ring, *, group: int, config: MosaicConfig
) -> StepOps:
    """Return the operations of a step of `config.blocks` blocks of inputs.

    Args:
      group: inputs that share a scale.
    """
    mine, count = pl.ds(lax.axis_index("warpgroup") * TILE, TILE), config.blocks
    rows = x_ring.shape[2]

    load_weight = loading(codes_ref, scales_ref, ring, scale_ring, group=group, config=config)

    def load(tile, row_tile, step, slot, full):
        load_weight(tile, step, slot, full)
        for block in range(count):
            inputs = pl.ds((step * count + block) * BLOCK, BLOCK)
            x = x_ref.at[pl.ds(row_tile * rows, rows), inputs]
            plgpu.copy_gmem_to_smem(x, x_ring.at[slot, block], full)

    def multiply(total, slot):
        for block in range(count):
            halves = (block * BLOCK + half * HALF for half in range(2))
            scales = [scale_ring.at[slot, first // group, mine] for first in halves]
            numbers = _numbers(ring.at[slot, block], *scales)
            plgpu.wgmma(total, numbers, x_ring.at[slot, block].transpose((1, 0)))
            if block < count - 1:
                plgpu.wgmma_wait(1)  # for the block before, whose registers the next one gets

    return StepOps(load, multiply, lambda total, first: total * 2.0**SHIFT)


def _numbers(codes_ref: Any, *scale_refs: Any) -> Array:
    """Return codes times scales as wgmma's left operand: a block of 64 outputs of a warpgroup.

    A thread loads 4 neighbours of the 32 bytes of an output, and of them hands 2 to the thread
    beside it, which needs these: wgmma takes 2 neighbours of 8 inputs from a thread, and 2 of the
    next 8.

    Args:
      codes_ref: [outputs / 4, 128] of all warpgroups.
      scale_refs: of the low and of the high halves, [64] each.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), BY_OUTPUT, BY_OUTPUT),
        return_type=plgpu.ShapeDtypeStruct((TILE, BLOCK), jnp.bfloat16, layout=LEFT),
    )
    def convert(_: Any, codes: Any, *scales: Any) -> Any:
        pair, layout = ir.VectorType.get((2,), ir.BF16Type.get()), LEFT.to_mgpu()
        thread = utils.thread_idx()
        warp, lane = arith.shrui(thread, word(5)), arith.andi(thread, word(31))
        odd = arith.andi(lane, word(1))
        is_even = arith.cmpi(arith.CmpIPredicate.eq, odd, word(0))
        exchanged = arith.select(is_even, word(0x5410), word(0x3276))
        # Of 16 bytes, thread 0 of four has the first 4, thread 2 the next 4, then 1 and 3.
        output = arith.addi(arith.muli(warp, word(16)), arith.shrui(lane, word(2)))
        byte = arith.muli(arith.andi(lane, word(2)), word(2))
        byte = arith.addi(byte, arith.muli(odd, word(8)))
        start = arith.addi(arith.muli(output, word(HALF)), byte)
        memory = utils.memref_ptr(codes)
        halves = dequantise_mosaic.halves()
        factors = [
            dequantise_mosaic.of_outputs(s, half) for s, half in zip(scales, halves, strict=True)
        ]
        made = np.empty(layout.registers_shape((TILE, BLOCK)), dtype=object)
        rest = (0,) * (made.ndim - 5)
        for below, group in np.ndindex(2, 2):  # 8 outputs below; 16 bytes further
            where = arith.addi(start, word(below * 8 * HALF + group * 16))
            eight: Any = llvm.load(i32(), at(memory, where))
            other = utils.shfl_bfly(eight, 1)
            (eight,) = words(EXCHANGE, 1, eight, other, exchanged)
            for half in range(2):
                by = factors[half][below]
                for i, two in enumerate(
                    dequantise_mosaic.numbers(eight, halves[half], by, effects=True)
                ):
                    column = 2 * (2 * half + group) + i
                    made[(0, column, 0, 0, below, *rest)] = utils.bitcast(two, pair)
        return FragmentedArray(_registers=made, _layout=layout, _is_signed=None)

    scales = [load_as(ref, BY_OUTPUT, optimized=False) for ref in scale_refs]
    return convert(codes_ref, *scales)  # pyright: ignore[reportCallIssue]


def loading(
    codes_ref: Any, scales_ref: Any, ring: Any, scale_ring: Any, *, group: int, config: MosaicConfig
) -> Callable[[Any, Any, Any, Any], None]:
    """Return the function that loads the codes and scales of a step, in two copies."""
    lines = ring.shape[2]

    def load(tile, step, slot, full):
        first, own = step * config.blocks, pl.ds(tile * config.outputs, config.outputs)
        codes = codes_ref.at[pl.ds(first, config.blocks), pl.ds(tile * lines, lines)]
        plgpu.copy_gmem_to_smem(codes, ring.at[slot], full)
        groups = pl.ds(lax.div(first * BLOCK, group), scale_ring.shape[1])
        plgpu.copy_gmem_to_smem(scales_ref.at[groups, own], scale_ring.at[slot], full)

    return load


def linear_mosaic(
    x: Float[Array, "R K"], weight: Codes, *, group: int, dtype: DTypeLike, config: MosaicConfig
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.int4_matmul.linear`, which checks them."""

    def x_ring(rows: int) -> Any:
        return swizzled(config.stages, config.blocks, rows, BLOCK, dtype=x.dtype)

    kwargs: Any = dict(group=group, dtype=dtype, config=config, loads=2 + config.blocks)
    return launch(_steps, x, weight, x_ring, **kwargs)


def launch(
    steps_of: Callable[..., StepOps],
    x: Float[Array, "R K"],
    weight: Codes,
    x_ring: Callable[[int], Any],
    *,
    group: int,
    dtype: DTypeLike,
    config: MosaicConfig,
    loads: int,
    sums: Sums = "together",
    write: Callable[[Array, Any, Array], None] | None = None,
) -> Float[Array, "R N"]:
    """Launch a kernel of codes.

    Args:
      steps_of: as in `multiply_tiles`; it also takes `group` and `config`.
      x_ring: from the rows of a tile, shared memory for them.
      loads, sums, write: as in `multiply_tiles`.
    """
    assert weight.scales is not None
    outputs = weight.codes.shape[1]
    codes = weight.codes.reshape(-1, outputs * HALF // LINE, LINE)  # as they lie in memory
    of_codes = plgpu.SMEM(
        (config.stages, config.blocks, config.outputs * HALF // LINE, LINE), jnp.uint8
    )
    groups = max(1, config.inputs // group)
    of_scales = plgpu.SMEM((config.stages, groups, config.outputs), jnp.bfloat16)
    return multiply_tiles(
        "grouped_linear",
        functools.partial(steps_of, group=group, config=config),
        (x, codes, weight.scales),
        outputs=outputs,
        steps=codes.shape[0] // config.blocks,
        config=config,
        multiple=ROWS,
        dtype=dtype,
        rings=lambda rows: (of_codes, x_ring(rows), of_scales),
        loads=loads,
        sums=sums,
        write=write,
    )
