"""One run of `jaxspec generate`: prompts, requests, engine, rows. Read `run`.

Prompts keep their index throughout, which is part of their seed. A prompt that cannot be used
becomes a row with an error. A mistake that concerns the whole run is one of `USER_ERRORS`.
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
from collections.abc import Hashable, Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.text import Text

from jaxspec.api import MOST_SLOTS
from jaxspec.commands.dry_run import Plan, default_length, write
from jaxspec.commands.generate import plain
from jaxspec.commands.generate.options import GenerateOptions
from jaxspec.commands.generate.prompts import PromptInput
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
from jaxspec.commands.generate.requests import (
    Key,
    PromptRequest,
    check_requests,
    load_tokenizer,
    make_requests,
    note_idle_options,
    print_error,
    sampling_for,
)
from jaxspec.commands.generate.rows import (
    InOrder,
    RowsFile,
    RowsStream,
    models_digest,
    open_rows,
    row_digest,
)
from jaxspec.commands.options import note
from jaxspec.commands.output import OutputError
from jaxspec.commands.prefixes import prefix_bytes
from jaxspec.commands.startup import (
    check_agreement,
    has_all_files,
    join_processes,
    load_models,
    out_of_memory_explained,
    prepare,
    shorten,
    versions,
)
from jaxspec.configs.base import ConfigError
from jaxspec.engine.engine import Engine, fitting_sizes
from jaxspec.engine.request import Completion, Update, check_for_spec
from jaxspec.options import Sampling
from jaxspec.runtime.prefill import bucket, slots_on
from jaxspec.tokenizer import TextStream, Tokenizer, TokenizerError
from jaxspec.weights.loading import CheckpointError, LoadedModel
from jaxspec.weights.memory import DeviceMemoryError
from jaxspec.weights.sharding import mesh_of

STREAMING_STEPS = 4  # steps between returns for one prompt: each return is a piece of text
BATCH_STEPS = 16
UNKNOWN_LENGTH = 4096  # positions of a row in a dry run

USER_ERRORS = (CheckpointError, ConfigError, DeviceMemoryError, TokenizerError, OutputError)


def run(prompts: Sequence[PromptInput], options: GenerateOptions, console: Console) -> int:
    """Generate for all prompts, show the results, and return the number of prompts with an error.

    Args:
      console: standard error; results go to standard output or to `options.text.json_path`.

    Raises:
      USER_ERRORS: the run cannot go on. Finished rows stay in their file.
    """
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(out_of_memory_explained("--batch-size", "--cache-length"))
        models, text = options.models, options.text
        json_path = text.json_path
        if models.distributed and not join_processes():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            json_path = json_path and os.devnull
            console = Console(quiet=True)  # errors are raised, and printed by each process
        prepare(models, console)
        if models.distributed:
            same = dataclasses.replace(options, text=dataclasses.replace(text, json_path=None))
            check_agreement("versions", versions("jax", "jaxlib", "numpy"))
            check_agreement("options or prompts", (same, prompts))
        rows, tally = None, Tally()
        if json_path:
            rows = stack.enter_context(open_rows(json_path, overwrite=text.overwrite))
            for row in rows.read():
                tally.add(row)
        if models.target and not models.drafter:
            note(console, "no --drafter was given: decoding plainly, one token a step")
        with console.status("[dim]loading the models"):
            target, drafter = load_models(models, vision=True)
        load_s = time.perf_counter() - begin
        tokenizer = load_tokenizer(prompts, options, target)
        sampling = sampling_for(options, target)
        requests = make_requests(prompts, options, target, tokenizer, sampling)
        note_idle_options(options, requests, console)
        engine = make_engine(requests, options, target, drafter)
        requests = check_requests(requests, engine.check, console)
        tally.errors.update(r.key[0] for r in requests if r.error)
        done: set[Key] = set()
        digest = ""
        if rows is not None or models.distributed:
            digest = models_digest(engine.spec, engine.target, engine.drafter)
        if rows is not None:
            requests = [dataclasses.replace(r, digest=row_digest(digest, r)) for r in requests]
            done = take_over(rows, requests, console)
        if models.distributed:
            check_agreement("models", digest)
            done = agree(done, requests)
        left = [r for r in requests if r.key not in done]
        if len(requests) == 1 and rows is None:
            show_stream(requests[0], engine, tokenizer, tally, console)
        elif left:
            show_many(left, engine, tokenizer, rows, tally, console)
        compared = compare(left, engine, tally, console)
        total_s = time.perf_counter() - begin
        summary = summarise(
            tally, requests, sampling, options, engine, compared, len(done), load_s, total_s
        )
        if rows is not None and (left or not rows.is_complete):
            rows.finish(summary.to_json())
    console.print(summary_table(summary))
    return summary.errors


def dry_run(prompts: Sequence[PromptInput], options: GenerateOptions, console: Console) -> None:
    """Print the memory of a run.

    Args:
      prompts: none stand for one that is not known, as of standard input. Of a hub id the tokenizer
        is not fetched, so the length of texts is not known either: it is a guess.

    Raises:
      USER_ERRORS, UsageError: the run would not start, whatever the memory.
    """
    models, running, text = options.models, options.running, options.text
    prepare(models, console)
    target, drafter = load_models(models, read_weights=False, vision=True)
    requests: list[PromptRequest] = []
    if has_all_files(models.target):
        tokenizer = load_tokenizer(prompts, options, target)
        sampling = sampling_for(options, target)
        requests = make_requests(prompts, options, target, tokenizer, sampling)
    known = [r.request for r in requests]
    spec, length = fitting_sizes(
        target, drafter, known, options.drafting, cache_length=running.cache_length
    )
    if requests:
        check_requests(requests, functools.partial(check_for_spec, spec), console)
    elif running.cache_length is None:
        length = default_length(spec, UNKNOWN_LENGTH)
    count = max(len(prompts), 1) * options.decoding.num_samples
    rows = running.batch_size or bucket(min(count, MOST_SLOTS))
    mesh = mesh_of(target=target.params)
    plan = Plan(
        spec,
        mesh,
        rows,
        length,
        read_ahead=0 if count <= slots_on(mesh, rows) else None,
        invariant=running.invariant,
        prefix_gib=running.prefix_gib,
    )
    write(plan, shorten(target.source), text.json_path, overwrite=text.overwrite)


def make_engine(
    requests: Sequence[PromptRequest],
    options: GenerateOptions,
    target: LoadedModel,
    drafter: LoadedModel | None,
) -> Engine:
    """Make an engine with as many rows and positions as all requests need, in buckets.

    Finished rows count too: a run that continues has the shapes, and so the rounding, of the first
    one.
    """
    running = options.running
    make = functools.partial(
        Engine.fitting,
        target,
        drafter,
        [r.request for r in requests],
        cache_length=running.cache_length,
        invariant=running.invariant,
        choose_length=running.choose_length,
        batch_size=running.batch_size or bucket(min(len(requests), MOST_SLOTS)),
        drafting=options.drafting,
        steps_per_return=STREAMING_STEPS if len(requests) == 1 else BATCH_STEPS,
    )
    engine = make()  # allocates nothing
    if nbytes := prefix_bytes(engine, running.prefix_gib):
        return make(prefix_bytes=nbytes)
    return engine


def take_over(
    rows: RowsFile | RowsStream, requests: Sequence[PromptRequest], console: Console
) -> set[Key]:
    """Return the rows that an earlier run has finished, and print their number."""
    digests = {r.key: r.digest or "" for r in requests}
    done = rows.take_over(digests, {r.key for r in requests if r.error})
    if rows.is_torn:
        note(console, f"the last line of {rows.name} was cut short; that row is done again")
    if done:
        note(
            console,
            f"{len(done):,} of {len(requests):,} rows are in {rows.name} already"
            + (", and not done again" if len(done) < len(requests) else ": nothing to do"),
        )
    return done


def agree(done: set[Key], requests: Sequence[PromptRequest]) -> set[Key]:
    """Return the finished rows of the first of several processes, for all of them."""
    flags = np.asarray([r.key in done for r in requests])
    flags = multihost_utils.broadcast_one_to_all(flags)
    return {r.key for r, is_done in zip(requests, flags.tolist(), strict=True) if is_done}


# --- decoding ------------------------------------------------------------------------------------


def decode(requests: Sequence[PromptRequest], engine: Engine) -> Iterator[Update | Completion]:
    """Yield the errors of refused requests, then what the engine returns of the others."""
    for r in requests:
        if r.error:
            yield Completion(r.key, finish_reason="error", error=r.error)
    if accepted := [r.request for r in requests if not r.error]:
        yield from engine.run(accepted)


def show_stream(
    request: PromptRequest,
    engine: Engine,
    tokenizer: Tokenizer | None,
    tally: Tally,
    console: Console,
) -> None:
    """Decode one prompt and print its text as it comes; on a terminal, after the prompt itself."""
    stream = None if tokenizer is None else TextStream(tokenizer, request.stop)
    text = request.prompt.text
    events = decode([request], engine)
    with console.status("[dim]compiling"):
        first = next(events)
    if sys.stdout.isatty() and text == request.text:  # no chat template around it
        Console().print(Text(text or "", "dim", end=""), end="", soft_wrap=True)
    for event in itertools.chain([first], events):
        if isinstance(event, Update):
            piece = "" if stream is None else stream.push(event.token_ids)
        else:
            result = PromptResult.of(request, event, tokenizer)
            tally.add(result.to_json())
            rest = body(result) if stream is None else stream.finish(event.token_ids)
            piece = rest + "\n"
        sys.stdout.write(piece)
        sys.stdout.flush()


def show_many(
    requests: Sequence[PromptRequest],
    engine: Engine,
    tokenizer: Tokenizer | None,
    rows: RowsFile | RowsStream | None,
    tally: Tally,
    console: Console,
) -> None:
    """Decode prompts. Each result is written at once, or printed at its turn."""
    by_key: dict[Hashable, PromptRequest] = {r.key: r for r in requests}
    progress = RunProgress(console, {r.key: r.request.max_new_tokens for r in requests})
    places = {r.key: place for place, r in enumerate(requests, 1)}

    def show(result: PromptResult) -> None:
        if result.error is None:
            with progress.hidden():
                place = header(result, places[result.request.key], len(requests))
                print(place, body(result), "", sep="\n", flush=True)

    printed = InOrder(places, show)
    with contextlib.closing(progress):
        for event in decode(requests, engine):
            finished = isinstance(event, Completion)
            progress.update(event.id, len(event.token_ids), finished=finished)
            if not isinstance(event, Completion):
                continue
            request = by_key[event.id]
            result = PromptResult.of(request, event, tokenizer)
            values = result.to_json()
            tally.add(values)
            if result.error is not None and request.error is None:
                with progress.hidden():
                    print_error(f"{request.prompt.origin}: {result.error}", console)
            if rows is not None:
                rows.write(values)
            else:
                printed.add(request.key, result)


# --- after decoding ------------------------------------------------------------------------------


def compare(
    requests: Sequence[PromptRequest], engine: Engine, tally: Tally, console: Console
) -> plain.PlainSpeed | None:
    """Measure plain decoding after a run that was long enough; None if not measured."""
    decoded = [r.request for r in requests if r.key[0] not in tally.errors]
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
    requests: Sequence[PromptRequest],
    sampling: Sampling,
    options: GenerateOptions,
    engine: Engine,
    compared: plain.PlainSpeed | None,
    taken_over: int,
    load_s: float,
    total_s: float,
) -> Summary:
    """Return the summary of a run."""
    timings, device, drafter = engine.timings, jax.devices()[0], engine.drafter
    steps = tally.steps
    speed = timings.decode_tokens / timings.decode_s if timings.decode_s else None
    return Summary(
        prompts=len({r.key[0] for r in requests}),
        num_samples=len({r.key[1] for r in requests}),
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
        steps_by_length={v: use.steps for v, use in engine.draft_length.used.items() if use.steps},
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
        sampling=dataclasses.replace(sampling, logit_bias=options.biases),
        ban_tokens=options.banned,
        seed=options.decoding.seed,
        dtype=engine.target.model_def.dtypes,
        drafter_dtype=None if drafter is None else drafter.model_def.storage,
        platform=device.platform,
        device=device.device_kind,
        mesh=dict(engine.mesh.shape),
        versions=versions("jax", "jaxlib"),
    )
