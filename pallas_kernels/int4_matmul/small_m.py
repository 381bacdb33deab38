"""Products of very few rows with 4-bit codes, or with gate and up, for Hopper."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.common.small_m import multiply
from pallas_kernels.common.tiles import SmallMConfig
from pallas_kernels.int4_matmul.coding import Codes
from pallas_kernels.int4_matmul.mma import Int4Weight


def linear_small_m(
    x: Float[Array, "R K"],
    weight: Codes,
    *,
    group: int,
    dtype: DTypeLike,
    config: SmallMConfig,
    activation: Activation | None = None,
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.int4_matmul`, whose functions check them.

    Args:
      activation: None for `linear`.
    """
    config = dataclasses.replace(config, pieces=2 if activation else 1)
    own = Int4Weight.of(weight, config, group, gated=activation is not None)
    name = "grouped_gate_up" if activation else "grouped_linear"
    kwargs: Any = dict(outputs=weight.codes.shape[-2], dtype=dtype, activation=activation)
    return multiply(name, x, own, **kwargs)
