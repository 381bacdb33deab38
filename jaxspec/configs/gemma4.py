"""Gemma 4's text decoder: its config, its reader, and the released sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.configs.base import (
    ConfigError,
    LayerSpec,
    LayerType,
    TargetConfig,
    layer_types_of,
    refuse_unless,
    text_part,
    whole_number,
)

MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")


@dataclass(frozen=True)
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
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    full_num_kv_heads: int
    full_head_dim: int
    intermediate_size: int
    sliding_window: int
    max_positions: int
    k_eq_v: bool = False
    double_wide_mlp: bool = False
    num_kv_shared_layers: int = 0
    per_layer_input_size: int = 0
    per_layer_vocab_size: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    final_logit_softcap: float | None = 30.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    full_rope_theta: float = 1_000_000.0
    full_partial_rotary_factor: float = 0.25

    def __post_init__(self) -> None:
        for kind, heads in (("sliding", self.num_kv_heads), ("full", self.full_num_kv_heads)):
            if heads < 1 or self.num_heads % heads:
                raise ConfigError(
                    f"num_heads {self.num_heads} is not a multiple of the {heads} kv heads of {kind} layers"
                )
        if not self.layer_types or self.layer_types[-1] != "full":
            raise ConfigError("the last layer of a Gemma 4 target is always a full-attention layer")
        owners = self.layer_types[: self.first_shared_layer]
        for kind in set(self.layer_types[self.first_shared_layer :]):
            if kind not in owners:
                raise ConfigError(
                    f"layers from {self.first_shared_layer} on share K/V, but no earlier {kind} layer owns any"
                )
        if self.num_experts and not 0 < self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_token {self.num_experts_per_token} does not fit {self.num_experts} experts"
            )

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
        moe = bool(text.get("enable_moe_block", False))
        return cls(
            **decoder_fields(text),
            k_eq_v=bool(text.get("attention_k_eq_v", False)),
            double_wide_mlp=bool(text.get("use_double_wide_mlp", False)),
            num_kv_shared_layers=whole_number(text, "num_kv_shared_layers", 0),
            per_layer_input_size=whole_number(text, "hidden_size_per_layer_input", 0),
            per_layer_vocab_size=(
                whole_number(text, "vocab_size_per_layer_input", whole_number(text, "vocab_size"))
                if text.get("hidden_size_per_layer_input")
                else 0
            ),
            num_experts=whole_number(text, "num_experts") if moe else 0,
            num_experts_per_token=whole_number(text, "top_k_experts") if moe else 0,
            expert_intermediate_size=whole_number(text, "moe_intermediate_size") if moe else 0,
            final_logit_softcap=text.get("final_logit_softcapping"),
        )


def _gemma4_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    outer, text = config.get("model_type"), text_part(config)
    if str(outer).endswith("_assistant"):
        raise ConfigError(
            f"config.json has model_type {outer!r}: that is an assistant, a drafter, not a target"
        )
    if outer not in MODEL_TYPES:
        raise ConfigError(
            f"config.json has model_type {outer!r} (architectures {config.get('architectures')}); a target "
            f"must be one of {', '.join(MODEL_TYPES)}"
        )
    if outer in ("gemma4", "gemma4_unified") and text is config:
        raise ConfigError(f"config.json has model_type {outer!r} but no text_config")
    if config.get("quantization_config"):
        raise ConfigError(
            "config.json has a quantization_config: quantised checkpoints are not supported; "
            "use the bfloat16 release"
        )
    return text


def decoder_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that targets and their assistants have in common."""
    layer_types = list(layer_types_of(text))
    layer_types[-1] = "full"  # transformers does so too, with a warning
    kv_heads, head_dim = (
        whole_number(text, "num_key_value_heads"),
        whole_number(text, "head_dim", 256),
    )
    if "per_layer_config" in text:  # wins over both released keys, even when empty
        full_head_dim, full_kv_heads = _full_layer_values(text, layer_types, head_dim, kv_heads)
    else:
        full_head_dim = whole_number(text, "global_head_dim", 512)
        full_kv_heads = kv_heads
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
            full_kv_heads = whole_number(text, "num_global_key_value_heads")
    refuse_unless(text, "hidden_activation", ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    refuse_unless(text, "attention_bias", (False, None), default=False)
    refuse_unless(text, "tie_word_embeddings", (True,), default=True)
    refuse_unless(text, "attn_logit_softcapping", (None,), default=None)
    refuse_unless(text, "use_bidirectional_attention", (None, "vision"), default=None)
    rope = text.get("rope_parameters") or {}
    sliding_rope, full_rope = rope.get("sliding_attention", {}), rope.get("full_attention", {})
    refuse_unless(sliding_rope, "rope_type", ("default",), default="default")
    refuse_unless(full_rope, "rope_type", ("proportional",), default="proportional")
    return dict(
        vocab_size=whole_number(text, "vocab_size"),
        hidden_size=whole_number(text, "hidden_size"),
        layer_types=tuple(layer_types),
        num_heads=whole_number(text, "num_attention_heads"),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        full_num_kv_heads=full_kv_heads,
        full_head_dim=full_head_dim,
        intermediate_size=whole_number(text, "intermediate_size"),
        sliding_window=whole_number(text, "sliding_window"),
        max_positions=whole_number(text, "max_position_embeddings", 131072),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope_theta=float(sliding_rope.get("rope_theta", 10_000.0)),
        full_rope_theta=float(full_rope.get("rope_theta", 1_000_000.0)),
        full_partial_rotary_factor=float(full_rope.get("partial_rotary_factor", 0.25)),
    )


def _full_layer_values(
    text: Mapping[str, Any], layer_types: Sequence[LayerType], head_dim: int, kv_heads: int
) -> tuple[int, int]:
    """Read the head dim and the number of kv heads of full layers from `per_layer_config`.

    Its keys are layer indices as strings. They are zero-padded to the width of the last index, so
    they are compared as integers.
    """
    try:
        overrides = {int(k): dict(v) for k, v in (text["per_layer_config"] or {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"per_layer_config does not map layer indices to values: {error}"
        ) from None
    values: dict[LayerType, set[tuple[int, int]]] = {"sliding": set(), "full": set()}
    for i, kind in enumerate(layer_types):
        override = overrides.pop(i, {})
        values[kind].add(
            (
                int(override.pop("head_dim", head_dim)),
                int(override.pop("num_key_value_heads", kv_heads)),
            )
        )
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
