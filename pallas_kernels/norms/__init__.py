"""What stands between two products of a layer: a norm, the sum with the residual, its norms.

Read `reference.py` for what is computed, `triton.py` for how one kernel does it.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Candidate, Implementation, dispatch, why_not_triton
from pallas_kernels.norms.reference import Branch, RouterScale, reference, router_norm
from pallas_kernels.norms.triton import MAX_WIDTH, add_norm_triton

__all__ = ["Branch", "RouterScale", "add_norm", "reference", "router_norm"]

FEW_ROWS = 512  # on an H200 XLA is as fast from about 2048 on, and faster where parts are added up


def add_norm(
    x: Float[Array, "*rows D"],
    h: Float[Array, "*rows D"] | tuple[Branch, ...],
    scale: Float[Array, " D"],
    next_norms: tuple[Float[Array, " D"] | RouterScale, ...] = (),
    *,
    eps: float,
    factor: Float[Array, " 1"] | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "*rows D"], tuple[Float[Array, "*rows D"], ...]]:
    """Add h to the residual, normed, and norm the sum for all that read it.

    Args:
      x: the residual.
      h: what a part of the layer made of it; or what several did, each normed before they are added
        up.
      scale: the weight of the norm of h.
      next_norms: the weight of the sum's norm for each part that reads it next, or a router's
        scale.
      eps: of the norms. Each is computed in float32 and rounded to the residual's dtype, as are
        sums.
      factor: what the sum is multiplied by; None for nothing.
      implementation: "triton" needs an NVIDIA GPU of compute capability 8.0 or newer (or
        `interpret`) and 16-bit numbers; "auto" takes it for up to 512 rows where it can run, and
        "reference" elsewhere.
      interpret: run the kernel on any device, slowly, to test it.

    Returns:
      The new residual, and its norms.

    Raises:
      ValueError: shapes do not fit together.
      NotImplementedError: implementation is "triton" and it cannot run.
    """
    _check(x, h, [scale, *jax.tree.leaves(next_norms)])
    triton = Candidate(
        "triton",
        functools.partial(add_norm_triton, eps=eps, interpret=interpret),
        reason=_why_not(x, interpret),
        worth_it=x.size <= FEW_ROWS * x.shape[-1],
    )
    plain = functools.partial(reference, eps=eps)
    return dispatch(implementation, [triton], plain, x, h, scale, next_norms, factor)


def _check(x: Array, h: Array | tuple[Branch, ...], scales: list[Array]) -> None:
    parts = h if isinstance(h, tuple) else (Branch(h, scales[0]),)
    scales = [*scales, *(part.scale for part in parts)]
    if not parts or any(part.x.shape != x.shape for part in parts):
        shapes = [part.x.shape for part in parts]
        raise ValueError(f"what is added to {x.shape} must have that shape too, not {shapes}")
    shapes = [scale.shape for scale in scales]
    if any(shape != x.shape[-1:] for shape in shapes):
        raise ValueError(f"weights of norms of {x.shape} must be {x.shape[-1:]}; they are {shapes}")


def _why_not(x: Array, interpret: bool) -> str | None:
    """Say why the kernel cannot run for such rows on this machine's GPU, if it has one."""
    if x.shape[-1] > MAX_WIDTH:
        return f"the Triton kernel holds rows of up to {MAX_WIDTH} numbers, not {x.shape[-1]}"
    return why_not_triton(x, interpret=interpret)
