"""The family of Gemma 4's vision parts, which embed images for a target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.configs.gemma4_vision import PRESETS, Gemma4VisionConfig
from jaxspec.registry.base import Family

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet
    from jaxspec.shapes import Params


def _read(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> Gemma4VisionConfig | None:
    del generation
    return Gemma4VisionConfig.from_hf(config)


def _module() -> type[Any]:
    from jaxspec.models.gemma4_vision import Gemma4Vision

    return Gemma4Vision


def _rules(config: Gemma4VisionConfig, params: Iterable[str]) -> RuleSet:
    from checkpoints_convert import gemma4_vision

    return gemma4_vision.rule_set(params, num_layers=config.num_layers)


def _randomise(params: Params, seed: int) -> Params:
    """Widen the ranges of clips, in which random numbers would all become one."""
    import jax.numpy as jnp

    del seed
    wide = [-30.0, 30.0, -30.0, 30.0]
    return {
        name: jnp.asarray(wide, x.dtype) if name.endswith(".ranges") else x
        for name, x in params.items()
    }


FAMILY = Family(
    name="gemma4_vision",
    role="vision",
    title="the vision part of a Gemma 4 target",
    config=Gemma4VisionConfig,
    read=_read,
    module=_module,
    rules=_rules,
    model_types=("gemma4", "gemma4_unified"),
    presets=PRESETS,
    randomise=_randomise,
)
