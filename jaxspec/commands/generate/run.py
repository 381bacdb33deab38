"""One run of `jaxspec generate`: load, encode, decode, show.

Read `run`. Prompts keep their place in the list throughout: it is part of their seed, and results come
out in that order. A prompt that cannot be used becomes a result with an error; a mistake that concerns
the whole run is one of `USER_ERRORS`, raised before anything is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import jax
from rich.console import Console
from rich.text import Text

from jaxspec.api import MOST_SLOTS
from jaxspec.commands.generate.options import DecodingOptions, GenerateOptions
from jaxspec.commands.generate.prompts import Prompt, encode
from jaxspec.commands.generate.report import (
    PromptResult,
    RunProgress,
    Summary,
    acceptance_by_position,
    body,
    header,
    summary_table,
)
from jaxspec.commands.options import UsageError, as_flag, note, told
from jaxspec.commands.output import OutputError, json_lines, write_line
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
from jaxspec.engine import Engine
from jaxspec.loading import CheckpointError, LoadedModel
from jaxspec.memory import DeviceMemoryError
from jaxspec.records import DEFAULTS, FieldError, Sampling
from jaxspec.requests import Completion, Request, Update
from jaxspec.tokenizer import TextStream, Tokenizer, TokenizerError, completed_text, stop_at_text

STREAMING_STEPS = 4  # steps between returns for one prompt: each return is a piece of text
BATCH_STEPS = 16
FILTERS = ("top_k", "top_p", "min_p")  # what greedy decoding does not look at

USER_ERRORS = (CheckpointError, ConfigError, DeviceMemoryError, TokenizerError, OutputError)


@dataclass(frozen=True)
class Job:
    """The prompts, ready to decode. Lists have one entry a prompt; refused ones have empty requests.

    Samples of a prompt are requests of their own, one after the other: the place of each in the list makes
    it another one, and it needs a slot when there is one, not when there are as many as samples.
    """

    prompts: Sequence[Prompt]
    texts: list[str | None]  # as the model reads them
    requests: list[Request]  # `num_samples` a prompt
    errors: dict[int, str]  # by prompt
    tokenizer: Tokenizer | None
    sampling: Sampling
    stop_texts: tuple[str, ...]
    num_samples: int

    def result(self, done: Completion) -> PromptResult:
        """Put a completion together with its prompt."""
        text = None
        if self.tokenizer is not None:
            text = completed_text(self.tokenizer, done.token_ids, self.stop_texts)
        assert isinstance(done.id, int)
        prompt, sample = divmod(done.id, self.num_samples)
        return PromptResult(
            index=done.id,
            prompt=self.texts[prompt],
            prompt_ids=self.requests[done.id].prompt_ids,
            token_ids=done.token_ids,
            text=text,
            finish_reason=done.finish_reason,
            acceptance_lengths=done.acceptance_lengths,
            error=self.errors.get(prompt, done.error),
            sample=sample if self.num_samples > 1 else None,
            logprobs=done.logprobs,
            sampled_logprobs=done.sampled_logprobs,
            top_logprobs=done.top_logprobs,
        )


def run(prompts: Sequence[Prompt], options: GenerateOptions, console: Console) -> int:
    """Generate for all prompts, show results and summary, and return how many prompts were refused.

    Args:
      console: standard error; results go to standard output or to `options.text.json_path`.

    Raises:
      USER_ERRORS: the run cannot go on; no file is left behind.
    """
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(out_of_memory_explained("--batch-size", "--cache-length"))
        models, json_path = options.models, options.text.json_path
        if models.distributed and not join_processes():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            json_path = json_path and os.devnull
            console = Console(quiet=True)  # errors are raised, and told by each process
        lines = stack.enter_context(json_lines(json_path)) if json_path else None
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
        if len(job.requests) == 1 and lines is None:
            results = show_stream(job, engine, console)
        else:
            results = show_many(job, engine, lines, console)
        tell_failures(results, job, console)
        summary = summarise(results, job, options, engine, load_s, time.perf_counter() - begin)
        if lines is not None:
            write_line(lines, summary.to_json())
    console.print(summary_table(summary))
    return summary.errors


# --- before decoding ---------------------------------------------------------------------------------


def make_job(
    prompts: Sequence[Prompt], options: GenerateOptions, target: LoadedModel, console: Console
) -> Job:
    """Encode prompts and settle how to decode them."""
    text, decoding = options.text, options.decoding
    tokenizer = None
    if any(p.ids is None for p in prompts) or text.stop:
        tokenizer = Tokenizer.load(target.directory)
    else:  # ids alone need none, but are shown as text where there is one
        with contextlib.suppress(TokenizerError):
            tokenizer = Tokenizer.load(target.directory)
    if text.chat and tokenizer is not None and tokenizer.chat_template is None:
        raise TokenizerError(
            f"--chat: {target.source} has no chat template; use an instruction-tuned checkpoint"
        )
    stop_at = None
    if text.stop and tokenizer is not None:
        stop_at = stop_at_text(tokenizer, text.stop)
    sampling = sampling_for(options, target, console)
    shared: dict[str, Any] = dict(
        max_new_tokens=decoding.max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids(decoding, target),
        seed=decoding.seed,
        stop_at=stop_at,
    )
    texts: list[str | None] = []
    requests, errors = [], {}
    for index, prompt in enumerate(prompts):
        shown, ids = prompt.text, ()
        try:
            shown, ids = encode(
                prompt, tokenizer, chat=text.chat, chat_template_kwargs=text.chat_template_kwargs
            )
        except TokenizerError as error:
            errors[index] = str(error)
        texts.append(shown)
        requests += [Request(prompt_ids=ids, **shared)] * decoding.num_samples
    return Job(
        prompts, texts, requests, errors, tokenizer, sampling, text.stop, decoding.num_samples
    )


def sampling_for(options: GenerateOptions, target: LoadedModel, console: Console) -> Sampling:
    """Settle what rules sampling: as given, else the checkpoint's if asked for, else greedy and nothing.

    A ban counts more than a bias.
    """
    refuse_outside("--logit-bias", options.biases, target)
    refuse_outside("--ban-token", options.banned, target)
    biases = {**options.biases, **dict.fromkeys(options.banned, -math.inf)}
    own = sampling_of(target) if options.decoding.sampling == "model" else {}
    sampling = dataclasses.replace(options.sampling.over(own), logit_bias=biases)
    given = options.sampling.values
    idle = [(name,) for name in FILTERS if given.get(name, DEFAULTS[name]) != DEFAULTS[name]]
    idle += [(field,) for field, _ in options.drafting.changes_acceptance]
    if sampling.temperature == 0 and idle:
        flags = ", ".join(as_flag(*shown) for shown in idle)
        note(console, f"{flags}: without effect at temperature 0; add --temperature 1")
    return sampling


def sampling_of(target: LoadedModel) -> dict[str, Any]:
    """Return what the checkpoint itself says of sampling.

    Raises:
      UsageError: it says nothing, or something that cannot be.
    """
    if target.generation is None:
        raise UsageError(f"--sampling model: {target.source} has no generation config of its own")
    names = {f.name for f in dataclasses.fields(Sampling)}
    own = dataclasses.asdict(target.generation)
    own = {name: value for name, value in own.items() if name in names}
    try:
        Sampling(**own)
    except FieldError as error:
        raise UsageError(
            f"--sampling model: in {target.source}'s generation config {error}; give the values as flags "
            "instead"
        ) from None
    return own


def stop_ids(options: DecodingOptions, target: LoadedModel) -> tuple[int, ...]:
    """Return the ids that end a row: the checkpoint's own, unless ignored, and those given."""
    refuse_outside("--stop-id", options.stop_ids, target)
    own = () if options.ignore_eos or target.generation is None else target.generation.eos_token_ids
    return (*own, *options.stop_ids)


