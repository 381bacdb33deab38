"""The mixture of experts of 26B-A4B: a router over 128 experts, eight of them per token."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxspec.config import TargetConfig
from jaxspec.models.layers import project, rms_norm
from jaxspec.params import param
from jaxspec.shapes import Array, Float, Int
from jaxspec.sharding import whole
from pallas_kernels.experts import choose, experts


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

    def logits(self, residual: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Return what the router says of each expert, in float32."""
        d = residual.shape[-1]
        x = rms_norm(residual, None, self.eps) * self.router_scale[...]
        x = (x.astype(jnp.float32) * d**-0.5).astype(residual.dtype)
        return project(x, self.router[...]).astype(jnp.float32)

    def route(
        self, residual: Float[Array, "B T D"]
    ) -> tuple[Int[Array, "B T topk"], Float[Array, "B T topk"]]:
        """Return the experts that a call would choose, and their weights, which need not sum to 1."""
        return choose(self.logits(residual), self.expert_scale[...], self.top_k)

    def __call__(
        self, x: Float[Array, "B T D"], residual: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Add up each token's experts, as their weights say."""
        logits = self.logits(residual)
        out = experts(
            whole(x).reshape(-1, x.shape[-1]),
            logits.reshape(-1, logits.shape[-1]),
            self.expert_scale[...],
            self.gate_up[...],
            self.down[...],
            top_k=self.top_k,
        )
        return whole(out.reshape(x.shape))
