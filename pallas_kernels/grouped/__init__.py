"""A product of rows with a weight of four-bit codes and a scale for each group of inputs.

`coding.py` says what is stored. `reference.py` shows what is computed. `decode.py` shows how a GPU
makes numbers of codes, `triton.py` how they are multiplied. `tuning.py` has tile sizes.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Candidate, Implementation, dispatch, why_not_triton
from pallas_kernels.grouped.coding import BLOCK, Codes, Coding
from pallas_kernels.grouped.reference import reference
from pallas_kernels.grouped.triton import Cut, linear_triton
from pallas_kernels.grouped.tuning import cut_for

# With more rows, writing the weight out in 16 bits costs little beside the product.
MOST_ROWS = 512
LEAST_OUTPUTS = 16

__all__ = ["Codes", "Coding", "Cut", "linear", "reference"]


def linear(
    x: Float[Array, "R K"],
    weight: Codes,
    *,
    coding: Coding,
    inputs_first: bool = True,
    dtype: DTypeLike,
    implementation: Implementation = "auto",
    cut: Cut | None = None,
    interpret: bool = False,
) -> Float[Array, "R N"]:
    """Return x @ weight, summed in float32.

    Args:
      x: rows.
      weight: codes [K / 64, N, 32] and scales [K / group, N]; or, unless `inputs_first`,
        [N, K / 64, 32] and [N, K / group]. `coding.Codes` has more.
      dtype: of the result.
      implementation: "triton" needs bfloat16 rows, up to 512 of them, inputs that are a multiple of
        64, outputs that are a multiple of 16, and an NVIDIA GPU of compute capability 8.0 or newer
        (or `interpret`). "auto" takes it where it can run, and takes "reference" elsewhere.
      cut: tile sizes of the kernel; None takes them from the table in `tuning.py`.
      interpret: whether to interpret the kernel. It then runs on any device, slowly. For tests.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "triton" and it cannot run.
    """
    blocks, outputs = weight.codes.shape[:2] if inputs_first else weight.codes.shape[1::-1]
    _check(x, weight, coding, inputs_first)
    how = dict(coding=coding, inputs_first=inputs_first, dtype=dtype)
    per_group = [array for array in (weight.scales, weight.zeros) if array is not None]
    scale_bytes = min(array.dtype.itemsize for array in per_group)
    cut = cut or cut_for(x.shape[0], blocks, outputs, scale_bytes)
    kernel = functools.partial(linear_triton, **how, cut=cut, interpret=interpret)
    reason = why_not_triton(x, interpret=interpret, dtypes=(jnp.bfloat16,))
    reason = reason or _why_not(x, weight, outputs)
    candidate = Candidate("triton", kernel, reason)
    return dispatch(implementation, [candidate], functools.partial(reference, **how), x, weight)


def _why_not(x: Array, weight: Codes, outputs: int) -> str | None:
    if x.shape[0] > MOST_ROWS:
        return f"the Triton kernel is cut for {MOST_ROWS} rows at most, not {x.shape[0]}"
    if x.shape[1] % BLOCK or outputs % LEAST_OUTPUTS:
        return (
            f"the Triton kernel needs inputs that are a multiple of {BLOCK} and outputs that are one "
            f"of {LEAST_OUTPUTS}, not {x.shape[1]} and {outputs}"
        )
    if weight.codes.size >= 2**31:
        return f"the Triton kernel's offsets are 32 bits, and there are {weight.codes.size} codes"
    return None


def _check(x: Array, weight: Codes, coding: Coding, inputs_first: bool) -> None:
    inputs, outputs = x.shape[1], weight.codes.shape[1 if inputs_first else 0]

    def shape(count: int) -> tuple[int, ...]:
        return (count, outputs) if inputs_first else (outputs, count)

    wanted: dict[str, tuple[int, ...]] = dict(
        codes=(*shape(-(-inputs // BLOCK)), BLOCK // 2),
        scales=shape(-(-inputs // coding.group)),
        zeros=shape(-(-inputs // coding.group)),
        factors=(outputs,),
    )
    for name, array in weight._asdict().items():
        if array is not None and array.shape != wanted[name]:
            raise ValueError(
                f"for rows {x.shape} and groups of {coding.group}, {name} must be "
                f"{wanted[name]}; they are {array.shape}"
            )
