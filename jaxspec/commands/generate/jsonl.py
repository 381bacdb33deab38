"""Prompts, and files of them: lines of JSON, each with what it asks for itself.

Read `Prompt`, then `FIELDS`. A line is refused where a known field has a value that cannot be meant. What is not
known is passed on to the line's rows. So nothing that a line says is dropped.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from jaxspec.commands.generate.options import DecodingOptions
from jaxspec.commands.options import as_flag
from jaxspec.options import SEEDS, FieldError, Sampling, at_least

KINDS = ("prompt", "prompt_ids", "messages")
MOST = 2**31 - 1
"""The largest id, count or limit: devices hold them in 32 bits."""
DEEPEST = 64
"""Levels of lists and objects. Deeper ones would overflow the stack of whoever walks them."""


class PromptError(ValueError):
    """Prompts that cannot be read: says where, what was expected and the way out."""


@dataclass(frozen=True)
class Prompt:
    """One prompt as it was given: exactly one of `text`, `ids` and `messages`.

    Attributes:
      origin: where it came from, for messages.
      id: what its rows are called.
      seed, max_new_tokens, stop: its own; None for those of the run.
      sampling: its own values of fields of `Sampling`.
      extra: what its line says besides, for its rows.
    """

    origin: str
    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    id: str | int | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


def read_jsonl(path: Path) -> list[Prompt]:
    """Read one prompt a line; empty lines count for nothing.

    Raises:
      PromptError: naming the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: {error}") from None
    prompts = [read_line(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f'{path} has no prompts; expected lines such as {{"prompt": "def f("}}')
    return prompts


def read_line(origin: str, line: str) -> Prompt:
    """Read one prompt and what it asks for itself.

    Raises:
      PromptError: beginning with `origin`.
    """
    try:
        given = _object(line)
        found: dict[str, Any] = {"sampling": {}, "extra": {}}
        for name, value in given.items():
            if name not in FIELDS:
                _refuse_misspelt(name)
                found["extra"][name] = value
            elif value is not None:  # null says what leaving it out says
                place = found["sampling"] if name in _SAMPLING else found
                place[name] = FIELDS[name](name, value)
        kinds = [kind for kind in KINDS if kind in found]
        if len(kinds) != 1:
            raise _Refused(
                f"expected an object with one of {', '.join(KINDS)}, such as "
                f'{{"prompt": "def f("}}; this one has {" and ".join(kinds) or "none of them"}'
            )
        content = found.pop(kinds[0])
        kind = {"prompt_ids": "ids", "prompt": "text"}.get(kinds[0], kinds[0])
        if kinds[0] == "prompt" and not isinstance(content, str):
            kind = "ids"
        Sampling(**found["sampling"])  # ranges
        return Prompt(origin, **{kind: content}, **found)
    except (_Refused, FieldError) as error:
        raise PromptError(f"{origin}: {error}") from None


class _Refused(ValueError):
    """What is wrong with a line."""


# --- JSON --------------------------------------------------------------------------------------------


def _object(line: str) -> dict[str, Any]:
    """Read an object. Stricter than `json`: each name once, finite numbers, not too deep."""
    try:
        value = json.loads(
            line,
            object_pairs_hook=_once,
            parse_constant=_no_constant,
            parse_float=_finite_number,
        )
    except _Refused:
        raise
    except RecursionError:
        raise _Refused(_TOO_DEEP) from None
    except ValueError as error:
        raise _Refused(f"not JSON: {error}") from None
    level, depth = [value], 0
    while level := [
        inner
        for outer in level
        for inner in (
            outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()
        )
    ]:
        if (depth := depth + 1) > DEEPEST:
            raise _Refused(_TOO_DEEP)
    return value if isinstance(value, dict) else {}


_TOO_DEEP = f"lists and objects are nested more than {DEEPEST} deep"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"{json.dumps(twice)} is there twice; leave one out")
    return values


