"""Qwen3's dense decoder: its config, its reader, and the released sizes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.configs.base import LayerSpec, TargetConfig, layer_types_of
from jaxspec.configs.fields import (
    COUNTS,
    EPS,
    EVEN,
    FLAGS,
    LAYERS,
    SIZES,
    THETAS,
    ConfigError,
    check_fields,
    flag,
    limited,
    read,
    read_fields,
    refuse_unless,
    size,
    words_of,
)
from jaxspec.configs.known_keys import check_plain_rope, refuse_unknown
from jaxspec.options import REQUIRED, shown

MODEL_TYPES = ("qwen3",)
ARCHITECTURES = ("Qwen3ForCausalLM",)


@dataclass(frozen=True)
class Qwen3Config(TargetConfig):
    """A dense Qwen3 decoder, whose layers all see every earlier token."""

    vocab_size: int = size()
    hidden_size: int = size()
    layer_count: int = limited(LAYERS)
    num_heads: int = size()
    num_kv_heads: int = size()
    head_dim: int = limited(EVEN)  # num_heads x head_dim may differ from hidden_size
    intermediate_size: int = size()
    max_positions: int = size()
    tied_head: bool = flag()  # the head is the embedding
    rms_norm_eps: float = limited(EPS, 1e-6)
    rope_theta: float = limited(THETAS, 1_000_000.0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of {self.num_kv_heads} kv heads"
            )

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
                f"config.json has model_type {shown(config.get('model_type'))}; a dense Qwen3 target "
                f"has {', '.join(MODEL_TYPES)}"
            )
        architectures = words_of(config, "architectures")
        if architectures and not set(ARCHITECTURES) & set(architectures):
            raise ConfigError(
                f"config.json has architectures {shown(list(architectures))}; a Qwen3 target has "
                f"{', '.join(ARCHITECTURES)}"
            )
        refuse_unless(config, "hidden_act", ("silu",), default="silu")
        refuse_unless(config, "attention_bias", (False, None), default=False)
        refuse_unless(config, "tie_word_embeddings", (True, False), default=False)
        _refuse_windows(config)
        check_plain_rope(config)
        refuse_unknown(config, _READ)
        heads = read(config, _KEYS["num_heads"], SIZES)
        absent: dict[str, Any] = dict(
            head_dim=128, num_kv_heads=heads, tied_head=False
        )  # as in transformers
        return cls(**read_fields(cls, config, _KEYS, **absent, rope_theta=REQUIRED))


_KEYS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "layer_count": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size",),
    "max_positions": ("max_position_embeddings",),
    "tied_head": ("tie_word_embeddings",),
    "rms_norm_eps": ("rms_norm_eps",),
    "rope_theta": ("rope_parameters.rope_theta", "rope_scaling.rope_theta", "rope_theta"),
}


_READ = (
    *("attention_bias", "hidden_act", "layer_types", "rope_parameters", "rope_scaling"),
    *("rope_theta", "sliding_window", "use_sliding_window"),
    *itertools.chain(*_KEYS.values()),
)


def _refuse_windows(config: Mapping[str, Any]) -> None:
    """Refuse sliding windows, which no release has. `sliding_window` alone does not ask for one."""
    sliding = read(config, "use_sliding_window", FLAGS, False)
    read(config, "sliding_window", COUNTS, None)
    if sliding or "sliding" in layer_types_of(config, full_every=1):
        raise ConfigError(
            "config.json asks for sliding windows (use_sliding_window, layer_types); only full "
            "attention is supported for Qwen3, as in all its releases"
        )


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
