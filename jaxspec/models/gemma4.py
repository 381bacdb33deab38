"""Gemma 4's text decoder, all five sizes, as one module over fixed-shape batches.

Read `Gemma4.run_layers`, then `DecoderLayer`. What differs between sizes is in `Gemma4Config`. A
layer holds only what it needs. Source for every detail: transformers
`models/gemma4/modeling_gemma4.py`, which the parity tests run beside this.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import KVCache, KVSegment
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.mesh import whole_rows
from jaxspec.models.attention import Attention
from jaxspec.models.layers import (
    GatedMLP,
    gelu_tanh,
    norm_for,
    project,
    rms_norm,
    rounded_sqrt,
    softcap,
    table_logits,
)
from jaxspec.models.moe import Experts
from jaxspec.models.residual import Residual, Sum
from jaxspec.models.target import Caches, LayersOutput, Placement, Target
from jaxspec.models.xla import forgotten, materialize, traced_once
from jaxspec.shapes import Array, Float, Int
from jaxspec.weights.model_def import param
from pallas_kernels.norms import Branch, NextNorm, RouterScale


class Gemma4(Target):
    """A Gemma 4 target."""

    config: Gemma4Config
    mixes = True

    def __init__(self, config: Gemma4Config, *, dtype: jnp.dtype):
        self.config = config
        self.embedder = Embedder(config, dtype=dtype)
        if config.per_layer_input_size:
            self.per_layer = PerLayerInputs(config, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype) for i in range(config.num_layers)]
        )
        self.final_norm = param(config.hidden_size, dtype=dtype)

    def embed(self, tokens: Int[Array, "B T"], *, scaled: bool = True) -> Float[Array, "B T D"]:
        return self.embedder.embed(tokens, scaled=scaled)

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return self.embedder.head(x)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return softcap(self.head(hidden), self.config.final_logit_softcap)

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
        per_layer = self.per_layer(tokens, x) if self.config.per_layer_input_size else None
        new_caches: list[KVCache | None] = []
        segments: list[tuple[KVSegment, ...]] = []
        features: dict[int, Array] = {}
        norms = [*(layer.norm_before() for layer in self.layers), self.final_norm[...]]
        stream = Residual(x, self.config.rms_norm_eps).norm(norms[0])
        run, whole = forgotten(run_layer, where.remat), where
        narrow_at = self.first_behind_keys(feature_layers)
        for i, (layer, spec) in enumerate(zip(self.layers, self.config.layers, strict=True)):
            if i == narrow_at and not whole.is_all_wanted:
                only = whole
                if whole.wanted is not None:
                    only = whole.replace(wanted=_two_at_least(whole.wanted))
                stream, per_layer = jax.tree.map(only.only_wanted, (stream, per_layer))
                where = only.narrowed()
            stream, new_cache, seen = run(
                layer,
                stream,
                norms[i + 1],
                where,
                None if caches is None else caches[i],
                None if spec.kv_owner == i else segments[spec.kv_owner],
                None if per_layer is None else per_layer[:, :, i],
            )
            new_caches.append(new_cache)
            segments.append(seen)
            if i in feature_layers:
                features[i] = stream.value
        assert isinstance(stream.normed, Array)  # a head rounds nothing
        hidden = where.only_wanted(stream.normed)
        if whole.wanted is not None:
            hidden = hidden[:, : whole.wanted.shape[1]]
        return LayersOutput(
            hidden,
            tuple(features[i] for i in feature_layers),
            None if caches is None else tuple(new_caches),
            tuple(segments),
        )

    def first_behind_keys(self, feature_layers: tuple[int, ...]) -> int:
        """Return the first layer whose output for a token no other token depends on.

        These layers have no keys and values of their own. E4B has 18 such layers of 42, E2B 20 of
        35. A drafter that reads features of late layers leaves fewer.
        """
        return 1 + max(*(spec.kv_owner for spec in self.config.layers), *feature_layers, -1)

    def distinct_experts(
        self, tokens: Int[Array, "B T"], where: Placement, caches: Caches
    ) -> Int[Array, " L"]:
        stream = Residual(self.embed(tokens), self.config.rms_norm_eps)
        counts = []
        for layer, cache in zip(self.layers, caches, strict=True):
            norm = layer.norm_before()
            stream = stream.norm(norm)
            behind_attention, _, _ = layer.attention_block(stream, where, cache, None)
            chosen, _ = layer.experts.route(behind_attention.value)
            used = jnp.zeros(self.config.num_experts, jnp.int32).at[chosen].set(1)
            counts.append(jnp.sum(used, dtype=jnp.int32))
            # The norm of what follows does not matter here.
            stream = run_layer(layer, stream, norm, where, cache, None, None)[0]
        return jnp.stack(counts)


class Embedder(nnx.Module):
    """The tied embedding: scaled rows on the way in, the raw table as head on the way out."""

    def __init__(self, config: Gemma4Config, *, dtype: jnp.dtype):
        v, d = config.vocab_size, config.hidden_size
        axes = ("vocab", None)
        self.table = param(
            v, d, dtype=dtype, fan_in=d, axes=axes, contracting_axes=(1,), table=True
        )

    def embed(self, tokens: Int[Array, "B T"], *, scaled: bool = True) -> Float[Array, "B T D"]:
        """Look tokens up; scaled by sqrt(D) rounded to the weight dtype (31B in bfloat16: 73.5)."""
        x = whole_rows(self.table[tokens])
        return x * rounded_sqrt(x.shape[-1], x.dtype) if scaled else x

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Multiply by the table, in float32."""
        return table_logits(x, self.table[...])


