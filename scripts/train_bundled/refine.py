"""Teach the trained target not to loop, and to write what is usual: training on text of its own.

A small model's greedy text soon repeats itself. In every step the target continues prompts greedily, and the
tokens that complete a 4-gram its text already had are made less likely. Source: Welleck et al. 2019, "Neural
Text Generation with Unlikelihood Training", section 5.2. Beside that it is trained on real text, so that it
stays good at that, and on the best of the texts it sampled a while ago: those that repeat themselves least
and are made of what other texts have too, the idioms of the language, which is also what can be drafted.
"""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.shapes import Array, Bool, Float, Int, Params
from jaxspec.weights.model_def import ModelDef
from scripts.train_bundled import recipe
from scripts.train_bundled.recipe import RefineSchedule
from scripts.train_bundled.target import (
    Report,
    crop,
    generate,
    losses,
    make_optimizer,
    mean_loss,
    rounded,
)


def best_texts(new: Int[np.ndarray, "N S"], common_share: float) -> Int[np.ndarray, " N4"]:
    """Return the quarter of the rows that repeat themselves least and have most in common with the others.

    Args:
      common_share: a 4-gram is common when more than this share of the rows have it.
    """
    wide = new.astype(np.int64)
    grams = sum(
        wide[:, i : wide.shape[1] - 3 + i] * recipe.TARGET.vocab_size ** (3 - i) for i in range(4)
    )
    ordered = np.sort(grams, axis=1)
    is_repeat = np.pad(ordered[:, 1:] == ordered[:, :-1], ((0, 0), (1, 0)))
    values, inverse, counts = np.unique(
        np.where(is_repeat, -1, ordered), return_inverse=True, return_counts=True
    )
    is_common = (counts > common_share * len(new)) & (values >= 0)
    score = is_repeat.mean(axis=1) - is_common[inverse].reshape(ordered.shape).mean(axis=1)
    score[(new < len(recipe.SPECIALS)).any(axis=1)] = np.inf
    return np.argsort(score)[: len(new) // 4]


def completes_a_repeat(rows: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """Say which tokens end a 4-gram that ended before in the same row."""
    s = rows.shape[1]
    same = rows[:, :, None] == rows[:, None, :]
    for i in range(1, 4):
        shifted = rows[:, : s - i, None] == rows[:, None, : s - i]
        same &= jnp.pad(shifted, ((0, 0), (i, 0), (i, 0)))
    return jnp.any(same & jnp.tril(jnp.ones((s, s), bool), -1), axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def _step(
    model_def: ModelDef,
    optimizer: optax.GradientTransformation,
    schedule: RefineSchedule,
    params: Params,
    opt_state: optax.OptState,
    best: Int[Array, "N S"],
    library: Int[Array, " S"],
    tests: Int[Array, " S"],
    key: Array,
) -> tuple[Params, optax.OptState, Float[Array, ""], Float[Array, ""]]:
    def crops(key: Array, rows: int, length: int) -> Int[Array, "B T"]:
        at = jax.random.uniform(key, (2, rows // 2))
        starts = [
            (share * (stream.shape[0] - length)).astype(jnp.int32)
            for share, stream in zip(at, (library, tests), strict=True)
        ]
        return jnp.concatenate([crop(library, starts[0], length), crop(tests, starts[1], length)])

    greedy_key, best_key, real_key = jax.random.split(key, 3)
    prompts = crops(greedy_key, schedule.greedy_rows, schedule.prompt_length - 1)
    greedy = write(model_def, params, prompts, 0.0, key, schedule.new_tokens)
    repeats = completes_a_repeat(greedy[:, schedule.prompt_length :])
    chosen = best[jax.random.randint(best_key, (schedule.best_rows,), 0, best.shape[0])]
    real = crops(real_key, schedule.real_rows, schedule.real_length)

    def loss_of(p: Params) -> tuple[Array, Array]:
        written = losses(model_def, p, jnp.concatenate([greedy, chosen]))
        nats = written[:, schedule.prompt_length - 1 :]
        unlikelihood = -jnp.log1p(-jnp.exp(-jnp.maximum(nats[: len(greedy)], 1e-4)))
        real_loss = jnp.mean(losses(model_def, p, real))
        loss = real_loss + schedule.repeat_weight * jnp.mean(unlikelihood * repeats)
        return loss + schedule.best_weight * jnp.mean(nats[len(greedy) :]), real_loss

    (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)  # type: ignore[assignment]
    return params, opt_state, loss, 1 - jnp.mean(repeats)


def write(
    model_def: ModelDef,
    params: Params,
    prompts: Int[Array, "B P"],
    temperature: float,
    key: Array,
    num_tokens: int,
) -> Int[Array, "B S"]:
    """Continue prompts of one length."""
    b, width = prompts.shape
    return generate(
        model_def,
        rounded(params, model_def.dtype),
        prompts,
        jnp.full(b, width, jnp.int32),
        jnp.full(b, temperature, jnp.float32),
        key,
        num_tokens=num_tokens,
    )


def train(
    model_def: ModelDef,
    params: Params,
    schedule: RefineSchedule,
    streams: dict[str, np.ndarray],
    report: Report,
) -> Params:
    """Refine a trained target; return float32 master weights."""
    optimizer = make_optimizer(
        schedule.peak_rate, schedule.weight_decay, schedule.warmup_steps, schedule.steps
    )
    opt_state = optimizer.init(params)
    library, tests = jnp.asarray(streams["library"]), jnp.asarray(streams["tests"])
    validation, width = streams["validation"], schedule.prompt_length
    starts = np.linspace(0, len(validation) - width, 64).astype(np.int32)
    judged = crop(jnp.asarray(validation), jnp.asarray(starts), width - 1)
    key, begin = jax.random.key(recipe.SEED + 5), time.perf_counter()
    best = jnp.zeros((0, 0), jnp.int32)
    for step in range(1, schedule.steps + 1):
        key, write_key, step_key = jax.random.split(key, 3)
        if (step - 1) % schedule.steps_a_round == 0:
            where = jax.random.uniform(write_key, (schedule.sequences,))
            starts = (where * (library.shape[0] - width)).astype(jnp.int32)
            prompts = crop(library, starts, width - 1)
            texts = write(
                model_def, params, prompts, schedule.temperature, write_key, schedule.new_tokens
            )
            best = texts[best_texts(np.asarray(texts)[:, width:], schedule.common_share)]
        params, opt_state, loss, distinct = _step(
            model_def, optimizer, schedule, params, opt_state, best, library, tests, step_key
        )
        if step % schedule.steps_a_round == 0:
            greedy = write(model_def, params, judged, 0.0, key, schedule.new_tokens)[:, width:]
            judged_distinct = 1 - float(jnp.mean(completes_a_repeat(greedy)))
            nats = mean_loss(model_def, params, validation, length=schedule.real_length)
            report(
                f"refine step {step}/{schedule.steps} loss {float(loss):.4f} distinct 4-grams "
                f"{float(distinct):.3f}; validation: distinct {judged_distinct:.3f}, {nats:.4f} "
                f"nats/token; after {time.perf_counter() - begin:.0f} s"
            )
    return params
