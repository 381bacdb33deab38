"""Train the MTP assistant on text that the target wrote, through the very steps that decoding takes.

A round of decoding reads frozen keys and values up to one position. Here every anchor of a text is such a
round, all at once: the target reads the text once, and each anchor's steps see what stands before it. The
tokens fed are the text's own, which is what a draft is while it is right; the states are the assistant's.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.drafters.mtp import FrozenKV, MTPDrafter
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.weights.model_def import ModelDef
from scripts.train_bundled import recipe
from scripts.train_bundled.drafter import write_text
from scripts.train_bundled.recipe import AssistantSchedule
from scripts.train_bundled.target import Report, cross_entropy, make_optimizer, rounded


def assistant_def(dtype: str) -> ModelDef:
    return ModelDef(MTPDrafter, recipe.MTP, dtype)


def initial_params(model_def: ModelDef, target_params: Params, seed: int) -> Params:
    """Return float32 weights that start training well.

    Norms begin as the target's do. The head begins as the directions in which the target's embeddings differ
    most, so that likely tokens are near each other from the start.
    """
    num_sublayers = 2 * model_def.config.num_layers
    params = {}
    for name, value in (
        ModelDef(model_def.module, model_def.config, "float32").random_params(seed).items()
    ):
        if name.endswith("q_norm"):
            value = value * value.shape[0] ** -0.25
        elif name.endswith(("post_attention_norm", "post_mlp_norm")):
            value = value * num_sublayers**-0.5
        params[name] = value
    table = np.asarray(target_params["embedder.table"], np.float32)
    directions = np.linalg.svd(table, full_matrices=False)[0][:, : model_def.config.hidden_size]
    spread = np.sqrt(len(table) / model_def.config.hidden_size)
    return params | {"head": jnp.asarray(directions * spread)}


def chain_logits(
    model_defs: tuple[ModelDef, ModelDef],
    target_params: Params,
    params: Params,
    text: Int[Array, "B S"],
    anchors: Int[Array, "B A"],
    num_drafts: int,
) -> Float[Array, "G B A V"]:
    """Return the draft logits of chains whose anchors are these positions, fed with the text's own tokens."""
    target = model_defs[0].bind(rounded(target_params, model_defs[0].dtype))
    drafter = model_defs[1].bind(rounded(params, model_defs[1].dtype))
    b, s = text.shape
    out = target(
        text,
        jnp.zeros(b, jnp.int32),
        jnp.full(b, s, jnp.int32),
        None,
        logit_rows=jnp.zeros((b, 1), jnp.int32),
        ancestors=jnp.broadcast_to(jnp.tril(jnp.ones((s, s), bool)), (b, s, s)),  # for its K/V
    )
    out = jax.lax.stop_gradient(out)
    segments = {}
    for kind in recipe.MTP.layer_types:
        segment = out.fresh[recipe.TARGET.last_kv_owner(kind)]
        assert segment is not None
        segments[kind] = segment._replace(seen_by=None)
    frozen = FrozenKV(segments, anchors - 1)
    states = jnp.take_along_axis(out.hidden, (anchors - 1)[:, :, None], axis=1)
    logits = []
    for i in range(num_drafts):
        tokens = jnp.take_along_axis(text, anchors + i, axis=1)
        hidden, states = drafter.step(target, tokens, states, frozen)
        logits.append(drafter.choices(hidden).logits)
    return jnp.stack(logits)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def _step(
    model_defs: tuple[ModelDef, ModelDef],
    optimizer: optax.GradientTransformation,
    schedule: AssistantSchedule,
    target_params: Params,
    params: Params,
    opt_state: optax.OptState,
    texts: Int[Array, "N S"],
    key: Array,
) -> tuple[Params, optax.OptState, Array, Array]:
    which, where = jax.random.split(key)
    text = texts[jax.random.randint(which, (schedule.rows,), 0, texts.shape[0])].astype(jnp.int32)
    g = schedule.num_drafts
    anchors = jax.random.randint(
        where,
        (schedule.rows, schedule.anchors),
        schedule.prompt_lengths[1],
        texts.shape[1] - g,
    )
    at = anchors + jnp.arange(g + 1)[:, None, None]  # [G + 1, B, A]
    tokens = jnp.take_along_axis(text[None], at, axis=2)
    alive = jnp.cumprod(tokens[:-1] != recipe.EOS, axis=0)  # nothing is drafted past the end
    weights = (schedule.step_decay ** jnp.arange(g))[:, None, None] * alive

    def loss_of(p: Params) -> tuple[Array, Array]:
        logits = chain_logits(model_defs, target_params, p, text, anchors, g)
        loss = jnp.sum(cross_entropy(logits, tokens[1:]) * weights) / jnp.sum(weights)
        right = jnp.cumprod((jnp.argmax(logits, axis=-1) == tokens[1:]) * alive, axis=0)
        return loss, 1 + jnp.mean(jnp.sum(right, axis=0))

    (loss, tau), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, tau  # type: ignore[return-value]


def train(
    model_defs: tuple[ModelDef, ModelDef],
    target_params: Params,
    schedule: AssistantSchedule,
    streams: dict[str, np.ndarray],
    report: Report,
) -> Params:
    """Train from scratch; return float32 master weights."""
    stream = np.concatenate([streams["library"], streams["tests"][: len(streams["library"])]])
    shipped = rounded(rounded(target_params, "bfloat16"), model_defs[0].dtype)
    texts = jnp.asarray(write_text(model_defs[0], shipped, schedule, stream, report)[0])
    optimizer = make_optimizer(
        schedule.peak_rate, schedule.weight_decay, schedule.warmup_steps, schedule.steps
    )
    params = initial_params(model_defs[1], shipped, recipe.SEED + 3)
    opt_state = optimizer.init(params)
    key, begin = jax.random.key(recipe.SEED + 4), time.perf_counter()
    taus: list[Any] = []
    for step in range(1, schedule.steps + 1):
        params, opt_state, loss, tau = _step(
            model_defs,
            optimizer,
            schedule,
            shipped,
            params,
            opt_state,
            texts,
            jax.random.fold_in(key, step),
        )
        taus.append(tau)
        if step % 100 == 0 or step in (1, schedule.steps):
            mean = np.mean([float(t) for t in taus[-100:]])
            report(
                f"assistant step {step}/{schedule.steps} loss {float(loss):.4f} tau {mean:.3f} (training "
                f"text, greedy and sampled) after {time.perf_counter() - begin:.0f} s"
            )
    return params


@functools.partial(jax.jit, static_argnames="model_defs")
def drafts(
    model_defs: tuple[ModelDef, ModelDef],
    target_params: Params,
    params: Params,
    text: Array,
    anchors: Array,
) -> Int[Array, "B A G"]:
    """Return what is drafted at these positions of a text.

    Steps are fed the text's tokens: right while all drafts before them are, and then they alone count.
    """
    logits = chain_logits(
        model_defs, target_params, params, text, anchors, recipe.MTP.num_draft_tokens
    )
    return jnp.argmax(logits, axis=-1).transpose(1, 2, 0)
