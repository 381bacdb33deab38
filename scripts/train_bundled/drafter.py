"""Train a drafter on text that the target wrote, and measure how much of it a draft gets right.

`draft_logits` is the training pass of `jaxspec.training.passes`: the modules that decode, at many places of a
text at once. The text's own tokens stand in the slots before, which is what drafts are while they are right.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.training import passes
from jaxspec.weights.model_def import ModelDef
from scripts.train_bundled import recipe
from scripts.train_bundled.recipe import AssistantSchedule, DrafterSchedule
from scripts.train_bundled.target import Report, cross_entropy, generate, make_optimizer, rounded


def dflash_def(dtype: str) -> ModelDef:
    return ModelDef(DFlashDrafter, recipe.DFLASH, dtype)


def initial_params(model_def: ModelDef, target_params: Params, seed: int) -> Params:
    """Return float32 weights; what layers add to the residual stream begins small."""
    del target_params
    params = ModelDef(model_def.module, model_def.config, "float32").random_params(seed)
    return {
        name: value * 0.5 if name.endswith((".out", ".down")) else value
        for name, value in params.items()
    }


def draft_logits(
    model_defs: tuple[ModelDef, ModelDef],
    target_params: Params,
    params: Params,
    text: Int[Array, "B S"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "B A G V"]:
    """Return the logits of the drafts whose anchors are these positions of the text."""
    target = model_defs[0].bind(rounded(target_params, model_defs[0].dtype))
    drafter = model_defs[1].bind(rounded(params, model_defs[1].dtype))
    reading = passes.read(target, drafter, text, jnp.full(len(text), text.shape[1]))
    return passes.predictor(drafter, reading)(anchors).final.logits


def write_text(
    model_def: ModelDef,
    params: Params,
    schedule: DrafterSchedule | AssistantSchedule,
    stream: np.ndarray,
    report: Report,
) -> tuple[np.ndarray, np.ndarray]:
    """Let the target continue prompts cut from the training text; return its text and prompt lengths.

    Half of the prompts have the shortest length, the others any; a quarter of the texts are sampled at
    temperature 1, the others greedy.
    """
    rng = np.random.default_rng(recipe.SEED)
    shortest, longest = schedule.prompt_lengths
    texts, all_lengths, begin = [], [], time.perf_counter()
    batch = min(schedule.sequences, 2048)
    for i in range(schedule.sequences // batch):
        starts = rng.integers(0, len(stream) - longest, batch)
        prompts = stream[starts[:, None] + np.arange(longest - 1)].astype(np.int32)
        prompts = np.pad(prompts, ((0, 0), (1, 0)), constant_values=recipe.BOS)
        lengths = rng.integers(shortest, longest + 1, batch).astype(np.int32)
        lengths[: batch // 2] = shortest
        text = generate(
            model_def,
            params,
            jnp.asarray(np.where(np.arange(longest) < lengths[:, None], prompts, recipe.PAD)),
            jnp.asarray(lengths),
            jnp.asarray(np.arange(batch) % 4 == 3, jnp.float32),
            jax.random.fold_in(jax.random.key(recipe.SEED), i),
            num_tokens=schedule.new_tokens,
        )
        texts.append(np.asarray(text, np.uint16))
        all_lengths.append(lengths)
    report(
        f"drafter: the target wrote {len(texts) * batch} texts in {time.perf_counter() - begin:.0f} s"
    )
    return np.concatenate(texts), np.concatenate(all_lengths)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def _step(
    model_defs: tuple[ModelDef, ModelDef],
    optimizer: optax.GradientTransformation,
    schedule: DrafterSchedule | AssistantSchedule,
    target_params: Params,
    params: Params,
    opt_state: optax.OptState,
    texts: Int[Array, "N S"],
    lengths: Int[Array, " N"],
    key: Array,
) -> tuple[Params, optax.OptState, Array, Array]:
    which, where = jax.random.split(key)
    chosen = jax.random.randint(which, (schedule.rows,), 0, texts.shape[0])
    text, length = texts[chosen].astype(jnp.int32), lengths[chosen]
    slot_weights = schedule.slot_weights()
    num_drafts = len(slot_weights)
    span = schedule.new_tokens - num_drafts
    anchors = length[:, None] + jax.random.randint(
        where, (schedule.rows, schedule.anchors), 0, span
    )
    at = anchors[..., None] + jnp.arange(num_drafts + 1)  # [B, A, G + 1]
    tokens = jnp.take_along_axis(text, at.reshape(len(text), -1), axis=1).reshape(at.shape)
    labels = tokens[..., 1:]
    alive = jnp.cumprod(tokens[..., :-1] != recipe.EOS, axis=-1)  # nothing is drafted past the end
    weights = slot_weights * alive

    def loss_of(p: Params) -> tuple[Array, Array]:
        logits = draft_logits(model_defs, target_params, p, text, anchors)
        loss = jnp.sum(cross_entropy(logits, labels) * weights) / jnp.sum(weights)
        right = jnp.cumprod((jnp.argmax(logits, axis=-1) == labels) * alive, axis=-1)
        return loss, 1 + jnp.mean(jnp.sum(right, axis=-1))

    (loss, tau), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, tau  # type: ignore[return-value]


def train(
    model_defs: tuple[ModelDef, ModelDef],
    target_params: Params,
    schedule: DrafterSchedule | AssistantSchedule,
    streams: dict[str, np.ndarray],
    report: Report,
    *,
    initial_params: Callable[[ModelDef, Params, int], Params] = initial_params,
    seed: int = recipe.SEED + 1,
) -> Params:
    """Train from scratch; return float32 master weights.

    Args:
      initial_params: makes weights of the drafter's definition, the target's weights and a seed.
    """
    stream = np.concatenate([streams["library"], streams["tests"][: len(streams["library"])]])
    shipped = rounded(rounded(target_params, "bfloat16"), model_defs[0].dtype)
    written = write_text(model_defs[0], shipped, schedule, stream, report)
    texts, lengths = jnp.asarray(written[0]), jnp.asarray(written[1])
    optimizer = make_optimizer(
        schedule.peak_rate, schedule.weight_decay, schedule.warmup_steps, schedule.steps
    )
    params = initial_params(model_defs[1], shipped, seed)
    opt_state = optimizer.init(params)
    key, begin = jax.random.key(seed + 1), time.perf_counter()
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
            lengths,
            jax.random.fold_in(key, step),
        )
        taus.append(tau)
        if step % 500 == 0 or step in (1, 100, schedule.steps):
            mean = np.mean([float(t) for t in taus[-200:]])
            report(
                f"drafter step {step}/{schedule.steps} loss {float(loss):.4f} tau {mean:.3f} (training text, "
                f"greedy and sampled) after {time.perf_counter() - begin:.0f} s"
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
    """Return what is drafted at these positions of a text."""
    return jnp.argmax(draft_logits(model_defs, target_params, params, text, anchors), axis=-1)


def acceptance_lengths(
    draft: Callable[[Int[Array, "B S"], Int[Array, "B A"]], Int[Array, "B A G"]],
    text: Int[Array, "B S"],
    prompt_length: int,
    num_tokens: int,
) -> list[list[int]]:
    """Return the acceptance lengths speculation has when the target writes this very text.

    A draft token is a certain choice, so it is accepted exactly when the target, greedy or sampling, comes
    to the same token: drafts at every position of a finished text therefore tell every verify step.

    Args:
      draft: gives the drafts at positions of the text.
      num_tokens: how many new tokens to count, the first (the prefill's) included; the text is longer by
        a block, so that the last step is whole.
    """
    anchors = jnp.arange(prompt_length, prompt_length + num_tokens)
    all_drafts = np.asarray(draft(text, jnp.broadcast_to(anchors, (text.shape[0], num_tokens))))
    rows = []
    for b, row in enumerate(np.asarray(text)):
        steps, at = [], 0
        while at < num_tokens - 1:
            truth = row[prompt_length + at + 1 :][: all_drafts.shape[2]]
            accepted = int(np.cumprod(all_drafts[b, at] == truth).sum())
            steps.append(accepted + 1)
            at += accepted + 1
        rows.append(steps)
    return rows
