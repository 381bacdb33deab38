"""Rules for DFlash drafters. In z-lab's layout they have no embedding and no head."""

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
    offsets,
    same,
)

_RULES = (
    Rule("fc.weight", "fuse", linear),
    Rule("hidden_norm.weight", "context_norm", same),
    Rule("norm.weight", "final_norm", same),
    Rule("embed_tokens.weight", "embedding", same),
    Rule("lm_head.weight", "head", same),
    Rule("d2t", "ids", offsets),
    Rule("layers.{i}.input_layernorm.weight", "layers.{i}.input_norm", same),
    Rule("layers.{i}.self_attn.q_proj.weight", "layers.{i}.q", linear),
    Rule(
        ("layers.{i}.self_attn.k_proj.weight", "layers.{i}.self_attn.v_proj.weight"),
        "layers.{i}.kv",
        heads,
    ),
    Rule("layers.{i}.self_attn.q_norm.weight", "layers.{i}.q_norm", same),
    Rule("layers.{i}.self_attn.k_norm.weight", "layers.{i}.k_norm", same),
    Rule("layers.{i}.self_attn.o_proj.weight", "layers.{i}.out", linear_out),
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
    Skip(r"t2d", "the inverse of d2t, for training"),
    Skip(r"verifier_(norm|lm_head)\.weight", "weights of the target, for training"),
)


def rule_set(params: Iterable[str], *, num_layers: int) -> RuleSet:
    """Return the conversion table of one drafter with these layers and these parameters.

    Args:
      params: names of the parameters that the drafter has.
      num_layers: number of its layers.
    """
    return RuleSet(for_layers(_RULES, num_layers, params), ("", "model."), _SKIPS)
