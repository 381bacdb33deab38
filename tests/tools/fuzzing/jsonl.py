"""Mutated files of prompts, a JSON object a line.

What is accepted must be the prompts that the file holds, all of them and in order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.commands.generate.prompts import read_jsonl
from jaxspec.commands.options import UsageError
from jaxspec.options import FieldError
from tests.tools.fuzzing import mutate
from tests.tools.fuzzing.outcomes import Case, Fault, Outcome, judge

KINDS = ("prompt", "prompt_ids", "messages")
GOOD: tuple[dict[str, Any], ...] = (
    {"prompt": "def f("},
    {"prompt": "é\u2028\n"},
    {"prompt_ids": [2, 17, 5]},
    {"messages": [{"role": "user", "content": "Hello"}]},
    {"messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Why?"}]},
)


def fuzz(directory: Path, count: int, seed: int = 0) -> Iterator[Case]:
    """Yield the outcomes of so many mutated files."""
    for i in range(count):
        yield _case(directory / "prompts.jsonl", random.Random(f"jsonl {seed} {i}"), i)


def _case(file: Path, rng: random.Random, number: int) -> Case:
    lines = [json.dumps(rng.choice(GOOD)).encode() for _ in range(rng.randrange(1, 6))]
    at = rng.randrange(len(lines))
    what, lines[at] = _line(rng)
    ending = rng.choice((b"\n", b"\n", b"\r\n"))
    text = ending.join(lines) + rng.choice((b"", ending, ending * 3))
    if rng.random() < 0.05:
        text, what = b"\xef\xbb\xbf" + text, f"{what}, after a byte order mark"
    file.write_bytes(text)

    def run() -> None:
        _check([line for line in text.split(b"\n") if line.strip()], read_jsonl(file))

    return judge(
        f"{number} line {at + 1}: {what}",
        run,
        documented=(UsageError, FieldError),
        names=(str(file),),
        places=(f"{file}:", f"{file} has no prompts", "not UTF-8"),
    )


def _line(rng: random.Random) -> tuple[str, bytes]:
    document = dict(rng.choice(GOOD))
    which = rng.randrange(6)
    if which == 0:
        document |= dict(rng.choice(GOOD))
        return "two kinds", json.dumps(document).encode()
    if which == 1:
        key = next(iter(document))
        document = {rng.choice(("Prompt", "text", "ids", "")): document[key]}
        return f"{list(document)}", json.dumps(document).encode()
    if which == 2:
        ids = rng.choice(([2.0], [2.5], [True], ["2"], [None], [[2]], [-1], [2**40], [], "2,3", 5))
        return f"prompt_ids {ids}", json.dumps({"prompt_ids": ids}).encode()
    mutation = mutate.mutated(rng, document, ())
    return mutation.words, mutation.text.replace(b"\n", b" ")


def _check(lines: list[bytes], prompts: list[Any]) -> None:
    if len(lines) != len(prompts):
        raise Fault(Outcome.MISREAD, f"{len(prompts)} prompts of {len(lines)} lines")
    for line, prompt in zip(lines, prompts, strict=True):
        try:
            value = json.loads(line, object_pairs_hook=_once)
        except Exception as error:
            raise Fault(Outcome.NONSENSE, f"no JSON: {str(error)[:80]}") from None
        given = [kind for kind in KINDS if isinstance(value, dict) and value.get(kind) is not None]
        if len(given) != 1:
            raise Fault(Outcome.NONSENSE, f"{mutate.shown(value)} has {given}")
        content = value[given[0]]
        found = next(x for x in (prompt.text, prompt.ids, prompt.messages) if x is not None)
        found = list(found) if isinstance(found, tuple) else found
        if not _makes_sense(given[0], content):
            raise Fault(Outcome.NONSENSE, f"{given[0]} is {mutate.shown(content)}")
        if json.dumps(found) != json.dumps(content):
            raise Fault(
                Outcome.MISREAD, f"{mutate.shown(content)} was read as {mutate.shown(found)}"
            )


def _makes_sense(kind: str, content: Any) -> bool:
    if isinstance(content, str):
        return kind == "prompt"
    if not isinstance(content, list):
        return False
    if kind == "messages":
        return bool(content) and all(isinstance(m, dict) for m in content)
    return all(type(i) is int for i in content)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)