def refuse_outside(flag: str, ids: Iterable[int], target: LoadedModel) -> None:
    """Refuse ids that are not tokens of the target."""
    size = target.config.vocab_size
    bad = [i for i in ids if not 0 <= i < size]
    if bad:
        raise UsageError(f"{flag} {bad[0]} is outside the vocabulary; expected 0 to {size - 1}")


def make_engine(
    job: Job, options: GenerateOptions, target: LoadedModel, drafter: LoadedModel | None
) -> Engine:
    """Make an engine that fits the job: as many rows and positions as it needs, in buckets."""
    running = options.running
    return Engine.fitting(
        target,
        drafter,
        job.requests,
        cache_length=running.cache_length,
        batch_size=running.batch_size or min(len(job.requests), MOST_SLOTS),
        drafting=options.drafting,
        steps_per_return=STREAMING_STEPS if len(job.requests) == 1 else BATCH_STEPS,
    )


def refuse(job: Job, engine: Engine, console: Console) -> None:
    """Note and report the prompts that cannot be decoded; when that is all of them, there is no run."""
    for index, request in enumerate(job.requests[:: job.num_samples]):
        error = job.errors.get(index) or engine.check(request)
        if error is not None:
            job.errors[index] = told(error)
    named = [f"{job.prompts[i].origin}: {error}" for i, error in sorted(job.errors.items())]
    if len(named) == len(job.prompts):
        raise UsageError("\n".join(named))
    for message in named:
        console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)


