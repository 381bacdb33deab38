"""The tensors of dense Qwen3 checkpoints, by rule.

A checkpoint has the head beside the model, not in it. So the rules have whole names, and no prefix.
"""

from __future__ import annotations

from collections.abc import Iterable

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

_LAYER_RULES = (
    Rule("input_layernorm.weight", "attention_norm", same),
    Rule(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "attention.qkv",
        heads,
    ),
    Rule("self_attn.q_norm.weight", "attention.q_norm", same),
    Rule("self_attn.k_norm.weight", "attention.k_norm", same),
    Rule("self_attn.o_proj.weight", "attention.out", linear_out),
    Rule("post_attention_layernorm.weight", "mlp_norm", same),
    Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.gate_up", linear),
    Rule("mlp.down_proj.weight", "mlp.down", linear),
)

_RULES = (
    Rule("model.embed_tokens.weight", "table", same),
    Rule("lm_head.weight", "head_table", same),
    Rule("model.norm.weight", "final_norm", same),
    *(
        Rule(
            tuple(f"model.layers.{{i}}.{source}" for source in rule.sources),
            f"layers.{{i}}.{rule.path}",
            rule.transform,
        )
        for rule in _LAYER_RULES
    ),
)

_SKIPS = (
    Skip(r"(.+\.)?rotary_emb\..+", "rotary tables, which are computed"),
    # An untied head is never skipped: a rule uses it.
    Skip(r"lm_head\.weight", "tied head", copy_of="model.embed_tokens.weight"),
)


def rule_set(params: Iterable[str], *, num_layers: int) -> RuleSet:
    """Return the table for one target, whose parameters are `params`."""
    return RuleSet(for_layers(_RULES, num_layers, params), ("",), _SKIPS)
