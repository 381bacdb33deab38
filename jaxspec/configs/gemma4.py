"""Gemma 4's text decoder: its config, its reader, and the released sizes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxspec.configs.base import (
    LayerSpec,
    LayerType,
    TargetConfig,
    layer_types,
    layer_types_of,
    text_part,
)
from jaxspec.configs.fields import (
    COUNTS,
    EPS,
    EVEN,
    FACTORS,
    FLAGS,
    SHARES,
    SIZES,
    SOFTCAPS,
    THETAS,
    ConfigError,
    check_fields,
    count,
    flag,
    limited,
    object_of,
    read,
    read_fields,
    refuse_unless,
    short_repr,
    size,
)
from jaxspec.configs.known_keys import refuse_unknown
from jaxspec.options import REQUIRED, shown

MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")


@dataclass(frozen=True, repr=False)
class Gemma4Config(TargetConfig):
    """The text decoder of a Gemma 4 model.

    Attributes:
      num_kv_heads, head_dim: of sliding layers. Full layers have values of their own.
      sliding_window: the number of keys that a query of a sliding layer sees, its own included.
      k_eq_v: whether the values of full layers are the raw key projection, with a norm of their
        own.
      double_wide_mlp: whether layers that share K/V have an MLP of twice the width.
      num_kv_shared_layers: how many of the last layers read an earlier layer's K/V.
      per_layer_input_size: 0 for a model without per-layer inputs.
      num_experts: 0 for a dense model.
      full_rope_factor: what positions are divided by in the rotary embedding of full layers.
    """

    normed_values: ClassVar[bool] = True

    vocab_size: int = size()
    hidden_size: int = size()
    layer_types: tuple[LayerType, ...] = layer_types()
    num_heads: int = size()
    num_kv_heads: int = size()
    head_dim: int = limited(EVEN)
    full_num_kv_heads: int = size()
    full_head_dim: int = limited(EVEN)
    intermediate_size: int = size()
    sliding_window: int = size()
    max_positions: int = size()
    k_eq_v: bool = flag(False)
    double_wide_mlp: bool = flag(False)
    num_kv_shared_layers: int = count()
    per_layer_input_size: int = count()
    per_layer_vocab_size: int = count()
    num_experts: int = count()
    num_experts_per_token: int = count()
    expert_intermediate_size: int = count()
    final_logit_softcap: float | None = limited(SOFTCAPS, 30.0, none=True)
    rms_norm_eps: float = limited(EPS, 1e-6)
    rope_theta: float = limited(THETAS, 10_000.0)
    full_rope_theta: float = limited(THETAS, 1_000_000.0)
    full_partial_rotary_factor: float = limited(SHARES, 0.25)
    full_rope_factor: float = limited(FACTORS, 1.0)

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        check_fields(self)
        for kind, heads in (("sliding", self.num_kv_heads), ("full", self.full_num_kv_heads)):
            if self.num_heads % heads:
                raise ConfigError(
                    f"num_heads {self.num_heads} is not a multiple of the {heads} kv heads of {kind} layers"
                )
        if self.layer_types[-1] != "full":
            raise ConfigError(
                "layer_types: the last layer of a Gemma 4 target is always a full-attention layer"
            )
        if self.num_kv_shared_layers >= len(self.layer_types):
            raise ConfigError(
                f"num_kv_shared_layers is {self.num_kv_shared_layers}; it must be below the "
                f"{len(self.layer_types)} layers, because one has to own what others share"
            )
        owners = self.layer_types[: self.first_shared_layer]
        for kind in set(self.layer_types[self.first_shared_layer :]):
            if kind not in owners:
                raise ConfigError(
                    f"num_kv_shared_layers is {self.num_kv_shared_layers}: layers from "
                    f"{self.first_shared_layer} on share K/V, but no earlier {kind} layer owns any"
                )
        if self.per_layer_input_size and not self.per_layer_vocab_size:
            raise ConfigError("per_layer_vocab_size is 0; per-layer inputs need a vocabulary")
        if self.num_experts and not 0 < self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_token {self.num_experts_per_token} does not fit {self.num_experts} experts"
            )
        if self.num_experts and not self.expert_intermediate_size:
            raise ConfigError("expert_intermediate_size is 0; experts need a width")

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        owners: dict[LayerType, int] = {}
        layers = []
        for i, kind in enumerate(self.layer_types):
            if i < self.first_shared_layer:
                owners[kind] = i
            sliding = kind == "sliding"
            layers.append(
                LayerSpec(
                    window=self.sliding_window if sliding else None,
                    num_heads=self.num_heads,
                    num_kv_heads=self.num_kv_heads if sliding else self.full_num_kv_heads,
                    head_dim=self.head_dim if sliding else self.full_head_dim,
                    kv_owner=owners[kind],
                )
            )
        return tuple(layers)

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size)

    @property
    def first_shared_layer(self) -> int:
        return len(self.layer_types) - self.num_kv_shared_layers

    def mlp_width_of(self, layer: int) -> int:
        wide = self.double_wide_mlp and not self.owns_kv(layer)
        return self.intermediate_size * (2 if wide else 1)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4Config:
        """Read a Hugging Face config.json.

        The file may be as released, or as transformers 5.17+ writes it.

        Args:
          config: the parsed file. Only the text part of a multimodal checkpoint is read.

        Raises:
          ConfigError: it is not a Gemma 4 text decoder, or it uses a feature that no released
            target has.
        """
        text = _gemma4_text_config(config)
        values = decoder_fields(cls, text)
        keys = dict(_TARGET_KEYS)
        if read(text, "enable_moe_block", FLAGS, False):
            keys |= _EXPERT_KEYS
            for name in _EXPERT_KEYS.values():
                read(text, name, SIZES)
        if read(text, "hidden_size_per_layer_input", COUNTS, 0):
            keys["per_layer_vocab_size"] = ("vocab_size_per_layer_input",)
        absent: dict[str, Any] = dict(
            final_logit_softcap=None, per_layer_vocab_size=values["vocab_size"]
        )
        more = read_fields(cls, text, keys, **absent)
        return cls(**values, **more)


_DECODER_KEYS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size",),
    "sliding_window": ("sliding_window",),
    "max_positions": ("max_position_embeddings",),
    "rms_norm_eps": ("rms_norm_eps",),
}
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "rope_theta": ("rope_parameters.sliding_attention.rope_theta",),
    "full_rope_theta": ("rope_parameters.full_attention.rope_theta",),
    "full_partial_rotary_factor": ("rope_parameters.full_attention.partial_rotary_factor",),
    "full_rope_factor": ("rope_parameters.full_attention.factor",),
}
_TARGET_KEYS: dict[str, tuple[str, ...]] = {
    "k_eq_v": ("attention_k_eq_v",),
    "double_wide_mlp": ("use_double_wide_mlp",),
    "num_kv_shared_layers": ("num_kv_shared_layers",),
    "per_layer_input_size": ("hidden_size_per_layer_input",),
    "final_logit_softcap": ("final_logit_softcapping",),
}
_EXPERT_KEYS: dict[str, tuple[str, ...]] = {
    "num_experts": ("num_experts",),
    "num_experts_per_token": ("top_k_experts",),
    "expert_intermediate_size": ("moe_intermediate_size",),
}

_SIZES_OF_FEATURES = (
    *("global_head_dim", "moe_intermediate_size", "num_experts", "num_global_key_value_heads"),
    *("top_k_experts", "vocab_size_per_layer_input"),
)
_OTHER_KEYS = (
    *("attention_bias", "attn_logit_softcapping", "enable_moe_block", "hidden_activation"),
    *("layer_types", "num_hidden_layers", "per_layer_config", "rope_parameters"),
    *("tie_word_embeddings", "use_bidirectional_attention", *_SIZES_OF_FEATURES),
)
_READ = frozenset(
    (
        *_OTHER_KEYS,
        *itertools.chain(*_DECODER_KEYS.values(), *_TARGET_KEYS.values(), *_EXPERT_KEYS.values()),
    )
)


def _gemma4_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    outer, text = config.get("model_type"), text_part(config)
    if str(outer).endswith("_assistant"):
        raise ConfigError(
            f"config.json has model_type {shown(outer)}: that is an assistant, a drafter, not a target"
        )
    if outer not in MODEL_TYPES:
        raise ConfigError(
            f"config.json has model_type {shown(outer)} (architectures "
            f"{shown(config.get('architectures'))}); a target "
            f"must be one of {', '.join(MODEL_TYPES)}"
        )
    if outer in ("gemma4", "gemma4_unified") and not object_of(config, "text_config"):
        raise ConfigError(f"config.json has model_type {outer!r} but no text_config")
    if text is not config:
        refuse_unknown(config, ("text_config",), only={"tie_word_embeddings": (True,)})
    return text


def decoder_fields(kind: type[Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that targets and their assistants have in common.

    Args:
      kind: the class of the config.
    """
    layer_types = list(layer_types_of(text))
    layer_types[-1] = "full"  # transformers does so too, with a warning
    refuse_unknown(text, _READ)
    read(text, "attention_k_eq_v", FLAGS, False)
    for name in _SIZES_OF_FEATURES:  # a model without the feature may have them too
        read(text, name, COUNTS, None)
    values = read_fields(kind, text, _DECODER_KEYS, head_dim=256, max_positions=131_072)
    values |= _rope_fields(kind, text, layer_types)
    head_dim, kv_heads = values["head_dim"], values["num_kv_heads"]
    if "per_layer_config" in text:  # wins over both released keys, even when empty
        full_head_dim, full_kv_heads = _full_layer_values(text, layer_types, head_dim, kv_heads)
    else:
        full_head_dim = read(text, "global_head_dim", EVEN, 512)
        full_kv_heads = kv_heads
        if read(text, "attention_k_eq_v", FLAGS, False):
            full_kv_heads = read(text, "num_global_key_value_heads", SIZES, kv_heads)
    refuse_unless(text, "hidden_activation", ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    refuse_unless(text, "attention_bias", (False, None), default=False)
    refuse_unless(text, "tie_word_embeddings", (True,), default=True)
    refuse_unless(text, "attn_logit_softcapping", (None,), default=None)
    refuse_unless(text, "use_bidirectional_attention", (None, "vision"), default=None)
    return dict(
        **values,
        layer_types=tuple(layer_types),
        full_num_kv_heads=full_kv_heads,
        full_head_dim=full_head_dim,
    )


def _rope_fields(
    kind: type[Any], text: Mapping[str, Any], layer_types: Sequence[LayerType]
) -> dict[str, Any]:
    """Read the rotary embeddings of both types of layers.

    What the file leaves out means what it means in transformers. So full layers without a
    `rope_type` turn whole heads, whatever the file says of parts.
    """
    if text.get("rope_parameters") is None:
        return {}
    ropes = object_of(text, "rope_parameters")
    refuse_unknown(ropes, ("sliding_attention", "full_attention"), within="rope_parameters")
    keys, values = dict(_ROPE_KEYS), {}
    if "sliding" in layer_types:
        _rope_type(ropes, "sliding_attention", ("default",))
    else:
        del keys["rope_theta"]
    if _rope_type(ropes, "full_attention", ("default", "proportional")) == "default":
        values["full_partial_rotary_factor"] = 1.0
        del keys["full_partial_rotary_factor"], keys["full_rope_factor"]
    absent: dict[str, Any] = dict(rope_theta=REQUIRED, full_rope_theta=REQUIRED)
    return values | read_fields(kind, text, keys, **absent, full_partial_rotary_factor=1.0)


def _rope_type(ropes: Mapping[str, Any], name: str, allowed: Sequence[str]) -> str:
    """Return the kind of a rotary embedding, after a look at all its keys."""
    if not (rope := object_of(ropes, name)):
        raise ConfigError(f"config.json has rope_parameters without {name}")
    where = f"rope_parameters.{name}"
    kind = rope.get("rope_type", rope.get("type", "default"))  # older files say "type"
    refuse_unless({f"{where}.rope_type": kind}, f"{where}.rope_type", allowed)
    known = ["rope_type", "type", "rope_theta", "partial_rotary_factor"]
    if kind == "proportional":
        known.append("factor")
    else:
        read(rope, "partial_rotary_factor", SHARES, None, f"config.json: {where}")
    refuse_unknown(rope, known, only={"factor": (1.0,)}, within=where)
    return kind


def _full_layer_values(
    text: Mapping[str, Any], layer_types: Sequence[LayerType], head_dim: int, kv_heads: int
) -> tuple[int, int]:
    """Read the head dim and the number of kv heads of full layers from `per_layer_config`.

    Its keys are layer indices as strings. They are zero-padded to the width of the last index, so
    they are compared as integers.
    """
    overrides = {}
    for key in (layer_config := object_of(text, "per_layer_config")):
        if not (key.isascii() and key.isdigit()):
            raise ConfigError(f"per_layer_config has {shown(key)}; its keys must be layer numbers")
        overrides[int(key)] = dict(object_of(layer_config, key))
    values: dict[LayerType, set[tuple[int, int]]] = {"sliding": set(), "full": set()}
    for i, kind in enumerate(layer_types):
        override = overrides.pop(i, {})
        where = f"config.json: per_layer_config of layer {i}"
        heads = read(override, "head_dim", EVEN, head_dim, where)
        kv = read(override, "num_key_value_heads", SIZES, kv_heads, where)
        values[kind].add((heads, kv))
        override = set(override) - {"head_dim", "num_key_value_heads"}
        if override:
            raise ConfigError(
                f"per_layer_config of layer {i} overrides {sorted(override)}, which is not known"
            )
    if overrides:
        raise ConfigError(f"per_layer_config names layers {sorted(overrides)}, which do not exist")
    if values["sliding"] - {(head_dim, kv_heads)} or len(values["full"]) != 1:
        raise ConfigError(
            f"per_layer_config must give all layers of a type the same heads, but has {values}"
        )
    return values["full"].pop()


def _pattern(num_layers: int, every: int) -> tuple[LayerType, ...]:
    return tuple("full" if (i + 1) % every == 0 else "sliding" for i in range(num_layers))


_COMMON: dict[str, Any] = dict(vocab_size=262_144, head_dim=256, full_head_dim=512)

PRESETS: dict[str, Gemma4Config] = {
    "e2b": Gemma4Config(
        **_COMMON,
        hidden_size=1536,
        layer_types=_pattern(35, 5),
        num_heads=8,
        num_kv_heads=1,
        full_num_kv_heads=1,
        intermediate_size=6144,
        double_wide_mlp=True,
        sliding_window=512,
        num_kv_shared_layers=20,
        per_layer_input_size=256,
        per_layer_vocab_size=262_144,
        max_positions=131_072,
    ),
    "e4b": Gemma4Config(
        **_COMMON,
        hidden_size=2560,
        layer_types=_pattern(42, 6),
        num_heads=8,
        num_kv_heads=2,
        full_num_kv_heads=2,
        intermediate_size=10_240,
        sliding_window=512,
        num_kv_shared_layers=18,
        per_layer_input_size=256,
        per_layer_vocab_size=262_144,
        max_positions=131_072,
    ),
    "12b": Gemma4Config(
        **_COMMON,
        hidden_size=3840,
        layer_types=_pattern(48, 6),
        num_heads=16,
        num_kv_heads=8,
        full_num_kv_heads=1,
        k_eq_v=True,
        intermediate_size=15_360,
        sliding_window=1024,
        max_positions=262_144,
    ),
    "26b-a4b": Gemma4Config(
        **_COMMON,
        hidden_size=2816,
        layer_types=_pattern(30, 6),
        num_heads=16,
        num_kv_heads=8,
        full_num_kv_heads=2,
        k_eq_v=True,
        intermediate_size=2112,
        sliding_window=1024,
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_size=704,
        max_positions=262_144,
    ),
    "31b": Gemma4Config(
        **_COMMON,
        hidden_size=5376,
        layer_types=_pattern(60, 6),
        num_heads=32,
        num_kv_heads=16,
        full_num_kv_heads=4,
        k_eq_v=True,
        intermediate_size=21_504,
        sliding_window=1024,
        max_positions=262_144,
    ),
}
