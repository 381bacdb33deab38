"""The engine: continuous batching of requests over a fixed number of slots.

`request` has requests and replies, `scheduler` chooses the device's next call, and `slots` has the
rows. `draft_length` chooses the number of drafts that a step verifies, and `prefix_cache` stores
prefixes that prompts have in common. Read `engine` first.
"""

from __future__ import annotations

from typing import Any

from jaxspec import _deprecated


def __getattr__(name: str) -> Any:
    """Forward names that were in the module of this name before it was a package."""
    return _deprecated.forward(__name__, name)
