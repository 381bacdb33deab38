"""The family of DFlash block drafters, in z-lab's layout and in the speculators container."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxspec.configs import speculators
from jaxspec.configs.base import TargetConfig
from jaxspec.configs.dflash import (
    ARCHITECTURES,
    KEYS,
    PRESETS,
    ConfigT,
    DFlashConfig,
    default_feature_layers,
)
from jaxspec.configs.speculators import is_speculators, read_speculators
from jaxspec.registry.base import Assumption, Change, Conventions, Family, WeightChange
from jaxspec.registry.costs import DraftStep, StepCost, operations, stored_bytes
from jaxspec.registry.describe import shown_scale
from jaxspec.registry.weight_changes import changed, common_changes, is_quantised

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet
    from jaxspec.shapes import Params


def _read(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> DFlashConfig:
    del generation
    if is_speculators(config):
        return read_speculators(DFlashConfig, config)
    return DFlashConfig.from_hf(config)


def fit_to(config: ConfigT, names: Collection[str]) -> ConfigT:
    """Return the config of a drafter without the tables that its files leave out, as some do."""
    last = {name.removeprefix("model.") for name in names}
    return dataclasses.replace(
        config,
        own_embedding=config.own_embedding and "embed_tokens.weight" in last,
        own_head=config.own_head and (bool(config.draft_vocab_size) or "lm_head.weight" in last),
    )


def keys_of(config: DFlashConfig) -> Mapping[str, Sequence[str]]:
    """Return the keys that may set each field, in the container of a drafter."""
    return speculators.KEYS if config.container == "speculators" else KEYS


def _module() -> type[Any]:
    from jaxspec.drafters.dflash import DFlashDrafter

    return DFlashDrafter


def _module_with_head(config: DFlashConfig) -> type[Any] | None:
    from jaxspec.drafters.dflash import DFlashWithHead

    return None if config.own_head else DFlashWithHead


def rules_of(config: DFlashConfig, params: Iterable[str]) -> RuleSet:
    """Return the conversion table of a drafter of DFlash's or DFlash2's."""
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


def preset_drafter(method: str, presets: Mapping[str, ConfigT], preset: str) -> tuple[ConfigT, str]:
    """Return the config of a drafter of a later method for a target's preset, and a description.

    Args:
      presets: its configs, each with the layers of the target's DFlash.

    Raises:
      ValueError: there is none for this preset.
    """
    if preset not in presets:
        raise ValueError(
            f"there is no {method} drafter for {preset}; there is one for {', '.join(presets)}"
        )
    config = presets[preset]
    layers = f"the layers of its DFlash, blocks of {config.block_size}"
    return config, f"{method} made up for {preset} ({layers}), random weights"


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


def cost_of(step: DraftStep, batch: int, context: int) -> StepCost:
    """Return the cost of drafting one block and of absorbing the target's features of one block."""
    from jaxspec.quantised import get_format

    config: DFlashConfig = step.config
    block = (
        step.depth + config.first_slot
    )  # a tree also takes one block, whose positions are its levels
    rows = batch * block
    weight_bytes = flops = kv_bytes = 0.0
    weights = dict(step.weights)
    head: Any = weights.pop("head", None)
    if weights.pop("embedding", None) is not None:
        weight_bytes += rows * config.hidden_size * step.itemsize
    for name, a in weights.items():
        # Keys and values are computed twice: once for the drafted block, once for the kept context.
        uses = 2 if name.endswith(".kv") else 1
        weight_bytes += uses * stored_bytes(a)
        flops += uses * operations(a, rows)
    weight_bytes += step.head_bytes if head is None else stored_bytes(head)
    # Drafts may round what a table multiplies, and products of 8-bit floats count half.
    rounds = head is not None and get_format(head.format).rounds_activations
    products = (
        2.0
        * (config.draft_vocab_size or config.vocab_size)
        * config.hidden_size
        * batch
        * step.depth
    )
    flops += products * (0.5 if rounds else 1.0)
    for kind in config.layer_types:
        seen = context if kind == "full" else min(context, config.sliding_window or context)
        kv_bytes += 2.0 * batch * seen * config.num_kv_heads * config.head_dim * step.itemsize
        flops += 4.0 * rows * (seen + block) * config.num_heads * config.head_dim
    return StepCost(weight_bytes, kv_bytes, flops)


