"""JSON documents of a schema as a regular expression."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.options import shown
from jaxspec.text.grammars.schemas import Notation, Schemas, Unsupported
from jaxspec.text.strict_json import strict_json

_CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])'
_PLAIN = re.compile(
    r"\(\?:|\((?!\?:)|\\[.\-/+*?()]|\[(?!\^)(?:[\w \-/:@,.+]|\\-)+\]|[\w \-/:@,|)+*?{}]"
)
_WRITTEN_OTHERWISE = '"\\' + "".join(map(chr, range(0x20)))
_MAX_NUMBERS, _MAX_PATTERN = 1_000, 2_000


class JsonRegex(Notation):
    """Writes JSON as a regular expression: one line, at most one blank after commas and colons."""

    def text(self, text: str) -> str:
        """Return the piece for a literal text."""
        return re.sub(r"([^\w ])", lambda m: _escaped(m[1]), text)

    def sequence(self, *parts: str) -> str:
        """Return the parts one after the other."""
        return "".join(parts)

    def either(self, *parts: str) -> str:
        """Return a choice of one of the parts."""
        return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"

    def repeated(self, part: str, lower: int, upper: int | None) -> str:
        """Return a part `lower` to `upper` times."""
        return f"(?:{part}){{{lower},{'' if upper is None else upper}}}"

    def shared(self, part: str) -> str:
        """Return the part itself."""
        if len(part) > 1_000_000:
            raise Unsupported("is too large")
        return part

    def recursive(self, name: str) -> str:
        """Refuse."""
        raise Unsupported(f"has $ref: {shown(name)}, which contains itself")

    def define(self, name: str, part: str) -> str:
        """Return the part itself."""
        del name
        return self.shared(part)  # definitions that have others several times grow fast

    def anything(self) -> str:
        """Refuse."""
        raise Unsupported("has a part that may be any value, nested without bound")

    def constant(self, value: Any) -> str:
        """Return a value."""
        return self.text(json.dumps(value, ensure_ascii=False))

    def string(self, lower: int, upper: int | None, pattern: str | None) -> str:
        """Return a string."""
        if pattern is None:
            return f'"{self.repeated(_CHARACTER, lower, upper)}"'
        starts, middle, ends = pattern_parts(pattern)
        # Characters that JSON escapes would be written otherwise than the pattern has them.
        plain = re.fullmatch(f"(?:{_PLAIN.pattern})*", middle)
        ranges = re.findall(r"\[[^\]]*\]", middle)  # those of [A-z] are among them
        if any(re.match(one, c) for one in ranges if plain for c in _WRITTEN_OTHERWISE):
            plain = None
        if (lower, upper) != (0, None) or not plain:
            raise Unsupported(
                f"has pattern: {shown(pattern)}, with lengths or characters beside it"
            )
        around = self.repeated(_CHARACTER, 0, None)
        return f'"{"" if starts else around}{middle}{"" if ends else around}"'

    def number(self, schema: Mapping[str, Any]) -> str:
        """Return a number: any, one from 0 or 1 on, or a whole one of a small range."""
        bounds = {k: v for k, v in schema.items() if k != "type"}
        whole = schema["type"] == "integer"
        fraction = "" if whole else r"(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?"
        if not bounds:
            return f"-?(?:0|[1-9][0-9]*){fraction}"
        if bounds == {"minimum": 0}:
            return f"(?:0|[1-9][0-9]*){fraction}"
        if whole and bounds in ({"minimum": 1}, {"exclusiveMinimum": 0}):
            return "[1-9][0-9]*"
        low = bounds.get("minimum", bounds.get("exclusiveMinimum", 0.5))
        high = bounds.get("maximum", bounds.get("exclusiveMaximum", 0.5))
        if not whole or len(bounds) != 2 or not (isinstance(low, int) and isinstance(high, int)):
            listed = ", ".join(f"{k}: {shown(v)}" for k, v in bounds.items())
            raise Unsupported(f"has a number with {listed}, which is not supported there")
        begin, end = low + ("minimum" not in bounds), high + ("maximum" in bounds)
        if not 0 < (count := end - begin) <= _MAX_NUMBERS:
            raise Unsupported(f"has a range of {count} numbers; 1 to {_MAX_NUMBERS} are taken")
        return self.either(*map(str, range(begin, end)))

    def key(self, name: str | None) -> str:
        """Return a key."""
        return (self.string(0, None, None) if name is None else self.constant(name)) + ": ?"

    def comma(self) -> str:
        """Return a comma."""
        return ", ?"

    def order(self, names: Sequence[str]) -> list[str]:
        """Return the order of the schema."""
        return [*names]


def _escaped(character: str) -> str:
    # \< and \> are the beginning and the end of a word.
    return "\\" + character if character.isascii() and character not in "<>" else character


def regex_of(schema: Any) -> str:
    """Return the regular expression of JSON documents of a schema.

    Args:
      schema: as text or values.

    Raises:
      Unsupported: the schema has a keyword that an expression cannot follow.
    """
    if isinstance(schema, str):
        try:
            schema = strict_json(schema)
        except (ValueError, RecursionError) as error:
            raise Unsupported(f"is no valid JSON: {error}") from None
    return Schemas(schema, JsonRegex()).whole()


_ESCAPE = r"\\(?:[dDwWsSnrt]|[!-/:;=?@\[-`{-~])"
_UNIT = re.compile(rf"{_ESCAPE}|\[\^?(?:{_ESCAPE}|[^\]\\])+\]|\(\?:|\(\?|[^\\\[]")
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")
_OF_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}


def pattern_parts(pattern: Any) -> tuple[bool, str, bool]:
    r"""Return whether a pattern is anchored at the start, its middle, and whether at the end.

    Patterns are those of ECMAScript, where \d and \w are ASCII characters. The middle writes them
    out for Rust.

    Raises:
      Unsupported: Rust's expressions have no such syntax, or read it differently.
    """
    why = Unsupported(f"has pattern: {shown(pattern)}, which is not supported")
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN or not pattern.isprintable():
        raise why
    units = _UNIT.findall(pattern)
    if "".join(units) != pattern or "(?" in units or any(map(_reads_differently, units)):
        raise why
    starts, ends = units[:1] == ["^"], units[-1:] == ["$"]
    middle = units[starts : len(units) - ends]
    depth, is_choice = 0, False
    for index, unit in enumerate(middle):
        depth += unit.startswith("(") - (unit == ")")
        is_choice |= depth == 0 and unit == "|"
        if unit == "{" and not _COUNT.match("".join(middle[index:])):
            raise why
    if {"^", "$"} & {*middle} or (is_choice and (starts or ends)) or not middle:
        raise why
    try:
        re.compile("".join(middle))  # it finds what is no expression at all
    except (re.error, OverflowError, RecursionError):
        raise why from None
    return starts, "(?:" + "".join(map(_of_ascii, middle)) + ")", ends


def _reads_differently(unit: str) -> bool:
    """Tell whether Rust sees a nested class or an operator in a character class."""
    inside = re.sub(_ESCAPE, "", unit[1:-1]) if len(unit) > 1 and unit[0] == "[" else ""
    return any(odd in inside for odd in ("[", "&&", "--", "~~"))


def _of_ascii(unit: str) -> str:
    around = "{}" if unit.startswith("[") else "[{}]"

    def put(escape: re.Match[str]) -> str:
        of_class = _OF_ASCII.get(escape[0])
        return escape[0] if of_class is None else around.format(of_class)

    return re.sub(_ESCAPE, put, unit)
