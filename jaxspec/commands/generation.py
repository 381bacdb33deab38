"""One run of `jaxspec generate`: load, encode, decode, show.

Read `run`. Prompts keep their place in the list throughout: it is part of their seed, and results come
out in that order. A prompt that cannot be used becomes a result with an error; a mistake that concerns
the whole run is one of `USER_ERRORS`, raised before anything is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import itertools
import math
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import jax
from rich.console import Console
from rich.text import Text

import jaxspec
from jaxspec.api import BUNDLED, MOST_SLOTS, load
from jaxspec.commands.prompts import Prompt, encode
from jaxspec.commands.report import (
    OutputError,
    Result,
    RunProgress,
    Summary,
    acceptance_by_position,
    body,
    header,
    json_lines,
    summary_table,
    write_line,
)
from jaxspec.configs.base import ConfigError
from jaxspec.drafters.base import Tree
from jaxspec.engine import VALUES, Completion, Engine, Request, Update
from jaxspec.loading import CheckpointError, LoadedModel
from jaxspec.memory import DeviceMemoryError
from jaxspec.ranges import refusal
from jaxspec.sharding import parse_mesh
from jaxspec.tokenizer import TextStream, Tokenizer, TokenizerError, completed_text, stop_at_text

STREAMING_STEPS = 4  # steps between returns for one prompt: each return is a piece of text
BATCH_STEPS = 16


class RunError(ValueError):
    """Options that cannot be carried out with these models or prompts."""


USER_ERRORS = (
    RunError,
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    TokenizerError,
    OutputError,
)


@dataclass(frozen=True)
class Options:
    """What was asked for; None where the choice is left to the run."""

    target: str | None = None
    drafter: str | None = None
    revision: str | None = None
    drafter_revision: str | None = None
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    dtype: str | None = None
    mesh: str | None = None  # as in "data=2,model=4"
    distributed: bool = False  # over the devices of several processes
    chat: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop_texts: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_new_tokens: int = 128
    sampling_of_model: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ban_tokens: tuple[int, ...] = ()
    seed: int = 0
    num_samples: int = 1  # of each prompt
    num_draft_tokens: int | None = None
    tree: tuple[int, int] | None = None  # topk and depth
    draft_sampling: bool = False
    verification: Literal["standard", "block"] = "standard"
    logprobs: bool = False
    top_logprobs: int = 0
    batch_size: int | None = None
    cache_length: int | None = None
    compilation_cache: str | None = None
    json_path: str | None = None


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
    stop_texts: tuple[str, ...]
    num_samples: int

    def result(self, done: Completion) -> Result:
        """Put a completion together with its prompt."""
        text = None
        if self.tokenizer is not None:
            text = completed_text(self.tokenizer, done.token_ids, self.stop_texts)
        prompt, sample = divmod(done.index, self.num_samples)
        return Result(
            index=done.index,
            prompt=self.texts[prompt],
            prompt_ids=self.requests[done.index].prompt_ids,
            token_ids=done.token_ids,
            text=text,
            finish_reason=done.finish_reason,
            acceptance_lengths=done.acceptance_lengths,
            error=self.errors.get(prompt),
            sample=sample if self.num_samples > 1 else None,
            logprobs=done.logprobs,
            sampled_logprobs=done.sampled_logprobs,
            top_logprobs=done.top_logprobs,
        )


def run(prompts: Sequence[Prompt], options: Options, console: Console) -> int:
    """Generate for all prompts, show results and summary, and return how many prompts were refused.

    Args:
      console: standard error; results go to standard output or to `options.json_path`.

    Raises:
      USER_ERRORS: the run cannot go on; no file is left behind.
    """
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(out_of_memory_explained())
        if options.distributed and not is_first_process():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            options = dataclasses.replace(options, json_path=options.json_path and os.devnull)
            console = Console(quiet=True)  # errors are raised, and told by each process
        lines = stack.enter_context(json_lines(options.json_path)) if options.json_path else None
        set_compilation_cache(options.compilation_cache, console)
        if options.target is None and options.mesh is None:
            use_one_thread()
        target, drafter = load_models(options, console)
        load_s = time.perf_counter() - begin
        job = make_job(prompts, options, target, console)
        engine = make_engine(job, options, target, drafter)
        refuse(job, engine, console)
        if len(job.requests) == 1 and lines is None:
            results = show_stream(job, engine, console)
        else:
            results = show_many(job, engine, lines, console)
        summary = summarise(results, job, options, engine, load_s, time.perf_counter() - begin)
        if lines is not None:
            write_line(lines, summary.to_json())
    console.print(summary_table(summary))
    return summary.errors


@contextlib.contextmanager
def out_of_memory_explained() -> Iterator[None]:
    """Say what would help when the device runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(
            "the device has not enough memory; lower --batch-size or --cache-length, use --dtype bfloat16, "
            f"or a smaller model ({str(error).splitlines()[0]})"
        ) from None


