"""Seeded mutations of JSON documents. Read `mutated`."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]

NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 7, 64, -(2**31), 2**31, 2**32, 2**60, 2**63, 10**30, 10**400),
    *(0.5, 2.5, -0.5, 1.0, 1e-320, 1e-40, 1e40, 1e308, math.nan, math.inf, -math.inf),
)
WORDS: tuple[Any, ...] = ("", "abc", "12", "1e-6", "true", "full", "x" * 5000, "\ud800", "é")
OTHERS: tuple[Any, ...] = (True, False, None, [], [3], [[]], {}, {"a": 1}, [None], ["abc"], [1.5])
LFS = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@dataclass(frozen=True)
class Mutation:
    """A mutated document.

    Attributes:
      words: what was done.
      text: the file's new bytes.
      path: what was changed; () for the whole text.
      value: the new value there.
      kind: "type" for a value of another type, "value" for another value of the same type, "gone" for a key or an
        entry that was removed or null, or for another document; "text" where the file is no JSON object any more.
    """

    words: str
    text: bytes
    path: Path
    value: Any
    kind: str


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Yield the places in a document, containers included, the document itself left out."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        yield (*at, key)
        yield from paths(inner, (*at, key))


def lookup(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}… ({len(text)} characters)"


def mutated(rng: random.Random, document: Any, read: Collection[Path]) -> Mutation:
    """Change one place of a document, or its text.

    Args:
      read: the places that are read. Most mutations are there.
    """
    if rng.random() < 0.12:
        return _text_mutation(rng, document, read)
    document = copy.deepcopy(document)
    places = list(paths(document))
    wanted = [p for p in places if p in read]
    path = rng.choice(wanted if wanted and rng.random() < 0.85 else places)
    parent, key = lookup(document, path[:-1]), path[-1]
    old = parent[key]
    if rng.random() < 0.08:
        del parent[key]
        return Mutation(f"{_name(path)} removed", _bytes(document), path, None, "gone")
    new = _list_mutation(rng, old) if isinstance(old, list) and rng.random() < 0.6 else _value(rng)
    parent[key] = new
    kind = "gone" if new is None else "value" if _kind(new) == _kind(old) else "type"
    if old is None or (_kind(old) == "number" and isinstance(new, int)):
        kind = "value"  # 1 is a good 1.0
    if isinstance(old, list) and isinstance(new, list):
        entries = {_kind(x) for x in old}
        kind = "type" if any(_kind(x) not in entries for x in new) and entries else "value"
    return Mutation(f"{_name(path)} = {shown(new)}", _bytes(document), path, new, kind)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int):
        return "whole number"
    return {float: "number", str: "text", list: "list", dict: "object"}.get(type(value), "none")


def _value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, NUMBERS, WORDS, OTHERS))))


def _list_mutation(rng: random.Random, old: list[Any]) -> list[Any]:
    new, i = list(old), rng.randrange(len(old) + 1)
    match rng.randrange(6):
        case 0:
            return []
        case 1:
            return new[:i] + new[i + 1 :]
        case 2:
            return [*new[:i], _value(rng), *new[i:]]
        case 3 | 4:
            return [*new[:i], _value(rng), *new[i + 1 :]]
        case _:
            return new * rng.choice((2, 1000))


def _text_mutation(rng: random.Random, document: Any, read: Collection[Path]) -> Mutation:
    """Change the text: cut it, nest it, repeat a key, or replace it."""
    text = _bytes(document)
    keys = [p for p in (read or paths(document)) if isinstance(p[-1], str) and _has(document, p)]
    path: Path = rng.choice(sorted(keys, key=str))
    which = rng.randrange(10)
    if which == 0:
        return _whole("cut", text[: rng.randrange(len(text))])
    if which == 1:
        depth = rng.choice((200, 3000, 200_000))
        nested = _put(document, path, "@@").replace(b'"@@"', b"[" * depth + b"]" * depth)
        return Mutation(f"{_name(path)} = {depth} lists", nested, path, [[]], "type")
    if which == 2:
        depth = rng.choice((200, 3000, 200_000))
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        return _whole(f"{depth} objects", deep, "text" if depth > 200 else "gone")
    if which == 3:
        again = {str(path[-1]): _value(rng)}
        one = json.dumps({path[-1]: lookup(document, path)}).encode()[1:-1]
        twice = _bytes(document).replace(one, one + b", " + _bytes(again)[1:-1], 1)
        if twice == text:
            return _whole("cut", text[:-1])
        return Mutation(f"{_name(path)} twice", twice, path, ..., "text")
    if which == 4:
        return _whole("a git-lfs pointer", LFS.encode())
    if which == 5:
        return _whole("empty", b"")
    if which == 6:
        other = rng.choice((b"[]", b"5", b"null", b'"a"', b"NaN", b"{}"))
        return _whole("another document", other, "gone" if other == b"{}" else "text")
    if which == 7:
        i = rng.randrange(len(text))
        return _whole("a byte that is no UTF-8", text[:i] + b"\xff" + text[i:])
    if which == 8:
        return _whole("more after its end", text + rng.choice((b"}", b"{}", b"\0" * 50)))
    digits = b"9" * 5000
    return Mutation(
        f"{_name(path)} of 5000 digits",
        _put(document, path, "@@").replace(b'"@@"', digits),
        path,
        0,
        "text",
    )


def _whole(words: str, text: bytes, kind: str = "text") -> Mutation:
    return Mutation(words, text, (), None, kind)


def _has(document: Any, path: Path) -> bool:
    try:
        lookup(document, path)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _put(document: Any, path: Path, value: Any) -> bytes:
    document = copy.deepcopy(document)
    lookup(document, path[:-1])[path[-1]] = value
    return _bytes(document)


def _bytes(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _name(path: Path) -> str:
    return ".".join(map(str, path))
