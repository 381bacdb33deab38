"""Requests in, tokens out: a queue over a fixed batch of slots that are refilled as rows finish.

`request` says what is asked and answered, `scheduler` what the device does next, and `slots` who has which row.
`draft_length` chooses how many drafts a step verifies, and `prefix_cache` keeps what prompts have in common.
Read `engine` first.
"""

from __future__ import annotations

from typing import Any

from jaxspec import _deprecated


def __getattr__(name: str) -> Any:
    """Forward names that were in the module of this name before it was a package."""
    return _deprecated.forward(__name__, name)