# --- before decoding ---------------------------------------------------------------------------------


def is_first_process() -> bool:
    """Join the processes that decode together, and say whether this one shows what they find.

    They all run the same rounds on the same prompts, so that each knows all tokens.
    """
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise RunError(
            "--distributed: this process finds no others; start it by Slurm, Open MPI or Kubernetes "
            f"({error})"
        ) from None
    return jax.process_index() == 0


def set_compilation_cache(given: str | None, console: Console) -> None:
    """Keep compiled programs from run to run: in the user's cache directory, in another, or not ("off").

    JAX's own JAX_COMPILATION_CACHE_DIR stands where nothing is given.
    """
    if given == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if given is None and os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / "jaxspec" / "compiled" if given is None else Path(given)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if given is not None:
            raise RunError(
                f"--compilation-cache: cannot make {directory}: {error.strerror}"
            ) from None
        note(console, f"compiled programs are not kept: cannot make {directory}: {error.strerror}")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def use_one_thread() -> None:
    """Let programs on a CPU run on one thread, unless NPROC says on how many; call it before JAX starts.

    A step of models as small as the bundled ones is some hundred operations of a microsecond to thirty. To
    share them, XLA wakes a second thread so often that it loses more than it wins (jax 0.10.2, 2 cores, one
    row with DFlash: 1.6 ms a step instead of 2.1; plain 0.66 instead of 0.58). Where JAX may start on a GPU,
    nothing is changed: its compiler counts threads in the same way, and needs them.
    """
    other_devices = importlib.metadata.entry_points(group="jax_plugins")
    if jax.config.values["jax_platforms"] == "cpu" or not other_devices:
        os.environ.setdefault("NPROC", "1")


def load_models(options: Options, console: Console) -> tuple[LoadedModel, LoadedModel | None]:
    """Load target and drafter, onto a mesh if there is to be one."""
    try:
        mesh = None if options.mesh is None else parse_mesh(options.mesh)
    except ValueError as error:
        raise RunError(f"--{error}") from None
    if options.target and not options.drafter:
        note(console, "no --drafter was given: decoding plainly, one token a step")
    with console.status("[dim]loading the models"):
        return load(
            options.target,
            options.drafter,
            dtype=options.dtype,
            revision=options.revision,
            drafter_revision=options.drafter_revision,
            token=options.token,
            offline=options.offline,
            mesh=mesh,
        )


