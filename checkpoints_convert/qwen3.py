"""Rules for the tensors of dense Qwen3 checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from checkpoints_convert import kv_scales
from checkpoints_convert.rules import (
    Rule,
    RuleSet,
    Skip,
    for_layers,
    heads,
    linear,
    linear_out,
    same,
)

_RULES = (
    Rule("embed_tokens.weight", "table", same),
    Rule("lm_head.weight", "head_table", same, outside=True),
    Rule("norm.weight", "final_norm", same),
    Rule("layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm", same),
    Rule(
        tuple(f"layers.{{i}}.self_attn.{name}_proj.weight" for name in "qkv"),
        "layers.{i}.attention.qkv",
        heads,
    ),
    Rule("layers.{i}.self_attn.q_norm.weight", "layers.{i}.attention.q_norm", same),
    Rule("layers.{i}.self_attn.k_norm.weight", "layers.{i}.attention.k_norm", same),
    Rule("layers.{i}.self_attn.o_proj.weight", "layers.{i}.attention.out", linear_out),
    Rule("layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm", same),
    Rule(
        ("layers.{i}.mlp.gate_proj.weight", "layers.{i}.mlp.up_proj.weight"),
        "layers.{i}.mlp.gate_up",
        linear,
    ),
    Rule("layers.{i}.mlp.down_proj.weight", "layers.{i}.mlp.down", linear),
)

_SKIPS = (
    Skip(r"(.+\.)?rotary_emb\..+", "rotary tables, which are computed"),
    kv_scales.SKIP,
    # This never skips an untied head, because a rule uses it.
    Skip(r"lm_head\.weight", "tied head", copy_of="embed_tokens.weight"),
)


def rule_set(params: Iterable[str], *, num_layers: int) -> RuleSet:
    """Return the conversion table of one target with these layers and these parameters.

    Args:
      params: names of the parameters that the target has.
      num_layers: number of its layers.
    """
    return RuleSet(for_layers(_RULES, num_layers, params), ("model.", ""), _SKIPS)
