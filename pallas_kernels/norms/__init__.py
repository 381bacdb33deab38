"""The operation between two products of a layer: a norm, the sum with the residual, its norms.

`reference.py` shows what is computed. `triton.py` shows how one kernel computes it.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import (
    Candidate,
    Implementation,
    dispatch,
    why_not_rounding,
    why_not_triton,
)
from pallas_kernels.norms.reference import (
    Branch,
    NextNorm,
    RoundedNorm,
    RouterScale,
    branches_of,
    next_norm,
    reference,
    router_norm,
)
from pallas_kernels.norms.triton import MAX_WIDTH, add_norm_triton
from pallas_kernels.rounding.reference import Rounded, Sums

__all__ = [
    "Branch",
    "NextNorm",
    "RoundedNorm",
    "RouterScale",
    "add_norm",
    "next_norm",
    "reference",
    "router_norm",
]

# "auto" takes the kernel for up to this many rows. On an H200 XLA is as fast from about 2048 rows
# on, and faster where branches are added up. It has no kernel that rounds rows.
FEW_ROWS = 512


def add_norm(
    x: Float[Array, "*rows D"],
    h: Float[Array, "*rows D"] | Sums | tuple[Branch, ...],
    scale: Float[Array, " D"],
    next_norms: tuple[NextNorm, ...] = (),
    *,
    eps: float,
    factor: Float[Array, " 1"] | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "*rows D"], tuple[Float[Array, "*rows D"] | Rounded, ...]]:
    """Add the norm of h to the residual, and norm the sum for each part that reads it.

    Norms and sums are computed in float32. Each is rounded to the dtype of the residual.

    Args:
      x: the residual.
      h: the output of one part of the layer. Or a tuple of the outputs of several branches; each is
        normed with its own weight before they are added up. An output may be `Sums`, which are
        multiplied with their scales and rounded to the dtype of the residual first.
      scale: the weight of the norm of h.
      next_norms: for each part that reads the sum, the weight of its norm, by itself or as
        `RoundedNorm`, or the scale of a router.
      eps: added to the mean square in each norm.
      factor: multiplies the sum; None leaves it as it is.
      implementation: "triton" needs 16-bit numbers and an NVIDIA GPU of compute capability 8.0 or
        newer, 8.9 to round rows (or `interpret`). "auto" takes it where it can run, for up to 512
        rows or to round rows, and takes "reference" elsewhere.
      interpret: whether to interpret the kernel. It then runs on any device, slowly. For tests.

    Returns:
      The new residual, and its norms.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "triton" and it cannot run.
    """
    _check(x, h, [scale, *jax.tree.leaves(next_norms)])
    rounding = any(isinstance(norm, RoundedNorm) for norm in next_norms)
    triton = Candidate(
        "triton",
        functools.partial(add_norm_triton, eps=eps, interpret=interpret),
        reason=_why_not(x, rounding, interpret),
        worth_it=rounding or x.size <= FEW_ROWS * x.shape[-1],
    )
    plain = functools.partial(reference, eps=eps)
    return dispatch(implementation, [triton], plain, x, h, scale, next_norms, factor)


def _check(x: Array, h: Array | Sums | tuple[Branch, ...], scales: list[Array]) -> None:
    parts = branches_of(h)
    scales = [*scales, *(scale for _, scale in parts if scale is not None)]
    if not parts or any(part.shape != x.shape for part, _ in parts):
        shapes = [part.shape for part, _ in parts]
        raise ValueError(f"what is added to {x.shape} must have that shape too, not {shapes}")
    shapes = [scale.shape for scale in scales]
    if any(shape != x.shape[-1:] for shape in shapes):
        raise ValueError(f"weights of norms of {x.shape} must be {x.shape[-1:]}; they are {shapes}")


def _why_not(x: Array, rounding: bool, interpret: bool) -> str | None:
    """Return why the kernel cannot take such rows on the GPU of this machine, or None."""
    if x.shape[-1] > MAX_WIDTH:
        return f"the Triton kernel holds rows of up to {MAX_WIDTH} numbers, not {x.shape[-1]}"
    why_not = why_not_rounding if rounding else why_not_triton
    return why_not(x, interpret=interpret)
