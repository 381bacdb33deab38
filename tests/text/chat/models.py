"""Tokenizers with the markers of both families, and what models of both might write."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from jaxspec.text.chat import Event, parser_for
from jaxspec.text.chat.parser import GEMMA4, QWEN3, Format
from jaxspec.tokenizer import Tokenizer
from tests import tiny_pair

BUNDLED = Path(__file__).parents[3] / "jaxspec/bundled/target/tokenizer.json"


def _with(backend: tokenizers.Tokenizer, tokens: list[str], *, special: bool) -> Tokenizer:
    """Give a tokenizer more tokens. In Gemma's they are special, which means without text. In Qwen3's not."""
    added = [tokenizers.AddedToken(t, special=special, normalized=False) for t in tokens]
    (backend.add_special_tokens if special else backend.add_tokens)(added)
    return Tokenizer(backend)


@functools.cache
def gemma() -> Tokenizer:
    """A tokenizer of Gemma's kind: characters that it does not know are raw bytes."""
    tokens = [*GEMMA4.markers.values(), "<|turn>", "<turn|>", "<|tool_response>"]
    return _with(_spelled(tiny_pair.backend(bos=False)), tokens, special=True)


def _spelled(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Let special tokens be found in a text, as a checkpoint's tokenizer does."""
    backend.add_special_tokens([t for t in tiny_pair.SPECIAL if t != "<unk>"])
    return backend


@functools.cache
def qwen() -> Tokenizer:
    """The bundled pair's tokenizer, of Qwen3's kind: bytes are letters, and characters are split between tokens."""
    backend = tokenizers.Tokenizer.from_file(str(BUNDLED))
    made = _with(backend, list(QWEN3.markers.values()), special=False)
    made.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


@dataclass(frozen=True)
class Family:
    """A family, and how its models write things."""

    format: Format

    @property
    def tokenizer(self) -> Tokenizer:
        return gemma() if self.format is GEMMA4 else qwen()

    @property
    def end(self) -> str:
        """The token that ends a turn. The engine keeps it."""
        return "<turn|>" if self.format is GEMMA4 else "<|im_end|>"

    def thought(self, text: str) -> str:
        if self.format is GEMMA4:
            return f"<|channel>thought\n{text}\n<channel|>"
        return f"<think>\n{text}\n</think>\n\n"

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        if self.format is GEMMA4:
            inside = ",".join(f"{k}:{gemma_value(v)}" for k, v in arguments.items())
            return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def encode(self, text: str) -> list[int]:
        # Not by `Tokenizer.encode_rendered`: under test its types are checked, with random numbers that
        # hypothesis does not allow where it draws.
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids


GEMMA, QWEN = Family(GEMMA4), Family(QWEN3)


def gemma_value(value: Any) -> str:
    """Write a value in Gemma's notation."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma_value, value)) + "]"
        case _:
            return json.dumps(value)


def parse(
    family: Family, ids: list[int], cuts: list[int], reason: str = "stop", **options: Any
) -> tuple[list[Event], str | None]:
    """Parse tokens that arrive in groups. Return the events as they came, and the finish reason."""
    parser = parser_for(family.tokenizer, call_id=lambda i: f"call-{i}", **options)
    edges = [0, *sorted(cuts), len(ids)]
    events = [e for a, b in itertools.pairwise(edges) for e in parser.push(ids[a:b])]
    events += parser.finish(reason)
    return events, parser.finish_reason


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Oslo", "days": 3},
    {"a": {"b": {"c": [1, [2, [{}]], {"d": None}]}}, "e": [], "f": -1.5e-3, "g": True},
    {"text": 'say "hi", {then} [leave]; \\d+ \\" ,a:b', "t": "", "u": "\n\t\x07"},
    {"text": "Zürich 😀 東京 \u2028 é", "ключ": "значение"},
    {"call": "call:f{a:1}", "json": '{"name": "f", "arguments": {}}', "think": "</think"},
]


def corpus(family: Family) -> dict[str, str]:
    """Return what a model might write, by what is special about it."""
    call, thought, marks = family.call, family.thought, family.format.markers
    weather = call("weather", ARGUMENTS[1])
    out = {
        "an answer": "Hello.\n\nThis is it.\n",
        "nothing": "",
        "thought, then an answer": thought("Let me see.\n\nYes.") + "Yes.",
        "an empty thought": thought("") + "Yes.",
        "an unclosed thought": thought("I wonder").split(marks["end think"])[0],
        "a thought, then a call": thought("It needs a tool.") + weather,
        "text around calls": f"First:\n{weather}\nthen\n{weather}\nDone.",
        "parallel calls": "".join(call(f"f{i}", a) for i, a in enumerate(ARGUMENTS)),
        "unicode": thought("😀 é 東京") + "né 😀😀 東京" + call("f", ARGUMENTS[4]),
        "a call without its end": weather.removesuffix(marks["end call"]),
        "a call cut in its name": weather[: weather.index("ther")],
        "a call cut in its arguments": weather[: weather.index("lo")],
        "a call that ends early": weather[: weather.index("lo")] + marks["end call"] + "sorry",
        "a call in a call": weather[: weather.index("lo")] + weather,
        "a call in a thought": thought("so " + weather + " it is"),
        "no call at all": marks["call"] + "get the weather" + marks["end call"] + "sorry",
        "an empty call": marks["call"] + marks["end call"] + "sorry",
        "ends without beginnings": marks["end think"] + "a" + marks["end call"] + "b",
        "markers in a thought": thought("a" + marks["think"] + "b"),
        "two thoughts": thought("a") + "b" + thought("c") + "d",
    }
    return {name: text + family.end for name, text in out.items()}
