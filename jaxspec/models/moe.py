"""The mixture of experts of 26B-A4B: a router over 128 experts, eight of them per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.config import TargetConfig
from jaxspec.models.layers import contract, gelu_tanh, over_rows, project, rms_norm
from jaxspec.params import param
from jaxspec.shapes import Array, Float, Int


class Experts(nnx.Module):
    """Router and experts. The router reads the raw residual, the experts its normed copy."""

    def __init__(self, config: TargetConfig, *, dtype: jnp.dtype):
        d, e, f = config.hidden_size, config.num_experts, config.expert_intermediate_size
        self.router = param(d, e, dtype=dtype, fan_in=d)
        self.router_scale = param(d, dtype=dtype)
        self.expert_scale = param(e, dtype=dtype)
        self.gate_up = param(e, d, 2, f, dtype=dtype, fan_in=d)
        self.down = param(e, f, d, dtype=dtype, fan_in=f)
        self.top_k = config.num_experts_per_token
        self.eps = config.rms_norm_eps

    def route(
        self, residual: Float[Array, "B T D"]
    ) -> tuple[Int[Array, "B T topk"], Float[Array, "B T topk"]]:
        """Choose experts and their float32 weights, which need not sum to 1."""
        d = residual.shape[-1]
        x = rms_norm(residual, None, self.eps) * self.router_scale[...]
        x = (x.astype(jnp.float32) * d**-0.5).astype(residual.dtype)
        logits = project(x, self.router[...]).astype(jnp.float32)
        weights, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return chosen, weights * self.expert_scale[...].astype(jnp.float32)[chosen]

    def __call__(
        self, x: Float[Array, "B T D"], residual: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Run every expert on every token and keep what the router chose.

        All weights are read once: near the memory floor from about 32 tokens on, and always right.
        """
        e, d, _, f = self.gate_up.shape
        rows = x.reshape(-1, d)
        chosen, weights = self.route(residual)
        row = jnp.arange(rows.shape[0])[:, None]
        combine = jnp.zeros((rows.shape[0], e), jnp.float32)
        combine = combine.at[row, chosen.reshape(-1, self.top_k)].set(
            weights.reshape(-1, self.top_k)
        )
        weights_in, weights_out = self.gate_up.reshape(e, d, 2 * f), self.down[...]

        def run(rows: Float[Array, "R D"]) -> Float[Array, "R D"]:
            # A batched product, an expert each. With the rows not repeated, D would stand between two
            # axes that are kept, and XLA transposes all of the weights in every step.
            repeated = jnp.broadcast_to(rows, (e, *rows.shape))
            gate_up = contract("erd,edf->erf", repeated, weights_in).astype(x.dtype)
            hidden = gelu_tanh(gate_up[..., :f]) * gate_up[..., f:]
            hidden = (hidden.astype(jnp.float32) * combine.T[:, :, None]).astype(x.dtype)
            return contract("erf,efd->rd", hidden, weights_out)

        return over_rows(run, rows).astype(x.dtype).reshape(x.shape)
