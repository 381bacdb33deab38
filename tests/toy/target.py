"""A family of targets, as small as one can be: one attention layer between an embedding and a head of its own.

Everything that jaxspec needs of it is here, in `rules.py` and in `entries.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.configs.base import LayerSpec, TargetConfig
from jaxspec.configs.fields import check_fields, read_fields, size
from jaxspec.models.attention import Attention
from jaxspec.models.layers import rms_norm, table_logits
from jaxspec.models.target import Caches, LayersOutput, Placement, Target
from jaxspec.shapes import Array, Float, Int
from jaxspec.weights.model_def import param


@dataclass(frozen=True)
class ToyConfig(TargetConfig):
    """The smallest target with keys and values."""

    vocab_size: int = size()
    hidden_size: int = size()
    num_heads: int = size()
    head_dim: int = size()
    max_positions: int = size()

    def __post_init__(self) -> None:
        check_fields(self)

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(None, self.num_heads, 1, self.head_dim, kv_owner=0),)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ToyConfig:
        del generation
        return cls(**read_fields(cls, config, KEYS))


KEYS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("width",),
    "num_heads": ("heads",),
    "head_dim": ("head_dim",),
    "max_positions": ("max_position_embeddings",),
}


class Toy(Target):
    """embedding -> norm -> attention -> add -> norm -> head."""

    config: ToyConfig

    def __init__(self, config: ToyConfig, *, dtype: jnp.dtype):
        v, d = config.vocab_size, config.hidden_size
        self.config = config
        self.embedding = param(v, d, dtype=dtype, fan_in=d, lookup=True)
        self.norm = param(d, dtype=dtype)
        self.attention = Attention(
            d,
            config.layers[0],
            norm_values=True,
            score_scale=1.0,
            rope_theta=10_000.0,
            eps=1e-6,
            dtype=dtype,
        )
        self.final_norm = param(d, dtype=dtype)
        self.table = param(v, d, dtype=dtype, fan_in=d)

    def embed(self, tokens: Int[Array, "B T"], *, scaled: bool = True) -> Float[Array, "B T D"]:
        del scaled  # nothing is scaled here
        return self.embedding[tokens]

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return table_logits(x, self.table[...])

    def run_layers(
        self,
        tokens: Int[Array, "B T"],
        x: Float[Array, "B T D"],
        where: Placement,
        caches: Caches | None,
        feature_layers: tuple[int, ...],
    ) -> LayersOutput:
        del tokens
        cache = None if caches is None else caches[0]
        normed = rms_norm(x, self.norm[...], 1e-6)
        added, cache, segments = self.attention(normed, where, cache, None)
        x = x + added
        hidden = rms_norm(where.only_wanted(x), self.final_norm[...], 1e-6)
        caches = None if caches is None else (cache,)
        return LayersOutput(hidden, tuple(x for _ in feature_layers), caches, (segments,))
