"""Rules for the tensors of Gemma 4's MTP assistants.

The decoder of an assistant has the same tensor names as the decoder of a target; see `gemma4`.
"""

from __future__ import annotations

from collections.abc import Iterable

from checkpoints_convert import gemma4
from checkpoints_convert.rules import (
    Rule,
    RuleSet,
    Skip,
    for_layers,
    heads,
    linear,
    permutation,
    same,
)

_RULES = (
    Rule("model.embed_tokens.weight", "head", same),
    Rule("pre_projection.weight", "pre_projection", linear),
    Rule("post_projection.weight", "post_projection", linear),
    Rule("masked_embedding.centroids.weight", "centroids", linear),
    Rule("masked_embedding.token_ordering", "token_ordering", permutation),
    Rule("model.layers.{i}.self_attn.q_proj.weight", "layers.{i}.attention.qkv", heads),
    *(
        Rule(tuple(f"model.{s}" for s in rule.sources), rule.path, rule.transform)
        for rule in gemma4.DECODER_RULES
    ),
)

_SKIPS = (
    Skip(r"(.+\.)?rotary_emb\..+", "rotary tables, which are computed"),
    Skip(r"lm_head\.weight", "tied head", copy_of="model.embed_tokens.weight"),
)

_ADVICE = (
    (
        r"masked_embedding\..+",
        "without its centroids this assistant drafts with the whole head, slower and about as well: set "
        "use_ordered_embeddings to false in config.json, or get a checkpoint that has them",
    ),
)


def rule_set(params: Iterable[str], *, num_layers: int, centroids: bool) -> RuleSet:
    """Return the conversion table of one assistant with these layers and these parameters.

    Args:
      params: names of the parameters that the assistant has.
      num_layers: number of its layers.
      centroids: whether the assistant drafts with centroids. If not, those in a checkpoint are
        skipped.
    """
    skips = _SKIPS
    if not centroids:
        unused = Skip(r"masked_embedding\..+", "centroids, which this assistant does not use")
        skips = (*skips, unused)
    return RuleSet(for_layers(_RULES, num_layers, params), ("",), skips, advice=_ADVICE)
