"""Rows of activations as 8-bit floats with a scale of their own.

`reference.py` shows what is computed. `triton.py` computes it in one kernel.
"""

from __future__ import annotations

import functools

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Candidate, Implementation, dispatch, why_not_rounding
from pallas_kernels.rounding.reference import LARGEST, Rounded, Sums, reference, values_of
from pallas_kernels.rounding.triton import MAX_WIDTH, round_rows_triton

__all__ = ["LARGEST", "Rounded", "Sums", "reference", "round_rows", "values_of"]


def round_rows(
    x: Float[Array, "R D"], *, implementation: Implementation = "auto", interpret: bool = False
) -> Rounded:
    """Return codes (e4m3) and scales (float32) of rows: x is about codes * scales.

    The scale of a row is its largest magnitude over 448, so nothing is clipped. A row of zeros has
    codes of zero.

    Args:
      implementation: "triton" needs 16-bit numbers, rows of at most 32,768 of them, and an NVIDIA
        GPU of compute capability 8.9 or newer (or `interpret`). "auto" takes it where it can run,
        and takes "reference" elsewhere.
      interpret: whether to interpret the kernel. It then runs on any device, slowly. For tests.

    Raises:
      NotImplementedError: implementation is "triton" and it cannot run.
    """
    kernel = functools.partial(round_rows_triton, interpret=interpret)
    candidate = Candidate("triton", kernel, _why_not(x, interpret))
    return dispatch(implementation, [candidate], reference, x)


def _why_not(x: Array, interpret: bool) -> str | None:
    """Return why the kernel cannot take such rows on the GPU of this machine, or None."""
    if x.shape[-1] > MAX_WIDTH:
        return f"the Triton kernel holds rows of up to {MAX_WIDTH} numbers, not {x.shape[-1]}"
    return why_not_rounding(x, interpret=interpret)
