"""Their entries in the registry: all that is special about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxspec.configs.base import TargetConfig
from jaxspec.registry import Assumption, Change, Conventions, Family, WeightChange
from jaxspec.registry.costs import DraftStep, StepCost
from jaxspec.shapes import Params
from tests.toy import rules
from tests.toy.drafter import KEYS, RecallConfig, RecallDrafter
from tests.toy.target import Toy, ToyConfig

TARGET = Family(
    name="toy",
    role="target",
    title="a toy target",
    config=ToyConfig,
    read=ToyConfig.from_hf,
    module=lambda: Toy,
    rules=rules.target_rules,
    model_types=("toy",),
    presets={"toy-s": ToyConfig(64, 32, 2, 16, 512)},
    usual_drafter="recall",
)


def _cost(step: DraftStep, batch: int, context: int) -> StepCost:
    """Count one row of the table a draft; nothing is multiplied."""
    del context
    row = step.config.vocab_size * step.itemsize
    return StepCost(batch * step.num_draft_tokens * row, 0, 0)


def _in_force(target: TargetConfig, c: RecallConfig, dtype: str) -> Iterator[Assumption]:
    del dtype
    shown = "what followed a token" if c.recall else "the table alone"
    yield Assumption("recall", c.recall, shown, "recall", "on")
    yield Assumption("positions", None, f"none of the target's {target.max_positions}")


def _changes(target: TargetConfig, c: RecallConfig, special_ids: Sequence[int]) -> Iterator[Change]:
    del target, special_ids
    yield Change("the other recall", "recall", not c.recall)
    yield Change("a long one", "num_draft_tokens", 8, needs_tokens=1000)


def _weight_changes(target: TargetConfig, params: Params) -> Iterator[WeightChange]:
    del target, params

    def turned(params: Params) -> Params:
        return {**params, "bigrams": params["bigrams"].T}

    yield WeightChange("bigrams turned", "bigrams", "transpose {where}", turned)


def _drafter_for(preset: str, target: TargetConfig) -> tuple[RecallConfig, str]:
    return RecallConfig(target.vocab_size, 4), f"recall for {preset}, random weights"


DRAFTER = Family(
    name="recall",
    role="drafter",
    title="a recall drafter",
    config=RecallConfig,
    read=RecallConfig.from_hf,
    module=lambda: RecallDrafter,
    rules=rules.drafter_rules,
    architectures=("RecallModel",),
    drafter_for=_drafter_for,
    cost=_cost,
    conventions=Conventions(KEYS, _in_force, _changes, _weight_changes),
    randomise=lambda params, seed: {**params, "bigrams": params["bigrams"] + seed},
)
