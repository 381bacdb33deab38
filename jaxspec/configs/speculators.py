"""The config.json of drafters in the container of the speculators library.

Read `read_speculators`. Sizes of layers stand in an object, `transformer_layer_config`, and the rest beside it. The
method is that of z-lab's layout. These conventions differ:

- A feature layer is named by the number of the layer that reads it, so one higher.
- Embedding and head are the drafter's own, unless the files lack them. Embeddings are not scaled and
  logits have no soft cap.
- The head may have logits of some tokens only.
- A window begins before the anchor, for all positions of a block.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxspec.configs.base import LayerType, layer_types_of
from jaxspec.configs.dflash import LAYER_KEYS, DFlashConfig
from jaxspec.configs.fields import (
    COUNTS,
    DRAFTS,
    FLAGS,
    SIZES,
    WORDS,
    ConfigError,
    entries,
    find_key,
    object_of,
    read,
    read_fields,
    refuse_unless,
)
from jaxspec.configs.known_keys import check_plain_rope, refuse_unknown
from jaxspec.options import REQUIRED, shown

ConfigT = TypeVar("ConfigT", bound=DFlashConfig)

LAYER = "transformer_layer_config"
METHOD = "speculators_model_type"


def _either(key: str) -> tuple[str, str]:
    return (f"{LAYER}.{key}", key)


KEYS: dict[str, tuple[str, ...]] = {
    "feature_layers": ("aux_hidden_state_layer_ids",),
    "layer_types": _either("layer_types"),
    "causal": ("is_causal", "dflash_config.causal", "dflash_config.is_causal"),
    "sliding_window": _either("sliding_window"),
    "rope_theta": (
        f"{LAYER}.rope_parameters.rope_theta",
        f"{LAYER}.rope_parameters.sliding_attention.rope_theta",
        f"{LAYER}.rope_theta",
    ),
    "mask_token_id": ("mask_token_id",),
    "block_size": ("block_size",),
    "sample_from_anchor": ("sample_from_anchor",),
    "scale_embeddings": (),
}
"""The keys of config.json that may set each field on which engines disagree. See `find_key`."""

_OWN_KEYS: dict[str, tuple[str, ...]] = {
    field: KEYS[field] for field in ("mask_token_id", "block_size", "sample_from_anchor")
} | {"target_hidden_size": ("target_hidden_size",)}

_OTHER_LAYER_KEYS = (
    *("attention_bias", "hidden_act", "layer_types", "num_hidden_layers", "rope_parameters"),
    *("rope_scaling", "sliding_window", "use_sliding_window"),
)
_OTHER_KEYS = (
    *("aux_hidden_state_layer_ids", "dflash_config", "draft_vocab_size", "is_causal"),
    *("layer_types", "sliding_window", "sliding_window_non_causal", LAYER, METHOD),
    "speculators_config",
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dflash",),
    "shift_label": (False,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "logit_scale": (1.0,),
}
"""Keys by which files of other methods change what a drafter computes."""

_USUAL_DRAFT_VOCAB = 32_000  # that of a file which does not say


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is in this container.

    Raises:
      ConfigError: its layers are of this container, and its method is missing.
    """
    method = read(config, METHOD, WORDS, None)
    if method is None and config.get(LAYER) is not None:
        raise ConfigError(
            f"config.json has {LAYER}, as the speculators library writes it, and no {METHOD}; add "
            "dflash, dflash2 or dspark"
        )
    return method is not None


def read_speculators(
    cls: type[ConfigT],
    config: Mapping[str, Any],
    *,
    more: Mapping[str, Sequence[str]] | None = None,
    non_causal: bool = False,
    **defaults: Any,
) -> ConfigT:
    """Read a drafter's config.json in this container.

    Args:
      more: for fields that `cls` has beyond `DFlashConfig`, the keys that may have them.
      non_causal: what `sliding_window_non_causal` is where the file does not say.
      defaults: values of fields that the file may leave out.

    Raises:
      ConfigError: it is no such drafter, or it needs a feature that is not supported.
    """
    layer = {**object_of(config, LAYER)}
    if not layer:
        raise ConfigError(f"config.json has no {LAYER}, which holds the sizes of the layers")
    for key in ("layer_types", "sliding_window"):
        layer[key] = find_key(config, _either(key))[1]
    with _named_within_layer():
        of_layers, layer_types = _of_layers(cls, layer)
    more = more or {}
    keys = {**_OWN_KEYS, **more}
    refuse_unknown(config, (*_OTHER_KEYS, *itertools.chain(*keys.values())), only=_ONLY)
    nested = object_of(config, "dflash_config")
    refuse_unknown(nested, ("causal", "is_causal"), only=_ONLY, within="dflash_config")
    own = read_fields(cls, config, keys, **defaults)
    _check_num_drafts(config, own)
    vocab = read(config, "draft_vocab_size", SIZES, _USUAL_DRAFT_VOCAB)
    return cls(
        **of_layers,
        **own,
        layer_types=layer_types,
        causal=_causal(config, layer_types, non_causal),
        feature_layers=_feature_layers(config),
        window_from_anchor="sliding" in layer_types,
        scale_embeddings=False,
        own_embedding=True,
        own_head=True,
        draft_vocab_size=None if vocab == of_layers["vocab_size"] else vocab,
        container="speculators",
    )


