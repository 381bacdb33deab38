"""Experts for few tokens: the choice of a router, a gated MLP per expert, and a weighted sum.

`reference.py` shows what is computed. `routing.py` and `triton.py` show how the kernels read each expert in use
once and the others never. `tuning.py` has tile sizes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from pallas_kernels.dispatch import Candidate, Implementation, dispatch, why_not_triton
from pallas_kernels.experts.reference import add_up, choose, reference, router_logits
from pallas_kernels.experts.triton import Tiling, experts_triton
from pallas_kernels.experts.tuning import tiling_for

# The dtypes of codes that the kernels read.
CODES = ("int8", "float8_e4m3fn")

__all__ = ["Tiling", "add_up", "choose", "experts", "reference", "router_logits"]


def experts(
    x: Float[Array, "T D"],
    logits: Float[Array, "S T E"],
    expert_scale: Float[Array, " E"],
    gate_up: Num[Array, "E _ _ _"],
    down: Num[Array, "E _ _"],
    gate_up_scales: Float[Array, "E 2 F"] | None = None,
    down_scales: Float[Array, "E D"] | None = None,
    real: Bool[Array, " T"] | None = None,
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
      gate_up_scales, down_scales: factors of the output channels of both, in float32. With them
        `gate_up` and `down` are codes of int8 or float8_e4m3fn with inputs last, [E, 2, F, D] and
        [E, D, F]. None: they are the weights.
      real: which tokens are no padding. Experts that only the others chose are not read, and the
        results of the others are 0. None: all.
      top_k: number of experts of a token.
      implementation: "triton" needs 16-bit experts and an NVIDIA GPU of compute capability 8.0 or
        newer (or `interpret`). "auto" takes it where it can run, and takes "reference" elsewhere.
      tiling: tile sizes of the kernels; None takes them from the table in `tuning.py`.
      interpret: whether to interpret the kernels. They then run on any device, slowly. For tests.

    Raises:
      ValueError: shapes or dtypes do not fit together.
      NotImplementedError: implementation is "triton" and it cannot run.
    """
    _check(x, logits, expert_scale, gate_up, down, top_k, down_scales)
    _check_scales(x, gate_up, down, gate_up_scales, down_scales)
    tiling = tiling or tiling_for(x.shape[0] * top_k / gate_up.shape[0])
    triton = Candidate(
        "triton",
        functools.partial(experts_triton, top_k=top_k, tiling=tiling, interpret=interpret),
        reason=why_not_triton(x, interpret=interpret)
        or why_not_triton(gate_up, interpret=interpret, dtypes=(x.dtype, *CODES)),
    )
    plain = functools.partial(reference, top_k=top_k)
    weights = (gate_up, down, gate_up_scales, down_scales, real)
    return dispatch(implementation, [triton], plain, x, logits, expert_scale, *weights)


def _check(
    x: Array,
    logits: Array,
    expert_scale: Array,
    gate_up: Any,
    down: Any,
    top_k: int,
    down_scales: Array | None,
) -> None:
    if down_scales is not None:  # codes have inputs last
        gate_up, down = (jax.eval_shape(_inputs_second, w) for w in (gate_up, down))
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


def _inputs_second(codes: Array) -> Array:
    """Bring codes to the order of weights."""
    return jnp.moveaxis(codes, -1, 1)


def _check_scales(
    x: Array, gate_up: Array, down: Array, gate_up_scales: Array | None, down_scales: Array | None
) -> None:
    dtypes = f"x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}"
    if gate_up_scales is None or down_scales is None:
        if gate_up_scales is not down_scales:
            raise ValueError("gate_up_scales and down_scales must be given together")
        if not x.dtype == gate_up.dtype == down.dtype:
            raise ValueError(f"tokens and experts must have one dtype; {dtypes}")
        return
    if gate_up.dtype not in CODES or down.dtype != gate_up.dtype:
        raise ValueError(f"experts with scales must be codes of one dtype of {CODES}; {dtypes}")
    e, d, f = down.shape
    if gate_up_scales.shape != (e, 2, f) or down_scales.shape != (e, d):
        raise ValueError(
            f"gate_up_scales must be [{e}, 2, {f}] and down_scales [{e}, {d}]; they are "
            f"{gate_up_scales.shape} and {down_scales.shape}"
        )
