"""The family of DFlash block drafters in z-lab's layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxspec.configs.base import TargetConfig
from jaxspec.configs.dflash import (
    ARCHITECTURES,
    KEYS,
    PRESETS,
    DFlashConfig,
    default_feature_layers,
)
from jaxspec.families.base import Assumption, Change, Conventions, Family
from jaxspec.families.costs import StepCost, itemsize
from jaxspec.families.words import shown_scale

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet
    from jaxspec.params import Graph
    from jaxspec.state import DecodeSpec


def _read(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> DFlashConfig:
    del generation
    return DFlashConfig.from_hf(config)


def _module() -> type[Any]:
    from jaxspec.drafters.dflash import DFlashDrafter

    return DFlashDrafter


def _rules(config: DFlashConfig, params: Iterable[str]) -> RuleSet:
    from checkpoints_convert import dflash

    return dflash.rule_set(params, num_layers=config.num_layers)


@dataclass(frozen=True)
class _MadeUp:
    """The proportions of a made-up drafter, for a preset that has no released drafter.

    Attributes:
      like: the preset whose released drafter gives everything else.
      heads: the width of all heads together, divided by the target's width.
      mlp: the width of the MLP, divided by the target's width.
      features: the number of feature layers, which are evenly spaced.
    """

    like: str
    heads: float
    mlp: int
    features: int


_MADE_UP = (_MadeUp("26b-a4b", 1.5, 2, 6), _MadeUp("qwen3-8b", 1, 3, 5))


def _drafter_for(preset: str, target: TargetConfig) -> tuple[DFlashConfig, str]:
    """Return the config of a DFlash drafter for a target's preset, and a description for messages.

    Some presets have no released drafter. For these a drafter is made up, with the proportions of a
    released drafter whose target has the same vocabulary.
    """
    if preset in PRESETS:
        return PRESETS[preset], f"DFlash as for {preset}, random weights"
    same_words = [m for m in _MADE_UP if PRESETS[m.like].vocab_size == target.vocab_size]
    made_up = (*same_words, _MADE_UP[0])[0]
    heads = max(8, 8 * round(made_up.heads * target.hidden_size / 128 / 8))
    config = dataclasses.replace(
        PRESETS[made_up.like],
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_heads=heads,
        intermediate_size=made_up.mlp * target.hidden_size,
        feature_layers=default_feature_layers(target.num_layers, made_up.features),
        num_target_layers=target.num_layers,
        max_positions=target.max_positions,
    )
    count = {5: "five", 6: "six"}[made_up.features]
    rule = (
        f"DFlash made up for {preset} ({made_up.like}'s, with the target's width, {heads} heads "
        f"for {made_up.heads:g} x width, MLP {made_up.mlp} x width, {count} even feature layers), "
        "random weights"
    )
    return config, rule


def _cost(spec: DecodeSpec, batch: int, context: int) -> StepCost:
    """Return the cost of drafting one block and of absorbing the target's features of one block."""
    assert spec.drafter is not None
    config: DFlashConfig = spec.drafter.config
    block = spec.depth + 1  # a tree also takes one block, whose positions are its levels
    rows = batch * block
    weight_bytes = flops = kv_bytes = 0.0
    for name, a in spec.drafter.abstract_params().items():
        # Keys and values are computed twice: once for the drafted block, once for the kept context.
        uses = 2 if name.endswith(".kv") else 1
        weight_bytes += uses * a.size * a.dtype.itemsize
        flops += uses * 2.0 * a.size * rows if a.ndim > 1 else 0.0
    head = config.vocab_size * config.hidden_size
    weight_bytes += head * itemsize(spec.target)
    flops += 2.0 * head * batch * spec.depth
    for kind in config.layer_types:
        seen = context if kind == "full" else min(context, config.sliding_window or context)
        kv_bytes += (
            2.0 * batch * seen * config.num_kv_heads * config.head_dim * itemsize(spec.target)
        )
        flops += 4.0 * rows * (seen + block) * config.num_heads * config.head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def _in_force(target: Graph, drafter: Graph) -> Iterator[Assumption]:
    c: DFlashConfig = drafter.config

    def assumption(name: str, field: str, shown: str, default: str = "none") -> Assumption:
        return Assumption(name, getattr(c, field), shown, field, default)

    shown = f"outputs of {', '.join(map(str, c.feature_layers))} of 0-{c.num_target_layers - 1}"
    yield assumption("feature layers", "feature_layers", shown, "evenly spaced")
    layers = (
        f"{i} {kind} {'causal' if causal else 'bidirectional'}"
        for i, (kind, causal) in enumerate(zip(c.layer_types, c.causal, strict=True))
    )
    yield assumption(
        "inside the block", "causal", ", ".join(layers), "sliding layers causal, full ones not"
    )
    shown = shown_scale(target, scaled=c.scale_embeddings)
    yield assumption("embedding scale", "scale_embeddings", shown, "scaled")
    shown = "none" if c.final_logit_softcap is None else f"{c.final_logit_softcap:g}"
    yield assumption("logit soft cap", "final_logit_softcap", shown)
    if "sliding" in c.layer_types:
        shown = f"{c.sliding_window} keys on sliding layers, the query's own included"
        yield assumption("window", "sliding_window", shown)
    yield assumption("mask id", "mask_token_id", str(c.mask_token_id))
    shown = f"{c.block_size}: anchor + {c.block_size - 1} drafts"
    yield assumption("block size", "block_size", shown)
    shown = "anchor at n, masks from n + 1 (n: committed tokens)"
    yield Assumption("positions", "n", shown)


def _changes(target: TargetConfig, c: DFlashConfig) -> Iterator[Change]:
    for offset, name in ((-1, "lower"), (1, "higher")):
        layers = [i + offset for i in c.feature_layers]
        yield Change(f"feature layers one {name}", "feature_layers", tuple(layers))
    if target.embedding_scale != 1:  # with a scale of 1 both are the same
        name = "embeddings not scaled" if c.scale_embeddings else "embeddings scaled"
        yield Change(name, "scale_embeddings", not c.scale_embeddings)
    seen = {c.causal}
    for name, causal in (
        ("sliding layers causal, full ones not", tuple(k == "sliding" for k in c.layer_types)),
        ("all layers causal", (True,) * c.num_layers),
        ("no layer causal", (False,) * c.num_layers),
    ):
        if causal not in seen:
            seen.add(causal)
            yield Change(name, "causal", causal)


FAMILY = Family(
    name="dflash",
    role="drafter",
    title="a DFlash drafter",
    config=DFlashConfig,
    read=_read,
    module=_module,
    rules=_rules,
    architectures=ARCHITECTURES,
    presets=PRESETS,
    drafter_for=_drafter_for,
    cost=_cost,
    conventions=Conventions(KEYS, _in_force, _changes),
)
