"""The family of drafting by look-up, whose checkpoints have no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.configs.base import TargetConfig
from jaxspec.configs.ngram import MODEL_TYPES, NGramConfig
from jaxspec.registry.base import Family

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet


def _read(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> NGramConfig:
    del generation
    return NGramConfig.from_hf(config)


def _module() -> type[Any]:
    from jaxspec.drafters.ngram import NGramDrafter

    return NGramDrafter


def _rules(config: NGramConfig, params: Iterable[str]) -> RuleSet:
    del config, params
    from checkpoints_convert.rules import RuleSet

    return RuleSet((), ("",))


def _drafter_for(preset: str, target: TargetConfig) -> tuple[NGramConfig, str]:
    del preset, target
    return NGramConfig(), "look-up in the row's own text"


FAMILY = Family(
    name="ngram",
    role="drafter",
    title="a look-up in the text",
    config=NGramConfig,
    read=_read,
    module=_module,
    rules=_rules,
    model_types=MODEL_TYPES,
    drafter_for=_drafter_for,
)
