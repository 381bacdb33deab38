"""Experts for few tokens: the choice of a router, a gated MLP per expert, and a weighted sum.

`reference.py` shows what is computed. `triton.py` shows how the kernels read each expert in use
once and the others never. `tuning.py` has tile sizes.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Candidate, Implementation, dispatch, why_not_triton
from pallas_kernels.experts.reference import add_up, choose, reference, router_logits
from pallas_kernels.experts.triton import Tiling, experts_triton
from pallas_kernels.experts.tuning import tiling_for

__all__ = ["Tiling", "add_up", "choose", "experts", "reference", "router_logits"]


def experts(
    x: Float[Array, "T D"],
    logits: Float[Array, "S T E"],
    expert_scale: Float[Array, " E"],
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
    *,
    top_k: int,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Run each token through the experts that the router chose, and return the weighted sum.

    The result of a token is the sum over its experts of
    weight * (gelu_tanh(x @ gate) * (x @ up)) @ down.

    Args:
      x: tokens, in the dtype of the experts.
      logits: float32 logits of the router, in S parts that are added up. The sum is rounded to the
        dtype of x, as a product would be. `choose` says which experts and weights follow from it.
      expert_scale: a factor of the weight of each expert.
      gate_up: gate and up matrices of each expert, side by side.
      down: down matrix of each expert.
      top_k: number of experts of a token.
      implementation: "triton" needs 16-bit experts and an NVIDIA GPU of compute capability 8.0 or
        newer (or `interpret`). "auto" takes it where it can run, and takes "reference" elsewhere.
      tiling: tile sizes of the kernels; None takes them from the table in `tuning.py`.
      interpret: whether to interpret the kernels. They then run on any device, slowly. For tests.

    Raises:
      ValueError: shapes or dtypes do not fit together.
      NotImplementedError: implementation is "triton" and it cannot run.
    """
    _check(x, logits, expert_scale, gate_up, down, top_k)
    tiling = tiling or tiling_for(x.shape[0] * top_k / gate_up.shape[0])
    triton = Candidate(
        "triton",
        functools.partial(experts_triton, top_k=top_k, tiling=tiling, interpret=interpret),
        reason=why_not_triton(gate_up, interpret=interpret),
    )
    plain = functools.partial(reference, top_k=top_k)
    return dispatch(implementation, [triton], plain, x, logits, expert_scale, gate_up, down)


def _check(
    x: Array, logits: Array, expert_scale: Array, gate_up: Array, down: Array, top_k: int
) -> None:
    (t, d), (e, f, _) = x.shape, down.shape
    if gate_up.shape != (e, d, 2, f) or down.shape != (e, f, d):
        raise ValueError(
            f"for tokens {x.shape}, gate_up must be [E, D, 2, F] and down [E, F, D]; "
            f"they are {gate_up.shape} and {down.shape}"
        )
    if logits.shape[1:] != (t, e) or expert_scale.shape != (e,) or logits.dtype != jnp.float32:
        raise ValueError(
            f"logits must be float32 [parts, {t}, {e}] and expert_scale [{e}]; they are "
            f"{logits.dtype} {logits.shape} and {expert_scale.shape}"
        )
    if not 0 < top_k <= e:
        raise ValueError(f"{top_k} different experts a token, of {e}")
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(
            f"tokens and experts must have one dtype; x is {x.dtype}, gate_up {gate_up.dtype}, "
            f"down {down.dtype}"
        )
