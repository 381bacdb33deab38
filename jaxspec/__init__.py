"""Speculative decoding of Gemma 4 and Qwen3 in JAX.

Read `decode` first: it is the algorithm on one page.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Engine",
    "GenerateResult",
    "Prompts",
    "Request",
    "Sampler",
    "Tree",
    "Update",
    "generate",
    "load",
]

if TYPE_CHECKING:
    from jaxspec.api import generate, load
    from jaxspec.drafters.base import Tree
    from jaxspec.engine import Completion, Engine, Request, Update
    from jaxspec.sampler import GenerateResult, Prompts, Sampler

_HOMES = {
    "generate": "api",
    "load": "api",
    "Tree": "drafters.base",
    "GenerateResult": "sampler",
    "Prompts": "sampler",
    "Sampler": "sampler",
}


def __getattr__(name: str) -> Any:
    """Import JAX and the rest only when something is used, so that `jaxspec --help` stays quick."""
    if name in __all__:
        return getattr(importlib.import_module(f"jaxspec.{_HOMES.get(name, 'engine')}"), name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
