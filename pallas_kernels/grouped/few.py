"""Products of very few rows with four-bit codes, and gate and up with the activation, by `pallas_kernels/few.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.elementary import Activation
from pallas_kernels.few import multiply
from pallas_kernels.grouped.coding import Codes
from pallas_kernels.grouped.mma import FourBits
from pallas_kernels.tiles import FewCut


def linear_few(
    x: Float[Array, "R K"],
    weight: Codes,
    *,
    group: int,
    dtype: DTypeLike,
    cut: FewCut,
    activation: Activation | None = None,
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.grouped`, whose functions check them.

    Args:
      activation: None for `linear`.
    """
    cut = dataclasses.replace(cut, pieces=2 if activation else 1)
    own = FourBits.of(weight, cut, group, gated=activation is not None)
    name = "grouped_gate_up" if activation else "grouped_linear"
    how: Any = dict(outputs=weight.codes.shape[-2], dtype=dtype, activation=activation)
    return multiply(name, x, own, **how)
