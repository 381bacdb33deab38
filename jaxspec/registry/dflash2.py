"""The family of DFlash2 block drafters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.configs.base import TargetConfig
from jaxspec.configs.dflash2 import (
    ARCHITECTURES,
    KEYS,
    PRESETS,
    SPECULATORS_KEYS,
    DFlash2Config,
)
from jaxspec.registry import dflash
from jaxspec.registry.base import Assumption, Conventions, Family
from jaxspec.registry.costs import DraftStep, StepCost


def _read(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> DFlash2Config:
    del generation
    return DFlash2Config.from_hf(config)


def _module() -> type[Any]:
    from jaxspec.drafters.dflash2 import DFlash2Drafter

    return DFlash2Drafter


def _module_with_head(config: DFlash2Config) -> type[Any] | None:
    from jaxspec.drafters.dflash2 import DFlash2WithHead

    return None if config.own_head else DFlash2WithHead


def _drafter_for(preset: str, target: TargetConfig) -> tuple[DFlash2Config, str]:
    """Return the config of a made-up DFlash2 drafter for a target's preset, and a description."""
    del target
    return dflash.preset_drafter("DFlash2", PRESETS, preset)


def _cost(step: DraftStep, batch: int, context: int) -> StepCost:
    """Return the cost of DFlash's backbone and of a walk over candidates, whose rows are gathered."""
    config: DFlash2Config = step.config
    tables = ("selector.predecessor", "selector.successor")
    weights = {name: a for name, a in step.weights.items() if name not in tables}
    cost = dflash.cost_of(dataclasses.replace(step, weights=weights), batch, context)
    rows = batch * step.depth * (config.selector_top_k + 1)
    gathered = rows * config.selector_rank * step.itemsize
    return cost + StepCost(gathered, 0, 2.0 * rows * config.selector_rank)


def _keys_of(config: DFlash2Config) -> Mapping[str, Sequence[str]]:
    return SPECULATORS_KEYS if config.container == "speculators" else KEYS


def _in_force(target: TargetConfig, c: DFlash2Config, dtype: str) -> Iterator[Assumption]:
    yield from dflash.in_force(target, c, dtype)
    shown = f"{c.selector_top_k} a slot, by the token before"
    yield Assumption("candidates", c.selector_top_k, shown, "selector_top_k", "16")
    yield Assumption(
        "factor of logits",
        c.output_multiplier,
        f"{c.output_multiplier:g}",
        "output_multiplier",
        "1",
    )


FAMILY = Family(
    name="dflash2",
    role="drafter",
    title="a DFlash2 drafter",
    config=DFlash2Config,
    read=_read,
    module=_module,
    rules=dflash.rules_of,
    architectures=ARCHITECTURES,
    presets=PRESETS,
    drafter_for=_drafter_for,
    cost=_cost,
    conventions=Conventions(
        _keys_of,
        _in_force,
        dflash.changes,
        dflash.weight_changes,
        traced=dflash.traced_fields,
        shortened="block_size",
    ),
    with_head=_module_with_head,
    method="DFlash2",
    fit_to=dflash.fit_to,
)