def _no_constant(literal: str) -> NoReturn:
    raise _Refused(f"{literal} is no JSON; numbers are finite")


def _finite_number(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise _Refused(f"{literal} is beyond the largest number, 1.8e308")
    return value


# --- fields ------------------------------------------------------------------------------------------


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    shown = json.dumps(value)
    raise _Refused(f"{name} is {shown if len(shown) <= 60 else shown[:59] + '…'}; {expected}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, value, "expected a number")
    try:
        return float(value)
    except OverflowError:
        _refuse(name, value, "it is beyond the largest number, 1.8e308")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name, value, "expected a whole number")
    if not -MOST <= value <= MOST:
        _refuse(name, value, f"the largest is {MOST}")
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "expected true or false")
    return value


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        _refuse(name, value, 'expected an object, such as {"17": -2.5}')
    found = {}
    for token, bias in value.items():
        if not re.fullmatch("[0-9]{1,10}", token) or int(token) > MOST:
            _refuse(name, {token: bias}, f"expected token ids, 0 to {MOST}, as names")
        is_ban = bias in ("-inf", "-Infinity")
        found[int(token)] = -math.inf if is_ban else _number(f"{name} of {token}", bias)
    if len(found) < len(value):
        _refuse(name, value, "one token is there twice")
    return found


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        _refuse(name, value, "expected a list of whole numbers")
    for i in value:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= MOST:
            _refuse(name, value, f"{json.dumps(i)[:60]} is no id; expected 0 to {MOST}")
    return tuple(value)


def _prompt(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list):
        return _ids(name, value)
    if not isinstance(value, str):
        _refuse(name, value, "expected text, or a list of token ids")
    return value


def _messages(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        expected = 'expected a list of objects such as {"role": "user", "content": "Hello"}'
        _refuse(name, value, expected)
    return tuple(value)


def _id(name: str, value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        _refuse(name, value, "expected text or a whole number")
    return value


def _seed(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not SEEDS.allows(value):
        _refuse(name, value, f"expected a whole number, {SEEDS.words}")
    return value


def _limit(name: str, value: Any) -> int:
    if wrong := at_least(1).refusal(_whole(name, value)):
        raise _Refused(f"{name} {wrong}")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        _refuse(name, value, "expected some text, or a list of texts")
    return tuple(texts)


_READERS = {float: _number, int: _whole, bool: _switch, Mapping[int, float]: _biases}
_SAMPLING = {name: _READERS[hint] for name, hint in typing.get_type_hints(Sampling).items()}

FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "prompt": _prompt,
    "prompt_ids": _ids,
    "messages": _messages,
    "id": _id,
    "seed": _seed,
    "max_new_tokens": _limit,
    "stop": _texts,
    **_SAMPLING,
}
"""What a line may say, by name, and what reads it: given the name and the value, it returns the value."""

_OF_THE_RUN = {
    f.name: f.metadata["flag"] or as_flag(f.name)
    for f in dataclasses.fields(DecodingOptions)
    if f.name not in FIELDS
}
_ELSEWHERE = {
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "stop_sequences": "stop",
    "stop_texts": "stop",
}
"""What other programs call some of ours; `max_tokens` and the like are near enough."""


def _refuse_misspelt(name: str) -> None:
    """Refuse a name that is nearly one of ours: a misspelt temperature would be greedy, and nobody would know."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if plain in _OF_THE_RUN:
        raise _Refused(
            f"{json.dumps(name)} is the same for all lines; give it as {_OF_THE_RUN[plain]}"
        )
    known = [ours for ours in FIELDS if ours not in (*KINDS, "id")]
    near = difflib.get_close_matches(_ELSEWHERE.get(plain, plain), known, n=1, cutoff=0.8)
    if near:
        raise _Refused(
            f'{json.dumps(name)} is not known; is it "{near[0]}"? Under a name that is less like it, it is '
            "passed on to the line's rows"
        )
