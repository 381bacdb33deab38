"""Train the target: next-token cross-entropy on random crops, and generate from it.

Master weights are float32. Every pass rounds them to the graph's dtype first, so what is optimised is
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

from jaxspec.models.gemma4 import Gemma4, TargetOutput, init_caches
from jaxspec.params import Graph
from jaxspec.shapes import Array, Float, Int, Params
from scripts.train_bundled import blocks, recipe
from scripts.train_bundled.optimize import cross_entropy, make_optimizer, rounded
from scripts.train_bundled.recipe import Phase, TargetSchedule

Report = Callable[[str], None]


def initial_params(graph: Graph, seed: int) -> Params:
    """Return float32 weights that start training well.

    Norms of queries and keys begin at head_dim^-1/4, since scores are not scaled; norms after a sublayer
    begin small, so that the residual stream does not grow sixteenfold.
    """
    num_sublayers = 2 * graph.config.num_layers
    params = {}
    for name, value in Graph(graph.module, graph.config, "float32").random_params(seed).items():
        if name.endswith(("q_norm", "k_norm")):
            value = value * value.shape[0] ** -0.25
        elif name.endswith(("post_attention_norm", "post_mlp_norm")):
            value = value * num_sublayers**-0.5
        params[name] = value
    return params


def crop(stream: Int[Array, " S"], starts: Int[Array, " B"], length: int) -> Int[Array, "B T"]:
    """Cut rows of <bos> and `length` tokens."""
    rows = stream[starts[:, None] + jnp.arange(length)[None, :]].astype(jnp.int32)
    return jnp.pad(rows, ((0, 0), (1, 0)), constant_values=recipe.BOS)


Pair = dict[str, Params]
"""The weights of both: {"target": ..., "dflash": ...}."""


def initial_pair(graphs: tuple[Graph, Graph]) -> Pair:
    return {
        "target": initial_params(graphs[0], recipe.SEED),
        "dflash": blocks.initial_params(graphs[1], recipe.SEED + 1),
    }


def _loss(
    graphs: tuple[Graph, Graph], schedule: TargetSchedule, pair: Pair, rows: Array, key: Array
) -> tuple[Array, Array]:
    """Return the loss to descend, and the target's own part of it."""
    target = graphs[0].bind(rounded(pair["target"], graphs[0].dtype))
    drafter = graphs[1].bind(rounded(pair["dflash"], graphs[1].dtype))
    tokens = rows[:, :-1]
    out = _run(target, tokens, drafter.feature_layers)
    loss = jnp.mean(cross_entropy(out.logits, rows[:, 1:]))
    last = tokens.shape[1] - recipe.DFLASH.block_size
    anchors = jax.random.randint(key, (rows.shape[0], schedule.draft_anchors), 1, last)
    logits = blocks.block_logits(target, drafter, out.features, tokens, anchors)
    draft_loss, _ = blocks.block_loss(logits, tokens, anchors)
    return loss + schedule.draft_weight * draft_loss, loss


def _run(target: Gemma4, tokens: Array, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
    b, t = tokens.shape
    start, count = jnp.zeros(b, jnp.int32), jnp.full(b, t, jnp.int32)
    return target(tokens, start, count, None, feature_layers=feature_layers)


def _sample_crops(
    schedule: TargetSchedule, phase: Phase, library: Array, tests: Array, key: Array
) -> Int[Array, "B T"]:
    where, which = jax.random.split(key)
    at = jax.random.uniform(where, (phase.rows,))
    from_library = jax.random.uniform(which, (phase.rows, 1)) < schedule.library_share
    crops = [
        crop(stream, (at * (stream.shape[0] - phase.length)).astype(jnp.int32), phase.length)
        for stream in (library, tests)
    ]
    return jnp.where(from_library, *crops)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(4, 5))
def _step(
    graphs: tuple[Graph, Graph],
    optimizer: optax.GradientTransformation,
    schedule: TargetSchedule,
    phase: Phase,
    pair: Pair,
    opt_state: optax.OptState,
    library: Int[Array, " S"],
    tests: Int[Array, " S"],
    key: Array,
) -> tuple[Pair, optax.OptState, Array]:
    crops_key, anchors_key = jax.random.split(key)
    rows = _sample_crops(schedule, phase, library, tests, crops_key)
    (_, loss), grads = jax.value_and_grad(
        lambda p: _loss(graphs, schedule, p, rows, anchors_key), has_aux=True
    )(pair)
    updates, opt_state = optimizer.update(grads, opt_state, pair)
    return optax.apply_updates(pair, updates), opt_state, loss  # type: ignore[return-value]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(4, 5))
