"""The operation between the two products of a gated MLP: activation(gate) * up, rounded to 8 bits.

`reference.py` shows what is computed. `triton.py` shows how one kernel computes it. Where nothing is
rounded, XLA makes one kernel by itself, and no other is needed.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Candidate, Implementation, dispatch, why_not_triton
from pallas_kernels.gated.reference import Activation, reference
from pallas_kernels.gated.triton import MAX_WIDTH, gated_triton
from pallas_kernels.rounding.reference import Rounded, Sums

__all__ = ["gated", "reference"]


def gated(
    gate_up: Float[Array, "*rows 2 F"] | Sums,
    activation: Activation,
    *,
    rounding: bool = False,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "*rows F"] | Rounded:
    """Return activation(gate) * up, the hidden numbers of a gated MLP.

    Args:
      gate_up: gates, then what they multiply. `Sums` are multiplied with their scales first.
      activation: of each number by itself. The kernel computes it in float32.
      rounding: whether rows are rounded, as `rounding.round_rows` does.
      implementation: "triton" needs `Sums` of 16 bits, rounding, up to 32,768 hidden numbers, and an
        NVIDIA GPU of compute capability 8.9 or newer (or `interpret`). "auto" takes it where it can
        run, and takes "reference" elsewhere.
      interpret: whether to interpret the kernel. It then runs on any device, slowly. For tests.

    Raises:
      NotImplementedError: implementation is "triton" and it cannot run.
    """
    kernel = functools.partial(gated_triton, activation=activation, interpret=interpret)
    candidate: Candidate[Array | Rounded] = Candidate(
        "triton", kernel, _why_not(gate_up, rounding, interpret)
    )
    plain = functools.partial(reference, activation=activation, rounding=rounding)
    return dispatch(implementation, [candidate], plain, gate_up)


def _why_not(gate_up: Array | Sums, rounding: bool, interpret: bool) -> str | None:
    """Return why the kernel cannot take these on the GPU of this machine, or None."""
    if not rounding or not isinstance(gate_up, Sums):
        return "the Triton kernel is for sums, and rounds"
    if gate_up.shape[-1] > MAX_WIDTH:
        return f"the Triton kernel holds rows of up to {MAX_WIDTH} numbers, not {gate_up.shape[-1]}"
    codes = jnp.empty(0, jnp.float8_e4m3fn)  # only GPUs that convert them
    return why_not_triton(gate_up.sums, interpret=interpret) or why_not_triton(
        codes, interpret=interpret, dtypes=(codes.dtype,)
    )
