"""The mixture of experts of 26B-A4B: a router over 128 experts, eight of them per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.config import TargetConfig
from jaxspec.models.layers import project, rms_norm
from jaxspec.params import param
from jaxspec.shapes import Array, Float, Int
from jaxspec.sharding import whole
from pallas_kernels.experts import experts


class Experts(nnx.Module):
    """Router and experts. The router reads the raw residual, the experts its normed copy."""

    def __init__(self, config: TargetConfig, *, dtype: jnp.dtype):
        d, e, f = config.hidden_size, config.num_experts, config.expert_intermediate_size
        self.router = param(d, e, dtype=dtype, fan_in=d)
        self.router_scale = param(d, dtype=dtype)
        self.expert_scale = param(e, dtype=dtype)
        self.gate_up = param(e, d, 2, f, dtype=dtype, fan_in=d, axes=("experts",))
        self.down = param(e, f, d, dtype=dtype, fan_in=f, axes=("experts",))
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
        """Add up each token's experts, as their weights say."""
        d = x.shape[-1]
        chosen, weights = self.route(residual)
        out = experts(
            whole(x).reshape(-1, d),
            chosen.reshape(-1, self.top_k),
            weights.reshape(-1, self.top_k),
            self.gate_up[...],
            self.down[...],
        )
        return whole(out.reshape(x.shape))
