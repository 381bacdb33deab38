"""Speculative decoding of Gemma 4 and Qwen3 in JAX.

Read `decode` first: it is the algorithm on one page.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
_HOMES = {
    "api": ("Generation", "Pair", "generate", "load"),
    "engine": ("Engine",),
    "records": ("Drafting", "Extras", "FieldError", "Sampling", "Tree"),
    "requests": ("Completion", "Request", "Update"),
    "rows": ("GenerateResult", "Prompts"),
    "runtime": ("Programs",),
    "sampler": ("Sampler",),
    "scoring": ("Sequences", "score"),
    "serving.handles": ("Handle",),
    "serving.open_engine": ("OpenEngine",),
    "sharding": ("make_mesh", "place_params"),
    "storage.saving": ("save", "save_hf"),
}
__all__ = [
    "Completion",
    "Drafting",
    "Engine",
    "Extras",
    "FieldError",
    "GenerateResult",
    "Generation",
    "Handle",
    "OpenEngine",
    "Pair",
    "Programs",
    "Prompts",
    "Request",
    "Sampler",
    "Sampling",
    "Sequences",
    "Tree",
    "Update",
    "generate",
    "load",
    "make_mesh",
    "place_params",
    "save",
    "save_hf",
    "score",
]

if TYPE_CHECKING:
    from jaxspec.api import Generation, Pair, generate, load
    from jaxspec.engine import Engine
    from jaxspec.records import Drafting, Extras, FieldError, Sampling, Tree
    from jaxspec.requests import Completion, Request, Update
    from jaxspec.rows import GenerateResult, Prompts
    from jaxspec.runtime import Programs
    from jaxspec.sampler import Sampler
    from jaxspec.scoring import Sequences, score
    from jaxspec.serving.handles import Handle
    from jaxspec.serving.open_engine import OpenEngine
    from jaxspec.sharding import make_mesh, place_params
    from jaxspec.storage.saving import save, save_hf


def __getattr__(name: str) -> Any:
    """Import JAX and the rest only when something is used, so that `jaxspec --help` stays quick."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxspec.{module}"), name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Show the public names, which are imported when they are used."""
    return [*__all__, "__version__"]
