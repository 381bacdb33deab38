"""Texts to train on: files of prompts and answers, and batches in a fixed order.

A line of a file is a JSON object. `jaxspec generate --json` writes such lines, so answers of the target itself
come from the target's own engine:

    {"prompt_ids": [...], "token_ids": [...]}      ids, with or without their texts beside them
    {"prompt": "...", "text": "..."}               texts; "completion" and "response" are read as "text"
    {"messages": [..., {"role": "assistant", "content": "..."}]}    through the chat template

Which texts an update has follows from the seed and from the number of the step. A run that is resumed
therefore goes on with the texts that it would have had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.tokenizer import Tokenizer
from jaxspec.training.trainer import Batch

ANSWERS = ("text", "completion", "response")
COMPARED = 8
"""Lines whose ids are compared with the tokenizer's."""


class DataError(ValueError):
    """A file that cannot be trained on."""


@dataclass(frozen=True)
class Text:
    """A prompt and an answer, as ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.answer)


def read_texts(
    paths: Sequence[Path],
    *,
    vocab_size: int,
    tokenizer: Callable[[], Tokenizer],
    end: int | None = None,
) -> list[Text]:
    """Read the texts of files.

    Args:
      tokenizer: makes the target's, for lines that have texts.
      end: id that is put behind answers that are texts.

    Raises:
      DataError: a line is no text to train on, or its ids are of another tokenizer. It names the line.
      OSError: a file cannot be read.
    """
    texts = []
    compared = 0
    for where, values in _lines(paths):
        if values.get("error") is not None:
            continue  # a prompt that was refused
        text = _read_line(where, values, tokenizer, end)
        if wrong := [i for i in (*text.prompt, *text.answer) if not 0 <= i < vocab_size]:
            raise DataError(
                f"{where} has the id {wrong[0]}, and the target's vocabulary has {vocab_size}: the ids "
                "are of another tokenizer"
            )
        if compared < COMPARED and _has_both(values):
            _compare(where, values, tokenizer())
            compared += 1
        texts.append(text)
    if not texts:
        raise DataError(f"{', '.join(map(str, paths))}: no texts")
    return texts


def _read_line(
    where: str, values: dict[str, Any], tokenizer: Callable[[], Tokenizer], end: int | None
) -> Text:
    def ids(key: str) -> tuple[int, ...]:
        value = values[key]
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise DataError(f"{where}: {key} is no list of ids")
        return tuple(value)

    if "prompt_ids" in values and "token_ids" in values:
        return _checked(where, Text(ids("prompt_ids"), ids("token_ids")))
    after = () if end is None else (end,)
    if isinstance(values.get("messages"), list) and values["messages"]:
        *before, last = values["messages"]
        if not isinstance(last, dict) or last.get("role") != "assistant":
            raise DataError(f"{where}: the last message is not the assistant's")
        prompt = tokenizer().apply_chat(before)
        answer = tokenizer().encode_rendered(str(last.get("content", "")))
        return _checked(where, Text(tuple(prompt), (*answer, *after)))
    name = next((n for n in ANSWERS if isinstance(values.get(n), str)), None)
    if isinstance(values.get("prompt"), str) and name is not None:
        prompt = tokenizer().encode(values["prompt"])
        answer = tokenizer().encode_rendered(values[name])
        return _checked(where, Text(tuple(prompt), (*answer, *after)))
    raise DataError(
        f"{where} has {', '.join(values) or 'nothing'}; expected prompt_ids and token_ids, prompt and text, or "
        "messages"
    )


def _checked(where: str, text: Text) -> Text:
    if not text.prompt:
        raise DataError(f"{where} has an empty prompt: nothing comes before the answer")
    return text


def _has_both(values: dict[str, Any]) -> bool:
    return isinstance(values.get("text"), str) and bool(values.get("token_ids"))


def _compare(where: str, values: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Refuse ids that the target's tokenizer reads as another text."""
    text, ours = values["text"], tokenizer.decode(values["token_ids"])
    # The end of a text may have been cut, at a stop text or inside of a character.
    size = max(len(text) - 4, 0)
    if ours[:size] != text[:size]:
        raise DataError(
            f"{where}: its token_ids are {ours[:40]!r} for the target's tokenizer, and its text is {text[:40]!r}: "
            "they were made with another tokenizer"
        )


