"""Qwen3's dense decoder: its config, its reader, and the released sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.configs.base import (
    ConfigError,
    LayerSpec,
    TargetConfig,
    refuse_unless,
    whole_number,
)

MODEL_TYPES = ("qwen3",)
ARCHITECTURES = ("Qwen3ForCausalLM",)


@dataclass(frozen=True)
class Qwen3Config(TargetConfig):
    """A dense Qwen3 decoder, whose layers all see every earlier token."""

    vocab_size: int
    hidden_size: int
    layer_count: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # num_heads x head_dim may differ from hidden_size
    intermediate_size: int
    max_positions: int
    tied_head: bool  # the head is the embedding
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "layer_count",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_positions",
        ):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of {self.num_kv_heads} kv heads"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim {self.head_dim} is odd; rotary embedding turns pairs, so it must be even"
            )
        for name in ("rms_norm_eps", "rope_theta"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"{name} is {value:g}; it must be above 0")

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(
            LayerSpec(
                window=None,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                kv_owner=i,
            )
            for i in range(self.layer_count)
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Read a Hugging Face config.json.

        The file may be as released, or as transformers 5 writes it.

        Args:
          config: the parsed file.

        Raises:
          ConfigError: it is not a dense Qwen3 decoder, or it uses a feature that no release has.
        """
        if config.get("model_type") not in MODEL_TYPES:
            raise ConfigError(
                f"config.json has model_type {config.get('model_type')!r}; a dense Qwen3 target "
                f"has {', '.join(MODEL_TYPES)}"
            )
        architectures = config.get("architectures")
        if architectures and not set(ARCHITECTURES) & set(architectures):
            raise ConfigError(
                f"config.json has architectures {list(architectures)}; a Qwen3 target has "
                f"{', '.join(ARCHITECTURES)}"
            )
        if config.get("quantization_config"):
            raise ConfigError(
                "config.json has a quantization_config: quantised checkpoints are not supported; "
                "use the bfloat16 release"
            )
        refuse_unless(config, "hidden_act", ("silu",), default="silu")
        refuse_unless(config, "attention_bias", (False, None), default=False)
        refuse_unless(config, "tie_word_embeddings", (True, False), default=False)
        _refuse_windows(config)
        heads = whole_number(config, "num_attention_heads")
        return cls(
            vocab_size=whole_number(config, "vocab_size"),
            hidden_size=whole_number(config, "hidden_size"),
            layer_count=whole_number(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=whole_number(config, "num_key_value_heads", heads),
            head_dim=whole_number(config, "head_dim", 128),  # transformers' default
            intermediate_size=whole_number(config, "intermediate_size"),
            max_positions=whole_number(config, "max_position_embeddings"),
            tied_head=bool(config.get("tie_word_embeddings", False)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(config),
        )


def _refuse_windows(config: Mapping[str, Any]) -> None:
    """Refuse sliding windows, which no release has. `sliding_window` alone does not ask for one."""
    kinds = set(config.get("layer_types") or ())
    if config.get("use_sliding_window") or kinds - {"full_attention"}:
        raise ConfigError(
            "config.json asks for sliding windows (use_sliding_window, layer_types); only full "
            "attention is supported for Qwen3, as in all its releases"
        )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Read the rotary base. Refuse scaled positions. `rope_parameters` wins over older keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"config.json has rope_type {kind!r}; only 'default' is supported, which reaches "
            "max_position_embeddings. The releases have no rope_scaling: take rope_scaling out"
        )
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConfigError(
            "config.json has no rope_theta, neither at the top nor in rope_parameters"
        )
    return float(theta)


def _released(
    layers: int, hidden: int, mlp: int, heads: int, *, tied_head: bool = False
) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        layer_count=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=mlp,
        max_positions=40_960,
        tied_head=tied_head,
    )


PRESETS: dict[str, Qwen3Config] = {
    "qwen3-0.6b": _released(28, 1024, 3072, 16, tied_head=True),
    "qwen3-1.7b": _released(28, 2048, 6144, 16, tied_head=True),
    "qwen3-4b": _released(36, 2560, 9728, 32, tied_head=True),
    "qwen3-8b": _released(36, 4096, 12_288, 32),
    "qwen3-14b": _released(40, 5120, 17_408, 40),
    "qwen3-32b": _released(64, 5120, 25_600, 64),
}
