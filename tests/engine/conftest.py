"""Small chunks and tight rings for every test of this folder."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from jaxspec.engine.length_forecast import LengthForecast
from jaxspec.engine.scheduler import Scheduler


@pytest.fixture(autouse=True)
def tight_everywhere(tight: None) -> None:
    """Apply `tight` without being asked for."""


def at_once(self: LengthForecast, limits: np.ndarray, tokens: np.ndarray, every: int = 1) -> Any:
    """Expect all rows to end at once."""
    return np.zeros(1, int), np.ones((1, len(limits)))


def at_limits(self: LengthForecast, limits: np.ndarray, tokens: np.ndarray, every: int = 1) -> Any:
    """Expect all rows to get as much as they may."""
    times = np.arange(int((limits - tokens).max(initial=0)) + 1)
    return times, (times[:, None] <= limits - tokens).astype(float)


@pytest.fixture
def rows_outgrow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let more rows be admitted than have room in the end."""
    monkeypatch.setattr(LengthForecast, "__call__", at_once)


@pytest.fixture
def wrong_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect rows to end at once or at their limits, at random."""
    rng = random.Random(0)
    monkeypatch.setattr(
        LengthForecast, "__call__", lambda *args: rng.choice((at_once, at_limits))(*args)
    )


@pytest.fixture
def mixed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call in whose pass prompts are read adds the number of rows that decode in it."""
    found, mix = [], Scheduler._mix

    def counting(scheduler: Scheduler, max_steps: int) -> None:
        found.append(len(scheduler.running))
        mix(scheduler, max_steps)

    monkeypatch.setattr(Scheduler, "_mix", counting)
    return found
