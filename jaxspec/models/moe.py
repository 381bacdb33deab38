"""The mixture of experts of 26B-A4B: a router over 128 experts, eight of them per token."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.mesh import ROWS, WHOLE, Axes, on_each_device, whole_rows
from jaxspec.quantised import QuantisedArray
from jaxspec.shapes import Array, Bool, Float, Int
from jaxspec.weights.model_def import param
from pallas_kernels.experts import add_up, choose, experts, router_logits
from pallas_kernels.int4_matmul import Codes, Coding
from pallas_kernels.norms import router_norm

_EXPERTS: Any = Axes("experts")
_LOGITS_AXES: Any = Axes(None, "batch")


class Experts(nnx.Module):
    """Router and experts. Both read the residual, each with a norm of its own.

    Only `pallas_kernels.experts` multiplies activations by `gate_up` and `down`. It takes codes of
    8 bits with a scale per output channel, and codes of 4 bits with groups.
    """

    def __init__(self, config: Gemma4Config, *, dtype: jnp.dtype):
        d, e, f = config.hidden_size, config.num_experts, config.expert_intermediate_size
        self.router = param(d, e, dtype=dtype, fan_in=d)
        self.router_scale = param(d, dtype=dtype)
        self.expert_scale = param(e, dtype=dtype)
        self.gate_up = param(
            e, d, 2, f, dtype=dtype, fan_in=d, axes=("experts",), contracting_axes=(1,)
        )
        self.down = param(e, f, d, dtype=dtype, fan_in=f, axes=("experts",), contracting_axes=(1,))
        self.top_k = config.num_experts_per_token
        self.eps = config.rms_norm_eps

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "S rows E"]:
        """Return the router's logits of all experts, in S parts whose sum they are.

        Args:
          x: the residual, normed by `router_norm`.
        """
        return router_logits(x.reshape(-1, x.shape[-1]), self.router[...])

    def route(
        self, residual: Float[Array, "B T D"]
    ) -> tuple[Int[Array, "B T topk"], Float[Array, "B T topk"]]:
        """Return the experts that a call would choose for each token, and their weights.

        The weights of a token need not sum to 1.
        """
        x = router_norm(residual, self.router_scale[...], self.eps)
        logits = add_up(self.logits(x), x.dtype).reshape(*x.shape[:2], -1)
        return choose(logits, self.expert_scale[...], self.top_k)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        to_router: Float[Array, "B T D"],
        real: Bool[Array, " rows"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the weighted sum of each token's experts.

        Args:
          x: the residual, normed for the experts.
          to_router: the residual, normed for the router.
          real: which tokens are no padding, row by row; results of the others are 0. None: all.
        """
        gate_up, coding = _codes(self.gate_up[...])
        down, _ = _codes(self.down[...])
        scale = self.expert_scale[...]

        def run(x: Array, *args: Any) -> Array:
            logits, scale, gate_up, down, real, numbers = args
            first = None if numbers.size == scale.size else numbers[0]
            of_router: dict[str, Any] = dict(top_k=self.top_k, coding=coding)
            return experts(x, logits, scale, gate_up, down, real, first, **of_router)

        rows, numbers = (
            whole_rows(x).reshape(-1, x.shape[-1]),
            jnp.arange(scale.size, dtype=jnp.int32),
        )
        args = rows, self.logits(to_router), scale, gate_up, down, real, numbers
        axes = ROWS, _LOGITS_AXES, WHOLE, _EXPERTS, _EXPERTS, ROWS, _EXPERTS
        out = on_each_device(run, args, axes, ROWS, contracting=_EXPERTS)
        return whole_rows(out.reshape(x.shape))


def _codes(weight: Array | QuantisedArray) -> tuple[Array | Codes, Coding | None]:
    """Return what the kernels take: an array; or codes, and the coding of those of 4 bits."""
    return weight.codes_of_experts() if isinstance(weight, QuantisedArray) else (weight, None)
