"""What both trainings share: the optimizer, the loss, the rounding of master weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxspec.shapes import Array, Float, Int, Params


def rounded(params: Params, dtype: str) -> Params:
    return {name: value.astype(dtype) for name, value in params.items()}


def make_optimizer(
    peak_rate: float, weight_decay: float, warmup_steps: int, steps: int
) -> optax.GradientTransformation:
    """AdamW with warm-up and linear decay; norms and scales do not decay."""
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak_rate, warmup_steps),
            optax.linear_schedule(peak_rate, 0.0, steps - warmup_steps),
        ],
        [warmup_steps],
    )

    def decays(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda value: value.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=weight_decay, mask=decays),
    )


def cross_entropy(logits: Float[Array, "... V"], labels: Int[Array, "..."]) -> Float[Array, "..."]:
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
