"""The operation in plain JAX. Tests compare the kernel with it."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Float

from pallas_kernels.rounding.reference import Rounded, Sums, values_of
from pallas_kernels.rounding.reference import reference as rounded

Activation = Callable[[Array], Array]


def reference(
    gate_up: Float[Array, "*rows 2 F"] | Sums, *, activation: Activation, rounding: bool
) -> Float[Array, "*rows F"] | Rounded:
    """Gate, and round. Arguments as in `pallas_kernels.gated.gated`."""
    gate_up = values_of(gate_up)
    hidden = activation(gate_up[..., 0, :]) * gate_up[..., 1, :]
    return rounded(hidden) if rounding else hidden
