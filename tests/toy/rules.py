"""The tensors of both, under the names that a checkpoint of another project would give them."""

from __future__ import annotations

from collections.abc import Iterable

from checkpoints_convert.rules import Rule, RuleSet, Skip, heads, linear, linear_out, same

_TARGET = (
    Rule("embed.weight", "embedding", same),
    Rule("block.norm.weight", "norm", same),
    Rule(("block.q.weight", "block.k.weight", "block.v.weight"), "attention.qkv", heads),
    Rule("block.q_norm.weight", "attention.q_norm", same),
    Rule("block.k_norm.weight", "attention.k_norm", same),
    Rule("block.out.weight", "attention.out", linear_out),
    Rule("norm.weight", "final_norm", same),
    Rule("lm_head.weight", "table", same),
)


def target_rules(config: object, params: Iterable[str]) -> RuleSet:
    del config, params
    return RuleSet(_TARGET, ("toy.", ""), (Skip(r"(toy\.)?extra\..+", "an extra"),))


def drafter_rules(config: object, params: Iterable[str]) -> RuleSet:
    del config, params
    return RuleSet((Rule("bigrams.weight", "bigrams", linear),), ("",))
