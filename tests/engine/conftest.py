"""Small chunks and tight rings for every test of this folder."""

from __future__ import annotations

import random

import pytest

from jaxspec.engine.length_forecast import LengthForecast


@pytest.fixture(autouse=True)
def tight_everywhere(tight: None) -> None:
    """Apply `tight` without being asked for."""


@pytest.fixture
def rows_outgrow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect all rows to end at once, so that more are admitted than have room in the end."""
    monkeypatch.setattr(LengthForecast, "new_tokens", lambda self, most, tokens=0: tokens)


@pytest.fixture
def wrong_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect rows to end at once or as late as they may, at random."""
    rng = random.Random(0)
    forecast = lambda self, most, tokens=0: rng.choice((tokens, most))  # noqa: E731
    monkeypatch.setattr(LengthForecast, "new_tokens", forecast)
