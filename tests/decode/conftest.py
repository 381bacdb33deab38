"""Small chunks and tight rings for every test here, so that short sequences reach what long ones do."""

from __future__ import annotations

import pytest

from jaxspec import cache
from jaxspec.runtime import prefill


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings without a slot to spare, and prompts beyond 16 tokens prefilled in pieces.

    `cases.target` has a number of positions of its own, so that no state made with other rings is reused.
    """
    monkeypatch.setattr(cache, "RING_MULTIPLE", 1)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 16)
