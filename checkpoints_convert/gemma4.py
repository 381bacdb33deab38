"""Rules for the text decoder of Gemma 4 checkpoints, and patterns of the tensors to skip."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from checkpoints_convert import kv_scales
from checkpoints_convert.rules import (
    Rule,
    RuleSet,
    Skip,
    Stack,
    experts,
    for_layers,
    heads,
    linear,
    linear_out,
    same,
)

DECODER_RULES = (
    Rule("norm.weight", "final_norm", same),
    Rule("layers.{i}.input_layernorm.weight", "layers.{i}.pre_attention_norm", same),
    Rule("layers.{i}.self_attn.q_norm.weight", "layers.{i}.attention.q_norm", same),
    Rule("layers.{i}.self_attn.o_proj.weight", "layers.{i}.attention.out", linear_out),
    Rule("layers.{i}.post_attention_layernorm.weight", "layers.{i}.post_attention_norm", same),
    Rule("layers.{i}.pre_feedforward_layernorm.weight", "layers.{i}.pre_mlp_norm", same),
    Rule(
        ("layers.{i}.mlp.gate_proj.weight", "layers.{i}.mlp.up_proj.weight"),
        "layers.{i}.mlp.gate_up",
        linear,
    ),
    Rule("layers.{i}.mlp.down_proj.weight", "layers.{i}.mlp.down", linear),
    Rule("layers.{i}.post_feedforward_layernorm.weight", "layers.{i}.post_mlp_norm", same),
    Rule("layers.{i}.layer_scalar", "layers.{i}.scalar", same),
)
"""Rules that hold for targets and for MTP assistants.

The rules of q, k and v are not among them, because their fusion depends on the layer.
"""

_RULES = (
    *DECODER_RULES,
    Rule("embed_tokens.weight", "embedder.table", same),
    Rule("embed_tokens_per_layer.weight", "per_layer.table", same),
    Rule("per_layer_model_projection.weight", "per_layer.projection", linear),
    Rule("per_layer_projection_norm.weight", "per_layer.norm", same),
    Rule("layers.{i}.self_attn.k_norm.weight", "layers.{i}.attention.k_norm", same),
    Rule("layers.{i}.post_feedforward_layernorm_1.weight", "layers.{i}.dense_post_norm", same),
    Rule("layers.{i}.pre_feedforward_layernorm_2.weight", "layers.{i}.experts_pre_norm", same),
    Rule("layers.{i}.router.proj.weight", "layers.{i}.experts.router", linear),
    Rule("layers.{i}.router.scale", "layers.{i}.experts.router_scale", same),
    Rule("layers.{i}.router.per_expert_scale", "layers.{i}.experts.expert_scale", same),
    Rule("layers.{i}.experts.gate_up_proj", "layers.{i}.experts.gate_up", experts),
    Rule("layers.{i}.experts.down_proj", "layers.{i}.experts.down", experts),
    Rule("layers.{i}.post_feedforward_layernorm_2.weight", "layers.{i}.experts_post_norm", same),
    Rule("layers.{i}.per_layer_input_gate.weight", "layers.{i}.per_layer_gate", linear),
    Rule("layers.{i}.per_layer_projection.weight", "layers.{i}.per_layer_out", linear),
    Rule("layers.{i}.post_per_layer_input_norm.weight", "layers.{i}.per_layer_norm", same),
)
"""All rules of a target except those of q, k and v.

A model keeps the rules of the parameters that it has.
"""

_PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")

_SKIPS = (
    Skip(r"(model\.)?vision_tower\..+", "vision tower"),
    Skip(r"(model\.)?audio_tower\..+", "audio tower"),
    Skip(r"(model\.)?(embed_vision|vision_embedder)\..+", "vision embedder"),
    Skip(r"(model\.)?embed_audio\..+", "audio embedder"),
    Skip(r"(.+\.)?rotary_emb\..+", "rotary tables, which are computed"),
    kv_scales.SKIP,
    Skip(r"(model\.|language_model\.)*lm_head\.weight", "tied head", copy_of="embed_tokens.weight"),
)

_STACKS = (
    Stack("experts.gate_up_proj", ("gate_proj", "up_proj")),
    Stack("experts.down_proj", ("down_proj",)),
)
"""The release has all experts of a layer in one tensor. Quantised builds have a matrix each."""

_ALIASES = ((".moe.", "."),)


def rule_set(
    params: Iterable[str],
    *,
    num_layers: int,
    shared: Collection[int] = (),
    key_is_value: Collection[int] = (),
) -> RuleSet:
    """Return the conversion table of one target with these layers and these parameters.

    Args:
      params: names of the parameters that the target has.
      num_layers: number of its layers.
      shared: layers that read the keys and values of an earlier layer.
      key_is_value: layers that use their raw keys as their values.
    """
    skips = _SKIPS
    # The release stores keys and values of shared layers. transformers does not.
    if shared:
        layers = "|".join(map(str, shared))
        unused = rf"(.+\.)?layers\.({layers})\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
        skips = (*skips, Skip(unused, "keys and values of layers that share an earlier layer's"))
    rules = for_layers(_RULES, num_layers, params)
    names = {
        i: "q" if i in shared else "qk" if i in key_is_value else "qkv" for i in range(num_layers)
    }
    attention = tuple(_qkv_rule(projections, i) for i, projections in names.items())
    return RuleSet((*rules, *attention), _PREFIXES, skips, stacks=_STACKS, aliases=_ALIASES)


def _qkv_rule(projections: str, layer: int) -> Rule:
    sources = tuple(f"layers.{{i}}.self_attn.{p}_proj.weight" for p in projections)
    return Rule(sources, "layers.{i}.attention.qkv", heads).at(layer)
