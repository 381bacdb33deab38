"""Train a drafter on text that the target wrote, by `jaxspec.training.run`, and measure how much a draft gets right.

`draft_logits` is the training pass of `jaxspec.training.passes`: the modules that decode, at many places of a
text at once. The text's own tokens stand in the slots before, which is what drafts are while they are right.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.shapes import Array, Float, Int, Params
from jaxspec.training import new, passes, run
from jaxspec.training.options import RunOptions
from jaxspec.training.texts import Text
from jaxspec.training.trainer import Trainer
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from scripts.train_bundled import recipe
from scripts.train_bundled.recipe import DrafterSchedule
from scripts.train_bundled.target import Report, generate, rounded


def dflash_def(dtype: str) -> ModelDef:
    return ModelDef(DFlashDrafter, recipe.DFLASH, dtype)


def assistant_def(dtype: str) -> ModelDef:
    return ModelDef(MTPDrafter, recipe.MTP, dtype)


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
    schedule: DrafterSchedule,
    stream: np.ndarray,
    report: Report,
) -> list[Text]:
    """Let the target continue prompts cut from the training text; return what it wrote.

    Half of the prompts have the shortest length, the others any; a quarter of the texts are sampled at
    temperature 1, the others greedy.
    """
    rng = np.random.default_rng(recipe.SEED)
    shortest, longest = schedule.prompt_lengths
    texts, begin = [], time.perf_counter()
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
        texts += [_text(row, n) for row, n in zip(np.asarray(text), lengths, strict=True)]
    report(f"drafter: the target wrote {len(texts)} texts in {time.perf_counter() - begin:.0f} s")
    return texts


def _text(row: np.ndarray, prompt_length: int) -> Text:
    """Divide a row. Its answer ends with the first end of a sequence."""
    ids = row.tolist()
    answer = ids[prompt_length:]
    if recipe.EOS in answer:
        answer = answer[: answer.index(recipe.EOS) + 1]
    return Text(tuple(ids[:prompt_length]), tuple(answer))


def train(
    model_defs: tuple[ModelDef, ModelDef],
    target_params: Params,
    schedule: DrafterSchedule,
    streams: dict[str, np.ndarray],
    directory: Path,
    report: Report,
) -> Params:
    """Train from scratch, or go on with the run in a directory; return the weights that drafted best."""
    stream = np.concatenate([streams["library"], streams["tests"][: len(streams["library"])]])
    shipped = rounded(rounded(target_params, "bfloat16"), model_defs[0].dtype)
    target = LoadedModel(model_defs[0], shipped, model_defs[0].config, None, directory, "bundled")
    texts = write_text(model_defs[0], shipped, schedule, stream, report)
    options = schedule.training
    trainer = Trainer(*model_defs, options, weights=schedule.weights)
    start = new.start_params(model_defs[1], target, options.seed)
    running = RunOptions(
        max_length=schedule.prompt_lengths[1] + schedule.new_tokens,
        held_out=64,
        evaluate_every=max(options.steps // schedule.evaluations, 1),
        report_every=max(options.steps // 24, 1),
        save_every=max(options.steps // 4, 1),
    )
    return run.train(trainer, target, start, texts, directory, running, report).params


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
