"""Read the inside of a tool call block, one character at a time.

There is a class for each notation: `GemmaCall` and `HermesCall`. Both have the members of `Call`.
"""

from __future__ import annotations

import json
import re
from typing import Protocol

from jaxspec.text.chat.values import QUOTE, Malformed, Value
from jaxspec.text.strict_json import strict_json

NAME = re.compile(r"[\w.\-/]+(?::[\w.\-/]+)*")
# Gemma's models have been seen to leave out "call", and the colon with it.
_HEADER = re.compile(rf"(?:(?:call)?\s*:)?\s*({NAME.pattern})")


class Call(Protocol):
    """Reads one tool call.

    Attributes:
      name: the tool's name, once it is known.
      done: whether the call is complete.
      repaired: whether it was not well formed.
    """

    name: str | None
    done: bool

    @property
    def repaired(self) -> bool: ...

    def feed(self, unit: str) -> None:
        """Read a character, or `QUOTE`. Raises `Malformed` if no call can continue with it."""
        ...

    def take(self) -> str:
        """Return the arguments' JSON text since the last call; empty until `name` is known."""
        ...

    def close(self) -> None:
        """Complete the call, whose text is over. Raises `Malformed` if more than brackets lack."""
        ...


class GemmaCall:
    """Reads `call:NAME{key:value,…}`, Gemma 4's notation."""

    def __init__(self) -> None:
        """Make a reader."""
        self.name: str | None = None
        self.done = False
        self._header = ""
        self._arguments = Value(bare=True)

    def feed(self, unit: str) -> None:
        """Read a character, or `QUOTE`."""
        if self.name is None:
            if unit != "{":
                self._header += unit
                return
            self.name = self._named()
        self._arguments.feed(unit)
        self.done = self._arguments.done

    def take(self) -> str:
        """Return the JSON text of the arguments since the last call."""
        return self._arguments.take()

    @property
    def repaired(self) -> bool:
        """True if the arguments were not well formed."""
        return self._arguments.repaired

    def close(self) -> None:
        """Complete the call, whose text is over."""
        if self.name is None:
            raise Malformed("the call has no arguments")
        self._arguments.close()
        self.done = True

    def _named(self) -> str:
        match = _HEADER.fullmatch(self._header.strip())
        if match is None:
            raise Malformed(f"found {self._header[:80]!r} where call:NAME was expected")
        return match[1]


class HermesCall:
    """Reads `{"name": NAME, "arguments": {…}}`, the notation of Qwen3 and Hermes.

    Arguments may come before the name, and are then held back. Arguments may also be a string with
    a JSON object in it. Other keys are read and ignored.
    """

    def __init__(self) -> None:
        """Make a reader."""
        self.name: str | None = None
        self.done = self.repaired = False
        # What comes next: open, first key, key, in key, colon, value, after.
        self._state = "open"
        self._seen: set[str] = set()
        self._key = ""
        self._value = Value(bare=False)
        # Whether the value is the object of arguments. None: its first character has not come.
        self._streams: bool | None = None
        self._arguments: list[str] = []  # JSON that was not taken

    def take(self) -> str:
        """Return the JSON text of the arguments since the last call, once the name is known."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, unit: str) -> None:
        """Read a character."""
        if unit == QUOTE:
            raise Malformed(f"found {unit!r}, which is no JSON")
        if self._state in ("in key", "value") and self._feed_value(unit):
            return
        if not unit.isspace():
            self._structure(unit)

    def close(self) -> None:
        """Complete the call, whose text is over."""
        if self._state == "value":
            self._value.close()
            self._take_value()
        if self._state != "after":
            raise Malformed("the text ended inside the call")
        self._finish()
        self.repaired = True

    def _feed_value(self, unit: str) -> bool:
        """Return whether the character belongs to the value that is being read."""
        if self._streams is None and not unit.isspace():
            self._streams = self._key == "arguments" and unit == "{"
        belongs = self._value.feed(unit)
        self._take_value()
        return belongs

    def _take_value(self) -> None:
        """Take the new text of the value that is being read, and end the value if it is done."""
        if self._streams:
            self._arguments.append(self._value.take())
        if self._value.done:
            self.repaired |= self._value.repaired
            self._end_value(self._value.take())

    def _end_value(self, text: str) -> None:
        if self._state == "in key":
            self._key = json.loads(text)
            if self._key in self._seen and self._key in ("name", "arguments"):
                raise Malformed(f"found {self._key!r} twice in one call")
            self._seen.add(self._key)
            self._state = "colon"
            return
        if self._key == "name":
            name = json.loads(text) if text.startswith('"') else ""
            if not NAME.fullmatch(name):
                raise Malformed(f"found {text[:80]} where the name of a tool was expected")
            self.name = name
        elif self._key == "arguments" and not self._streams:
            self._arguments.append(_object(text))
        self._state = "after"

    def _structure(self, unit: str) -> None:
        match self._state:
            case "open" if unit == "{":
                self._state = "first key"
            case "key" | "first key" if unit in ('"', "'"):
                self._state, self._value, self._streams = "in key", Value(bare=False), False
                self._value.feed(unit)
            case "colon" if unit == ":":
                self._state, self._value, self._streams = "value", Value(bare=False), None
            case "after" if unit == ",":
                self._state = "key"
            case "after" | "first key" | "key" if unit == "}":
                self.repaired |= self._state == "key"  # a comma before it
                self._finish()
            case _:
                raise Malformed(f"found {unit!r} in a call that should be an object of JSON")

    def _finish(self) -> None:
        if self.name is None:
            raise Malformed("the call has no name")
        if "arguments" not in self._seen:
            self._arguments.append("{}")
        self.done = True


def _object(text: str) -> str:
    """Return the JSON object of arguments that were not written as an object."""
    if text == "null":
        return "{}"
    if text.startswith('"'):
        try:
            value = strict_json(json.loads(text))
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
    raise Malformed(f"found {text[:80]} where an object of arguments was expected")
