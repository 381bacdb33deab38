"""Four-bit codes for `pallas_kernels.few`."""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.few import Weight, multiply
from pallas_kernels.grouped.coding import HALF, Codes
from pallas_kernels.grouped.decode import SHIFT
from pallas_kernels.grouped.mma import numbers_of
from pallas_kernels.grouped.mosaic import LINE
from pallas_kernels.tiles import TILE, FewCut


def linear_few(
    x: Float[Array, "R K"], weight: Codes, *, group: int, dtype: DTypeLike, cut: FewCut
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.grouped.linear`, which checks them."""
    assert weight.scales is not None
    outputs, lines = weight.codes.shape[1], cut.outputs * HALF // LINE
    codes = weight.codes.reshape(-1, outputs * HALF // LINE, LINE)  # as they lie in memory
    rings = (
        plgpu.SMEM((cut.stages, cut.blocks, lines, LINE), codes.dtype),
        plgpu.SMEM((cut.stages, cut.inputs // group, cut.outputs), weight.scales.dtype),
    )

    def copies(refs: tuple[Any, ...], column: Array, step: Array) -> list[Any]:
        sizes = (ring.shape[1:3] for ring in rings)
        return [
            ref.at[pl.ds(step * count, count), pl.ds(column * width, width)]
            for ref, (count, width) in zip(refs, sizes, strict=True)
        ]

    numbers = functools.partial(numbers_of, group=group, outputs=cut.outputs, piece=TILE)
    arrays = codes, weight.scales
    own = Weight(arrays, rings, copies, numbers, lambda refs, first, rows: 2.0**SHIFT)
    return multiply("grouped_linear", x, own, outputs=outputs, dtype=dtype, cut=cut)
