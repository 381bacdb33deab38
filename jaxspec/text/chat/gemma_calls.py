"""Gemma 4's tool calls as a grammar, in the Lark dialect of llguidance: `call:NAME{key:value,…}`.

Keys are bare, and a string stands between two quote tokens. The arguments follow the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.options import FieldError, shown
from jaxspec.text.grammars.json_regex import pattern_parts
from jaxspec.text.grammars.schemas import Notation, Schemas, Unsupported

# Keys without a schema.
_KEY = r'[^\s:,{}\[\]"<]+'
_KEYS = re.compile(rf"{_KEY}( +{_KEY})*")
_UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that no string of Lark has."""
_VALUES = rf"""
fields: pair ("," pair)*
pair: KEY ":" value
KEY: /{_KEY}/
value: string | NUMBER | "true" | "false" | "null"
    | "{{" fields? "}}" | "[" (value ("," value)*)? "]"
string: QUOTE /(?s:.*)/ QUOTE
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""


def gemma_calls(functions: Sequence[Mapping[str, Any]], call: str, end: str, quote: str) -> str:
    """Return the rules of calls of some tools. The one named `call` is a whole call.

    A keyword that cannot be followed is ignored, as for calls in JSON, unless the tool is `strict`.

    Args:
      functions: the `function` of each tool's declaration.
      call, end, quote: the tokens of the notation, in Lark.

    Raises:
      FieldError: a schema cannot be followed, and its tool is strict.
    """
    lark, calls = _Lark(quote), []
    for function in functions:
        name, strict = function["name"], function.get("strict") is True
        arguments = _arguments(name, function.get("parameters") or {}, lark, strict=strict)
        calls.append(lark.sequence(lark.text(f"call:{name}"), arguments))
    lark.rules["call"] = lark.sequence(call, lark.either(*calls), end)
    written = "".join(f"{name}: {rule}\n" for name, rule in lark.rules.items())
    return written + _VALUES.replace("QUOTE", quote)


def _arguments(name: str, schema: Mapping[str, Any], lark: _Lark, *, strict: bool) -> str:
    if schema.get("type", "object") != "object" and not strict:
        schema = {}
    try:
        return Schemas({"type": "object", **schema}, lark, lenient=not strict).whole()
    except Unsupported as error:
        if strict:
            raise FieldError(
                "tools", f"has {name}, which is strict, and its schema {error.why}"
            ) from None
        return '"{" fields? "}"'


class _Lark(Notation):
    """Writes Gemma's notation.

    Attributes:
      rules: by name.
    """

    def __init__(self, quote: str):
        self.quote = quote
        self.rules: dict[str, str] = {}
        self._names: dict[str, str] = {}  # of references that contain themselves

    def text(self, text: str) -> str:
        """Return the piece for a literal text."""
        if _UNWRITABLE.search(text):
            raise Unsupported(f"has {shown(text)}, with control characters")
        return json.dumps(text, ensure_ascii=False)  # JSON's strings are those of Lark

    def sequence(self, *parts: str) -> str:
        """Return the parts one after the other."""
        return " ".join(parts)

    def either(self, *parts: str) -> str:
        """Return a choice of one of the parts."""
        return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"

    def repeated(self, part: str, lower: int, upper: int | None) -> str:
        """Return a part `lower` to `upper` times."""
        if upper == 0:
            return '""'
        if (lower, upper) == (0, 1):
            return f"({part})?"
        if (lower, upper) == (0, None):
            return f"({part})*"
        return f"({part}){{{lower},{'' if upper is None else upper}}}"

    def shared(self, part: str) -> str:
        """Return the name of a rule."""
        name = f"r{len(self.rules)}"
        self.rules[name] = part
        return name

    def recursive(self, name: str) -> str:
        """Return the name of the rule that will be defined."""
        if name not in self._names:
            self._names[name] = f"d{len(self.rules)}"
            self.rules[self._names[name]] = "value"  # until it is defined
        return self._names[name]

    def define(self, name: str, part: str) -> str:
        """Return the name of a rule."""
        if (rule := self._names.pop(name, None)) is None:
            return self.shared(part)
        self.rules[rule] = part
        return rule

    def anything(self) -> str:
        """Return any value."""
        return "value"

    def constant(self, value: Any) -> str:
        """Return a value."""
        if not isinstance(value, str):
            return self.text(json.dumps(value))
        return self.sequence(self.quote, *([self.text(value)] if value else []), self.quote)

    def string(self, lower: int, upper: int | None, pattern: str | None) -> str:
        """Return a string."""
        inside = f"/(?s:.{{{lower},{'' if upper is None else upper}}})/"
        if pattern is not None:
            starts, middle, ends = pattern_parts(pattern)
            middle = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", middle)
            around = "(?s:.*)"
            inside += f" & /{'' if starts else around}{middle}{'' if ends else around}/"
            name = f"S{len(self.rules)}"
            self.rules[name] = inside
            inside = name
        return self.sequence(self.quote, inside, self.quote)

    def number(self, schema: Mapping[str, Any]) -> str:
        """Return a number. It is written as in JSON."""
        return self.shared(f"%json {json.dumps(dict(schema))}")

    def key(self, name: str | None) -> str:
        """Return a key."""
        if name is None:
            return 'KEY ":"'
        if not _KEYS.fullmatch(name):
            raise Unsupported(f"has the property {shown(name)}, which a bare key cannot be")
        return self.text(f"{name}:")

    def comma(self) -> str:
        """Return a comma."""
        return '","'

    def order(self, names: Sequence[str]) -> list[str]:
        """Return names in the order of the template, which sorts them."""
        return sorted(names, key=str.lower)
