"""Rules for the vision part of Gemma 4 checkpoints: a tower, or 12B's embedder of patches."""

from __future__ import annotations

from collections.abc import Iterable

from checkpoints_convert.rules import (
    Rule,
    RuleSet,
    Skip,
    for_layers,
    linear,
    linear_out,
    same,
    scalars,
)

_LAYER = "vision_tower.encoder.layers.{i}."
_OURS = "encoder.layers.{i}."
_LINEARS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "out",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_RANGES = ("input_min", "input_max", "output_min", "output_max")
_NORMS = {
    "input_layernorm": "pre_attention_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}

_TOWER = (
    Rule("vision_tower.patch_embedder.input_proj.weight", "encoder.patch_in", linear),
    Rule("vision_tower.patch_embedder.position_embedding_table", "encoder.positions", same),
    Rule("vision_tower.std_bias", "encoder.shift", same),
    Rule("vision_tower.std_scale", "encoder.scale", same),
    *(Rule(f"{_LAYER}{theirs}.weight", _OURS + ours, same) for theirs, ours in _NORMS.items()),
    *(
        Rule(
            f"{_LAYER}{theirs}.linear.weight",
            f"{_OURS}{ours}.weight",
            linear_out if ours == "out" else linear,
        )
        for theirs, ours in _LINEARS.items()
    ),
    *(
        Rule(tuple(f"{_LAYER}{theirs}.{r}" for r in _RANGES), f"{_OURS}{ours}.ranges", scalars)
        for theirs, ours in _LINEARS.items()
    ),
)
_EMBEDDER = (
    Rule("vision_embedder.patch_dense.weight", "encoder.patch_in", linear),
    Rule("vision_embedder.patch_dense.bias", "encoder.patch_bias", same),
    Rule("vision_embedder.pos_embedding", "encoder.positions", same),
    *(
        Rule(f"vision_embedder.{theirs}.{part}", f"encoder.{ours}.{name}", same)
        for theirs, ours in (
            ("patch_ln1", "patch_norm"),
            ("patch_ln2", "embedding_norm"),
            ("pos_norm", "position_norm"),
        )
        for part, name in (("weight", "scale"), ("bias", "bias"))
    ),
)
_PROJECTION = Rule("embed_vision.embedding_projection.weight", "projection", linear)

_PART = r"(model\.)?(vision_tower|embed_vision|vision_embedder)\."
_SKIPS = (
    Skip(rf"(?!{_PART}).+", "not of the vision part"),
    Skip(rf"{_PART}embedding\..+", "a vocabulary of images, which no program reads"),
)


def rule_set(params: Iterable[str], *, num_layers: int) -> RuleSet:
    """Return the conversion table of a vision part with these parameters.

    Args:
      num_layers: of its tower; 0 for 12B's embedder.
    """
    rules = (*(_TOWER if num_layers else _EMBEDDER), _PROJECTION)
    return RuleSet(for_layers(rules, num_layers, params), ("model.", ""), _SKIPS)
