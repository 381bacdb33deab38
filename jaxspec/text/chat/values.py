"""Turn the value that a model writes into JSON text, one character at a time.

Two notations are read. One is JSON. The other is Gemma 4's, in which keys are bare words and a
string stands between two quote tokens: `{city:<|"|>Oslo<|"|>,days:3}`. The output so far is always
the beginning of valid JSON, so it can be streamed.
"""

from __future__ import annotations

import json
import re

QUOTE = '<|"|>'
"""Stands for Gemma's quote token among characters. It is one unit, and never part of a string."""

_SPACE = " \t\n\r"
_LITERAL = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The model's text is no value. The message has the text and the expectation."""


class Value:
    """Reads one value. `take` returns its JSON text.

    Attributes:
      done: whether the value is complete.
    """

    def __init__(self, *, bare: bool):
        """Make a reader.

        Args:
          bare: whether the notation is Gemma's: bare keys, quote tokens, and bare words as strings,
            except numbers, true, false and null.
        """
        self.done = False
        self._bare = bare
        self._open: list[str] = []  # the brackets that are open, outermost first
        # What may come next: value, item (or "]"), key, first key (or "}"), colon, after (a value);
        # or what is being read: string, word.
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

    def _structure(self, unit: str) -> None:
        """Read a character outside strings and words."""
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
                self._written.append(",")
                self._state = "key" if self._open[-1] == "{" else "value"
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
        return unit == '"' or (self._bare and unit == QUOTE)

    def _begin_string(self, unit: str, *, is_key: bool) -> None:
        self._written.append('"')
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
        elif unit == "\\" and self._quote == '"':
            self._part = unit
        else:
            self._written.append(_escaped(unit))

    def _escape(self, unit: str) -> None:
        """Read on after a backslash in a string of JSON."""
        self._part += unit
        hexadecimal = self._part[2:]
        if self._part[1] != "u":
            if unit == QUOTE or unit not in '"\\/bfnrt':
                raise Malformed(f"found {self._part!r}, which is no escape of JSON")
        elif hexadecimal.strip("0123456789abcdefABCDEF"):
            raise Malformed(f"found {self._part!r}, which is no escape of JSON")
        elif len(hexadecimal) < 4:
            return
        self._written.append(self._part)
        self._part = ""

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


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
