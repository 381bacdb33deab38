"""The registry of families. A family is one kind of model.

An entry holds everything that is special to its family. The entries are `gemma4`, `qwen3`, `dflash`,
`dflash2`, `dspark`, `mtp`, `ngram` and `gemma4_vision`. `base` defines what an entry holds. To add a
target or a drafter, write its module, its table of conversion rules and an entry, and call `register`.
Nothing outside this folder checks the class of a config.

This package lies below `weights`, `models` and `drafters`. An entry imports its module inside a
function, so importing this package does not import JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.configs.drafter_methods import method_of
from jaxspec.configs.fields import WORDS, ConfigError, read
from jaxspec.options import shown
from jaxspec.registry import dflash, dflash2, dspark, gemma4, gemma4_vision, mtp, ngram, qwen3
from jaxspec.registry.base import (
    Assumption,
    Change,
    Conventions,
    Family,
    ModelConfig,
    Role,
    WeightChange,
)

__all__ = [
    "Assumption",
    "Change",
    "Conventions",
    "Family",
    "ModelConfig",
    "WeightChange",
    "families",
    "family_of",
    "get_family",
    "presets",
    "recognise",
    "recognise_vision",
    "register",
]

_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add an entry to the registry, and return it.

    Raises:
      ValueError: another entry has its name, its config class or one of its presets.
    """
    for other in _FAMILIES.values():
        if other.name == family.name or other.config is family.config:
            raise ValueError(
                f"family {family.name!r} ({family.config.__name__}) is registered already, as "
                f"{other.name!r} ({other.config.__name__}); name and config class must be new"
            )
    if family.role == "target" and (taken := set(presets()) & set(family.presets)):
        raise ValueError(f"presets {sorted(taken)} of family {family.name!r} have names of others")
    _FAMILIES[family.name] = family
    return family


def families(role: Role | None = None) -> tuple[Family, ...]:
    """Return all entries, or only those of one role, in order of registration."""
    return tuple(f for f in _FAMILIES.values() if role in (None, f.role))


def get_family(name: str) -> Family:
    """Return the entry with a name.

    Raises:
      ValueError: no entry has that name; the message lists the known names.
    """
    if name not in _FAMILIES:
        raise ValueError(f"family {name!r} is not known; expected one of {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def family_of(config: ModelConfig) -> Family:
    """Return the entry of a config's class.

    Raises:
      ValueError: no entry has that class.
    """
    for family in _FAMILIES.values():
        if type(config) is family.config:
            return family
    raise ValueError(
        f"no family has configs of class {type(config).__name__}; register one with registry.register"
    )


def recognise(config: Mapping[str, Any]) -> Family:
    """Return the family of a parsed config.json.

    Drafters are tried first, because the files of some have the `model_type` of a target.

    Raises:
      ConfigError: no family has this model type or one of these architectures; or it is a drafter of
        a method that jaxspec knows and does not run.
    """
    read(config, "model_type", WORDS, None)
    recognised = (f for f in (*families("drafter"), *families("target")) if f.recognises(config))
    family = next(recognised, None)
    if family is None or family in _OWN:  # files of other methods have their types
        own = {one.method: one for one in _OWN if one.method is not None}
        if (method := method_of(config, own)) is not None:
            return own[method]
    if family is not None:
        return family
    known = (*families("target"), *families("drafter"))
    architectures = [word for family in known for word in family.architectures]
    model_types = [word for family in known for word in family.model_types]
    raise ConfigError(
        f"config.json has model_type {shown(config.get('model_type'))} (architectures "
        f"{shown(config.get('architectures'))}); a model must have one of the types {', '.join(model_types)} "
        f"or one of the architectures {', '.join(architectures)}"
    )


def recognise_vision(config: Mapping[str, Any]) -> tuple[Family, ModelConfig] | None:
    """Return the family and the config of the vision part of a parsed config.json; None for none.

    Raises:
      ConfigError: the vision part uses a feature that its module does not have.
    """
    for family in families("vision"):
        if family.recognises(config) and (vision := family.read(config, None)) is not None:
            return family, vision
    return None


def presets() -> dict[str, ModelConfig]:
    """Return the released sizes of all targets, by name."""
    return {name: config for f in families("target") for name, config in f.presets.items()}


_OWN = (
    *(gemma4.FAMILY, qwen3.FAMILY, dflash.FAMILY, dflash2.FAMILY, dspark.FAMILY),
    *(mtp.FAMILY, ngram.FAMILY, gemma4_vision.FAMILY),
)
for _family in _OWN:
    register(_family)