def in_force(target: TargetConfig, c: DFlashConfig, dtype: str) -> Iterator[Assumption]:
    """Yield what a block drafter assumes about its target and about itself."""

    def assumption(name: str, field: str, shown: str, default: str = "none") -> Assumption:
        return Assumption(name, getattr(c, field), shown, field, default)

    yield Assumption("container", c.container, c.container, origin="{config}")
    shown = f"outputs of {', '.join(map(str, c.feature_layers))} of 0-{target.num_layers - 1}"
    yield assumption("feature layers", "feature_layers", shown, "evenly spaced")
    shown = ", ".join(c.layer_types)
    yield assumption("layer types", "layer_types", shown, "all full")
    layers = (
        f"{i} {kind} {'causal' if causal else 'bidirectional'}"
        for i, (kind, causal) in enumerate(zip(c.layer_types, c.causal, strict=True))
    )
    yield assumption(
        "inside the block", "causal", ", ".join(layers), "sliding layers causal, full ones not"
    )
    method = "the container: no key changes it"
    if c.own_embedding:
        shown = f"its own embedding, {'scaled' if c.scale_embeddings else 'not scaled'}"
    else:
        shown = shown_scale(target, dtype, scaled=c.scale_embeddings)
    cap = "none" if c.final_logit_softcap is None else f"{c.final_logit_softcap:g}"
    if c.own_embedding or c.container == "speculators":
        yield Assumption("embedding scale", c.scale_embeddings, shown, origin=method)
    else:
        yield assumption("embedding scale", "scale_embeddings", shown, "scaled")
    if c.container == "speculators":
        yield Assumption("logit soft cap", c.final_logit_softcap, cap, origin=method)
    else:
        yield assumption("logit soft cap", "final_logit_softcap", cap)
    shown = "its own" if c.own_head else "the target's"
    if c.draft_vocab_size is not None:
        shown += f", of {c.draft_vocab_size} of {c.vocab_size} tokens"
    yield Assumption("head", c.draft_vocab_size, shown, origin="the tensors")
    if "sliding" in c.layer_types:
        shown = f"{c.sliding_window} keys on sliding layers, the query's own included"
        if c.window_from_anchor:
            shown = f"{c.sliding_window} keys before the anchor on sliding layers"
        yield assumption("window", "sliding_window", shown)
    yield assumption("rope theta", "rope_theta", f"{c.rope_theta:g}")
    yield assumption("mask id", "mask_token_id", str(c.mask_token_id))
    shown = f"{c.block_size}: anchor + {c.block_size - 1} drafts"
    if c.sample_from_anchor:
        shown = f"{c.block_size}: as many drafts, the first of them at the anchor"
    yield assumption("block size", "block_size", shown)
    shown = "predicts the first draft" if c.sample_from_anchor else "predicts nothing"
    if c.may_sample_from_anchor:
        default = "predicts nothing" if c.container == "speculators" else "predicts the first draft"
        yield assumption("slot of the anchor", "sample_from_anchor", shown, default)
    shown = "anchor at n, masks from n + 1 (n: committed tokens)"
    yield Assumption("positions", "n", shown)


def traced_fields(c: DFlashConfig) -> Mapping[str, Any]:
    """Return fixed values of the fields that shape no program."""
    return dict(
        feature_layers=tuple(range(len(c.feature_layers))),
        mask_token_id=0,
        rope_theta=1.0,
        final_logit_softcap=None,
    )


_USUAL_THETAS = (1e6, 1e4, 5e5, 5e6, 1e7)
_USUAL_SOFTCAPS = (None, 30.0, 15.0, 50.0)


def changes(target: TargetConfig, c: DFlashConfig, special_ids: Sequence[int]) -> Iterator[Change]:
    """Yield changes, the usual ones before others that may do as well on a short text."""
    for change in _feature_changes(c):
        if c.num_target_layers is not None or max(change.value) < target.num_layers - 1:
            yield change
    if c.may_sample_from_anchor:
        other = not c.sample_from_anchor
        name = "drafts from the anchor's slot" if other else "no draft from the anchor's slot"
        drafts = c.block_size - (not other)
        yield Change(name, "sample_from_anchor", other, num_draft_tokens=drafts)
    # With a scale of 1 both are the same. The speculators container has no key of scale and cap.
    scaled = target.embedding_scale != 1 and not c.own_embedding
    if scaled and c.container != "speculators":
        name = "embeddings not scaled" if c.scale_embeddings else "embeddings scaled"
        yield Change(name, "scale_embeddings", not c.scale_embeddings)
    yield from _attention_changes(target, c)
    for token in dict.fromkeys((*special_ids, 0)):
        if token != c.mask_token_id and token < c.vocab_size:
            yield Change(f"mask id {token}", "mask_token_id", token)
    for theta in _USUAL_THETAS:
        if theta != c.rope_theta:
            yield Change(f"rope theta {theta:g}", "rope_theta", theta)
    for cap in _USUAL_SOFTCAPS if c.container != "speculators" else ():
        if cap != c.final_logit_softcap:
            name = "no logit soft cap" if cap is None else f"logit soft cap {cap:g}"
            yield Change(name, "final_logit_softcap", cap)
    if c.block_size > 3:
        half = c.block_size // 2
        drafts = half - c.first_slot
        yield Change(f"blocks of {half}", "block_size", half, num_draft_tokens=drafts)
    longer = 2 * c.block_size
    drafts = longer - c.first_slot
    yield Change(f"blocks of {longer}", "block_size", longer, num_draft_tokens=drafts)


