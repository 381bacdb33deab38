"""Speculative decoding of Gemma 4 and Qwen3 in JAX.

Read `decode` first: it is the algorithm on one page.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxspec import _deprecated
from jaxspec.version import __version__ as __version__

_HOMES = {
    "api": ("Generation", "Pair", "generate", "load"),
    "engine.engine": ("Engine",),
    "options": ("Drafting", "ProgramFeatures", "FieldError", "Sampling", "Tree"),
    "engine.request": ("Completion", "Request", "Update"),
    "rollout.batch": ("GenerateResult", "Prompts"),
    "plots": ("plot_acceptance",),
    "runtime.runtime": ("Programs",),
    "rollout.sampler": ("Sampler",),
    "rollout.scoring": ("Sequences", "score"),
    "serving.handle": ("Handle",),
    "serving.open_engine": ("OpenEngine",),
    "weights.sharding": ("make_mesh",),
    "weights.saving": ("save", "save_hf"),
    "weights.trees": ("place_params",),
}
__all__ = [
    "Completion",
    "Drafting",
    "Engine",
    "FieldError",
    "GenerateResult",
    "Generation",
    "Handle",
    "OpenEngine",
    "Pair",
    "ProgramFeatures",
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
    "plot_acceptance",
    "save",
    "save_hf",
    "score",
]

if TYPE_CHECKING:
    from jaxspec.api import Generation, Pair, generate, load
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.request import Completion, Request, Update
    from jaxspec.options import Drafting, FieldError, ProgramFeatures, Sampling, Tree
    from jaxspec.plots import plot_acceptance
    from jaxspec.rollout.batch import GenerateResult, Prompts
    from jaxspec.rollout.sampler import Sampler
    from jaxspec.rollout.scoring import Sequences, score
    from jaxspec.runtime.runtime import Programs
    from jaxspec.serving.handle import Handle
    from jaxspec.serving.open_engine import OpenEngine
    from jaxspec.weights.saving import save, save_hf
    from jaxspec.weights.sharding import make_mesh
    from jaxspec.weights.trees import place_params


def __getattr__(name: str) -> Any:
    """Import JAX and the rest only when something is used, so that `jaxspec --help` stays quick."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxspec.{module}"), name)
    return _deprecated.forward(__name__, name)


def __dir__() -> list[str]:
    """Show the public names, which are imported when they are used."""
    return [*__all__, "__version__"]


_deprecated.install()
