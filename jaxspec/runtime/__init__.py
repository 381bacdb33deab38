"""Run the algorithm: compiled programs, the shapes they are compiled for, and where their arrays are.

`prefill` says which passes read prompts, `step_output` what the host gets of a step, and `memory`
what fits a device. Read `runtime` first.
"""

from __future__ import annotations

from typing import Any

from jaxspec import _deprecated


def __getattr__(name: str) -> Any:
    """Forward names that were in the module of this name before it was a package."""
    return _deprecated.forward(__name__, name)
