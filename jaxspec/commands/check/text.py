"""The texts of a check: prompts, and how the target continues them.

Read `prompts_for`, then `decode_greedily`, which makes the first text. `further` makes the second
text: the target samples several continuations of each prompt, and then continues these greedily.
Sampled tokens are context only; drafts are compared after them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.api import BUNDLED
from jaxspec.commands.check.options import MIN_ROWS, CheckOptions
from jaxspec.commands.options import UsageError, error_message, read_text
from jaxspec.configs.base import GenerationDefaults
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import Sampling
from jaxspec.tokenizer import Tokenizer, TokenizerError
from jaxspec.weights.loading import LoadedModel

PROMPT_TOKENS = 64  # of a row cut from a text
MIN_TOKENS = 8  # of a row's text
MAX_SPECIAL_IDS = 64
HELD_OUT = "held-out prompts"
DRAWS = 3  # rows of the second text for each prompt

MAX_DRAWN = 512
"""Largest number of tokens sampled to exceed the target's window in the second text."""

PROMPTS = (
    "Explain how a binary search finds an item in a sorted list.",
    "def merge(first, second):\n    result = []\n    while first and second:\n",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Name five rivers in Europe and say where each of them ends.",
    "for index, line in enumerate(lines):\n    if line.startswith('#'):\n        continue\n",
    "What is the difference between a virus and a bacterium?",
    "def test_parse():\n    result = parse('a = 1')\n    assert result ==",
    "Give me a recipe for a simple vegetable soup, with amounts for four people.",
    "try:\n    with open(path) as file:\n        data = file.read()\nexcept OSError as error:\n",
    "Summarise the water cycle in three sentences.",
    "    def __repr__(self):\n        return '%s(%r)' % (self.__class__.__name__, self.",
    "Translate into French: the library closes at six, but the reading room stays open.",
    "def factorial(n):\n    if n < 0:\n        raise ValueError(",
)


@dataclass(frozen=True)
class PromptSet:
    """Prompts as token ids, and their origin in words."""

    origin: str
    ids: Sequence[tuple[int, ...]]


def prompts_for(target: LoadedModel, checking: CheckOptions, measured_on: str = "") -> PromptSet:
    """Return prompts: pieces of a text, else held-out prompts, else our own.

    Args:
      measured_on: origin of the text in the drafter's record; held-out prompts are used again.

    Raises:
      UsageError, TokenizerError: the text cannot be read, or is too short.
    """
    text, rows = checking.text, checking.rows
    if text is None and (target.directory == BUNDLED / "target" or measured_on == HELD_OUT):
        held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
        return PromptSet(HELD_OUT, [tuple(p["ids"]) for p in held_out[:rows]])
    tokenizer = Tokenizer.load(target.directory)
    if text is not None:
        ids = tokenizer.encode(read_text("--text", text))
        try:
            return PromptSet(f"pieces of {text}", cut(ids, tokenizer.bos_token_id, rows))
        except UsageError as error:
            raise UsageError(f"{text}: {error}") from None
    if tokenizer.chat_template is None:
        return PromptSet("prompts of our own", [tokenizer.encode(p) for p in PROMPTS[:rows]])
    turns = ([{"role": "user", "content": p}] for p in PROMPTS[:rows])
    return PromptSet("prompts of our own, as chats", [tokenizer.apply_chat(turn) for turn in turns])


