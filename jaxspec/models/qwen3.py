"""Qwen3's dense decoder, all six sizes, as one module over fixed-shape batches.

Read `Qwen3.run_layers`, then `DecoderLayer`, then `attention.Attention`. What differs between sizes
is in `Qwen3Config`. Source for every detail: transformers `models/qwen3/modeling_qwen3.py`, which
the parity tests run beside this.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import KVCache, KVSegment
from jaxspec.configs.qwen3 import Qwen3Config
from jaxspec.mesh import whole_rows
from jaxspec.models.attention import Attention
from jaxspec.models.layers import GatedMLP, rms_norm, table_logits
from jaxspec.models.target import Caches, LayersOutput, Placement, Target
from jaxspec.models.xla import forgotten, traced_once
from jaxspec.shapes import Array, Float, Int
from jaxspec.weights.model_def import param
from pallas_kernels.rounding import values_of


class Qwen3(Target):
    """A dense Qwen3 target.

    `table` is the embedding. It is the head too where the config ties them. Otherwise the head is
    `head_table`.
    """

    config: Qwen3Config
    mixes = True

    def __init__(self, config: Qwen3Config, *, dtype: jnp.dtype):
        v, d = config.vocab_size, config.hidden_size
        tied = config.tied_head
        of_table: dict[str, Any] = dict(
            dtype=dtype, fan_in=d, axes=("vocab", None), contracting_axes=(1,), table=True
        )
        self.config = config
        self.table = param(v, d, lookup=not tied, **of_table)
        if not tied:
            self.head_table = param(v, d, **of_table)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype) for i in range(config.num_layers)]
        )
        self.final_norm = param(d, dtype=dtype)

    def embed(self, tokens: Int[Array, "B T"], *, scaled: bool = True) -> Float[Array, "B T D"]:
        del scaled  # the model's own inputs are the rows as they are
        return whole_rows(self.table[tokens])

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        table = self.table if self.config.tied_head else self.head_table
        return table_logits(x, table[...])

    def attention_of(self, layer: int) -> Attention:
        return self.layers[layer].attention

    def run_layers(
        self,
        tokens: Int[Array, "B T"],
        x: Float[Array, "B T D"],
        where: Placement,
        caches: Caches | None,
        feature_layers: tuple[int, ...],
    ) -> LayersOutput:
        del tokens
        new_caches: list[KVCache | None] = []
        segments: list[tuple[KVSegment, ...]] = []
        features: dict[int, Array] = {}
        run = forgotten(run_layer, where.remat)
        for i, layer in enumerate(self.layers):
            cache = None if caches is None else caches[i]
            x, new_cache, seen = run(layer, x, where, cache)
            new_caches.append(new_cache)
            segments.append(seen)
            if i in feature_layers:
                features[i] = x
        return LayersOutput(
            rms_norm(where.only_wanted(x), self.final_norm[...], self.config.rms_norm_eps),
            tuple(features[i] for i in feature_layers),
            None if caches is None else tuple(new_caches),
            tuple(segments),
        )


class DecoderLayer(nnx.Module):
    """One layer. Each part has one norm, before it:

    x = x + attention(rms_norm(x, attention_norm))
    x = x + mlp(rms_norm(x, mlp_norm))
    """

    def __init__(self, config: Qwen3Config, index: int, *, dtype: jnp.dtype):
        d, spec = config.hidden_size, config.layers[index]
        self.attention_norm = param(d, dtype=dtype)
        self.attention = Attention(
            d,
            spec,
            score_scale=spec.head_dim**-0.5,
            rope_theta=config.rope_theta,
            eps=config.rms_norm_eps,
            dtype=dtype,
        )
        self.mlp_norm = param(d, dtype=dtype)
        self.mlp = GatedMLP(d, config.intermediate_size, activation="silu", dtype=dtype)
        self.eps = config.rms_norm_eps

    def __call__(
        self, x: Float[Array, "B T D"], where: Placement, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None, tuple[KVSegment, ...]]:
        """Return the layer's output, its cache after the writes, and the K/V its queries saw."""
        with jax.named_scope("attention"):
            normed = rms_norm(x, self.attention_norm[...], self.eps)
            h, cache, segments = self.attention(normed, where, cache, None)
            x = x + values_of(h)
        with jax.named_scope("mlp"):
            x = x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps))
        return x, cache, segments


@traced_once
def run_layer(
    layer: DecoderLayer, *args: Any
) -> tuple[Float[Array, "B T D"], KVCache | None, tuple[KVSegment, ...]]:
    """Run a layer. All of them have one shape, so the first is traced for all."""
    return layer(*args)
