"""The family of DSpark block drafters."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.configs.base import TargetConfig
from jaxspec.configs.dspark import (
    ARCHITECTURES,
    DEEPSPEC_KEYS,
    KEYS,
    PRESETS,
    SPECULATORS_KEYS,
    DSparkConfig,
)
from jaxspec.registry import dflash
from jaxspec.registry.base import Assumption, Change, Conventions, Family, WeightChange
from jaxspec.registry.costs import DraftStep, StepCost, stored_bytes

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet
    from jaxspec.shapes import Params


def _read(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> DSparkConfig:
    del generation
    return DSparkConfig.from_hf(config)


def _module() -> type[Any]:
    from jaxspec.drafters.dspark import DSparkDrafter

    return DSparkDrafter


def _module_with_head(config: DSparkConfig) -> type[Any] | None:
    from jaxspec.drafters.dspark import DSparkWithHead

    return None if config.own_head else DSparkWithHead


def _rules(config: DSparkConfig, params: Iterable[str]) -> RuleSet:
    from checkpoints_convert import dflash

    return dflash.rule_set(
        params,
        num_layers=config.num_layers,
        gemma_layers=config.gemma_layers,
        k_eq_v=config.k_eq_v,
        bare=config.container == "ModelOpt",
    )


def _fit_to(config: DSparkConfig, names: Collection[str]) -> DSparkConfig:
    """Return the config with the container that the names of the heads show."""
    if config.container == "z-lab" and {"markov_w1.weight", "confidence_proj.weight"} & {*names}:
        config = dataclasses.replace(config, container="ModelOpt")
    return dflash.fit_to(config, names)


def _drafter_for(preset: str, target: TargetConfig) -> tuple[DSparkConfig, str]:
    """Return the config of a made-up DSpark drafter for a target's preset, and a description."""
    del target
    return dflash.preset_drafter("DSpark", PRESETS, preset)


def _cost(step: DraftStep, batch: int, context: int) -> StepCost:
    """Return the cost of DFlash's backbone, and of a product with the matrix of biases for each slot."""
    config: DSparkConfig = step.config
    weights = dict(step.weights)
    after = weights.pop("selector.after", None)
    weights.pop("selector.before", None)
    cost = dflash.cost_of(dataclasses.replace(step, weights=weights), batch, context)
    if after is None:
        return cost
    rows = batch * (1 + step.topk * (step.depth - 1))
    gathered = rows * config.markov_rank * step.itemsize
    read = step.depth * stored_bytes(after)
    return cost + StepCost(read + gathered, 0, 2.0 * after.size * rows)


def _keys_of(config: DSparkConfig) -> Mapping[str, Sequence[str]]:
    others = {"speculators": SPECULATORS_KEYS, "DeepSpec": DEEPSPEC_KEYS}
    return others.get(config.container, KEYS)


def _in_force(target: TargetConfig, c: DSparkConfig, dtype: str) -> Iterator[Assumption]:
    yield from dflash.in_force(target, c, dtype)
    shown = f"{c.markov_head_type}, rank {c.markov_rank}" if c.markov_rank else "none"
    yield Assumption("head by the token before", c.markov_rank, shown, "markov_rank", "none")


_OF_GEMMA = ("feature_layers", "mask_token_id", "block_size", "sample_from_anchor")


def _changes(target: TargetConfig, c: DSparkConfig, special_ids: Sequence[int]) -> Iterator[Change]:
    """Yield DFlash's changes; for layers of Gemma 4 those that its file has keys for."""
    for change in dflash.changes(target, c, special_ids):
        if not c.gemma_layers or change.field in _OF_GEMMA:
            yield change


def _weight_changes(target: TargetConfig, params: Params) -> Iterator[WeightChange]:
    """Yield the tables of the Markov head exchanged, where their shapes hide it, and DFlash's changes."""
    names = "selector.before", "selector.after"
    if all(n in params for n in names) and params[names[0]].shape == params[names[1]].shape:
        one, other = names

        def exchanged(params: Params) -> Params:
            return {**params, one: params[other], other: params[one]}

        where = "markov_w1 and markov_w2"
        yield WeightChange(
            "tables of the Markov head exchanged", where, "exchange {where}", exchanged
        )
    yield from dflash.weight_changes(target, params)


FAMILY = Family(
    name="dspark",
    role="drafter",
    title="a DSpark drafter",
    config=DSparkConfig,
    read=_read,
    module=_module,
    rules=_rules,
    architectures=ARCHITECTURES,
    presets=PRESETS,
    drafter_for=_drafter_for,
    cost=_cost,
    conventions=Conventions(
        _keys_of,
        _in_force,
        _changes,
        _weight_changes,
        traced=dflash.traced_fields,
        shortened="block_size",
    ),
    with_head=_module_with_head,
    method="DSpark",
    fit_to=_fit_to,
)
