"""The operation in plain JAX: every expert runs on every token, and a mask picks the chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.reference_ops import contract, gelu_tanh
from pallas_kernels.common.single_row import repeat_if_single
from pallas_kernels.int4_matmul.coding import Codes, Coding, dequantise

PART_INPUTS = 256  # inputs of the router that each part sums
MAX_TOKENS_IN_PARTS = 512  # most tokens whose logits are computed in parts


def router_logits(x: Float[Array, "T D"], weight: Float[Array, "D E"]) -> Float[Array, "S T E"]:
    """Multiply tokens by the router weight, in float32. Return S partial sums of the logits.

    Up to 512 tokens have a part for every 256 inputs, where these divide. `experts` adds the parts
    up where it reads them, which saves a kernel. XLA may also cut so small a product into parts, so
    that many processors read the weight, but it adds them up in a separate kernel.
    `docs/weight-format-speed.md` has the times of a GPU. A CPU takes longer with parts: some
    milliseconds for 512 tokens of 26B-A4B.
    """
    (t, d), e = x.shape, weight.shape[1]
    parts = d // PART_INPUTS if t <= MAX_TOKENS_IN_PARTS and d % PART_INPUTS == 0 else 1
    return contract("tsd,sde->ste", x.reshape(t, parts, -1), weight.reshape(parts, -1, e))


def add_up(logits: Float[Array, "S T E"], dtype: DTypeLike) -> Float[Array, "T E"]:
    """Add up all parts in float32. Round the sum as a product in this dtype would be rounded."""
    return jnp.sum(logits, axis=0).astype(dtype).astype(jnp.float32)


def choose(
    logits: Float[Array, "*T E"], expert_scale: Float[Array, " E"], top_k: int
) -> tuple[Int[Array, "*T topk"], Float[Array, "*T topk"]]:
    """Choose the `top_k` likeliest experts of each token, and weight them by their probabilities.

    Of equally likely experts, the first is chosen.

    Returns:
      The chosen experts, and their weights. A weight is the probability of the expert, normalized
      so that the chosen ones sum to 1, times its `expert_scale`.
    """
    weights, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights * expert_scale.astype(jnp.float32)[chosen]


def reference(
    x: Float[Array, "T D"],
    logits: Float[Array, "S T E"],
    expert_scale: Float[Array, " E"],
    gate_up: Float[Array, "X D 2 F"] | Codes,
    down: Float[Array, "X F D"] | Codes,
    real: Bool[Array, " T"] | None = None,
    first: Int[Array, ""] | None = None,
    *,
    top_k: int,
    coding: Coding | None = None,
) -> Float[Array, "T D"]:
    """Run every expert on every token, and sum the results of the chosen experts.

    All weights are read once. That is near the memory floor where tokens need nearly all of the
    experts. Sums are accumulated in float32. Arguments as in `pallas_kernels.experts.experts`.
    """
    chosen, weights = choose(add_up(logits, x.dtype), expert_scale, top_k)
    gate_up_scales = down_scales = None
    if isinstance(gate_up, Codes) and isinstance(down, Codes):
        if coding is None:
            gate_up_scales, down_scales = gate_up.factors, down.factors
            gate_up, down = gate_up.codes, down.codes
        else:
            f = gate_up.codes.shape[3]
            gate_up = dequantise(gate_up, coding, axis=1, inputs=x.shape[1]).astype(x.dtype)
            down = dequantise(down, coding, axis=1, inputs=f).astype(x.dtype)
    assert not isinstance(gate_up, Codes)
    assert not isinstance(down, Codes)
    e, d, _, f = (gate_up.shape[i] for i in ((0, 1, 2, 3) if down_scales is None else (0, 3, 1, 2)))
    combine = jnp.zeros((x.shape[0], logits.shape[2]), jnp.float32)
    # Row by row, so that a row on another device stays there.
    combine = jax.vmap(lambda row, i, w: row.at[i].set(w))(combine, chosen, weights)
    if first is not None:
        combine = lax.dynamic_slice_in_dim(combine, first, e, axis=1)

    def run(rows: Float[Array, "R D"], combine: Float[Array, "R E"]) -> Float[Array, "R D"]:
        # A batched product with one batch entry per expert. If the rows were not repeated, D would
        # lie between two axes that are kept, and XLA would transpose all weights in every step.
        repeated = jnp.broadcast_to(rows, (e, *rows.shape))
        if gate_up_scales is None:
            both = contract("erd,edf->erf", repeated, gate_up.reshape(e, d, 2 * f))
        else:
            codes = gate_up.reshape(e, 2 * f, d).astype(x.dtype)
            both = contract("erd,efd->erf", repeated, codes) * gate_up_scales.reshape(e, 1, 2 * f)
        both = both.astype(x.dtype)
        hidden = gelu_tanh(both[..., :f]) * both[..., f:]
        hidden = (hidden.astype(jnp.float32) * combine.T[:, :, None]).astype(x.dtype)
        if down_scales is None:
            return contract("erf,efd->rd", hidden, down).astype(x.dtype)
        # Each expert has its own scales, so they come before the sum over experts.
        of_each = contract("erf,edf->erd", hidden, down.astype(x.dtype))
        return jnp.sum(of_each * down_scales[:, None], axis=0).astype(x.dtype)

    out = repeat_if_single(
        run,
        x,
        combine,
        single=x.shape[0] == 1,
        repeat=lambda x, c: (jnp.repeat(x, 2, axis=0), jnp.repeat(c, 2, axis=0)),
        first=lambda out: out[:1],
    )
    return out if real is None else jnp.where(real[:, None], out, jnp.zeros((), out.dtype))