def cut(ids: Sequence[int], bos: int | None, rows: int) -> list[tuple[int, ...]]:
    """Cut up to `rows` equal pieces, evenly spaced, out of a text; each begins with BOS."""
    head = () if bos is None else (bos,)
    body = tuple(ids[len(head) :])
    rows = min(rows, len(body) // MIN_TOKENS)
    if rows < MIN_ROWS:
        raise UsageError(
            f"the text has {len(body)} tokens; check needs {MIN_ROWS * MIN_TOKENS} or more"
        )
    length = min(PROMPT_TOKENS - len(head), len(body) // rows)
    starts = np.linspace(0, len(body) - length, rows).astype(int)
    return [(*head, *body[i : i + length]) for i in starts]


def special_ids(target: LoadedModel) -> tuple[int, ...]:
    """Return candidates for a drafter's mask id: special tokens, and the id after the last token.

    Reserved tokens ("<unused7>") and all after the first `MAX_SPECIAL_IDS` are left out. Without a
    tokenizer there are none.
    """
    try:
        backend = Tokenizer.load(target.directory).backend
    except TokenizerError:
        return ()
    added = sorted(backend.get_added_tokens_decoder().items())
    ids = [i for i, token in added if token.special and "unused" not in token.content]
    return (*ids[:MAX_SPECIAL_IDS], max(backend.get_vocab().values()) + 1)


# --- continuations -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Rows of tokens: prompts, from `starts` on the target's own tokens, from `ends` on zeros."""

    tokens: np.ndarray  # [R, L]
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, prompts: Sequence[tuple[int, ...]], done: Sequence[Completion]) -> Text:
        rows = [p + c.token_ids for p, c in zip(prompts, done, strict=True)]
        tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        return cls(tokens, np.asarray([*map(len, prompts)]), np.asarray([*map(len, rows)]))

    def anchors(self, num_draft_tokens: int, width: int | None = None) -> np.ndarray:
        """Return [R, A]: True where the row has `num_draft_tokens` tokens after its token `a`.

        Args:
          width: A; None for as many as the longest row has.
        """
        counts = self.ends - self.starts - num_draft_tokens
        return np.arange(width or max(int(counts.max()), 1))[None, :] < counts[:, None]


def decode_greedily(
    target: LoadedModel,
    drafter: LoadedModel | None,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    **options: Any,
) -> list[Completion]:
    """Continue prompts greedily, up to a stop id of the checkpoint."""
    stop_ids = generation_of(target).eos_token_ids
    requests = [Request(p, new_tokens, stop_ids=stop_ids) for p in prompts]
    return _decode(target, drafter, requests, **options)


def further(
    target: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    *,
    reserve: int,
    **options: Any,
) -> Text | None:
    """Return the second text, `DRAWS` rows in a row for each prompt.

    Args:
      reserve: positions that must be left after a row.
      options: of the engine.

    Returns:
      The text; None if the model has too few positions for rows longer than those of the first
      text.
    """
    longest = max(map(len, prompts))
    drawn = _drawn_tokens(target, min(map(len, prompts)), new_tokens)
    drawn = min(drawn, target.config.max_positions - longest - new_tokens - reserve)
    if drawn < new_tokens:  # else drafts would be compared on the first text again
        return None
    sampling, stop_ids = Sampling(temperature=1.0), generation_of(target).eos_token_ids
    requests = [
        Request(p, drawn, sampling, stop_ids, seed=draw) for p in prompts for draw in range(DRAWS)
    ]
    prefixes = [
        _row(r, c)
        for r, c in zip(requests, _decode(target, None, requests, **options), strict=True)
    ]
    done = decode_greedily(target, None, prefixes, new_tokens, **options)
    # A row without sampled tokens is a row of the first text.
    kept = [
        c if row != r.prompt_ids else dataclasses.replace(c, token_ids=())
        for c, row, r in zip(done, prefixes, requests, strict=True)
    ]
    return Text.of(prefixes, kept)


def generation_of(target: LoadedModel) -> GenerationDefaults:
    """Return the checkpoint's generation config; an empty one if it has none."""
    return target.generation or GenerationDefaults()


def _drawn_tokens(target: LoadedModel, shortest: int, new_tokens: int) -> int:
    """Return the number of tokens to sample: past the window, if that is not too far."""
    windows = [layer.window for layer in target.config.layers if layer.window is not None]
    over = min(windows, default=0) - shortest
    return over if new_tokens < over <= MAX_DRAWN else new_tokens


def _row(request: Request, done: Completion) -> tuple[int, ...]:
    """Return a prompt with its sampled tokens; with half of them if they came to an end."""
    ids = done.token_ids
    return request.prompt_ids + (ids[: len(ids) // 2] if done.finish_reason == "stop" else ids)


def _decode(
    target: LoadedModel, drafter: LoadedModel | None, requests: Sequence[Request], **options: Any
) -> list[Completion]:
    engine = Engine.fitting(target, drafter, requests, **options)
    errors = enumerate(map(engine.check, requests))
    if refused := [f"row {i}: {error_message(error)}" for i, error in errors if error]:
        raise UsageError("\n".join(refused))
    done = {event.id: event for event in engine.run(requests) if isinstance(event, Completion)}
    return [done[row] for row in range(len(requests))]
