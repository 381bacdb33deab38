"""Run an evaluation: decode a task's prompts with drafts and without, and count.

Read `evaluate`. Each response is a row, as `generate` writes them: row 2 i is prompt i with drafts, row
2 i + 1 the same prompt without. Where prompts have several turns, each turn is a prompt here: the turns
before it, with the replies that were made with drafts. A row keeps its seconds, so an evaluation that goes
on after an interruption reports the speed of all its runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jaxspec
from jaxspec.api import Pair
from jaxspec.commands.evaluate.measure import Response, Summary, summarise
from jaxspec.commands.evaluate.options import EvalOptions
from jaxspec.commands.evaluate.published import Published, published_for
from jaxspec.commands.evaluate.score import Scorer, count_right, scorer_of
from jaxspec.commands.evaluate.tasks import PROTOCOLS, EvalPrompt, digest, load_prompts
from jaxspec.commands.generate.requests import Key
from jaxspec.commands.generate.rows import RowsFile, RowsStream, digest_of, models_digest
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import UsageError
from jaxspec.commands.startup import load_models, shorten
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import Drafting, Sampling
from jaxspec.runtime.runtime import make_spec

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Speed:
    """The speed of decoding prompts, prefill included.

    Attributes:
      seconds: for all of them, without compiling.
      tokens: new tokens.
      right: replies that a scorer counted as right; None: not scored.
    """

    seconds: float
    tokens: int
    right: int | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Evaluation:
    """An evaluation, with all that its numbers depend on.

    Attributes:
      prompts: of the task.
      turns: that have a response each, of all prompts.
      taken_over: rows of earlier runs.
      published: figures of others for this pair and task.
    """

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
    turns: int
    digest: str
    device: str
    version: str
    taken_over: int
    summary: Summary
    drafted: Speed
    plain: Speed | None
    published: tuple[Published, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = dataclasses.asdict(self)
        for name, speed in (("drafted", self.drafted), ("plain", self.plain)):
            if speed is not None:
                values[name]["tokens_per_s"] = speed.tokens_per_s
        return values


def evaluate(
    task: str,
    options: EvalOptions,
    models: ModelOptions,
    drafting: Drafting,
    notify: Notify,
    rows: RowsFile | RowsStream | None = None,
) -> Evaluation:
    """Decode the prompts of a task, and count what drafts were worth.

    Args:
      rows: where to keep responses; those that are there are not decoded again.

    Raises:
      UsageError: there is no such task, or no drafter, or a prompt does not fit.
      OutputError: the rows belong to something else, or cannot be written.
    """
    prompts = load_prompts(
        task, options.data, options.limit, offline=models.offline, token=models.token
    )
    scorer = scorer_of(task, prompts) if options.score else None
    earlier = {row["index"]: row for row in rows.read()} if rows is not None else {}
    protocol = PROTOCOLS[options.protocol]
    temperature = protocol.temperature if options.temperature is None else options.temperature
    limit = options.max_new_tokens or protocol.max_new_tokens
    notify("loading the models")
    target, drafter = load_models(models)
    if drafter is None:
        raise UsageError("eval needs a drafter: --drafter")
    pair = Pair(target, drafter)
    chat = pair.tokenizer.chat_template is not None and not options.raw
    if not (protocol.all_turns and chat):
        prompts = [dataclasses.replace(prompt, follow_ups=()) for prompt in prompts]
    turns = _turns_of(prompts)
    first = [_ids(pair, prompt.content, chat=chat, thinking=options.thinking) for prompt in prompts]
    generation = target.generation
    stop_ids = generation.eos_token_ids if generation else ()
    sampling = Sampling(temperature=temperature)
    step_tokens = make_spec(target, drafter, drafting).step_tokens
    max_prompt_tokens = target.config.max_positions - limit - step_tokens
    longest = [
        Request(_longest(pair, prompt, ids, limit, max_prompt_tokens), limit, sampling, stop_ids)
        for prompt, ids in zip(prompts, first, strict=True)
    ]
    engine = _engine(pair, longest, drafting, options.batch_size)
    modes = [Mode("drafts", engine)]
    if not options.skip_plain:
        modes.append(Mode("plain", _engine(pair.plain(), longest, Drafting(), options.batch_size)))
    digests: dict[Key, str] = {
        (mode.row(turn), None): digest_of(
            [
                *(of_mode, turn.number, first[turn.prompt], stop_ids, limit, temperature),
                *(options.seed, *prompts[turn.prompt].follow_ups[: turn.later]),
            ]
        )
        for mode in modes
        for of_mode in [mode.digest]
        for turn in turns
    }
    done = rows.take_over(digests) if rows is not None else set()
    made = {key: earlier[key[0]] for key in done}
    for later in range(1 + max(turn.later for turn in turns)):
        # A turn comes after the replies to all turns before it.
        now = [turn for turn in turns if turn.later == later]
        prompt_ids = {turn: first[turn.prompt] for turn in now}
        if later:
            for turn in now:
                prompt = prompts[turn.prompt]
                replies = [
                    made[modes[0].row(before), None]["text"]
                    for before in turns
                    if before.prompt == turn.prompt and before.later < later
                ]
                messages = _conversation(prompt, replies)
                prompt_ids[turn] = _ids(pair, messages, chat=chat, thinking=options.thinking)
        for mode in modes:
            left = [turn for turn in now if (mode.row(turn), None) not in done]
            # The draws of a turn are the same whichever turns are left to decode.
            requests = [
                Request(
                    prompt_ids[turn], limit, sampling, stop_ids, options.seed, turn.number, id=i
                )
                for i, turn in enumerate(left)
            ]
            for i, seconds, completion in mode.run(requests, notify) if left else ():
                key = (mode.row(left[i]), None)
                made[key] = {
                    "index": key[0],
                    "digest": digests[key],
                    "mode": mode.name,
                    "prompt_ids": prompt_ids[left[i]],
                    "token_ids": completion.token_ids,
                    "text": pair.tokenizer.decode(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                    "acceptance_lengths": completion.acceptance_lengths,
                    "seconds": seconds,
                }
                if rows is not None:
                    rows.write(made[key])
    if scorer is not None:
        notify("scoring the replies")
    of_modes = [[made[mode.row(turn), None] for turn in turns] for mode in modes]
    drafted, *plain = [_speed(mine, prompts, scorer) for mine in of_modes]
    responses = [
        Response(
            len(row["prompt_ids"]),
            tuple(row["acceptance_lengths"]),
            len(row["token_ids"]),
            prompts[turn.prompt].category,
        )
        for row, turn in zip(of_modes[0], turns, strict=True)
    ]
    num_drafts = engine.spec.num_draft_tokens
    result = Evaluation(
        task=task,
        protocol=options.protocol,
        target=shorten(target.source),
        drafter=shorten(drafter.source),
        dtypes=target.model_def.dtypes,
        num_draft_tokens=num_drafts,
        temperature=temperature,
        max_new_tokens=limit,
        chat=chat,
        thinking=options.thinking,
        batch_size=options.batch_size,
        seed=options.seed,
        prompts=len(prompts),
        turns=len(turns),
        digest=digest(prompts),
        device=jax.devices()[0].device_kind,
        version=jaxspec.__version__,
        taken_over=len(done),
        summary=summarise(responses, num_drafts),
        drafted=drafted,
        plain=plain[0] if plain else None,
        published=published_for(target.source, drafter.source, task),
    )
    if rows is not None and (len(done) < len(digests) or not rows.is_complete):
        rows.finish({"summary": result.to_json()})
    return result


@dataclass(frozen=True)
class Turn:
    """A turn of a prompt, which has a response in each mode.

    Attributes:
      prompt: its number.
      later: turns of the prompt before it.
      number: names the rows and the draws of the turn.
    """

    prompt: int
    later: int
    number: int


def _turns_of(prompts: Sequence[EvalPrompt]) -> list[Turn]:
    """Return the turns of all prompts. Numbers do not depend on the prompts behind."""
    turns: list[Turn] = []
    for i, prompt in enumerate(prompts):
        turns += [Turn(i, later, len(turns) + later) for later in range(1 + len(prompt.follow_ups))]
    return turns


def _conversation(prompt: EvalPrompt, replies: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the messages of a prompt up to the turn that follows these replies."""
    content = prompt.content
    messages: list[Mapping[str, Any]] = []
    messages += [{"role": "user", "content": content}] if isinstance(content, str) else content
    for reply, more in zip(replies, prompt.follow_ups, strict=False):
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": more})
    return messages


