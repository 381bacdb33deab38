"""Small chunks and tight rings for every test of this folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def tight_everywhere(tight: None) -> None:
    """Apply `tight` without being asked for."""
