"""Codes of 8 bits for `pallas_kernels.few`."""

from __future__ import annotations

import functools
import math
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.eight_bits.decode import factor
from pallas_kernels.eight_bits.mma import numbers_of
from pallas_kernels.few import Weight, multiply
from pallas_kernels.mma import of_outputs
from pallas_kernels.tiles import MMA_OUTPUTS, TILE, FewCut


def linear_few(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*out_in"],
    scales: Float[Array, "*out"],
    *,
    dtype: DTypeLike,
    cut: FewCut,
) -> Float[Array, "R *out"]:
    """Launch the kernel. Arguments as in `pallas_kernels.eight_bits.linear`, which checks them."""
    outputs = math.prod(scales.shape)
    arrays = codes.reshape(outputs, -1), scales.reshape(outputs)
    rings = (plgpu.SMEM((cut.stages, cut.outputs, cut.inputs), codes.dtype),)

    def copies(refs: tuple[Any, ...], column: Array, step: Array) -> list[Any]:
        some = pl.ds(column * cut.outputs, cut.outputs), pl.ds(step * cut.inputs, cut.inputs)
        return [refs[0].at[*some]]

    def factors(refs: tuple[Any, ...], first: Array, rows: int) -> Array:
        return of_outputs(refs[1].at[pl.ds(first, MMA_OUTPUTS)], rows) * factor(codes.dtype)

    numbers = functools.partial(numbers_of, kind=codes.dtype, inputs=cut.inputs, piece=TILE)
    own = Weight(arrays, rings, copies, numbers, factors)
    flat = x.reshape(x.shape[0], -1)
    out = multiply("eight_bit_linear", flat, own, outputs=outputs, dtype=dtype, cut=cut)
    return out.reshape(x.shape[0], *scales.shape)
