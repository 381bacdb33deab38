"""The mixture of experts of 26B-A4B: a router over 128 experts, eight of them per token."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxspec.config import TargetConfig
from jaxspec.models.layers import rms_norm
from jaxspec.params import param
from jaxspec.shapes import Array, Float, Int
from jaxspec.sharding import whole
from pallas_kernels.experts import add_up, choose, experts, router_logits


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

    def logits(self, residual: Float[Array, "B T D"]) -> Float[Array, "S rows E"]:
        """Return parts of what the router says of each expert."""
        d = residual.shape[-1]
        x = rms_norm(residual, None, self.eps) * self.router_scale[...]
        x = (x.astype(jnp.float32) * d**-0.5).astype(residual.dtype)
        return router_logits(x.reshape(-1, d), self.router[...])

    def route(
        self, residual: Float[Array, "B T D"]
    ) -> tuple[Int[Array, "B T topk"], Float[Array, "B T topk"]]:
        """Return the experts that a call would choose, and their weights, which need not sum to 1."""
        logits = add_up(self.logits(residual), residual.dtype).reshape(*residual.shape[:2], -1)
        return choose(logits, self.expert_scale[...], self.top_k)

    def __call__(
        self, x: Float[Array, "B T D"], residual: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Add up each token's experts, as their weights say."""
        out = experts(
            whole(x).reshape(-1, x.shape[-1]),
            self.logits(residual),
            self.expert_scale[...],
            self.gate_up[...],
            self.down[...],
            top_k=self.top_k,
        )
        return whole(out.reshape(x.shape))
