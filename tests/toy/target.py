"""A family of targets, as small as one can be: one attention layer between an embedding and a head of its own.

Everything that jaxspec needs of it is here, in `rules.py` and in `entries.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec import cache as kv
from jaxspec.configs.base import LayerSpec, TargetConfig, whole_number
from jaxspec.models.attention import attend, project_qkv
from jaxspec.models.layers import project, rms_norm, rope_frequencies, table_logits
from jaxspec.models.target import Caches, LayersOutput, Placement, Target
from jaxspec.params import param
from jaxspec.shapes import Array, Float, Int


@dataclass(frozen=True)
class ToyConfig(TargetConfig):
    """The smallest target with keys and values."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    max_positions: int

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(None, self.num_heads, 1, self.head_dim, kv_owner=0),)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ToyConfig:
        del generation
        return cls(
            vocab_size=whole_number(config, "vocab_size"),
            hidden_size=whole_number(config, "width"),
            num_heads=whole_number(config, "heads"),
            head_dim=whole_number(config, "head_dim"),
            max_positions=whole_number(config, "max_position_embeddings"),
        )


class Toy(Target):
    """embedding -> norm -> attention -> add -> norm -> head."""

    config: ToyConfig

    def __init__(self, config: ToyConfig, *, dtype: jnp.dtype):
        v, d = config.vocab_size, config.hidden_size
        n, h = config.num_heads, config.head_dim
        self.config = config
        self.embedding = param(v, d, dtype=dtype, fan_in=d, lookup=True)
        self.norm = param(d, dtype=dtype)
        self.qkv = param(d, 1, n + 2, h, dtype=dtype, fan_in=d)
        self.q_norm = param(h, dtype=dtype)
        self.k_norm = param(h, dtype=dtype)
        self.out = param(1, n, h, d, dtype=dtype, fan_in=n * h)
        self.final_norm = param(d, dtype=dtype)
        self.table = param(v, d, dtype=dtype, fan_in=d)

    def embed(self, tokens: Int[Array, "B T"], *, scaled: bool = True) -> Float[Array, "B T D"]:
        del scaled  # nothing is scaled here
        return self.embedding[tokens]

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        b, t, d = x.shape
        return table_logits(x.reshape(b * t, d), self.table[...]).reshape(b, t, -1)

    def run_layers(
        self,
        tokens: Int[Array, "B T"],
        x: Float[Array, "B T D"],
        where: Placement,
        caches: Caches | None,
        feature_layers: tuple[int, ...],
    ) -> LayersOutput:
        del tokens
        q, k, v = project_qkv(
            rms_norm(x, self.norm[...], 1e-6),
            self.qkv[...],
            self.q_norm[...],
            self.k_norm[...],
            where.positions,
            rope_frequencies(self.config.head_dim, 10_000.0),
            groups=self.config.num_heads,
            eps=1e-6,
            norm_values=True,
        )
        assert q is not None
        assert k is not None
        assert v is not None
        if caches is None or where.ancestors is not None:
            segments = (kv.pass_segment(k, v, where.positions, where.count, where.ancestors),)
            if caches is not None and caches[0] is not None:
                segments = (kv.view(caches[0], where.start, where.slots), *segments)
        else:
            assert caches[0] is not None
            cache, segments = kv.append_pass(caches[0], None, k, v, *where.written)
            caches = (cache,)
        x = x + project(
            attend(q, where.positions, segments, scale=1.0, window=None), self.out[...], inputs=3
        )
        hidden = rms_norm(x, self.final_norm[...], 1e-6)
        return LayersOutput(hidden, tuple(x for _ in feature_layers), caches, (segments,))
