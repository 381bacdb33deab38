"""A product of rounded rows with codes, both 8-bit floats, in Pallas Mosaic, for Hopper.

wgmma reads both operands from shared memory, so no code passes through registers. The work is shared
as in `mosaic.py`: TMA loads lines of 128 codes, several steps ahead.

The tensor cores add 8-bit floats with few bits. So the sums of each step leave them, and are added to
the others in float32.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.eight_bits.tuning import ROWS, FloatsCut
from pallas_kernels.mosaic import Steps, multiply_tiles, swizzled
from pallas_kernels.tiles import TILE, padded


def _steps(x_ref, codes_ref, ring, x_ring, *, cut: FloatsCut) -> Steps:
    """Return how `cut.line` inputs are multiplied."""
    warpgroup, rows = lax.axis_index("warpgroup"), x_ring.shape[1]

    def load(tile, row_tile, step, place, there):
        own, at = pl.ds(tile * cut.outputs, cut.outputs), pl.ds(step * cut.line, cut.line)
        plgpu.copy_gmem_to_smem(codes_ref.at[own, at], ring.at[place], there)
        x = x_ref.at[pl.ds(row_tile * rows, rows), at]
        plgpu.copy_gmem_to_smem(x, x_ring.at[place], there)

    def multiply(total, place):
        codes = ring.at[place, pl.ds(warpgroup * TILE, TILE)]
        plgpu.wgmma(total, codes, x_ring.at[place].transpose((1, 0)))

    return Steps(load, multiply)


def multiply_floats(
    x: Float[Array, "R K"], codes: Float[Array, "N K"], *, dtype: DTypeLike, cut: FloatsCut
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.eight_bits.rounded_sums`, which checks them."""
    count, inputs = x.shape
    x = jnp.pad(x, ((0, padded(count, ROWS * cut.row_tiles) - count), (0, 0)))
    rows = x.shape[0] // cut.row_tiles
    out = multiply_tiles(
        "eight_bit_floats",
        functools.partial(_steps, cut=cut),
        (x, codes),
        outputs=codes.shape[0],
        steps=inputs // cut.line,
        cut=cut,
        dtype=dtype,
        rings=(
            swizzled(cut.stages, cut.outputs, cut.line, dtype=codes.dtype),
            swizzled(cut.stages, rows, cut.line, dtype=x.dtype),
        ),
        loads=2,
        apart=True,
    )
    return out[:count]
