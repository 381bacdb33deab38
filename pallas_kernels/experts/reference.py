"""What the kernel computes, in plain JAX: every expert on every token, and a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.elementary import contract, gelu_tanh
from pallas_kernels.lone_row import twice_if_alone

PART_INPUTS = 256
MOST_IN_PARTS = 8  # tokens


def router_logits(x: Float[Array, "T D"], weight: Float[Array, "D E"]) -> Float[Array, "S T E"]:
    """Multiply tokens by the router, in float32; for few tokens in parts, to be added up.

    XLA too makes parts of so small a product, so that many processors read the weight, and adds
    them up in a kernel of its own. `experts` does that where it reads them (8 tokens of 26B-A4B on
    an H200: 5.5 us instead of 6.6 until all is routed; for 16 it takes as long).
    """
    (t, d), e = x.shape, weight.shape[1]
    parts = d // PART_INPUTS if t <= MOST_IN_PARTS and d % PART_INPUTS == 0 else 1
    return contract("tsd,sde->ste", x.reshape(t, parts, -1), weight.reshape(parts, -1, e))


def add_up(logits: Float[Array, "S T E"], dtype: DTypeLike) -> Float[Array, "T E"]:
    """Return the sum of all parts in float32, rounded as a product in this dtype would be."""
    return jnp.sum(logits, axis=0).astype(dtype).astype(jnp.float32)


def choose(
    logits: Float[Array, "*T E"], expert_scale: Float[Array, " E"], top_k: int
) -> tuple[Int[Array, "*T topk"], Float[Array, "*T topk"]]:
    """Choose the likeliest experts, the first of equals, and weigh them by their probabilities.

    Returns:
      The experts, and their weights: probabilities with the sum 1, times `expert_scale`.
    """
    weights, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights * expert_scale.astype(jnp.float32)[chosen]


def reference(
    x: Float[Array, "T D"],
    logits: Float[Array, "S T E"],
    expert_scale: Float[Array, " E"],
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
    *,
    top_k: int,
) -> Float[Array, "T D"]:
    """Run every expert on every token and keep what the router chose.

    All weights are read once: near the memory floor where tokens need nearly all of the experts,
    and always right. Accumulates in float32.
    """
    chosen, weights = choose(add_up(logits, x.dtype), expert_scale, top_k)
    e, d, _, f = gate_up.shape
    combine = jnp.zeros((x.shape[0], e), jnp.float32)
    # Row by row, so that rows which stand on other devices stay there.
    combine = jax.vmap(lambda row, i, w: row.at[i].set(w))(combine, chosen, weights)

    def run(rows: Float[Array, "R D"], combine: Float[Array, "R E"]) -> Float[Array, "R D"]:
        # A batched product, an expert each. With the rows not repeated, D would stand between two
        # axes that are kept, and XLA transposes all of the weights in every step.
        repeated = jnp.broadcast_to(rows, (e, *rows.shape))
        both = contract("erd,edf->erf", repeated, gate_up.reshape(e, d, 2 * f)).astype(x.dtype)
        hidden = gelu_tanh(both[..., :f]) * both[..., f:]
        hidden = (hidden.astype(jnp.float32) * combine.T[:, :, None]).astype(x.dtype)
        return contract("erf,efd->rd", hidden, down).astype(x.dtype)

    return twice_if_alone(
        run,
        x,
        combine,
        alone=x.shape[0] == 1,
        repeat=lambda x, c: (jnp.repeat(x, 2, axis=0), jnp.repeat(c, 2, axis=0)),
        first=lambda out: out[:1],
    )
