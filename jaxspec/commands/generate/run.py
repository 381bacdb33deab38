"""One run of `jaxspec generate`: load, encode, decode, show.

Read `run`. Prompts keep their place in the list throughout: it is part of their seed. A prompt that cannot be used
becomes a row with an error; a mistake that concerns the whole run is one of `USER_ERRORS`. What is decoded is
made in `job`, where rows go is in `rows`, and what is shown of them in `report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.text import Text

from jaxspec.api import MOST_SLOTS
from jaxspec.commands.generate import plain
from jaxspec.commands.generate.job import Job, make_job, refuse, say_error
from jaxspec.commands.generate.jsonl import Prompt
from jaxspec.commands.generate.options import GenerateOptions
from jaxspec.commands.generate.report import (
    PromptResult,
    RunProgress,
    Summary,
    Tally,
    acceptance_by_position,
    body,
    header,
    mean,
    summary_table,
)
from jaxspec.commands.generate.rows import Key, RowsFile, RowsStream, open_rows
from jaxspec.commands.options import note
from jaxspec.commands.output import OutputError
from jaxspec.commands.prefixes import prefix_bytes
from jaxspec.commands.startup import (
    join_processes,
    load_models,
    out_of_memory_explained,
    set_compilation_cache,
    shorten,
    use_one_thread,
    versions,
)
from jaxspec.configs.base import ConfigError
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request, Update
from jaxspec.tokenizer import TextStream, TokenizerError
from jaxspec.weights.loading import CheckpointError, LoadedModel
from jaxspec.weights.memory import DeviceMemoryError

STREAMING_STEPS = 4  # steps between returns for one prompt: each return is a piece of text
BATCH_STEPS = 16

USER_ERRORS = (CheckpointError, ConfigError, DeviceMemoryError, TokenizerError, OutputError)


def run(prompts: Sequence[Prompt], options: GenerateOptions, console: Console) -> int:
    """Generate for all prompts, show results and summary, and return how many prompts have an error.

    Args:
      console: standard error; results go to standard output or to `options.text.json_path`.

    Raises:
      USER_ERRORS: the run cannot go on. Rows that are finished stay in their file.
    """
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(out_of_memory_explained("--batch-size", "--cache-length"))
        models, text = options.models, options.text
        json_path = text.json_path
        if models.distributed and not join_processes():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            json_path = json_path and os.devnull
            console = Console(quiet=True)  # errors are raised, and told by each process
        rows, tally = None, Tally()
        if json_path:
            rows = stack.enter_context(open_rows(json_path, overwrite=text.overwrite))
            for row in rows.read():
                tally.add(row)
        set_compilation_cache(options.running.compilation_cache, console)
        if models.target is None and models.mesh is None:
            use_one_thread()
        if models.target and not models.drafter:
            note(console, "no --drafter was given: decoding plainly, one token a step")
        with console.status("[dim]loading the models"):
            target, drafter = load_models(models)
        load_s = time.perf_counter() - begin
        job = make_job(prompts, options, target, console)
        engine = make_engine(job, options, target, drafter)
        refuse(job, engine, console)
        done = set() if rows is None else take_over(rows, job, engine, console)
        if models.distributed:
            done = agreed(done, job)
        requests = [request for key, request in job.requests.items() if key not in done]
        if len(job.requests) == 1 and rows is None:
            show_stream(job, engine, tally, console)
        elif requests:
            show_many(job, requests, engine, rows, tally, console)
        tally.errors.update(job.errors)
        compared = compare(requests, engine, tally, console)
        total_s = time.perf_counter() - begin
        summary = summarise(tally, job, options, engine, compared, len(done), load_s, total_s)
        if rows is not None and (requests or not rows.is_complete):
            rows.finish(summary.to_json())
    console.print(summary_table(summary))
    return summary.errors


def make_engine(
    job: Job, options: GenerateOptions, target: LoadedModel, drafter: LoadedModel | None
) -> Engine:
    """Make an engine that fits the job: as many rows and positions as it needs, in buckets.

    Rows that are done already count: a run that goes on has the shapes, and so the rounding, of the first one.
    """
    running = options.running
    make = functools.partial(
        Engine.fitting,
        target,
        drafter,
        list(job.requests.values()),
        cache_length=running.cache_length,
        invariant=running.invariant,
        choose_length=running.choose_length,
        batch_size=running.batch_size or min(len(job.requests), MOST_SLOTS),
        drafting=options.drafting,
        steps_per_return=STREAMING_STEPS if len(job.requests) == 1 else BATCH_STEPS,
    )
    engine = make()  # allocates nothing
    if nbytes := prefix_bytes(engine, running.prefix_gib):
        return make(prefix_bytes=nbytes)
    return engine


def take_over(rows: RowsFile | RowsStream, job: Job, engine: Engine, console: Console) -> set[Key]:
    """Return the rows that an earlier run has finished, and say how many they are."""
    refused = {key for key in job.requests if key[0] in job.errors}
    done = rows.take_over(job.identify(engine), refused)
    if rows.is_torn:
        note(console, f"the last line of {rows.name} was cut short; that row is done again")
    if done:
        note(
            console,
            f"{len(done):,} of {len(job.requests):,} rows are in {rows.name} already"
            + (", and not done again" if len(done) < len(job.requests) else ": nothing to do"),
        )
    return done


def agreed(done: set[Key], job: Job) -> set[Key]:
    """Return what the first of several processes found to be done: they decode the same rows, together."""
    found = np.asarray([key in done for key in job.requests])
    found = multihost_utils.broadcast_one_to_all(found)
    return {key for key, is_done in zip(job.requests, found.tolist(), strict=True) if is_done}


# --- decoding ----------------------------------------------------------------------------------------


def show_stream(job: Job, engine: Engine, tally: Tally, console: Console) -> None:
    """Decode one prompt, printing its text as it becomes certain; on a terminal, after the prompt itself."""
    stream = None if job.tokenizer is None else TextStream(job.tokenizer, job.stops[0])
    given = job.prompts[0].text
    events = engine.run(list(job.requests.values()))
    with console.status("[dim]compiling"):
        first = next(events)
    if sys.stdout.isatty() and given == job.texts[0]:  # not what a chat template wraps it in
        Console().print(Text(given or "", "dim", end=""), end="", soft_wrap=True)
    for event in itertools.chain([first], events):
        if isinstance(event, Update):
            piece = "" if stream is None else stream.push(event.token_ids)
        else:
            result = job.result(event)
            tally.add(result.to_json())
            rest = body(result) if stream is None else stream.finish(event.token_ids)
            piece = rest + "\n"
        sys.stdout.write(piece)
        sys.stdout.flush()


def show_many(
    job: Job,
    requests: Sequence[Request],
    engine: Engine,
    rows: RowsFile | RowsStream | None,
    tally: Tally,
    console: Console,
) -> None:
    """Decode prompts. Each result is written, or printed when its turn comes."""
    progress = RunProgress(console, {r.id: r.max_new_tokens for r in requests})
    show = printer(job, progress)
    with contextlib.closing(progress):
        for event in engine.run(requests):
            finished = isinstance(event, Completion)
            progress.update(event.id, len(event.token_ids), finished=finished)
            if not isinstance(event, Completion):
                continue
            result = job.result(event)
            values = result.to_json()
            tally.add(values)
            if result.error is not None and result.index not in job.errors:
                with progress.aside():
                    say_error(f"{job.prompts[result.index].origin}: {result.error}", console)
            if rows is not None:
                rows.write(values)
            else:
                show(result)


def printer(job: Job, progress: RunProgress) -> Callable[[PromptResult], None]:
    """Return what prints results in the order of the prompts, those with an error left out."""
    due = enumerate(job.requests, 1)
    early: dict[Key, PromptResult] = {}
    number, key = next(due)

    def show(result: PromptResult) -> None:
        nonlocal number, key
        early[result.index, result.sample] = result
        if key not in early:
            return
        with progress.aside():
            while key in early:
                turn = early.pop(key)
                if turn.error is None:
                    print(header(turn, number, len(job.requests)), body(turn), "", sep="\n")
                number, key = next(due, (0, (-1, None)))
            sys.stdout.flush()

    return show


# --- after decoding ----------------------------------------------------------------------------------


def compare(
    requests: Sequence[Request], engine: Engine, tally: Tally, console: Console
) -> plain.PlainSpeed | None:
    """Measure plain decoding beside a run that was long enough."""
    decoded = [r for r in requests if isinstance(r.id, tuple) and r.id[0] not in tally.errors]
    acceptance = mean(tally.steps)
    if not decoded or acceptance is None or not plain.is_worth_it(engine):
        return None
    with console.status("[dim]measuring plain decoding"):
        try:
            return plain.measure(engine, decoded, acceptance)
        except jax.errors.JaxRuntimeError as error:
            first = str(error).splitlines()[0]
            note(console, f"plain decoding could not be measured beside it: {first}")
            return None


def summarise(
    tally: Tally,
    job: Job,
    options: GenerateOptions,
    engine: Engine,
    compared: plain.PlainSpeed | None,
    taken_over: int,
    load_s: float,
    total_s: float,
) -> Summary:
    """Put together what is said of a run."""
    timings, device, drafter = engine.timings, jax.devices()[0], engine.drafter
    steps = tally.steps
    speed = timings.decode_tokens / timings.decode_s if timings.decode_s else None
    samples = {sample for _, sample in job.requests}
    return Summary(
        prompts=len(job.prompts),
        num_samples=len(samples),
        errors=len(tally.errors),
        taken_over=taken_over,
        prompt_tokens=tally.prompt_tokens,
        new_tokens=tally.new_tokens,
        decode_tokens=timings.decode_tokens,
        decode_tokens_per_s=speed,
        plain_tokens_per_s=speed * compared.ratio if speed and compared else None,
        plain_measured_s=compared.measured_s if compared else None,
        verify_steps=steps.total(),
        acceptance_length=mean(steps),
        acceptance_by_position=acceptance_by_position(steps, engine.spec.depth),
        steps_by_length={v: use.steps for v, use in engine.chosen_length.used.items() if use.steps},
        prefill_s=timings.prefill_s,
        decode_s=timings.decode_s,
        compile_s=timings.compile_s,
        load_s=load_s,
        total_s=total_s,
        target=shorten(engine.target.source),
        drafter=None if drafter is None else shorten(drafter.source),
        drafting=options.drafting,
        num_draft_tokens=engine.spec.num_draft_tokens,
        choose_length=options.running.choose_length,
        batch_size=engine.batch_size,
        cache_length=engine.cache_length,
        max_new_tokens=options.decoding.max_new_tokens,
        sampling=dataclasses.replace(job.sampling, logit_bias=options.biases),
        ban_tokens=options.banned,
        seed=options.decoding.seed,
        dtype=engine.target.model_def.dtypes,
        drafter_dtype=None if drafter is None else drafter.model_def.storage,
        platform=device.platform,
        device=device.device_kind,
        mesh=dict(engine.mesh.shape),
        versions=versions("jax", "jaxlib"),
    )