def _loop_step(
    graphs: tuple[Graph, Graph],
    optimizer: optax.GradientTransformation,
    schedule: TargetSchedule,
    phase: Phase,
    pair: Pair,
    opt_state: optax.OptState,
    library: Int[Array, " S"],
    tests: Int[Array, " S"],
    texts: Int[Array, "N S"],
    repeated: Int[Array, "N S"],
    key: Array,
) -> tuple[Pair, optax.OptState, Array]:
    """Step on crops as before, and away from the repetitions in texts the target wrote.

    Source: Welleck et al., "Neural Text Generation with Unlikelihood Training", sequence level.
    """
    crops_key, anchors_key, texts_key = jax.random.split(key, 3)
    rows = _sample_crops(schedule, phase, library, tests, crops_key)
    chosen = jax.random.randint(texts_key, (schedule.loop_rows,), 0, texts.shape[0])
    text, wrong = texts[chosen].astype(jnp.int32), repeated[chosen][:, 1:]

    def loss_of(p: Pair) -> tuple[Array, Array]:
        loss, plain = _loss(graphs, schedule, p, rows, anchors_key)
        target = graphs[0].bind(rounded(p["target"], graphs[0].dtype))
        nats = cross_entropy(_run(target, text[:, :-1]).logits, text[:, 1:])
        unlikelihood = -jnp.log1p(-jnp.exp(-jnp.maximum(nats, 1e-4)))
        penalty = jnp.sum(unlikelihood * wrong) / (schedule.loop_rows * schedule.loop_tokens)
        return loss + schedule.loop_weight * penalty, plain

    (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(pair)
    updates, opt_state = optimizer.update(grads, opt_state, pair)
    return optax.apply_updates(pair, updates), opt_state, loss  # type: ignore[return-value]


@functools.partial(jax.jit, static_argnums=0)
def _losses(graph: Graph, params: Params, rows: Int[Array, "B T"]) -> Float[Array, "B T"]:
    out = _run(graph.bind(rounded(params, graph.dtype)), rows[:, :-1])
    return cross_entropy(out.logits, rows[:, 1:])


def mean_loss(graph: Graph, params: Params, stream: np.ndarray, *, length: int) -> float:
    """Return nats per token of a stream in crops that follow each other."""
    starts = np.arange(0, len(stream) - length, length)
    starts = starts[: len(starts) // 16 * 16]
    return float(
        np.mean(
            [
                _losses(graph, params, crop(jnp.asarray(stream), jnp.asarray(part), length))
                for part in np.split(starts, len(starts) // 16)
            ]
        )
    )


def train(
    graphs: tuple[Graph, Graph],
    schedule: TargetSchedule,
    streams: dict[str, np.ndarray],
    report: Report,
) -> Pair:
    """Train both from scratch on the text; return float32 master weights.

    The drafter learns along so that the features it reads come to tell of later tokens too; it is
    trained on in its own stage.
    """
    steps = sum(phase.steps for phase in schedule.phases)
    optimizer = make_optimizer(
        schedule.peak_rate, schedule.weight_decay, schedule.warmup_steps, steps
    )
    pair = initial_pair(graphs)
    opt_state = optimizer.init(pair)
    library, tests = jnp.asarray(streams["library"]), jnp.asarray(streams["tests"])
    key, step, begin = jax.random.key(recipe.SEED), 0, time.perf_counter()

    def tell(what: str, loss: Array, validate: bool) -> None:
        line = f"target {what} loss {float(loss):.4f}"
        if validate:
            nats = mean_loss(graphs[0], pair["target"], streams["validation"], length=512)
            line += f" validation {nats:.4f} nats/token"
        report(f"{line} after {time.perf_counter() - begin:.0f} s")

    for phase in schedule.phases:
        for _ in range(phase.steps):
            step_key = jax.random.fold_in(key, step)
            pair, opt_state, loss = _step(
                graphs, optimizer, schedule, phase, pair, opt_state, library, tests, step_key
            )
            step += 1
            if step % 500 == 0 or step in (1, 100, steps):
                tell(f"step {step}/{steps}", loss, step % 1000 == 0 or step == steps)

    phase = schedule.phases[0]
    steps = schedule.loop_rounds * schedule.loop_steps
    optimizer = make_optimizer(schedule.loop_rate, schedule.weight_decay, 20, steps)
    opt_state = optimizer.init(pair)
    rng = np.random.default_rng(recipe.SEED)
    for round_ in range(schedule.loop_rounds):
        shipped = rounded(pair["target"], graphs[0].dtype)
        starts = rng.integers(
            0, len(streams["library"]) - schedule.loop_prompt, schedule.loop_texts
        )
        text = generate(
            graphs[0],
            shipped,
            crop(library, jnp.asarray(starts), schedule.loop_prompt - 1),
            jnp.full(schedule.loop_texts, schedule.loop_prompt),
            jnp.zeros(schedule.loop_texts),
            key,
            num_tokens=schedule.loop_tokens,
        )
        repeated = _repetitions(np.asarray(text), schedule.loop_prompt)
        share = repeated[:, schedule.loop_prompt :].mean()
        if share <= schedule.loop_goal:
            report(f"target repeats {share:.3f} of its 4-grams: enough")
            break
        for i in range(schedule.loop_steps):
            pair, opt_state, loss = _loop_step(
                graphs,
                optimizer,
                schedule,
                phase,
                pair,
                opt_state,
                library,
                tests,
                text,
                jnp.asarray(repeated),
                jax.random.fold_in(key, step + i),
            )
        step += schedule.loop_steps
        tell(f"round {round_ + 1}, repeated {share:.3f} of its 4-grams,", loss, round_ % 4 == 3)
    assert math.isfinite(float(loss)), "training diverged"
    return pair


def _repetitions(texts: np.ndarray, prompt_length: int, n: int = 4) -> np.ndarray:
    """Mark each token that ends an n-gram which its row's new text already holds."""
    repeated = np.zeros(texts.shape, np.int32)
    for row, marks in zip(texts.tolist(), repeated, strict=True):
        seen = set()
        for i in range(prompt_length + n, len(row) + 1):
            gram = tuple(row[i - n : i])
            marks[i - 1] = gram in seen
            seen.add(gram)
    return repeated


@functools.partial(jax.jit, static_argnames=("graph", "num_tokens"))
def generate(
    graph: Graph,
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
    model = graph.bind(params)
    b, width = prompts.shape
    rows = jnp.arange(b)
    caches = init_caches(
        graph.config, b, cache_length=width + num_tokens, slack=1, dtype=jnp.dtype(graph.dtype)
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


def target_graph(dtype: str) -> Graph:
    return Graph(Gemma4, recipe.TARGET, dtype)
