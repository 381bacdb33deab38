"""Products of rows with codes of 8 bits in Pallas Mosaic, for Hopper, by TMA and wgmma.

A block of threads has two or four warpgroups. Each multiplies 64 outputs with a tile of rows, over
a share of the inputs. TMA loads codes and rows into a ring in shared memory, several steps ahead.
With few rows it loads whole lines of memory, 128 codes of an output: with 64 of them side by side
16 rows of 5376 x 43008 take 93 us, and not 66. More than 128 rows are one tile or several, of up to
256. Their time is that of multiplying, and 64 codes side by side leave room for more steps in the
ring. In a step a warpgroup takes its codes into registers, converts them, and hands them to wgmma
as its left operand. While these are multiplied the other warpgroups convert theirs.

Rows that are rounded to 8-bit floats need no conversion: wgmma reads them and codes that are
floats, too, from shared memory. The tensor cores add 8-bit floats with few bits. So the sums of
each step leave them, and are added to the others in float32.

Where outputs are few, several blocks share the inputs of a tile (`splits`). XLA adds their parts,
in their order.
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
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Shaped

from pallas_kernels.common.mosaic import BY_OUTPUT, StepOps, Sums, load_as, multiply_tiles, swizzled
from pallas_kernels.common.registers import i32, words
from pallas_kernels.common.tiles import TILE
from pallas_kernels.int8_matmul.dequantise import factor, pair
from pallas_kernels.int8_matmul.tuning import ROWS, MosaicConfig

SWIZZLED_BYTES = 128  # the most of a line


def _codes_converted(
    x_ref, codes_ref, scales_ref, ring, x_ring, *, config: MosaicConfig
) -> StepOps:
    """Return the operations of a step whose codes become bfloat16 in registers."""
    warpgroup = lax.axis_index("warpgroup")

    def multiply(total, slot):
        numbers = _numbers(ring.at[slot, pl.ds(warpgroup * TILE, TILE)])
        plgpu.wgmma(total, numbers, x_ring.at[slot].transpose((1, 0)))

    def finish(total, first):
        scales = load_as(scales_ref.at[pl.ds(first, TILE)], BY_OUTPUT, optimized=False)
        return total * lax.broadcast_in_dim(scales * factor(codes_ref.dtype), total.shape, [0])

    return StepOps(_loading(x_ref, codes_ref, ring, x_ring, config), multiply, finish)


def _codes_as_they_are(x_ref, codes_ref, ring, x_ring, *, config: MosaicConfig) -> StepOps:
    """Return the operations of a step whose codes and rows wgmma reads from shared memory."""
    warpgroup = lax.axis_index("warpgroup")

    def multiply(total, slot):
        codes = ring.at[slot, pl.ds(warpgroup * TILE, TILE)]
        plgpu.wgmma(total, codes, x_ring.at[slot].transpose((1, 0)))

    return StepOps(_loading(x_ref, codes_ref, ring, x_ring, config), multiply)


def _loading(x_ref, codes_ref, ring, x_ring, config: MosaicConfig) -> Any:
    """Return the function that loads `config.line` inputs of codes and of rows."""
    rows = x_ring.shape[1]

    def load(tile, row_tile, step, slot, full):
        own, at = (
            pl.ds(tile * config.outputs, config.outputs),
            pl.ds(step * config.line, config.line),
        )
        plgpu.copy_gmem_to_smem(codes_ref.at[own, at], ring.at[slot], full)
        x = x_ref.at[pl.ds(row_tile * rows, rows), at]
        plgpu.copy_gmem_to_smem(x, x_ring.at[slot], full)

    return load


def _numbers(codes_ref: Any) -> Array:
    """Return codes [64, inputs] in shared memory as bfloat16 in registers, as wgmma takes them.

    A thread loads two codes at once, which are neighbours in wgmma's operand. Of four codes it
    would hand two to another thread.
    """
    layout = plgpu.Layout.WGMMA
    codes = plgpu.load(codes_ref, layout=layout)  # pyright: ignore[reportCallIssue]
    assembly = pair(codes.dtype)

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.bfloat16, layout=layout),
    )
    def convert(_, codes):
        half = ir.IntegerType.get_signless(16)
        two = ir.VectorType.get((2,), ir.BF16Type.get())
        made = np.empty_like(codes.registers)
        for index, register in np.ndenumerate(codes.registers):
            bits = arith.extui(i32(), utils.bitcast(register, half))
            (number,) = words(assembly, 1, bits, effects=False)
            made[index] = utils.bitcast(number, two)
        return type(codes)(_registers=made, _layout=codes.layout, _is_signed=None)

    numbers: Any = convert
    return numbers(codes)


def linear_mosaic(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*out_in"],
    scales: Float[Array, "*out"],
    *,
    dtype: DTypeLike,
    config: MosaicConfig,
) -> Float[Array, "R *out"]:
    """Launch the kernel. Arguments as in `pallas_kernels.int8_matmul.linear`, which checks them."""
    rows, flat = x.reshape(x.shape[0], -1), codes.reshape(scales.size, -1)
    args = rows, flat, scales.reshape(scales.size)
    out = _launch("eight_bit_linear", _codes_converted, *args, dtype=dtype, config=config)
    return out.reshape(-1, *scales.shape)


def sums_mosaic(
    x: Float[Array, "R K"], codes: Float[Array, "N K"], *, dtype: DTypeLike, config: MosaicConfig
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `int8_matmul.rounded_sums`, which checks them."""
    kwargs: Any = dict(dtype=dtype, config=config, sums="apart")
    return _launch("eight_bit_sums", _codes_as_they_are, x, codes, **kwargs)


def _launch(
    name: str,
    steps_of: Any,
    x: Array,
    codes: Array,
    *others: Array,
    dtype: DTypeLike,
    config: MosaicConfig,
    sums: Sums = "together",
) -> Float[Array, "R N"]:
    outputs, inputs = codes.shape
    ring = swizzled(config.stages, config.outputs, config.line, dtype=codes.dtype)
    x_line = min(config.line, SWIZZLED_BYTES // x.dtype.itemsize)
    return multiply_tiles(
        name,
        functools.partial(steps_of, config=config),
        (x, codes, *others),
        outputs=outputs,
        steps=inputs // config.line,
        config=config,
        multiple=ROWS,
        dtype=dtype,
        rings=lambda rows: (
            ring,
            swizzled(config.stages, rows, config.line, dtype=x.dtype, line=x_line),
        ),
        loads=2,
        sums=sums,
    )
