"""Many prompts in one compiled program, for training and evaluation: params and prompts in, arrays out.

`batch` is what goes in and comes out, `rollout` and `refill` are the functions that programs are compiled of, and
`scoring` computes log-probabilities with gradients. Read `sampler` first.
"""

from __future__ import annotations

from typing import Any

from jaxspec import _deprecated


def __getattr__(name: str) -> Any:
    """Forward names that were in the module of this name before it was a package."""
    return _deprecated.forward(__name__, name)