def _feature_changes(c: DFlashConfig) -> Iterator[Change]:
    """Yield the layers above and below, and other orders."""
    layers = c.feature_layers

    def change(name: str, layers: tuple[int, ...]) -> Change:
        in_file = [i + 1 for i in layers] if c.container == "speculators" else None
        return Change(f"feature layers {name}", "feature_layers", layers, in_file=in_file)

    for offset, name in ((-1, "lower"), (1, "higher")):
        shifted = tuple(i + offset for i in layers)
        yield change(f"one {name}", shifted)
    orders = {"increasing": tuple(sorted(layers)), "reversed": layers[::-1]}
    orders["rotated left"] = (*layers[1:], layers[0])
    orders["rotated right"] = (layers[-1], *layers[:-1])
    for i in range(len(layers) - 1):
        pair = (layers[i + 1], layers[i])
        orders[f"with {i} and {i + 1} exchanged"] = (*layers[:i], *pair, *layers[i + 2 :])
    seen = {layers}
    for name, order in orders.items():
        if order not in seen:
            seen.add(order)
            yield change(name, order)


def _attention_changes(target: TargetConfig, c: DFlashConfig) -> Iterator[Change]:
    """Yield other layer types, causality inside the block, and windows."""
    swapped = tuple("full" if kind == "sliding" else "sliding" for kind in c.layer_types)
    windows = sorted({layer.window for layer in target.layers if layer.window is not None})
    window = c.sliding_window or max(windows, default=None)

    def of_types(name: str, kinds: tuple[str, ...]) -> Iterator[Change]:
        if kinds == c.layer_types or ("sliding" in kinds and window is None):
            return
        derived: dict[str, Any] = {"causal": tuple(kind == "sliding" for kind in kinds)}
        if "sliding" in kinds:
            derived["sliding_window"] = window
        in_file = [f"{kind}_attention" for kind in kinds]
        yield Change(f"layer types {name}", "layer_types", kinds, derived=derived, in_file=in_file)

    if len(set(swapped)) > 1:
        yield from of_types("swapped", swapped)
    usual = tuple(kind == "sliding" for kind in c.layer_types)
    if usual != c.causal:
        yield Change("sliding layers causal, full ones not", "causal", usual)
    # Before causality that types do not have: on a text within the window both do as well.
    mixed = ("sliding",) * (c.num_layers - 1) + ("full",)
    if mixed != swapped:
        yield from of_types("all sliding but the last", mixed)
    for name, all_layers in (("all layers causal", True), ("no layer causal", False)):
        causal = (all_layers,) * c.num_layers
        if causal not in (c.causal, usual):
            yield Change(name, "causal", causal)
    yield from of_types("all full", ("full",) * c.num_layers)
    yield from of_types("all sliding", ("sliding",) * c.num_layers)
    if "sliding" in c.layer_types:
        assert c.sliding_window is not None
        for other in dict.fromkeys((*windows, 2 * c.sliding_window)):
            if other != c.sliding_window:
                least = min(other, c.sliding_window)
                yield Change(f"window of {other} keys", "sliding_window", other, least)


def weight_changes(target: TargetConfig, params: Params) -> Iterator[WeightChange]:
    """Yield other scales and orders of weights."""
    scale = target.embedding_scale
    added = [n for n, x in params.items() if n.endswith((".out", ".down")) and not is_quantised(x)]
    if scale != 1:
        # What layers add to the embeddings is smaller beside larger embeddings, and norms undo the rest.
        yield WeightChange(
            "embeddings scaled twice",
            "every out and down",
            f"divide {{where}} by {scale:.5g}",
            lambda params: changed(params, added, lambda x: (x / scale).astype(x.dtype)),
        )

    def exchanged(params: Params) -> Params:
        twins = {n: n.replace("q_norm", "k_norm") for n in params if n.endswith("q_norm")}
        back = {twin: params[name] for name, twin in twins.items()}
        return {**params, **{name: params[twin] for name, twin in twins.items()}, **back}

    where = "every q_norm and its k_norm"
    yield WeightChange("norms of queries and keys exchanged", where, "exchange {where}", exchanged)
    yield from common_changes(params)


FAMILY = Family(
    name="dflash",
    role="drafter",
    title="a DFlash drafter",
    config=DFlashConfig,
    read=_read,
    module=_module,
    rules=rules_of,
    architectures=ARCHITECTURES,
    presets=PRESETS,
    drafter_for=_drafter_for,
    cost=cost_of,
    conventions=Conventions(
        keys_of,
        in_force,
        changes,
        weight_changes,
        traced=traced_fields,
        shortened="block_size",
    ),
    with_head=_module_with_head,
    method="DFlash",
    fit_to=fit_to,
)
