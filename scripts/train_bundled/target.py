"""Train the target: next-token cross-entropy on random crops, and generate from it.

Master weights are float32. Every pass rounds them to the model definition's dtype first, so what is optimised is
what ships.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.models.gemma4 import Gemma4
from jaxspec.models.target import init_caches
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.weights.model_def import ModelDef
from scripts.train_bundled import recipe
from scripts.train_bundled.recipe import TargetSchedule

Report = Callable[[str], None]


def initial_params(model_def: ModelDef, seed: int) -> Params:
    """Return float32 weights that start training well.

    Norms of queries and keys begin at head_dim^-1/4, since scores are not scaled; norms after a sublayer
    begin small, so that the residual stream does not grow sixteenfold.
    """
    num_sublayers = 2 * model_def.config.num_layers
    params = {}
    for name, value in (
        ModelDef(model_def.module, model_def.config, "float32").random_params(seed).items()
    ):
        if name.endswith(("q_norm", "k_norm")):
            value = value * value.shape[0] ** -0.25
        elif name.endswith(("post_attention_norm", "post_mlp_norm")):
            value = value * num_sublayers**-0.5
        params[name] = value
    return params


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

    def decays(params: Any) -> Any:
        return {name: value.ndim > 1 for name, value in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=weight_decay, mask=decays),
    )


def cross_entropy(logits: Float[Array, "... V"], labels: Int[Array, "..."]) -> Float[Array, "..."]:
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def crop(stream: Int[Array, " S"], starts: Int[Array, " B"], length: int) -> Int[Array, "B T"]:
    """Cut rows of <bos> and `length` tokens."""
    rows = stream[starts[:, None] + jnp.arange(length)[None, :]].astype(jnp.int32)
    return jnp.pad(rows, ((0, 0), (1, 0)), constant_values=recipe.BOS)


def losses(model_def: ModelDef, params: Params, rows: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Return the loss of every token of a row after its first."""
    b, t = rows.shape[0], rows.shape[1] - 1
    model = model_def.bind(rounded(params, model_def.dtype))
    out = model(rows[:, :-1], jnp.zeros(b, jnp.int32), jnp.full(b, t, jnp.int32), None)
    return cross_entropy(out.logits, rows[:, 1:])


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=(5, 6))
def _step(
    model_def: ModelDef,
    optimizer: optax.GradientTransformation,
    rows: int,
    length: int,
    library_share: float,
    params: Params,
    opt_state: optax.OptState,
    library: Int[Array, " S"],
    tests: Int[Array, " S"],
    key: Array,
) -> tuple[Params, optax.OptState, Array]:
    where, which = jax.random.split(key)
    at = jax.random.uniform(where, (rows,))

    def starts(stream: Array) -> Array:
        return (at * (stream.shape[0] - length)).astype(jnp.int32)

    from_library = jax.random.uniform(which, (rows, 1)) < library_share
    batch = jnp.where(
        from_library, crop(library, starts(library), length), crop(tests, starts(tests), length)
    )
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(losses(model_def, p, batch)))(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss  # type: ignore[return-value]


@functools.partial(jax.jit, static_argnums=0)
def _losses(model_def: ModelDef, params: Params, rows: Int[Array, "B T"]) -> Float[Array, "B T"]:
    return losses(model_def, params, rows)


def mean_loss(model_def: ModelDef, params: Params, stream: np.ndarray, *, length: int) -> float:
    """Return nats per token of a stream in crops that follow each other."""
    starts = np.arange(0, len(stream) - length, length)
    starts = starts[: max(len(starts) // 16 * 16, 1)]
    parts = np.array_split(starts, max(len(starts) // 16, 1))
    return float(
        np.mean(
            [
                _losses(model_def, params, crop(jnp.asarray(stream), jnp.asarray(p), length))
                for p in parts
            ]
        )
    )


def train(
    model_def: ModelDef, schedule: TargetSchedule, streams: dict[str, np.ndarray], report: Report
) -> Params:
    """Train from scratch; return float32 master weights."""
    steps = sum(phase.steps for phase in schedule.phases)
    optimizer = make_optimizer(
        schedule.peak_rate, schedule.weight_decay, schedule.warmup_steps, steps
    )
    params = initial_params(model_def, recipe.SEED)
    opt_state = optimizer.init(params)
    library, tests = jnp.asarray(streams["library"]), jnp.asarray(streams["tests"])
    key, step, begin = jax.random.key(recipe.SEED), 0, time.perf_counter()
    for phase in schedule.phases:
        for _ in range(phase.steps):
            params, opt_state, loss = _step(
                model_def,
                optimizer,
                phase.rows,
                phase.length,
                schedule.library_share,
                params,
                opt_state,
                library,
                tests,
                jax.random.fold_in(key, step),
            )
            step += 1
            if step % 500 == 0 or step in (1, 100, steps):
                line = f"target step {step}/{steps} loss {float(loss):.4f}"
                if step % 1000 == 0 or step == steps:
                    length = min(phase.length, 512)
                    loss = mean_loss(model_def, params, streams["validation"], length=length)
                    line += f" validation {loss:.4f} nats/token"
                report(f"{line} after {time.perf_counter() - begin:.0f} s")
    assert math.isfinite(float(loss)), "training diverged"
    return params


@functools.partial(jax.jit, static_argnames=("model_def", "num_tokens"))
def generate(
    model_def: ModelDef,
    params: Params,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    temperatures: Float[Array, " B"],
    key: Array,
    *,
    num_tokens: int,
) -> Int[Array, "B S"]:
    """Continue every prompt by `num_tokens` tokens, past any end-of-sequence token.

    Args:
      lengths: how many tokens of a row are prompt; the new ones follow them directly.
      temperatures: 0 for the most likely token.
    """
    model = model_def.bind(params)
    b, width = prompts.shape
    rows = jnp.arange(b)
    caches = init_caches(
        model_def.config,
        b,
        cache_length=width + num_tokens,
        slack=1,
        dtype=jnp.dtype(model_def.dtype),
    )

    def pick(logits: Array, index: Array | int) -> Array:
        noise = jax.random.gumbel(jax.random.fold_in(key, index), logits.shape)
        scaled = logits / jnp.maximum(temperatures, 1e-3)[:, None] + noise
        return jnp.argmax(jnp.where(temperatures[:, None] > 0, scaled, logits), axis=-1)

    out = model(
        prompts, jnp.zeros(b, jnp.int32), lengths, caches, logit_rows=(lengths - 1)[:, None]
    )
    text = jnp.pad(prompts, ((0, 0), (0, num_tokens)))

    def step(carry: Any, index: Array) -> Any:
        caches, text, tokens = carry
        text = text.at[rows, lengths + index].set(tokens)
        ones = jnp.ones(b, jnp.int32)
        out = model(tokens[:, None], lengths + index, ones, caches)
        return (out.caches, text, pick(out.logits[:, 0], index + 1)), None

    carry = (out.caches, text, pick(out.logits[:, 0], 0))
    (_, text, _), _ = jax.lax.scan(step, carry, jnp.arange(num_tokens))
    return text


def target_def(dtype: str) -> ModelDef:
    return ModelDef(Gemma4, recipe.TARGET, dtype)