def make_job(
    prompts: Sequence[Prompt], options: Options, target: LoadedModel, console: Console
) -> Job:
    """Encode prompts and settle how to decode them."""
    tokenizer = None
    if any(p.ids is None for p in prompts) or options.stop_texts:
        tokenizer = Tokenizer.load(target.directory)
    else:  # ids alone need none, but are shown as text where there is one
        with contextlib.suppress(TokenizerError):
            tokenizer = Tokenizer.load(target.directory)
    if options.chat and tokenizer is not None and tokenizer.chat_template is None:
        raise TokenizerError(
            f"--chat: {target.source} has no chat template; use an instruction-tuned checkpoint"
        )
    stop_at = None
    if options.stop_texts and tokenizer is not None:
        stop_at = stop_at_text(tokenizer, options.stop_texts)
    shared: dict[str, Any] = dict(
        max_new_tokens=options.max_new_tokens,
        **sampling_values(options, target, console),
        logit_bias=logit_biases(options, target),
        stop_ids=stop_ids(options, target),
        seed=options.seed,
        stop_at=stop_at,
    )
    texts: list[str | None] = []
    requests, errors = [], {}
    for index, prompt in enumerate(prompts):
        text, ids = prompt.text, ()
        try:
            text, ids = encode(
                prompt,
                tokenizer,
                chat=options.chat,
                chat_template_kwargs=options.chat_template_kwargs,
            )
        except TokenizerError as error:
            errors[index] = str(error)
        texts.append(text)
        requests += [Request(prompt_ids=ids, **shared)] * options.num_samples
    return Job(prompts, texts, requests, errors, tokenizer, options.stop_texts, options.num_samples)


def sampling_values(options: Options, target: LoadedModel, console: Console) -> dict[str, Any]:
    """Settle what rules sampling: as given, else the checkpoint's if asked for, else greedy and nothing."""
    values = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    if options.sampling_of_model:
        if target.generation is None:
            raise RunError(f"--sampling model: {target.source} has no generation config of its own")
        values = {name: getattr(target.generation, name) for name in values}
        wrong = [f"{name} {what}" for name in values if (what := refusal(name, values[name]))]
        if wrong:
            raise RunError(
                f"--sampling model: in {target.source}'s generation config {wrong[0]}; give the values "
                "as flags instead"
            )
    values |= {n: given for n in values if (given := getattr(options, n)) is not None}
    idle = [n for n in ("top_k", "min_p") if getattr(options, n)]
    idle += ["top_p"] if (options.top_p or 1) < 1 else []
    idle += ["draft_sampling"] if options.draft_sampling else []
    idle += ["verification"] if options.verification == "block" else []
    if values["temperature"] == 0 and idle:
        flags = ", ".join("--" + name.replace("_", "-") for name in idle)
        note(console, f"{flags}: without effect at temperature 0; add --temperature 1")
    penalties = ("presence_penalty", "frequency_penalty")
    return {**values, **{name: getattr(options, name) for name in penalties}}


def logit_biases(options: Options, target: LoadedModel) -> dict[int, float]:
    """Return what is added to the logits of tokens; a ban counts more than a bias."""
    for flag, ids in (("--logit-bias", options.logit_bias), ("--ban-token", options.ban_tokens)):
        refuse_outside(flag, ids, target)
    return {**options.logit_bias, **dict.fromkeys(options.ban_tokens, -math.inf)}


def stop_ids(options: Options, target: LoadedModel) -> tuple[int, ...]:
    """Return the ids that end a row: the checkpoint's own, unless ignored, and those given."""
    refuse_outside("--stop-id", options.stop_ids, target)
    own = () if options.ignore_eos or target.generation is None else target.generation.eos_token_ids
    return (*own, *options.stop_ids)


def refuse_outside(flag: str, ids: Iterable[int], target: LoadedModel) -> None:
    """Refuse ids that are not tokens of the target."""
    size = target.config.vocab_size
    bad = [i for i in ids if not 0 <= i < size]
    if bad:
        raise RunError(f"{flag} {bad[0]} is outside the vocabulary; expected 0 to {size - 1}")


