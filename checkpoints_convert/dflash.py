"""Rules for block drafters: DFlash and what is built on it. In z-lab's layout they have no embedding and no head."""

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
    row,
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
    *(
        rule
        for part in ("attention_conv", "mlp_conv")
        for rule in (
            Rule(f"layers.{{i}}.{part}.base_kernel", f"layers.{{i}}.{part}.base", same),
            Rule(
                f"layers.{{i}}.{part}.kernel_projection.weight",
                f"layers.{{i}}.{part}.dynamic",
                linear,
            ),
        )
    ),
    Rule("candidate_selector.predecessor_codebook", "selector.predecessor", same),
    Rule("candidate_selector.successor_codebook", "selector.successor", same),
    Rule("candidate_selector.hidden_projection.weight", "selector.hidden", linear),
)

_OF_GEMMA = {
    "mlp_norm": Rule("layers.{i}.pre_feedforward_layernorm.weight", "layers.{i}.mlp_norm", same),
    "attention_out_norm": Rule(
        "layers.{i}.post_attention_layernorm.weight", "layers.{i}.attention_out_norm", same
    ),
    "mlp_out_norm": Rule(
        "layers.{i}.post_feedforward_layernorm.weight", "layers.{i}.mlp_out_norm", same
    ),
    "scalar": Rule("layers.{i}.layer_scalar", "layers.{i}.scalar", same),
}
_KEYS_ALONE = Rule("layers.{i}.self_attn.k_proj.weight", "layers.{i}.kv", heads)
_MARKOV = (
    Rule("markov_head.markov_w1.weight", "selector.before", same),
    Rule("markov_head.markov_w2.weight", "selector.after", same),
    Rule("markov_head.gate_proj.weight", "selector.gate", linear),
    Rule("markov_head.gate_proj.bias", "selector.gate_bias", same),
    Rule("markov_head.joint_proj.weight", "selector.joint", linear),
    Rule("markov_head.joint_proj.bias", "selector.joint_bias", same),
    Rule("confidence_head.proj.weight", "selector.confidence", row),
    Rule("confidence_head.proj.bias", "selector.confidence_bias", same),
)
_BARE = (("markov_head.", ""), ("confidence_head.proj", "confidence_proj"))
"""Names of ModelOpt, whose heads are no modules of their own."""

_SKIPS = (
    Skip(r"(.+\.)?rotary_emb\..+", "rotary tables, which are computed"),
    Skip(r"t2d", "the inverse of d2t, for training"),
    Skip(r"verifier_(norm|lm_head)\.weight", "weights of the target, for training"),
)


def rule_set(
    params: Iterable[str],
    *,
    num_layers: int,
    gemma_layers: bool = False,
    k_eq_v: bool = False,
    bare: bool = False,
) -> RuleSet:
    """Return the conversion table of one drafter with these layers and these parameters.

    Args:
      params: names of the parameters that the drafter has.
      num_layers: number of its layers.
      gemma_layers: whether its layers have the norms of Gemma 4.
      k_eq_v: whether its layers have no values beside keys.
      bare: whether heads of DSpark are no modules of their own.
    """
    rules = (*_RULES, *_MARKOV)
    if gemma_layers:
        taken = {rule.path for rule in _OF_GEMMA.values()}
        rules = (*(r for r in rules if r.path not in taken), *_OF_GEMMA.values())
    if k_eq_v:
        rules = tuple(_KEYS_ALONE if r.path == _KEYS_ALONE.path else r for r in rules)
    for name, other in _BARE if bare else ():
        rules = tuple(
            Rule(tuple(s.replace(name, other) for s in r.sources), r.path, r.transform)
            for r in rules
        )
    return RuleSet(for_layers(rules, num_layers, params), ("", "model."), _SKIPS)
