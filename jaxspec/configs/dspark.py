"""DSpark drafters: DFlash with a head that makes a slot depend on the token before it, and confidences.

Four layouts: DeepSpec's, flat, with embedding and head; SpecForge's and ModelOpt's, as z-lab's; and the
speculators container. DeepSpec's drafters of Gemma 4 have layers of Gemma 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.configs import dflash, speculators
from jaxspec.configs.dflash import DFlashConfig, nested, read_zlab
from jaxspec.configs.fields import (
    FACTORS,
    FLAGS,
    LAYERS,
    SHARES,
    ConfigError,
    count,
    entries,
    flag,
    limited,
    read,
    read_fields,
    short_repr,
    words_of,
)
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.speculators import is_speculators, read_speculators
from jaxspec.options import Range

ARCHITECTURES = ("DSparkDraftModel", "Gemma4DSparkModel", "Qwen3DSparkModel")
HEADS = ("vanilla", "gated", "rnn")
_HEAD = Range(", ".join(HEADS), lambda x: x in HEADS, kind="a word")


@dataclass(frozen=True, repr=False)
class DSparkConfig(DFlashConfig):
    """A DSpark drafter.

    Attributes:
      markov_rank: width of the head that depends on the token before; 0 for no such head.
      markov_head_type: what it computes, see `drafters.dspark`.
      confidence: whether the drafter predicts for each draft whether it is accepted.
      confidence_with_markov: whether that prediction also depends on the token before.
      gemma_layers: whether the layers are those of Gemma 4: four norms, a scalar, normed values.
      k_eq_v: whether values are the raw keys.
      rotary_factor, rope_factor: as `rope_frequencies` takes them.
    """

    markov_rank: int = count()
    markov_head_type: str = limited(_HEAD, "vanilla")
    confidence: bool = flag(False)
    confidence_with_markov: bool = flag(False)
    gemma_layers: bool = flag(False)
    k_eq_v: bool = flag(False)
    rotary_factor: float = limited(SHARES, 1.0)
    rope_factor: float = limited(FACTORS, 1.0)

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.confidence and self.confidence_with_markov and not self.markov_rank:
            raise ConfigError(
                "confidence_head_with_markov is true, but markov_rank is 0: there is no such head"
            )

    @property
    def may_sample_from_anchor(self) -> bool:
        return True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DSparkConfig:
        """Read the config.json of a DSpark drafter.

        Drafts come from the anchor's slot where the file does not say, but not in the speculators
        container. Blocks are not causal where the file does not say.

        Raises:
          ConfigError: it is not such a drafter, or it needs a feature that is not supported.
        """
        if is_speculators(config):
            return read_speculators(cls, config, more=_FLAT_KEYS)
        of_gemma = str(config.get("model_type")).startswith("gemma4")
        if of_gemma or "Gemma4DSparkModel" in words_of(config, "architectures"):
            return _read_gemma(cls, config)
        made: dict[str, Any] = {}
        if config.get("target_layer_ids") is not None:  # DeepSpec's: nothing is nested
            made = dict(
                own_embedding=True, own_head=True, scale_embeddings=False, container="DeepSpec"
            )
        return read_zlab(
            cls,
            config,
            more=_NESTED_KEYS,
            only={"projector_type": ("dspark",), "dspark_backbone_conv_enabled": (False,)},
            causal=False,
            made=made,
            sample_from_anchor=True,
        )


_NAMES = {
    "markov_rank": ("markov_rank",),
    "markov_head_type": ("markov_head_type",),
    "confidence": ("enable_confidence_head", "use_confidence_head"),
    "confidence_with_markov": ("confidence_head_with_markov",),
}
_FLAT_KEYS = _NAMES
_NESTED_KEYS = {field: nested(*names) for field, names in _NAMES.items()} | {
    "sample_from_anchor": nested("sample_from_anchor", "shift_label")
}
KEYS = dflash.KEYS | _NESTED_KEYS
SPECULATORS_KEYS = speculators.KEYS | _FLAT_KEYS
DEEPSPEC_KEYS = {
    field: tuple(k for k in keys if "_config." not in k) for field, keys in KEYS.items()
}
DEEPSPEC_KEYS["rope_theta"] += ("rope_parameters.full_attention.rope_theta",)
"""The keys of config.json that may set each field on which engines disagree. See `find_key`."""

_BLOCK_KEYS = {
    "block_size": ("block_size",),
    "mask_token_id": ("mask_token_id",),
    "num_target_layers": ("num_target_layers",),
    "sample_from_anchor": ("sample_from_anchor", "shift_label"),
    **_NAMES,
}


def _read_gemma(cls: type[DSparkConfig], config: Mapping[str, Any]) -> DSparkConfig:
    """Read a file of DeepSpec's for Gemma 4: the text part of the target's, and keys of the method."""
    read(config, "tie_word_embeddings", FLAGS, None)
    own = {"target_layer_ids", "tie_word_embeddings"}
    own |= {key for keys in _BLOCK_KEYS.values() for key in keys}
    layers = Gemma4Config.from_hf({k: v for k, v in config.items() if k not in own})
    for feature in ("per_layer_input_size", "num_experts", "num_kv_shared_layers"):
        if getattr(layers, feature):
            raise ConfigError(
                f"config.json has {feature} = {getattr(layers, feature)}, and layers of a drafter have "
                "no such feature; it must be 0"
            )
    if "sliding" in layers.layer_types:
        raise ConfigError("config.json has sliding layers; DeepSpec's drafters have full ones only")
    read(config, "num_target_layers", LAYERS, None)
    field = cls.__dataclass_fields__["feature_layers"]
    ids = entries(field, "config.json: target_layer_ids", config.get("target_layer_ids"))
    values = read_fields(cls, config, _BLOCK_KEYS, sample_from_anchor=True)
    return cls(
        **values,
        vocab_size=layers.vocab_size,
        hidden_size=layers.hidden_size,
        layer_types=layers.layer_types,
        causal=(False,) * layers.num_layers,
        num_heads=layers.num_heads,
        num_kv_heads=layers.full_num_kv_heads,
        head_dim=layers.full_head_dim,
        intermediate_size=layers.intermediate_size,
        feature_layers=ids,
        max_positions=layers.max_positions,
        final_logit_softcap=layers.final_logit_softcap,
        rope_theta=layers.full_rope_theta,
        rms_norm_eps=layers.rms_norm_eps,
        own_embedding=True,
        own_head=True,
        container="DeepSpec",
        gemma_layers=True,
        k_eq_v=layers.k_eq_v,
        rotary_factor=layers.full_partial_rotary_factor,
        rope_factor=layers.full_rope_factor,
    )


def _of_preset(name: str) -> DSparkConfig:
    """Return the layers of z-lab's DFlash drafter with DSpark's heads: no such drafter is released."""
    values: dict[str, Any] = {
        n: getattr(dflash.PRESETS[name], n) for n in DFlashConfig.__dataclass_fields__
    }
    causal = (False,) * len(values["layer_types"])
    values |= dict(block_size=7, sample_from_anchor=True, causal=causal)
    values |= dict(markov_rank=256, confidence=True, confidence_with_markov=True)
    return DSparkConfig(**values)


PRESETS = {name: _of_preset(name) for name in dflash.PRESETS}
