"""A product of rows with a weight of 8-bit codes and a scale for each output.

`reference.py` shows what is computed. `decode.py` shows how a GPU makes numbers of codes, `triton.py`
how they are multiplied. `tuning.py` has tile sizes, and says for which products XLA is faster.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.dispatch import Candidate, Implementation, dispatch, why_not_triton
from pallas_kernels.eight_bits.reference import reference, sums
from pallas_kernels.eight_bits.triton import Cut, linear_triton
from pallas_kernels.eight_bits.tuning import MOST_ROWS, cut_for, faster_than_xla

LEAST = 64  # inputs and outputs are multiples of it
CODES = (jnp.int8, jnp.float8_e4m3fn)

__all__ = ["Cut", "linear", "reference", "sums"]


def linear(
    x: Float[Array, "R *in"],
    codes: Shaped[Array, "*out_in"],
    scales: Float[Array, "*out"],
    *,
    dtype: DTypeLike,
    implementation: Implementation = "auto",
    cut: Cut | None = None,
    interpret: bool = False,
) -> Float[Array, "R *out"]:
    """Return the sums of x * codes over all axes of x but the first, in float32, times scales.

    Args:
      x: rows.
      codes: [*out, *in], int8 or e4m3.
      scales: float32, [*out].
      dtype: of the result.
      implementation: "triton" needs bfloat16 rows, up to `tuning.MOST_ROWS` of them, inputs and
        outputs that are multiples of 64, and an NVIDIA GPU of compute capability 8.0 or newer, 8.9
        for e4m3 (or `interpret`). "auto" takes it where it can run and is faster than XLA, and takes
        "reference" elsewhere.
      cut: tile sizes of the kernel; None takes them from the table in `tuning.py`.
      interpret: whether to interpret the kernel. It then runs on any device, slowly. For tests.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "triton" and it cannot run.
    """
    if codes.shape != (*scales.shape, *x.shape[1:]):
        raise ValueError(
            f"for rows {x.shape} and scales {scales.shape}, codes must be "
            f"{(*scales.shape, *x.shape[1:])}; they are {codes.shape}"
        )
    rows, inputs, outputs = x.shape[0], math.prod(x.shape[1:]), scales.size
    reason = why_not_triton(x, interpret=interpret, dtypes=(jnp.bfloat16,))
    reason = reason or why_not_triton(codes, interpret=interpret, dtypes=CODES)
    if not reason and rows > MOST_ROWS:
        reason = f"the Triton kernel is cut for {MOST_ROWS} rows at most, not {rows}"
    if not reason and (inputs % LEAST or outputs % LEAST):
        reason = (
            f"the Triton kernel needs inputs and outputs that are multiples of {LEAST}, not "
            f"{inputs} and {outputs}"
        )
    worth_it = not reason and faster_than_xla(rows, inputs, outputs)
    cut = cut or (None if reason else cut_for(rows, inputs, outputs))
    kernel = functools.partial(linear_triton, dtype=dtype, cut=cut, interpret=interpret)
    candidate = Candidate("triton", kernel, reason, worth_it)
    plain = functools.partial(reference, dtype=dtype)
    return dispatch(implementation, [candidate], plain, x, codes, scales)
