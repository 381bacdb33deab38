"""Run an evaluation: decode a task's prompts with drafts and without, and count."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec.api import Pair
from jaxspec.commands.evaluate.measure import Interval, Response, Summary, summarise
from jaxspec.commands.evaluate.options import EvalOptions
from jaxspec.commands.evaluate.tasks import PROTOCOLS, EvalPrompt, digest, load_prompts
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.commands.startup import load_models, shorten
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import Drafting, Sampling

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Speed:
    """The speed of decoding prompts, prefill included.

    Attributes:
      seconds: for all of them, without compiling.
      tokens: new tokens.
    """

    seconds: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Evaluation:
    """An evaluation, with all that its numbers depend on."""

    task: str
    protocol: str
    target: str
    drafter: str
    dtypes: str
    num_draft_tokens: int
    temperature: float
    max_new_tokens: int
    chat: bool
    thinking: bool
    batch_size: int
    seed: int
    prompts: int
    digest: str
    device: str
    version: str
    summary: Summary
    drafted: Speed
    plain: Speed | None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = dataclasses.asdict(self)
        for name, speed in (("drafted", self.drafted), ("plain", self.plain)):
            if speed is not None:
                values[name]["tokens_per_s"] = speed.tokens_per_s
        return values


def evaluate(
    task: str, options: EvalOptions, models: ModelOptions, drafting: Drafting, notify: Notify
) -> Evaluation:
    """Decode the prompts of a task, and count what drafts were worth.

    Raises:
      UsageError: there is no such task, or no drafter, or a prompt does not fit.
    """
    prompts = load_prompts(task, options.data, options.limit)
    protocol = PROTOCOLS[options.protocol]
    temperature = protocol.temperature if options.temperature is None else options.temperature
    limit = options.max_new_tokens or protocol.max_new_tokens
    notify("loading the models")
    target, drafter = load_models(models)
    if drafter is None:
        raise UsageError("eval needs a drafter: --drafter")
    pair = Pair(target, drafter)
    chat = pair.tokenizer.chat_template is not None and not options.raw
    ids = [_ids(pair, prompt, chat, thinking=options.thinking) for prompt in prompts]
    requests = [_request(i, limit, temperature, options.seed) for i in ids]
    engine = _engine(pair, requests, drafting, options.batch_size)
    num_drafts = engine.spec.num_draft_tokens
    done, drafted = _timed(engine, requests, notify, "with drafts")
    responses = [
        Response(len(i), completion.acceptance_lengths, len(completion.token_ids), p.category)
        for i, completion, p in zip(ids, done, prompts, strict=True)
    ]
    plain = None
    if not options.skip_plain:
        engine = _engine(pair.plain(), requests, Drafting(), options.batch_size)
        _, plain = _timed(engine, requests, notify, "without drafts")
    return Evaluation(
        task,
        options.protocol,
        f"{shorten(target.source)}",
        f"{shorten(drafter.source)}",
        target.model_def.dtypes,
        num_drafts,
        temperature,
        limit,
        chat,
        options.thinking,
        options.batch_size,
        options.seed,
        len(prompts),
        digest(prompts),
        _device(),
        jaxspec.__version__,
        summarise(responses, num_drafts),
        drafted,
        plain,
    )


def _device() -> str:
    import jax

    return jax.devices()[0].device_kind


def _ids(pair: Pair, prompt: EvalPrompt, chat: bool, *, thinking: bool) -> tuple[int, ...]:
    if not chat:
        if not isinstance(prompt.content, str):
            raise UsageError("a prompt is a conversation, which needs the chat template")
        return pair.encode(prompt.content)
    options = {"enable_thinking": thinking}
    content: Any = prompt.content
    return pair.encode(content, chat=True, chat_options=options)


def _request(ids: tuple[int, ...], max_new_tokens: int, temperature: float, seed: int) -> Request:
    return Request(ids, max_new_tokens, Sampling(temperature=temperature), seed=seed)


def _engine(pair: Pair, requests: Sequence[Request], drafting: Drafting, rows: int) -> Engine:
    return Engine.fitting(
        pair.target,
        pair.drafter,
        requests,
        drafting=drafting,
        batch_size=min(rows, len(requests)),
        choose_length="never",  # every step has all its drafts, or figures mean nothing
        programs=pair.programs,
    )


def _timed(
    engine: Engine, requests: Sequence[Request], notify: Notify, mode: str
) -> tuple[list[Completion], Speed]:
    """Return the completions in order, and the time for them. Compiling comes before."""
    notify(f"compiling, {mode}")
    engine.warm_up()
    checked = [engine.validate(request) for request in requests]
    first = [dataclasses.replace(r, max_new_tokens=2) for r in checked[: engine.batch_size]]
    for _ in engine.run(first):  # what a first run alone does
        pass
    started, done = time.perf_counter(), {}
    for event in engine.run(checked):
        if isinstance(event, Completion):
            done[event.id] = event
            notify(f"decoding {mode}, {len(done)} of {len(checked)} prompts")
    seconds = time.perf_counter() - started
    completions = [done[i] for i in range(len(checked))]
    if failed := next((c for c in completions if c.error is not None), None):
        raise UsageError(f"prompt {failed.id}: {failed.error}")
    return completions, Speed(seconds, sum(len(c.token_ids) for c in completions))


# --- the report ----------------------------------------------------------------------------------


def render(e: Evaluation, console: Console) -> None:
    """Print the report."""
    s = e.summary
    words = "chat template" if e.chat else "no chat template"
    thinking = ", thinking" if e.thinking else ""
    console.print(
        f"{e.task}: {e.prompts} prompts ({e.digest}), {words}{thinking}, protocol {e.protocol}: "
        f"temperature {e.temperature:g}, at most {e.max_new_tokens} new tokens",
        markup=False,
        soft_wrap=True,
    )
    console.print(
        f"{e.target} with {e.drafter}, {e.num_draft_tokens} drafts, {e.dtypes}, {e.device}, "
        f"{e.batch_size} rows at a time",
        markup=False,
        soft_wrap=True,
    )
    table = _table("acceptance length, the bonus token included", "", "mean", "95%")
    table.add_row("micro: all tokens by all steps", *_interval(s.micro))
    table.add_row("macro: mean over responses", *_interval(s.macro))
    console.print(table)
    table = _table("accepted", "draft", "of all steps", "of those that came so far")
    for i, (share, conditional) in enumerate(zip(s.positions, s.conditional, strict=True), 1):
        table.add_row(str(i), f"{share:.0%}", f"{conditional:.0%}")
    console.print(table)
    for title, groups in (("context", s.by_context), ("category", s.by_category)):
        if not groups:
            continue
        table = _table(f"by {title}", title, "steps", "acceptance length")
        for group in groups:
            table.add_row(group.name, str(group.steps), f"{group.micro:.2f}")
        console.print(table)
    table = _table("speed, prefill included", "", "tokens a second", "tokens", "seconds")
    for name, speed in (("with drafts", e.drafted), ("plain", e.plain)):
        if speed is not None:
            figures = f"{speed.tokens_per_s:.1f}", str(speed.tokens), f"{speed.seconds:.1f}"
            table.add_row(name, *figures)
    console.print(table)
    if e.plain is not None:
        times = e.drafted.tokens_per_s / e.plain.tokens_per_s
        console.print(f"Drafts make it {times:.2f} times as fast.", markup=False)


def _interval(x: Interval) -> tuple[str, str]:
    return f"{x.value:.3f}", f"{x.low:.3f}-{x.high:.3f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    return table
