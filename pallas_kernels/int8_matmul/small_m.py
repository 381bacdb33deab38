"""Products of very few rows with 8-bit codes, or with gate and up, for Hopper."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.common.small_m import multiply
from pallas_kernels.common.tiles import SmallMConfig
from pallas_kernels.int8_matmul.mma import Int8Weight


def linear_small_m(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*out_in"],
    scales: Float[Array, "*out"],
    *,
    dtype: DTypeLike,
    config: SmallMConfig,
    activation: Activation | None = None,
) -> Float[Array, "R *result"]:
    """Launch the kernel. Arguments as in `pallas_kernels.int8_matmul`, whose functions check them.

    Args:
      activation: None for `linear`.
    """
    matrices = scales.shape[:1] if activation else ()
    result = scales.shape[len(matrices) :]
    outputs = math.prod(result)
    codes, scales = codes.reshape(*matrices, outputs, -1), scales.reshape(*matrices, outputs)
    config = dataclasses.replace(config, pieces=2 if activation else 1)
    own = Int8Weight(config, activation is not None, codes, scales)
    name = "eight_bit_gate_up" if activation else "eight_bit_linear"
    kwargs: Any = dict(outputs=outputs, dtype=dtype, activation=activation)
    out = multiply(name, x.reshape(x.shape[0], -1), own, **kwargs)
    return out.reshape(x.shape[0], *result)
