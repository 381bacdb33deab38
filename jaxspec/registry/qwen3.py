"""The family of dense Qwen3 targets, in six sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.configs.qwen3 import MODEL_TYPES, PRESETS, Qwen3Config
from jaxspec.registry.base import Family

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet


def _read(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> Qwen3Config:
    del generation
    return Qwen3Config.from_hf(config)


def _module() -> type[Any]:
    from jaxspec.models.qwen3 import Qwen3

    return Qwen3


def _rules(config: Qwen3Config, params: Iterable[str]) -> RuleSet:
    from checkpoints_convert import qwen3

    return qwen3.rule_set(params, num_layers=config.num_layers)


FAMILY = Family(
    name="qwen3",
    role="target",
    title="a Qwen3 target",
    config=Qwen3Config,
    read=_read,
    module=_module,
    rules=_rules,
    model_types=MODEL_TYPES,
    presets=PRESETS,
    usual_drafter="dflash",
)