# --- decoding ----------------------------------------------------------------------------------------


def show_stream(job: Job, engine: Engine, console: Console) -> list[PromptResult]:
    """Decode one prompt, printing its text as it becomes certain; on a terminal, after the prompt itself."""
    stream = None if job.tokenizer is None else TextStream(job.tokenizer, job.stop_texts)
    given = job.prompts[0].text
    events = engine.run(job.requests)
    with console.status("[dim]compiling"):
        first = next(events)
    if sys.stdout.isatty() and given == job.texts[0]:  # not what a chat template wraps it in
        Console().print(Text(given or "", "dim", end=""), end="", soft_wrap=True)
    results = []
    for event in itertools.chain([first], events):
        if isinstance(event, Update):
            piece = "" if stream is None else stream.push(event.token_ids)
        else:
            results.append(job.result(event))
            rest = body(results[0]) if stream is None else stream.finish(event.token_ids)
            piece = rest + "\n"
        sys.stdout.write(piece)
        sys.stdout.flush()
    return results


def show_many(
    job: Job, engine: Engine, lines: IO[str] | None, console: Console
) -> list[PromptResult]:
    """Decode prompts, printing each result in the order of the prompts, as soon as its turn comes."""
    results: list[PromptResult] = []
    early: dict[int, PromptResult] = {}
    progress = RunProgress(console, [r.max_new_tokens for r in job.requests])
    with contextlib.closing(progress):
        for event in engine.run(job.requests):
            finished = isinstance(event, Completion)
            assert isinstance(event.id, int)
            progress.update(event.id, len(event.token_ids), finished=finished)
            if not isinstance(event, Completion):
                continue
            early[event.id] = job.result(event)
            with progress.aside():
                while len(results) in early:
                    results.append(early.pop(len(results)))
                    if lines is not None:
                        write_line(lines, results[-1].to_json())
                    elif results[-1].error is None:
                        print(
                            header(results[-1], len(job.requests)), body(results[-1]), "", sep="\n"
                        )
                        sys.stdout.flush()
    return results


def tell_failures(results: Sequence[PromptResult], job: Job, console: Console) -> None:
    """Report rows that failed while they were decoded, which `refuse` could not know."""
    for result in results:
        prompt = result.index // job.num_samples
        if result.error is not None and prompt not in job.errors:
            message = f"error: {job.prompts[prompt].origin}: {result.error}"
            console.print(message, style="red", markup=False, soft_wrap=True)


def summarise(
    results: Sequence[PromptResult],
    job: Job,
    options: GenerateOptions,
    engine: Engine,
    load_s: float,
    total_s: float,
) -> Summary:
    """Add up a run."""
    lengths = [length for r in results for length in r.acceptance_lengths]
    timings, device = engine.timings, jax.devices()[0]
    drafter = engine.drafter
    return Summary(
        prompts=len(job.prompts),
        num_samples=job.num_samples,
        errors=len({r.index // job.num_samples for r in results if r.error is not None}),
        prompt_tokens=sum(
            len(r.prompt_ids) for r in results[:: job.num_samples] if r.error is None
        ),
        new_tokens=sum(len(r.token_ids) for r in results),
        decode_tokens=timings.decode_tokens,
        decode_tokens_per_s=timings.decode_tokens / timings.decode_s if timings.decode_s else None,
        verify_steps=len(lengths),
        acceptance_length=sum(lengths) / len(lengths) if lengths else None,
        acceptance_by_position=acceptance_by_position(lengths, engine.spec.depth),
        prefill_s=timings.prefill_s,
        decode_s=timings.decode_s,
        compile_s=timings.compile_s,
        load_s=load_s,
        total_s=total_s,
        target=shorten(engine.target.source),
        drafter=None if drafter is None else shorten(drafter.source),
        drafting=options.drafting,
        num_draft_tokens=engine.spec.num_draft_tokens,
        batch_size=engine.batch_size,
        cache_length=engine.cache_length,
        max_new_tokens=options.decoding.max_new_tokens,
        sampling=dataclasses.replace(job.sampling, logit_bias=options.biases),
        ban_tokens=options.banned,
        seed=options.decoding.seed,
        dtype=engine.target.graph.dtype,
        platform=device.platform,
        device=device.device_kind,
        mesh=dict(engine.mesh.shape),
        versions=versions("jax", "jaxlib"),
    )
