"""Train a drafter and write it: texts, the run, directories to load from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxspec.api import BUNDLED, BUNDLED_DRAFTERS
from jaxspec.commands.check.options import MIN_ROWS
from jaxspec.commands.check.run import measure
from jaxspec.commands.check.text import PromptSet
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.commands.startup import mesh_for, shorten
from jaxspec.commands.train_drafter.options import DrafterOptions, RegenerateOptions
from jaxspec.options import Sampling
from jaxspec.registry import family_of
from jaxspec.rollout.sampler import Sampler
from jaxspec.tokenizer import Tokenizer
from jaxspec.training import new
from jaxspec.training.features import digest_of
from jaxspec.training.objectives import usual_weights
from jaxspec.training.options import RunOptions, TrainingOptions, loss_terms
from jaxspec.training.run import Notify, TrainingResult, train
from jaxspec.training.texts import (
    Text,
    Texts,
    read_prompts,
    read_texts,
    take_answered,
    write_texts,
    write_tokens,
)
from jaxspec.training.trainer import Trainer, check_trainable
from jaxspec.weights.atomic_dir import atomic_directory
from jaxspec.weights.conversion import convert
from jaxspec.weights.define import model_def_of
from jaxspec.weights.loading import LoadedModel, default_dtype, load_drafter, load_target
from jaxspec.weights.measured_acceptance import read_acceptance, write_acceptance
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.saving import save, save_hf

TEXTS, TOKENS, ANSWERS = "texts.jsonl", "tokens", "answers.json"
TURNS = 8
"""Prompts of a call of the sampler, for each of its slots: rows that end make room for others."""


def run(
    drafter: DrafterOptions,
    training: TrainingOptions,
    running: RunOptions,
    answers: RegenerateOptions,
    models: ModelOptions,
    console: Console,
    notify: Notify,
    announce: Notify,
) -> None:
    """Train, write and report.

    Args:
      notify: called with a line of progress.
      announce: called with what should stay to be read.
    """
    assert drafter.out is not None
    mesh = mesh_for(models)
    places = [drafter.out / name for name in ("drafter", "drafter-hf")]
    if there := [place for place in places if place.exists()]:
        raise UsageError(f"{there[0]} is there: the run is over; give another --out")
    dtype = models.dtype or default_dtype()
    hub: dict[str, Any] = dict(dtype=dtype, token=models.token, offline=models.offline, mesh=mesh)
    begun = None
    if drafter.start is not None:
        bundled = drafter.start in BUNDLED_DRAFTERS
        source = str(BUNDLED / drafter.start) if bundled else drafter.start
        begun = load_drafter(source, **hub)
        check_trainable(begun.model_def)
    target = load_target(
        models.target or str(BUNDLED / "target"),
        quantize=models.quantize,
        quantize_head=models.quantize_head,
        kv_dtype=models.kv_dtype,
        drafter=begun,
        revision=models.revision,
        **hub,
    )
    model_def, start = _start(drafter, training, target, begun, dtype)
    weights = usual_weights(model_def.module)
    if drafter.loss is not None:
        terms = loss_terms(drafter.loss, family_of(model_def.config).name)
        weights = dataclasses.replace(weights, **terms)  # pyright: ignore[reportArgumentType]
    trainer = Trainer(target, model_def, training, weights=weights, mesh=mesh)
    drafter.out.mkdir(parents=True, exist_ok=True)
    texts = _texts(drafter, answers, target, begun, notify)
    result = train(trainer, target, start, texts, drafter.out, running, notify, announce)
    same = begun is not None and begun.model_def.config == model_def.config
    _write(drafter.out, model_def, begun if same else None, target, result, dtype)
    recorded = _record(drafter, running, target, result, hub, notify)
    _report(console, drafter.out, target, model_def, result, recorded)


def _start(
    drafter: DrafterOptions,
    training: TrainingOptions,
    target: LoadedModel,
    begun: LoadedModel | None,
    dtype: str,
) -> tuple[ModelDef, Any]:
    """Return the definition of the drafter, and the weights that training begins with."""
    if begun is None:
        assert drafter.kind is not None
        config = new.new_config(
            drafter.kind,
            target.config,
            layers=drafter.layers,
            hidden_size=drafter.hidden_size,
            intermediate_size=drafter.intermediate_size,
            num_heads=drafter.num_heads,
            block_size=drafter.block_size or 8,
            mask_token_id=drafter.mask_token_id,
            container=drafter.container or "z-lab",
        )
        model_def = model_def_of(config, dtype)
        return model_def, new.start_params(model_def, target, training.seed)
    kind = drafter.kind or family_of(begun.config).name
    config = new.config_from(kind, begun.config)
    if config == begun.config:
        return begun.model_def, begun.params
    model_def = model_def_of(config, dtype)
    return model_def, new.start_params(model_def, target, training.seed, begun.params)


def _texts(
    drafter: DrafterOptions,
    answers: RegenerateOptions,
    target: LoadedModel,
    begun: LoadedModel | None,
    notify: Notify,
) -> Texts:
    """Read the texts into a file of ids. With --regenerate the target writes them first, with the drafter.

    Prompts that leave no room for an answer are left out. A run that was killed goes on behind its last answer.
    """
    assert drafter.out is not None
    tokenizer = functools.cache(lambda: Tokenizer.load(target.directory))
    stops = target.generation.eos_token_ids if target.generation else ()
    data = drafter.data
    if answers.regenerate:
        _check_answers(drafter.out, answers, target)
        data = (drafter.out / TEXTS,)
        if not data[0].exists():
            prompts = read_prompts(drafter.data, tokenizer=tokenizer, thinking=answers.thinking)
            temporary = data[0].with_suffix(".partial")
            longest = target.config.max_positions - answers.answer_tokens - 32
            fitting = (ids for ids in prompts if len(ids) <= longest)
            count = take_answered(temporary, fitting)
            if count:
                notify(f"{count} prompts were answered before")
            write_texts(temporary, _answered(answers, target, begun, fitting, count, notify))
            temporary.replace(data[0])
    texts = read_texts(
        data,
        vocab_size=target.config.vocab_size,
        tokenizer=tokenizer,
        end=stops[0] if stops else None,
    )
    place = drafter.out / TOKENS
    shutil.rmtree(place, ignore_errors=True)  # of an earlier start; the files may have changed
    return write_tokens(place, texts)


def _check_answers(out: Path, answers: RegenerateOptions, target: LoadedModel) -> None:
    """Write down what answers depend on, or compare it with those that are there.

    Raises:
      UsageError: a run was begun there with other answers.
    """
    about = {
        "--answer-tokens": answers.answer_tokens,
        "--temperature": answers.temperature,
        "--thinking": answers.thinking,
        "target": f"{target.model_def!r} {digest_of(target.params)}",
    }
    file = out / ANSWERS
    if not file.exists():
        temporary = file.with_suffix(".partial")
        temporary.write_text(json.dumps(about) + "\n", encoding="utf-8")
        temporary.replace(file)
        return
    there = json.loads(file.read_text(encoding="utf-8"))
    if other := [name for name, value in about.items() if there.get(name) != value]:
        raise UsageError(
            f"{out} holds answers with another {', '.join(other)}: give the options of that run to go on with it, "
            "or another --out"
        )


def _answered(
    answers: RegenerateOptions,
    target: LoadedModel,
    begun: LoadedModel | None,
    prompts: Iterator[tuple[int, ...]],
    count: int,
    notify: Notify,
) -> Iterator[Text]:
    """Yield prompts with the target's answers.

    Args:
      count: prompts that were answered before. Seeds go on from there.
    """
    sampler = Sampler(
        target, begun, max_new_tokens=answers.answer_tokens, batch_size=answers.batch_size
    )
    sampling = Sampling(temperature=answers.temperature)
    drafter_params = None if begun is None else begun.params
    before, begin = count, time.perf_counter()
    while batch := list(itertools.islice(prompts, TURNS * answers.batch_size)):
        seeds = np.arange(count, count + len(batch))
        result = sampler(target.params, drafter_params, batch, sampling, seeds)
        tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
        for prompt, row, length in zip(batch, tokens, lengths, strict=True):
            yield Text(prompt, tuple(row[:length].tolist()))
        count += len(batch)
        rate = (count - before) / (time.perf_counter() - begin)
        notify(f"the target has answered {count} prompts; {rate:.1f} a second")


def _write(
    out: Path,
    model_def: ModelDef,
    begun: LoadedModel | None,
    target: LoadedModel,
    result: TrainingResult,
    dtype: str,
) -> None:
    """Write the drafter as a directory of ours, and in the layout of the releases.

    Args:
      begun: the drafter that training began with, if it has the same config. Its files are copied.
    """
    ours, hf = out / "drafter", out / "drafter-hf"
    if begun is None:
        with atomic_directory(hf) as (temporary, _):
            new.write_hf(temporary, model_def.config, result.params, dtype, target)
        convert(hf, ours)
        return
    model = dataclasses.replace(begun, params=result.params)
    save(ours, model)
    if (begun.directory / "config.json").is_file():
        save_hf(hf, model)
    for place in (ours, hf):  # what was measured of other weights
        if place.exists() and read_acceptance(place) is not None:
            write_acceptance(place, None)


def _record(
    drafter: DrafterOptions,
    running: RunOptions,
    target: LoadedModel,
    result: TrainingResult,
    hub: Mapping[str, Any],
    notify: Notify,
) -> bool:
    """Measure what was written on the held-out prompts, and write that into both directories.

    Returns:
      Whether there were enough prompts to measure on.
    """
    assert drafter.out is not None
    origin = f"prompts held out of {', '.join(path.name for path in drafter.data)}"
    prompts = PromptSet(origin, [tuple(ids) for ids in result.held_out])
    if len(prompts.ids) < MIN_ROWS:
        return False
    written = load_drafter(str(drafter.out / "drafter"), **hub)
    sizes = dict(new_tokens=running.evaluated_tokens, batch_size=min(8, len(prompts.ids)))
    try:
        measured = measure(target, written, prompts, notify=notify, **sizes)
    except UsageError:  # rows that end at once
        return False
    for place in (drafter.out / "drafter", drafter.out / "drafter-hf"):
        if place.exists():
            write_acceptance(place, dataclasses.asdict(measured))
    return True


def _report(
    console: Console,
    out: Path,
    target: LoadedModel,
    model_def: ModelDef,
    result: TrainingResult,
    recorded: bool,
) -> None:
    lines = [f"{out / 'drafter'}: {family_of(model_def.config).title} for {shorten(target.source)}"]
    if result.resumed_from:
        lines.append(f"went on from update {result.resumed_from}")
    if result.stopped == "patience":
        lines.append("stopped early: no measurement was better for a while")
    if result.stopped == "minutes":
        lines.append("ended by --minutes")
    if result.acceptance_length is not None:
        lines.append(
            f"{result.acceptance_length:.3f} tokens a verify step on {len(result.held_out)} held-out prompts, greedy; "
            f"{result.first_acceptance_length:.3f} before training. These are the weights after update {result.step}"
        )
        if not result.step:
            lines.append(
                "no measurement was better than the start: train longer, or at another rate"
            )
    else:
        lines.append("nothing was held out, so nothing was measured")
    name = "bundled" if Path(target.source).parent == BUNDLED else target.source
    if recorded:
        lines.append("the drafter's config holds what was measured on these prompts")
    lines.append(f"next: jaxspec check {name} {out / 'drafter'}")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