class PerLayerInputs(nnx.Module):
    """The second embedding of E2B and E4B: a small vector for every token and layer."""

    def __init__(self, config: Gemma4Config, *, dtype: jnp.dtype):
        d, n, p = config.hidden_size, config.num_layers, config.per_layer_input_size
        v = config.per_layer_vocab_size
        self.table = param(v, n * p, dtype=dtype, fan_in=p, axes=("vocab", None), lookup=True)
        self.projection = param(d, n, p, dtype=dtype, fan_in=d)
        self.norm = param(p, dtype=dtype)
        self.eps = config.rms_norm_eps

    def __call__(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T L P"]:
        d, n, p = self.projection.shape
        # Ids past this table (placeholders of other modalities) read row 0, as transformers does.
        ids = jnp.where(tokens < self.table.shape[0], tokens, 0)
        looked_up = whole_rows(self.table[ids]).reshape(*tokens.shape, n, p) * rounded_sqrt(
            p, x.dtype
        )
        projected = project(x, self.projection[...])
        # In bfloat16 neither D^-0.5 nor 2^-0.5 is rounded before it multiplies.
        projected = (projected.astype(jnp.float32) * d**-0.5).astype(x.dtype)
        projected = rms_norm(projected, self.norm[...], self.eps)
        out = ((projected + looked_up).astype(jnp.float32) * 2**-0.5).astype(x.dtype)
        return materialize(out)


class DecoderLayer(nnx.Module):
    """One layer: attention, MLP (with experts beside it, if any), per-layer input, layer scalar:

        x = x + norm(attention(norm(x)))
        x = x + norm(mlp(norm(x)))
        x = x + norm(per_layer(x))
        x = x * scalar

    E2B and E4B have the third line. With experts the second one is

        x = x + norm(norm(mlp(norm(x))) + norm(experts(norm(x))))

    `Residual` says how the norms are joined with the sums.
    """

    def __init__(self, config: Gemma4Config, index: int, *, dtype: jnp.dtype):
        d, p = config.hidden_size, config.per_layer_input_size
        self.pre_attention_norm = param(d, dtype=dtype)
        spec = config.layers[index]
        full = spec.window is None
        self.attention = Attention(
            d,
            spec,
            owns_kv=config.owns_kv(index),
            lends_kv=any(spec.kv_owner == index for spec in config.layers[index + 1 :]),
            values_are_keys=config.k_eq_v and full,
            norm_values=True,
            score_scale=1.0,
            rope_theta=config.full_rope_theta if full else config.rope_theta,
            rotary_factor=config.full_partial_rotary_factor if full else 1.0,
            rope_factor=config.full_rope_factor if full else 1.0,
            eps=config.rms_norm_eps,
            dtype=dtype,
        )
        self.post_attention_norm = param(d, dtype=dtype)
        self.pre_mlp_norm = param(d, dtype=dtype)
        self.mlp = GatedMLP(d, config.mlp_width_of(index), activation="gelu_tanh", dtype=dtype)
        self.post_mlp_norm = param(d, dtype=dtype)
        if config.num_experts:
            self.dense_post_norm = param(d, dtype=dtype)
            self.experts_pre_norm = param(d, dtype=dtype)
            self.experts = Experts(config, dtype=dtype)
            self.experts_post_norm = param(d, dtype=dtype)
        if p:
            self.per_layer_gate = param(d, p, dtype=dtype, fan_in=d)
            self.per_layer_out = param(p, d, dtype=dtype, fan_in=p)
            self.per_layer_norm = param(d, dtype=dtype)
        self.scalar = param(1, dtype=dtype)
        self.has_experts, self.has_per_layer = bool(config.num_experts), bool(p)

    def __call__(
        self,
        x: Residual,
        where: Placement,
        cache: KVCache | None,
        shared: tuple[KVSegment, ...] | None,
        per_layer: Float[Array, "B T P"] | None,
    ) -> tuple[Sum, KVCache | None, tuple[KVSegment, ...]]:
        """Return the layer's output, its cache after the writes, and the K/V its queries saw.

        Args:
          x: the stream, normed with `pre_attention_norm`.
          cache, shared: as `Attention` takes them.
          per_layer: the layer's own input of each token, where the model has such.
        """
        x, cache, segments = self.attention_block(x, where, cache, shared)
        with jax.named_scope("mlp"):
            h = self.mlp.sums(x.normed)
        if self.has_experts:
            with jax.named_scope("experts"):
                for_experts, to_router = x.norms[1:]
                assert isinstance(for_experts, Array)  # experts round weights only
                assert isinstance(to_router, Array)
                routed = self.experts(for_experts, to_router, where.real)
            h = (Branch(h, self.dense_post_norm[...]), Branch(routed, self.experts_post_norm[...]))
        out = x.add(h, self.post_mlp_norm[...])
        if self.has_per_layer:
            assert per_layer is not None
            x = out.norm()
            with jax.named_scope("per_layer_input"):
                out = x.add(self.per_layer_block(x.value, per_layer), self.per_layer_norm[...])
        return out.times(self.scalar[...]), cache, segments

    def norm_before(self) -> NextNorm:
        """Return the norm of the stream that the layer reads."""
        return norm_for(self.pre_attention_norm[...], self.attention.qkv[...])

    def attention_block(
        self,
        x: Residual,
        where: Placement,
        cache: KVCache | None,
        shared: tuple[KVSegment, ...] | None,
    ) -> tuple[Residual, KVCache | None, tuple[KVSegment, ...]]:
        """Return the stream behind attention, normed for MLP, experts and router."""
        with jax.named_scope("attention"):
            h, cache, segments = self.attention(x.normed, where, cache, shared)
            readers: tuple[NextNorm, ...] = (
                norm_for(self.pre_mlp_norm[...], self.mlp.gate_up[...]),
            )
            if self.has_experts:
                router = RouterScale(self.experts.router_scale[...])
                readers = (*readers, self.experts_pre_norm[...], router)
            return x.add(h, self.post_attention_norm[...]).norm(*readers), cache, segments

    def per_layer_block(
        self, x: Float[Array, "B T D"], per_layer: Float[Array, "B T P"]
    ) -> Float[Array, "B T D"]:
        """Return the per-layer branch: a gate of x, times the layer's input, projected back."""
        gated = gelu_tanh(project(x, self.per_layer_gate[...])) * per_layer
        return project(materialize(gated), self.per_layer_out[...])


@traced_once
def run_layer(
    layer: DecoderLayer, x: Residual, next_norm: NextNorm, *args: Any
) -> tuple[Residual, KVCache | None, tuple[KVSegment, ...]]:
    """Run a layer, and norm its output for the next layer, or for the head."""
    out, cache, segments = layer(x, *args)
    return out.norm(next_norm), cache, segments


def _two_at_least(rows: Int[Array, "B R"]) -> Int[Array, "B _"]:
    """Repeat a single row, for the reason that `pallas_kernels.common.single_row` gives."""
    return jnp.repeat(rows, 2, axis=1) if rows.size == 1 else rows
