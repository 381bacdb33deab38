"""Turn the value that a model writes into JSON text, one character at a time.

Two notations are read. One is JSON. The other is Gemma 4's, in which keys are bare words and a
string stands between two quote tokens: `{city:<|"|>Oslo<|"|>,days:3}`. The output so far is always
the beginning of valid JSON, so it can be streamed.

Slips of a model are repaired where they leave no doubt: a comma before a closing bracket, words and
quotes of Python, a backslash that escapes nothing, and brackets that are missing at the end.
"""

from __future__ import annotations

import json
import re
from typing import Any

QUOTE = '<|"|>'
"""Stands for Gemma's quote token among characters. It is one unit, and never part of a string."""

_SPACE = " \t\n\r"
_LITERAL = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")


class Malformed(Exception):
    """The model's text is no value. The message has the text and the expectation."""


class Value:
    """Reads one value. `take` returns its JSON text.

    Attributes:
      done: whether the value is complete.
      repaired: whether it was not well formed.
    """

    def __init__(self, *, bare: bool):
        """Make a reader.

        Args:
          bare: whether the notation is Gemma's: bare keys, quote tokens, and bare words as strings,
            except numbers, true, false and null.
        """
        self.done = self.repaired = False
        self._bare = bare
        self._open: list[str] = []  # the brackets that are open, outermost first
        # What may come next: value, item (or "]"), key, first key (or "}"), colon, after (a value),
        # after a comma; or what is being read: string, word.
        self._state = "value"
        self._is_key = False  # of the string or word that is being read
        self._quote = ""  # what ends the string that is being read
        self._part = ""  # the word that is being read, or an unfinished escape of a string
        self._written: list[str] = []

    def take(self) -> str:
        """Return the JSON text since the last call."""
        text = "".join(self._written)
        self._written.clear()
        return text

    def feed(self, unit: str) -> bool:
        """Read a character, or `QUOTE`.

        Returns:
          Whether it belongs to the value. False: the value ended before it, and `done` is True.

        Raises:
          Malformed: no value can continue with it.
        """
        if self._state == "string":
            self._in_string(unit)
        elif self._state == "word" and not self._ends_word(unit):
            self._part += unit
        else:
            if self._state == "word":
                self._end_word()
                if self.done:
                    return False
            if unit not in _SPACE:
                self._structure(unit)
        return True

    def close(self) -> None:
        """Close the brackets that are open, because the text is over.

        Raises:
          Malformed: more than brackets is missing.
        """
        if self._state == "word" and not self._is_key:
            self._end_word()
        while self._open and self._state in ("after", "first key", "item"):
            self._close()
        if not self.done:
            raise Malformed("the text ended inside a value")
        self.repaired = True

    @property
    def can_end(self) -> bool:
        """True if `ending` would make JSON of what was read. A string may end anywhere."""
        if self._state == "string":
            return not self._is_key and not self._part
        return self._state in ("after", "first key", "item")

    @property
    def ending(self) -> str:
        """The quote and the brackets that end what was read."""
        brackets = "".join(_CLOSING[bracket] for bracket in reversed(self._open))
        return ('"' if self._state == "string" else "") + brackets

    def _structure(self, unit: str) -> None:
        """Read a character outside strings and words."""
        if self._state == "after a comma":
            self._state = "after"
            if unit == _CLOSING[self._open[-1]]:
                self.repaired = True
            else:
                self._written.append(",")
                self._state = "key" if self._open[-1] == "{" else "value"
        match self._state:
            case "item" if unit == "]":
                self._close()
            case "first key" if unit == "}":
                self._close()
            case "value" | "item":
                self._begin_value(unit)
            case "key" | "first key" if self._begins_string(unit):
                self._begin_string(unit, is_key=True)
            case "key" | "first key" if self._bare and unit not in ",:{}[]":
                self._begin_word(unit, is_key=True)
            case "colon" if unit == ":":
                self._written.append(":")
                self._state = "value"
            case "after" if unit == ",":
                self._state = "after a comma"
            case "after" if unit == _CLOSING[self._open[-1]]:
                self._close()
            case state:
                wanted = {"colon": "':'", "after": "',' or the closing bracket"}.get(state, "a key")
                raise Malformed(f"found {unit!r} where {wanted} was expected")

    def _begin_value(self, unit: str) -> None:
        if unit in _CLOSING:
            self._written.append(unit)
            self._open.append(unit)
            self._state = "first key" if unit == "{" else "item"
        elif self._begins_string(unit):
            self._begin_string(unit, is_key=False)
        elif unit in ",:}]" or unit == QUOTE:
            raise Malformed(f"found {unit!r} where a value was expected")
        else:
            self._begin_word(unit, is_key=False)

    def _close(self) -> None:
        self._written.append(_CLOSING[self._open.pop()])
        self._end_value()

    def _end_value(self) -> None:
        self.done = not self._open
        self._state = "after"

    def _begins_string(self, unit: str) -> bool:
        return unit == '"' or unit == (QUOTE if self._bare else "'")

    def _begin_string(self, unit: str, *, is_key: bool) -> None:
        self._written.append('"')
        self.repaired |= unit == "'"
        self._quote, self._is_key, self._part = unit, is_key, ""
        self._state = "string"

    def _in_string(self, unit: str) -> None:
        if self._part:
            self._escape(unit)
        elif unit == self._quote:
            self._written.append('"')
            if self._is_key:
                self._state = "colon"
            else:
                self._end_value()
        elif unit == QUOTE:
            raise Malformed("found a quote token inside a string of JSON")
        elif unit == "\\" and self._quote != QUOTE:
            self._part = unit
        else:
            self._written.append(_escaped(unit))

    def _escape(self, unit: str) -> None:
        """Read on after a backslash in a string of JSON."""
        begun, self._part = self._part, self._part + unit
        if begun != "\\":  # a character's number
            if len(self._part) < 6 and unit in _HEXADECIMAL:
                return
            is_escape = unit in _HEXADECIMAL
        elif unit == "u":
            return
        elif unit == "'":
            self._part, is_escape, self.repaired = unit, True, True
        else:
            is_escape = unit != QUOTE and unit in '"\\/bfnrt'
        if is_escape:
            self._written.append(self._part)
            self._part = ""
        else:  # the backslash means itself, as in a regular expression or a path
            self._written.append("\\" + begun)
            self._part, self.repaired = "", True
            self._in_string(unit)

    def _begin_word(self, unit: str, *, is_key: bool) -> None:
        self._part, self._is_key, self._state = unit, is_key, "word"

    def _ends_word(self, unit: str) -> bool:
        if unit in (":" if self._is_key else ",}]"):
            return True
        if unit in ("{", "[", '"', QUOTE) or (self._is_key and unit in ",}]"):
            raise Malformed(f"found {unit!r} after the bare word {self._part!r}")
        return unit in _SPACE and not self._bare

    def _end_word(self) -> None:
        word = self._part.strip()
        if word in _PYTHON and not self._is_key:
            word, self.repaired = _PYTHON[word], True
        is_literal = _LITERAL.fullmatch(word) is not None
        if not is_literal and not self._bare:
            raise Malformed(f"found {word!r} where a value of JSON was expected")
        if self._is_key or not is_literal:
            word = f'"{_escaped(word)}"'
        self._written.append(word)
        if self._is_key:
            self._state = "colon"
        else:
            self._end_value()


def begun_object(text: str) -> dict[str, Any] | None:
    """Return the object that JSON text begins, as far as it goes; None if it begins none."""
    value, end, rest = Value(bare=False), 0, None
    try:
        for index, unit in enumerate(text, 1):
            if value.done or not value.feed(unit):
                return None
            if value.can_end:
                end = index
        value = Value(bare=False)
        for unit in text[:end]:
            value.feed(unit)
        rest = json.loads(value.take() + value.ending)
    except (Malformed, ValueError, RecursionError):
        return None
    return rest if isinstance(rest, dict) else None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
