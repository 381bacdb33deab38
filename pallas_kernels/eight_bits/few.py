"""Products of very few rows with codes of 8 bits, by `pallas_kernels/few.py`."""

from __future__ import annotations

import math

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.eight_bits.mma import EightBits
from pallas_kernels.few import multiply
from pallas_kernels.tiles import FewCut


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
    own = EightBits(cut, False, codes.reshape(outputs, -1), scales.reshape(outputs))
    flat = x.reshape(x.shape[0], -1)
    out = multiply("eight_bit_linear", flat, own, outputs=outputs, dtype=dtype)
    return out.reshape(x.shape[0], *scales.shape)
