"""Old names of public modules and of what is in them. They work for one release, with a warning.

`MODULES` maps old modules to new ones, and `NAMES` old names in a module to new ones.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

MODULES = {
    "jaxspec.chat": "jaxspec.text.chat",
    "jaxspec.families": "jaxspec.registry",
    "jaxspec.grammars": "jaxspec.text.grammars",
    "jaxspec.loading": "jaxspec.weights.loading",
    "jaxspec.params": "jaxspec.weights.model_def",
    "jaxspec.programs": "jaxspec.runtime.programs",
    "jaxspec.quantised.formats": "jaxspec.quantised.format",
    "jaxspec.quantised.grouped": "jaxspec.quantised.int4",
    "jaxspec.quantised.per_channel": "jaxspec.quantised.int8_fp8",
    "jaxspec.records": "jaxspec.options",
    "jaxspec.requests": "jaxspec.engine.request",
    "jaxspec.rows": "jaxspec.rollout.batch",
    "jaxspec.sampler": "jaxspec.rollout.sampler",
    "jaxspec.scoring": "jaxspec.rollout.scoring",
    "jaxspec.serving.handles": "jaxspec.serving.handle",
    "jaxspec.sharding": "jaxspec.weights.sharding",
    "jaxspec.storage": "jaxspec.weights",
    "jaxspec.storage.acceptance": "jaxspec.weights.measured_acceptance",
    "jaxspec.trees": "jaxspec.weights.trees",
    "jaxspec.weights.acceptance": "jaxspec.weights.measured_acceptance",
}
"""Submodules follow their package."""

NAMES = {
    "jaxspec": {"Extras": "jaxspec.options.ProgramFeatures"},
    "jaxspec.decode": {
        name: f"jaxspec.decode_loop.{name}"
        for name in ("decode_loop", "plain_steps", "survival_step", "Carry", "PLAIN_STEPS")
    },
    "jaxspec.engine": {
        "Completion": "jaxspec.engine.request.Completion",
        "Engine": "jaxspec.engine.engine.Engine",
        "Request": "jaxspec.engine.request.Request",
        "Update": "jaxspec.engine.request.Update",
    },
    "jaxspec.families": {
        "graph_of": "jaxspec.weights.define.model_def_of",
        "named": "jaxspec.registry.get_family",
        "random_drafter": "jaxspec.weights.define.random_drafter",
    },
    "jaxspec.params": {"Graph": "jaxspec.weights.model_def.ModelDef"},
    "jaxspec.records": {"Extras": "jaxspec.options.ProgramFeatures"},
    "jaxspec.runtime": {"Programs": "jaxspec.runtime.runtime.Programs"},
    "jaxspec.sharding": {
        "RULES": "jaxspec.mesh.RULES",
        "constrain": "jaxspec.mesh.constrain",
        "left_to_xla": "jaxspec.mesh.left_to_xla",
        "row_parts": "jaxspec.mesh.row_parts",
        "varying_as": "jaxspec.mesh.varying_as",
        "whole_rows": "jaxspec.mesh.whole_rows",
        "place_params": "jaxspec.weights.trees.place_params",
    },
}
"""By the module where the name was. The values say where it is now."""


def forward(module: str, name: str) -> Any:
    """Return what an old name of a module stands for, and warn.

    Raises:
      AttributeError: the module never had such a name.
    """
    new = NAMES.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn_renamed(f"{module}.{name}", new)
    home, _, attribute = new.rpartition(".")
    return getattr(importlib.import_module(home), attribute)


def renamed_keywords(**new_names: str) -> Callable[[Function], Function]:
    """Decorate a function whose keyword arguments have new names, so that the old ones still work.

    Args:
      new_names: the new name, by the old one.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in new_names.keys() & kwargs:
                new = new_names[old]
                if new in kwargs:
                    raise TypeError(f"{old} is the old name of {new}; pass {new} alone")
                warn_renamed(f"{old}=", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate


def new_name(module: str) -> str | None:
    """Return the new name of an old module, or None for any other."""
    package, dot, rest = module, "", ""
    while package:
        if package in MODULES:
            return MODULES[package] + dot + rest
        package, _, last = package.rpartition(".")
        dot, rest = ".", f"{last}{dot}{rest}"
    return None


class Finder:
    """Find old modules. It is asked last, after all other finders."""

    @staticmethod
    def find_spec(
        name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load an old module, or None for any other."""
        del path, target
        new = new_name(name)
        return None if new is None else ModuleSpec(name, _Loader(new), is_package=True)


class _Loader(Loader):
    """Load a module that has nothing of its own, and looks up every name in another one."""

    def __init__(self, new: str):
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        del spec

    def exec_module(self, module: ModuleType) -> None:
        new = importlib.import_module(self.new)
        warn_renamed(module.__name__, self.new)

        def __getattr__(name: str) -> Any:
            is_renamed = name in NAMES.get(module.__name__, {})
            return forward(module.__name__, name) if is_renamed else getattr(new, name)

        module.__doc__ = new.__doc__
        module.__dict__["__getattr__"] = __getattr__


def warn_renamed(old: str, new: str) -> None:
    """Warn at the line of the user, who used an old name."""
    message = f"{old} is now {new}; the old name goes in the next release"
    # The warning names the caller's line, past this package and what checks its types. Python itself
    # leaves the import system out of the count.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_between(frame):
        level += "importlib" not in frame.f_code.co_filename
        frame = frame.f_back
    warnings.warn(message, DeprecationWarning, stacklevel=level)


def _is_between(frame: FrameType) -> bool:
    """Return whether a frame is between a warning and the caller that it is for."""
    module = frame.f_globals.get("__name__", "")
    return bool(re.match(r"(jaxspec|importlib|beartype|jaxtyping)\b", module)) or (
        frame.f_code.co_filename.startswith("<")
    )


def install() -> None:
    """Let old modules be imported."""
    if Finder not in sys.meta_path:
        sys.meta_path.append(Finder)