def make_engine(
    job: Job, options: Options, target: LoadedModel, drafter: LoadedModel | None
) -> Engine:
    """Make an engine that fits the job: as many rows and positions as it needs, in buckets."""
    try:
        return Engine.fitting(
            target,
            drafter,
            job.requests,
            cache_length=options.cache_length,
            batch_size=options.batch_size or min(len(job.requests), MOST_SLOTS),
            num_draft_tokens=options.num_draft_tokens,
            tree=None if options.tree is None else Tree(*options.tree),
            draft_sampling=options.draft_sampling,
            verification=options.verification,
            logprobs=options.logprobs or options.top_logprobs > 0,
            top_logprobs=options.top_logprobs,
            steps_per_return=STREAMING_STEPS if len(job.requests) == 1 else BATCH_STEPS,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise RunError(as_flags(str(error))) from None


def refuse(job: Job, engine: Engine, console: Console) -> None:
    """Note and report the prompts that cannot be decoded; when that is all of them, there is no run."""
    for index, request in enumerate(job.requests[:: job.num_samples]):
        error = job.errors.get(index) or engine.check(request)
        if error is not None:
            job.errors[index] = as_flags(error)
    named = [f"{job.prompts[i].origin}: {error}" for i, error in sorted(job.errors.items())]
    if len(named) == len(job.prompts):
        raise RunError("\n".join(named))
    for message in named:
        console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)


def as_flags(message: str) -> str:
    """Turn the library's argument names in a message into the command's options."""
    message = re.sub(r"\bcache_length=(\d+)", r"--cache-length \1", message)
    message = re.sub(r"\btree (topk|depth)\b", r"--tree-\1", message)
    message = message.replace('verification="block"', "--verification block")
    names = (
        r"\b(max_new_tokens|num_draft_tokens|batch_size|cache_length|draft_sampling|top_logprobs"
        r"|synthetic_acceptance)\b"
    )
    return re.sub(names, lambda name: "--" + name[0].replace("_", "-"), message)


# --- decoding ----------------------------------------------------------------------------------------


def show_stream(job: Job, engine: Engine, console: Console) -> list[Result]:
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


def show_many(job: Job, engine: Engine, lines: IO[str] | None, console: Console) -> list[Result]:
    """Decode prompts, printing each result in the order of the prompts, as soon as its turn comes."""
    results: list[Result] = []
    early: dict[int, Result] = {}
    progress = RunProgress(console, [r.max_new_tokens for r in job.requests])
    with contextlib.closing(progress):
        for event in engine.run(job.requests):
            finished = isinstance(event, Completion)
            progress.update(event.index, len(event.token_ids), finished=finished)
            if not isinstance(event, Completion):
                continue
            early[event.index] = job.result(event)
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


def summarise(
    results: Sequence[Result],
    job: Job,
    options: Options,
    engine: Engine,
    load_s: float,
    total_s: float,
) -> Summary:
    """Add up a run."""
    lengths = [length for r in results for length in r.acceptance_lengths]
    timings, device = engine.timings, jax.devices()[0]
    drafter, request = engine.drafter, job.requests[0]
    return Summary(
        prompts=len(job.prompts),
        num_samples=job.num_samples,
        errors=len(job.errors),
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
        num_draft_tokens=engine.spec.num_draft_tokens,
        tree=None if engine.spec.tree is None else dataclasses.asdict(engine.spec.tree),
        draft_sampling=engine.spec.drafting.draft_sampling,
        verification=engine.spec.drafting.verification,
        batch_size=engine.batch_size,
        cache_length=engine.cache_length,
        max_new_tokens=request.max_new_tokens,
        **{name: getattr(request, name) for name in VALUES},
        logit_bias=dict(options.logit_bias),
        ban_tokens=options.ban_tokens,
        seed=request.seed,
        dtype=engine.target.graph.dtype,
        platform=device.platform,
        device=device.device_kind,
        mesh=dict(engine.mesh.shape),
        versions={
            "jaxspec": jaxspec.__version__,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "python": platform.python_version(),
        },
    )


def shorten(source: str) -> str:
    """Name the bundled models as such, and others as they were given."""
    path = Path(source)
    return f"bundled {path.name}" if path.parent == BUNDLED else source


def note(console: Console, message: str) -> None:
    """Say something about a run that goes on."""
    console.print(f"note: {message}", style="yellow", markup=False, soft_wrap=True)
