"""JSON without what Python adds to it: NaN, and numbers that are infinite."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from jaxspec.options import shown


class NotFinite(ValueError):
    """A number is not finite. The message has it."""


def strict_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
      NotFinite: a number is none of JSON, such as NaN, or becomes infinite, such as 1e400.
      ValueError, RecursionError: the text is no JSON, or is nested too deeply.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise NotFinite(f"{shown(text)}, which is too large for a number")
    return number


def _refuse(constant: str) -> NoReturn:
    raise NotFinite(f"{constant}, which is no number of JSON")
