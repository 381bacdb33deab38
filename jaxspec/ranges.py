"""Which sampling values are allowed, in words and as a test. Knows no JAX, so that refusing costs no start-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

RANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "temperature": ("finite and not negative; 0: greedy", lambda x: (x >= 0) & (x < math.inf)),
    "top_k": ("0 or more; 0: off", lambda x: x >= 0),
    "top_p": ("in (0, 1]; 1: off", lambda x: (x > 0) & (x <= 1)),
    "min_p": ("in [0, 1]; 0: off", lambda x: (x >= 0) & (x <= 1)),
    "repetition_penalty": ("finite and above 0; 1: off", lambda x: (x > 0) & (x < math.inf)),
    "presence_penalty": ("finite; 0: off", lambda x: abs(x) < math.inf),
    "frequency_penalty": ("finite; 0: off", lambda x: abs(x) < math.inf),
    "bias": ("a number, or -inf to ban", lambda x: x < math.inf),
}
"""What each value must be. Tests take a number or an array of them; nan passes none."""


def refusal(name: str, value: float) -> str | None:
    """Say what is wrong with a value and what it must be, or None when it is allowed."""
    words, allows = RANGES[name]
    return None if allows(value) else f"is {value:g}; it must be {words}"
