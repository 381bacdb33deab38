"""Products of very few rows with four-bit codes, by `pallas_kernels/few.py`."""

from __future__ import annotations

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.few import multiply
from pallas_kernels.grouped.coding import Codes
from pallas_kernels.grouped.mma import FourBits
from pallas_kernels.tiles import FewCut


def linear_few(
    x: Float[Array, "R K"], weight: Codes, *, group: int, dtype: DTypeLike, cut: FewCut
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.grouped.linear`, which checks them."""
    own, outputs = FourBits.of(weight, cut, group), weight.codes.shape[1]
    return multiply("grouped_linear", x, own, outputs=outputs, dtype=dtype)