@contextlib.contextmanager
def _named_within_layer() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error} (in its {LAYER})") from None


def _of_layers(
    cls: type[DFlashConfig], layer: dict[str, Any]
) -> tuple[dict[str, Any], tuple[LayerType, ...]]:
    """Read the fields that the object of the layers has, and the types of the layers."""
    refuse_unless(layer, "model_type", ("qwen3",), default="qwen3")
    refuse_unless(layer, "hidden_act", ("silu",), default="silu")
    refuse_unless(layer, "attention_bias", (False, None), default=False)
    windows = read(layer, "use_sliding_window", FLAGS, False)
    if windows and layer["layer_types"] is None:
        raise ConfigError(
            "config.json has use_sliding_window = True but no layer_types; say in layer_types "
            "which layers are sliding_attention and which full_attention"
        )
    layer_types = layer_types_of(layer, full_every=1)
    if (of_kind := object_of(layer, "rope_parameters")).get("sliding_attention") is not None:
        refuse_unknown(of_kind, ("full_attention", "sliding_attention"), within="rope_parameters")
        layer = {**layer, "rope_parameters": object_of(of_kind, "sliding_attention")}
    check_plain_rope(layer)
    refuse_unknown(layer, (*_OTHER_LAYER_KEYS, *itertools.chain(*LAYER_KEYS.values())))
    keys = dict(LAYER_KEYS)
    if "sliding" in layer_types:
        keys["sliding_window"] = ("sliding_window",)
    else:
        read(layer, "sliding_window", COUNTS, None)
    heads = read(layer, "num_attention_heads", SIZES)
    values = read_fields(
        cls,
        layer,
        keys,
        head_dim=read(layer, "hidden_size", SIZES) // heads,
        num_kv_heads=heads,
        max_positions=262_144,
        sliding_window=REQUIRED,
        rope_theta=REQUIRED,
    )
    return values, layer_types


def _causal(
    config: Mapping[str, Any], layer_types: tuple[LayerType, ...], non_causal: bool
) -> tuple[bool, ...]:
    """Read which layers are causal inside the block."""
    causal = read(config, KEYS["causal"], FLAGS, None)
    non_causal = read(config, "sliding_window_non_causal", FLAGS, non_causal)
    if causal is not None:
        return (causal,) * len(layer_types)
    return tuple(kind == "sliding" and not non_causal for kind in layer_types)


def _feature_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the feature layers, whose outputs are the inputs of the layers that the file names."""
    (key,) = KEYS["feature_layers"]
    if (ids := config.get(key)) is None:
        raise ConfigError(f"config.json has no {key}")
    ids = entries(DFlashConfig.__dataclass_fields__["feature_layers"], f"config.json: {key}", ids)
    if 0 in ids:
        raise ConfigError(
            f"config.json has {key} = {shown(list(ids))}, and 0 is the embedding; only outputs of "
            "layers are features, from 1 on"
        )
    return tuple(i - 1 for i in ids)


def _check_num_drafts(config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a file whose numbers of drafts and of slots do not fit its way to sample."""
    about = object_of(config, "speculators_config")
    method, algorithm = config[METHOD], read(about, "algorithm", WORDS, config[METHOD])
    if algorithm != method:
        raise ConfigError(
            f"config.json has {METHOD} = {shown(method)} and speculators_config.algorithm = "
            f"{shown(algorithm)}, which are one thing; take the wrong one out"
        )
    proposals = about.get("proposal_methods", [])
    if not isinstance(proposals, list) or not all(isinstance(p, dict) for p in proposals):
        raise ConfigError("config.json: speculators_config.proposal_methods must hold objects")
    limit = own["block_size"] - (not own["sample_from_anchor"])
    for proposal in proposals:
        count = read(proposal, "speculative_tokens", DRAFTS, limit)
        if count > limit:
            raise ConfigError(
                f"config.json has speculative_tokens = {count}, and a block of {own['block_size']} with "
                f"sample_from_anchor = {shown(own['sample_from_anchor'])} has {limit} drafts; set "
                "sample_from_anchor to true if it was trained so"
            )