def _longest(
    pair: Pair, prompt: EvalPrompt, first: tuple[int, ...], limit: int, max_prompt_tokens: int
) -> tuple[int, ...]:
    """Return as many ids as the last turn of a prompt may have, from the ids of its first one.

    Args:
      limit: new tokens of a reply.
      max_prompt_tokens: the largest number of ids with which the model can still make so many.
    """
    later = len(prompt.follow_ups)
    if not later:
        return first
    ids = _ids(pair, _conversation(prompt, ["."] * later), chat=True, thinking=False)
    # A reply is decoded to text and encoded again, which may take other tokens.
    spare = limit * later * 5 // 4
    return (ids + ids[:1] * spare)[: max(max_prompt_tokens, len(first))]


@dataclass(frozen=True)
class Mode:
    """A way to decode the prompts: with drafts, or without."""

    name: str
    engine: Engine

    def row(self, turn: Turn) -> int:
        """Return the index of a turn's row."""
        return 2 * turn.number + (self.name == "plain")

    @property
    def digest(self) -> str:
        return models_digest(self.engine.spec, self.engine.target, self.engine.drafter)

    def run(
        self, requests: Sequence[Request], notify: Notify
    ) -> Iterator[tuple[int, float, Completion]]:
        """Yield each completion with its id, and the seconds since the one before. Compiling comes first.

        Raises:
          UsageError: a prompt failed.
        """
        engine = self.engine
        words = "with drafts" if self.name == "drafts" else "without drafts"
        notify(f"compiling, {words}")
        engine.warm_up([len(request.prompt_ids) for request in requests])
        checked = [engine.validate(request) for request in requests]
        first = [dataclasses.replace(r, max_new_tokens=2) for r in checked[: engine.batch_size]]
        for _ in engine.run(first):  # what a first run alone does
            pass
        before, count = time.perf_counter(), 0
        for event in engine.run(checked):
            if not isinstance(event, Completion):
                continue
            if event.error is not None:
                raise UsageError(f"prompt {event.id}: {event.error}")
            now, count = time.perf_counter(), count + 1
            notify(f"decoding {words}, {count} of {len(checked)} prompts")
            assert isinstance(event.id, int)
            yield event.id, now - before, event
            before = now


def _speed(
    rows: Sequence[dict[str, Any]], prompts: Sequence[EvalPrompt], scorer: Scorer | None
) -> Speed:
    right = count_right(scorer, [row["text"] for row in rows], prompts) if scorer else None
    tokens = sum(len(row["token_ids"]) for row in rows)
    return Speed(sum(row["seconds"] for row in rows), tokens, right)


def _ids(pair: Pair, content: Any, *, chat: bool, thinking: bool) -> tuple[int, ...]:
    """Return the ids of a text or of messages."""
    if not chat:
        if not isinstance(content, str):
            raise UsageError("a prompt is a conversation, which needs the chat template")
        return pair.encode(content)
    return pair.encode(content, chat=True, chat_options={"enable_thinking": thinking})


def _engine(pair: Pair, requests: Sequence[Request], drafting: Drafting, rows: int) -> Engine:
    return Engine.fitting(
        pair.target,
        pair.drafter,
        requests,
        drafting=drafting,
        batch_size=min(rows, len(requests)),
        choose_length="never",  # every step has all its drafts, or figures mean nothing
    )
