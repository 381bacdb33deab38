"""What the target is to continue: pieces of a text, held-out prompts, or a few prompts of our own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec.api import BUNDLED
from jaxspec.commands.check import FEWEST_ROWS
from jaxspec.commands.options import UsageError
from jaxspec.tokenizer import Tokenizer, TokenizerError
from jaxspec.weights.loading import LoadedModel

PROMPT_TOKENS = 64  # of a row cut from a text
FEWEST_TOKENS = 8  # of a row's text
MOST_SPECIAL_IDS = 64
HELD_OUT = "held-out prompts"

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
    """What the target is to continue, and where that comes from."""

    origin: str
    ids: Sequence[tuple[int, ...]]


def prompts_for(
    target: LoadedModel, text: Path | None, rows: int, measured_on: str = ""
) -> PromptSet:
    """Choose prompts: pieces of the text given, else held-out ones, else our own.

    Args:
      measured_on: the text of the drafter's record, which is taken again if it is in the package.

    Raises:
      UsageError, TokenizerError: the text cannot be read, or is too short.
    """
    if text is None and (target.directory == BUNDLED / "target" or measured_on == HELD_OUT):
        held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
        return PromptSet(HELD_OUT, [tuple(p["ids"]) for p in held_out[:rows]])
    tokenizer = Tokenizer.load(target.directory)
    if text is not None:
        try:
            ids = tokenizer.encode(text.read_text(encoding="utf-8"))
            return PromptSet(f"pieces of {text}", cut(ids, tokenizer.bos_token_id, rows))
        except OSError as error:
            raise UsageError(f"cannot read {text}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"{text} is not UTF-8 text: {error}") from None
        except UsageError as error:
            raise UsageError(f"{text}: {error}") from None
    if tokenizer.chat_template is None:
        return PromptSet("prompts of our own", [tokenizer.encode(p) for p in PROMPTS[:rows]])
    turns = ([{"role": "user", "content": p}] for p in PROMPTS[:rows])
    return PromptSet("prompts of our own, as chats", [tokenizer.apply_chat(turn) for turn in turns])


def cut(ids: Sequence[int], bos: int | None, rows: int) -> list[tuple[int, ...]]:
    """Cut up to `rows` pieces of equal length, evenly spaced, out of a text; each gets its own BOS."""
    head = () if bos is None else (bos,)
    body = tuple(ids[len(head) :])
    rows = min(rows, len(body) // FEWEST_TOKENS)
    if rows < FEWEST_ROWS:
        raise UsageError(
            f"the text has {len(body)} tokens; check needs {FEWEST_ROWS * FEWEST_TOKENS} or more"
        )
    length = min(PROMPT_TOKENS - len(head), len(body) // rows)
    starts = np.linspace(0, len(body) - length, rows).astype(int)
    return [(*head, *body[i : i + length]) for i in starts]


def special_ids(target: LoadedModel) -> tuple[int, ...]:
    """Return ids that a drafter's mask may be: the special tokens of the tokenizer, and the id after its last.

    Tokens that are there to be used by somebody ("<unused7>") are left out, and of the others all after the
    first `MOST_SPECIAL_IDS`. None where there is no tokenizer.
    """
    try:
        backend = Tokenizer.load(target.directory).backend
    except TokenizerError:
        return ()
    added = sorted(backend.get_added_tokens_decoder().items())
    ids = [i for i, token in added if token.special and "unused" not in token.content]
    return (*ids[:MOST_SPECIAL_IDS], max(backend.get_vocab().values()) + 1)
