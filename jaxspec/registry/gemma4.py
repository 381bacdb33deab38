"""The family of Gemma 4 targets, in five sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.configs.gemma4 import MODEL_TYPES, PRESETS, Gemma4Config
from jaxspec.registry.base import Family

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet


def _read(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> Gemma4Config:
    del generation
    return Gemma4Config.from_hf(config)


def _module() -> type[Any]:
    from jaxspec.models.gemma4 import Gemma4

    return Gemma4


def _rules(config: Gemma4Config, params: Iterable[str]) -> RuleSet:
    from checkpoints_convert import gemma4

    layers = range(config.num_layers)
    return gemma4.rule_set(
        params,
        num_layers=config.num_layers,
        shared=[i for i in layers if not config.owns_kv(i)],
        key_is_value=[i for i in layers if config.k_eq_v and config.layers[i].window is None],
    )


FAMILY = Family(
    name="gemma4",
    role="target",
    title="a Gemma 4 target",
    config=Gemma4Config,
    read=_read,
    module=_module,
    rules=_rules,
    model_types=MODEL_TYPES,
    presets=PRESETS,
    usual_drafter="dflash",
)