def read_prompts(
    paths: Sequence[Path], *, tokenizer: Callable[[], Tokenizer], thinking: bool = False
) -> list[tuple[int, ...]]:
    """Read the prompts of files alone, for answers that the target is to write.

    Args:
      thinking: whether chat templates turn thinking on.

    Raises:
      DataError: a line has no prompt. It names the line.
      OSError: a file cannot be read.
    """
    prompts = []
    for where, values in _lines(paths):
        messages = values.get("messages")
        if isinstance(values.get("prompt_ids"), list):
            prompt = values["prompt_ids"]
        elif isinstance(messages, list) and messages:
            before = messages[:-1] if messages[-1].get("role") == "assistant" else messages
            options = {"enable_thinking": True} if thinking else {}
            prompt = tokenizer().apply_chat(before, **options)
        elif isinstance(values.get("prompt"), str):
            prompt = tokenizer().encode(values["prompt"])
        else:
            raise DataError(f"{where} has no prompt: expected prompt_ids, prompt or messages")
        if not prompt:
            raise DataError(f"{where} has an empty prompt")
        prompts.append(tuple(prompt))
    if not prompts:
        raise DataError(f"{', '.join(map(str, paths))}: no prompts")
    return prompts


def write_texts(path: Path, texts: Sequence[Text]) -> None:
    """Write texts as a file that `read_texts` reads."""
    lines = (json.dumps({"prompt_ids": t.prompt, "token_ids": t.answer}) + "\n" for t in texts)
    path.write_text("".join(lines), encoding="utf-8")


def _lines(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the values of each line."""
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON: {error}") from None
            if not isinstance(values, dict):
                raise DataError(f"{where} is no JSON object")
            yield where, values


def usable(texts: Sequence[Text], drafts: int, width: int) -> list[Text]:
    """Return the texts with a whole block of answer within a width.

    Args:
      drafts: tokens that a drafter predicts behind an anchor.

    Raises:
      DataError: there are none.
    """
    kept = [t for t in texts if min(t.size, width) - len(t.prompt) > drafts]
    if not kept:
        longest = max(len(t.answer) for t in texts)
        raise DataError(
            f"no answer is as long as a block: the longest has {longest} tokens, and an anchor and {drafts} "
            f"drafts must be within the first {width} tokens of a text; give longer answers, or a larger max_length"
        )
    return kept


def split(texts: Sequence[Text], held_out: int, seed: int) -> tuple[list[Text], list[Text]]:
    """Return texts to train on, and others to measure with, at most a quarter of all."""
    order = np.random.default_rng([seed, 0x5EED]).permutation(len(texts))
    count = min(held_out, len(texts) // 4)
    return [texts[i] for i in order[count:]], [texts[i] for i in order[:count]]


class Batches:
    """The batches of a run, by the number of the update."""

    def __init__(self, texts: Sequence[Text], rows: int, parts: int, width: int, seed: int):
        self.count, self.parts, self.width, self.seed = rows * parts, parts, width, seed
        cut = [(text.prompt + text.answer)[:width] for text in texts]
        self.tokens = np.concatenate([np.asarray(ids, np.int32) for ids in cut])
        self.lengths = np.asarray([len(ids) for ids in cut])
        self.ends = np.cumsum(self.lengths)
        self.prompts = np.asarray([len(text.prompt) for text in texts])
        self.orders: dict[int, np.ndarray] = {}

    def __call__(self, step: int) -> Batch:
        """Return the texts of an update. Every text comes once before any comes twice."""
        places = range(step * self.count, (step + 1) * self.count)
        size = len(self.lengths)
        chosen = [self._order(place // size)[place % size] for place in places]
        tokens = np.zeros((self.count, self.width), np.int32)
        for row, text in zip(tokens, chosen, strict=True):
            end, length = self.ends[text], self.lengths[text]
            row[:length] = self.tokens[end - length : end]
        at, lengths = np.arange(self.width), self.lengths[chosen].astype(np.int32)
        answers = (at >= self.prompts[chosen, None]) & (at < lengths[:, None])
        return Batch.split(tokens, lengths, answers, self.parts)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the order of the texts in an epoch. A batch may reach over the end of one."""
        if epoch not in self.orders:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.lengths))
            kept = {e: x for e, x in self.orders.items() if e == epoch - 1}
            self.orders = {**kept, epoch: order}
        return self.orders[epoch]


def width_of(texts: Sequence[Text], max_length: int) -> int:
    """Return the columns that texts need, in multiples of 64, and at most `max_length`."""
    longest = max(text.size for text in texts)
    return min(-(-longest // 64) * 64, max_length)
