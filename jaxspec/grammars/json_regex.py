"""JSON documents of a schema as a regular expression."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.grammars.schemas import Notation, Schemas, Unsupported
from jaxspec.records import shown

_CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])'
_PLAIN = re.compile(
    r"\(\?:|\\[dw.\-/+*?()]|\[(?!\^)(?:[\w \-/:@,.+]|\\[dw\-])+\]|[\w \-/:@,|()+*?{}]"
)
_MOST_NUMBERS = 1_000


class JsonRegex(Notation):
    """Writes JSON as a regular expression: on one line, with one blank or none after commas and colons."""

    def text(self, text: str) -> str:
        """Return what is this text."""
        return re.sub(r"([^\w ])", lambda m: _escaped(m[1]), text)

    def sequence(self, *parts: str) -> str:
        """Return one part after the other."""
        return "".join(parts)

    def either(self, *parts: str) -> str:
        """Return one of some parts."""
        return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"

    def repeated(self, part: str, least: int, most: int | None) -> str:
        """Return a part several times."""
        return f"(?:{part}){{{least},{'' if most is None else most}}}"

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
        return part

    def anything(self) -> str:
        """Refuse."""
        raise Unsupported("has a part that may be any value, nested without bound")

    def constant(self, value: Any) -> str:
        """Return a value."""
        return self.text(json.dumps(value, ensure_ascii=False))

    def string(self, least: int, most: int | None, pattern: str | None) -> str:
        """Return a string."""
        if pattern is None:
            return f'"{self.repeated(_CHARACTER, least, most)}"'
        starts, middle, ends = pattern_parts(pattern)
        # Characters that JSON escapes would be written otherwise than the pattern has them.
        plain = re.fullmatch(f"(?:{_PLAIN.pattern})*", middle)
        if (least, most) != (0, None) or not plain:
            raise Unsupported(
                f"has pattern: {shown(pattern)}, with lengths or characters beside it"
            )
        around = self.repeated(_CHARACTER, 0, None)
        return f'"{"" if starts else around}{middle}{"" if ends else around}"'

    def number(self, schema: Mapping[str, Any]) -> str:
        """Return a number: any, from 0 or 1 on, or a whole one between two that are near."""
        given = {k: v for k, v in schema.items() if k != "type"}
        whole = schema["type"] == "integer"
        fraction = "" if whole else r"(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?"
        if not given:
            return f"-?(?:0|[1-9][0-9]*){fraction}"
        if given == {"minimum": 0}:
            return f"(?:0|[1-9][0-9]*){fraction}"
        if whole and given in ({"minimum": 1}, {"exclusiveMinimum": 0}):
            return "[1-9][0-9]*"
        low = given.get("minimum", given.get("exclusiveMinimum", 0.5))
        high = given.get("maximum", given.get("exclusiveMaximum", 0.5))
        if not whole or len(given) != 2 or not (isinstance(low, int) and isinstance(high, int)):
            say = ", ".join(f"{k}: {shown(v)}" for k, v in given.items())
            raise Unsupported(f"has a number with {say}, which is not supported there")
        numbers = range(low + ("minimum" not in given), high + ("maximum" in given))
        if not 0 < len(numbers) <= _MOST_NUMBERS:
            raise Unsupported(
                f"has a range of {len(numbers)} numbers; 1 to {_MOST_NUMBERS} are taken"
            )
        return self.either(*map(str, numbers))

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
    return "\\" + character if character.isascii() else character


def regex_of(schema: Any) -> str:
    """Return the regular expression of JSON documents of a schema.

    Args:
      schema: as text or values.

    Raises:
      Unsupported: it has a keyword that an expression cannot follow, or that is not supported.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise Unsupported(f"is no valid JSON: {error}") from None
    return Schemas(schema, JsonRegex()).whole()


_UNIT = re.compile(
    r"\\[dDwWsS.\-/+*?()\[\]{}|\\^$nrt]|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\(\?|[^\\\[]"
)


def pattern_parts(pattern: Any) -> tuple[bool, str, bool]:
    """Return whether a schema's pattern begins at the start, its middle, and whether it ends at the end.

    Raises:
      Unsupported: it has what expressions of Rust have not, or read differently.
    """
    why = Unsupported(f"has pattern: {shown(pattern)}, which is not supported")
    units = _UNIT.findall(pattern) if isinstance(pattern, str) else []
    if not isinstance(pattern, str) or "".join(units) != pattern or "(?" in units:
        raise why
    starts, ends = units[:1] == ["^"], units[-1:] == ["$"]
    middle = units[starts : len(units) - ends]
    depth, is_choice = 0, False
    for unit in middle:
        depth += unit.startswith("(") - (unit == ")")
        is_choice |= depth == 0 and unit == "|"
    if {"^", "$"} & {*middle} or (is_choice and (starts or ends)) or not middle:
        raise why
    return starts, "(?:" + "".join(middle) + ")", ends
