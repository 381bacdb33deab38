"""Experts for few tokens: a router's choice, a gated MLP for each expert, their weighted sum.

Read `reference.py` for what is computed, `triton.py` for how each expert in use is read once and
the others never, `tuning.py` for tile sizes.
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
    """Return sum over a token's experts of weight * (gelu_tanh(x @ gate) * (x @ up)) @ down.

    Args:
      x: tokens, in the dtype of the experts.
      logits: what the router says of each token, in float32, in any number of parts to be added up.
        The sum is rounded to the tokens' dtype, as a product would be. Experts and weights are
        `choose`'s.
      expert_scale: a factor for the weights of each expert.
      gate_up: gate and up matrices of each expert, side by side.
      down: down matrices.
      top_k: experts of a token.
      implementation: "triton" needs an NVIDIA GPU of compute capability 8.0 or newer (or
        `interpret`) and 16-bit experts; "auto" takes it where it can run, and "reference"
        elsewhere.
      tiling: tile sizes of the kernel, instead of the table's.
      interpret: run the kernel on any device, slowly, to test it.

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
