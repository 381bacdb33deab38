"""Gate and up with their activation, for products with codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.common import reference_ops
from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.common.tiles import MMA_OUTPUTS, MMA_ROWS, SmallMConfig
from pallas_kernels.dispatch import Candidate, dispatch


def dispatch_gated(
    implementation: str,
    kernel: Callable[..., Array],
    linear: Callable[..., Array],
    x: Float[Array, "R *in"],
    *weight: Any,
    outputs: int,
    activation: Activation,
    config: SmallMConfig | None,
    reason: str | None,
    worth_it: bool = True,
) -> Float[Array, "R F"]:
    """Return activation(x @ gate) * (x @ up) by one kernel, or by `linear` and an activation.

    Args:
      kernel: takes x, the weight and `config`.
      linear: takes x, the weight and `implementation`. It multiplies by gate and up side by side.
      outputs: of gate.
      config: tile sizes of the kernel; None where it does not fit.
      reason: why the kernel cannot run; None if it can.
      worth_it: whether "auto" should take the kernel when it can run.
    """

    def mosaic(*args: Any) -> Array:
        return kernel(*args, config=config)

    def plain(*args: Any) -> Array:
        both = linear(
            *args, implementation="reference" if implementation == "reference" else "auto"
        )
        return reference_ops.gated(both.reshape(x.shape[0], 2, outputs), activation)

    if config is None:
        reason = (
            f"the Mosaic kernel of gate and up takes up to {MMA_ROWS} rows, and outputs that are a "
            f"multiple of {MMA_OUTPUTS}; there are {x.shape[0]} rows and {outputs} outputs"
        )
    candidates = [Candidate("mosaic", mosaic, reason, worth_it)]
    return dispatch(implementation, candidates, plain, x, *weight)
