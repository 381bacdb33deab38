"""DFlash: a block drafter that fills masked positions in one pass, from the target's own features.

The drafter reads its context as features, not as tokens. Features are the outputs of a few target
layers. They are concatenated, fused by one matrix, and normed. Each draft layer projects the
context to keys and values once, and caches them. A draft is one pass over a block, which is
[anchor, mask, mask, ...]. The queries of the block see the cached context and the block itself.

Source: z-lab/dflash `dflash/model.py`. The attention masks of training are those of SpecForge
`specforge/modeling/draft/dflash.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec import cache as kv
from jaxspec.cache import KVCache, KVSegment, Paging
from jaxspec.configs.base import LayerType
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.drafters.base import Draft, Drafter, Draws, Kept, TargetView
from jaxspec.drafters.selector import Block, Independent, Selector
from jaxspec.mesh import whole_rows
from jaxspec.models.attention import (
    KV_WEIGHT_AXES,
    OUT_WEIGHT_AXES,
    Q_WEIGHT_AXES,
    attend,
    project_qkv,
)
from jaxspec.models.layers import (
    GatedMLP,
    project,
    rms_norm,
    rope_frequencies,
    rounded_sqrt,
    softcap,
    table_logits,
)
from jaxspec.models.target import Target
from jaxspec.options import Tree
from jaxspec.sampling import suppress
from jaxspec.shapes import Array, DTypeLike, Float, Int
from jaxspec.weights.model_def import param
from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.qkv import Destination

DFlashState = tuple[KVCache, ...]
"""Context keys and values of every draft layer. Draft blocks never enter it."""

_NO_SOFTCAP = 1e6  # so high a cap bends no logit, and unlike infinity it can be multiplied with


class DFlashDrafter(Drafter[DFlashState]):
    """A DFlash drafter. It uses the target's embedding and head where it has none of its own."""

    absorbs_again = True
    absorbs_together = True
    drafts_by_slot = True
    reads_last_hidden_only = True

    def __init__(self, config: DFlashConfig, *, dtype: jnp.dtype):
        d, c = config.hidden_size, config.feature_size * len(config.feature_layers)
        self.config = config
        self.mask_token_id: int | Array = config.mask_token_id
        self.softcap: float | Array | None = config.final_logit_softcap
        self.fuse = param(c, d, dtype=dtype, fan_in=c, axes=("inputs", None), contracting_axes=(0,))
        self.context_norm = param(d, dtype=dtype)
        self.layers = nnx.List([self.layer(i, dtype=dtype) for i in range(config.num_layers)])
        self.final_norm = param(d, dtype=dtype)
        table: dict[str, Any] = dict(dtype=dtype, fan_in=d, axes=("vocab", None), table=True)
        if config.own_embedding:
            self.embedding = param(config.vocab_size, d, lookup=True, **table)
        if config.own_head:
            size = config.draft_vocab_size or config.vocab_size
            self.head = param(size, d, contracting_axes=(1,), **table)
        if config.draft_vocab_size is not None:
            self.ids = param(config.draft_vocab_size, dtype=jnp.dtype(jnp.int32))
        self.selector: Selector = Independent()

    def layer(self, index: int, *, dtype: jnp.dtype) -> DFlashLayer:
        """Make a layer."""
        return DFlashLayer(self.config, index, dtype=dtype)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.config.feature_layers

    @property
    def max_draft_tokens(self) -> int:
        return self.config.max_draft_tokens

    def assume(self, values: Mapping[str, Array]) -> None:
        self.mask_token_id = nnx.data(values["mask_token_id"])
        self.softcap = nnx.data(jnp.minimum(values["final_logit_softcap"], _NO_SOFTCAP))
        for layer in self.layers:
            layer.theta = nnx.data(values["rope_theta"])

    def init_state(
        self, batch: int, *, cache_length: int, dtype: DTypeLike, paging: Paging | None = None
    ) -> DFlashState:
        c = self.config
        return tuple(
            kv.init_cache(
                batch,
                c.num_kv_heads,
                c.head_dim,
                cache_length=cache_length,
                window=self._ring_window(kind),
                slack=c.max_draft_tokens + 1,
                dtype=dtype,
                paging=paging,
            )
            for kind in c.layer_types
        )

    def _ring_window(self, kind: LayerType) -> int | None:
        """Return how many keys the anchor sees in a layer of this kind, its own included; None: all."""
        if kind == "full" or self.config.sliding_window is None:
            return None
        return self.config.sliding_window + self.config.window_from_anchor

    def context(self, features: tuple[Float[Array, "B T F"], ...]) -> Float[Array, "B T D"]:
        """Fuse target features into the context that every draft layer reads."""
        fused = project(whole_rows(jnp.concatenate(features, axis=-1)), self.fuse[...])
        return rms_norm(whole_rows(fused), self.context_norm[...], self.config.rms_norm_eps)

    def absorb(self, state: DFlashState, kept: Kept) -> DFlashState:
        with jax.named_scope("dflash_absorb"):
            context = self.context(kept.features)
            positions = kept.start[:, None] + jnp.arange(context.shape[1], dtype=jnp.int32)[None, :]
            new = []
            for layer, cache in zip(self.layers, state, strict=True):
                into = kv.destination(cache, positions.shape[1], kept.start, kept.count, kept.slots)
                k, v = layer.keys_and_values(context, positions, into)
                new.append(cache.replace(k=k, v=v))
            return tuple(new)

    def draft(
        self,
        state: DFlashState,
        view: TargetView,
        anchors: Int[Array, " B"],
        lengths: Int[Array, " B"],
        *,
        num_draft_tokens: int,
        tree: Tree | None = None,
        draws: Draws | None = None,
    ) -> Draft:
        context = tuple(kv.view(cache, lengths, view.slots) for cache in state)
        depth = num_draft_tokens if tree is None else tree.depth
        # The positions of a block see each other, so all of them are there, whichever are verified.
        hidden, logits = self.block(
            context,
            view.target,
            anchors,
            lengths,
            num_draft_tokens=depth,
            num_wanted=view.num_verified,
        )
        ids = None if self.config.draft_vocab_size is None else self.ids[...]
        logits = suppress(logits, view.suppress_tokens, ids)
        block = Block(anchors, hidden, logits, ids, self.config.vocab_size)
        if tree is not None:
            return self.selector.tree(block, tree, num_draft_tokens)
        draft = self.selector.chain(block, draws)
        if view.wants_confidence:
            draft = draft.replace(confidence=self.selector.confidences(block, draft.tokens))
        return draft

    def _in_window(
        self, segment: KVSegment, lengths: Int[Array, " B"], kind: LayerType
    ) -> KVSegment:
        """Hide keys before a window that begins before the anchor."""
        window = self.config.sliding_window
        if kind == "full" or window is None or not self.config.window_from_anchor:
            return segment
        seen = segment.positions >= lengths[:, None] - window
        return segment._replace(positions=jnp.where(seen, segment.positions, -1))

    def block(
        self,
        context: tuple[KVSegment, ...],
        target: Target,
        anchors: Int[Array, " B"],
        lengths: Int[Array, " B"],
        *,
        num_draft_tokens: int,
        num_wanted: int | None = None,
    ) -> tuple[Float[Array, "B G D"], Float[Array, "B G V"]]:
        """Return hidden states and logits of the slots of a block that predict.

        Args:
          context: each layer's keys and values at positions below `lengths`.
          lengths: the position of each row's anchor.
          num_draft_tokens: slots that predict.
          num_wanted: the number of positions to return, from the first one on; None: all.
        """
        c = self.config
        num_masks = num_draft_tokens - (1 - c.first_slot)
        masks = jnp.full((anchors.shape[0], num_masks), self.mask_token_id, anchors.dtype)
        tokens = jnp.concatenate([anchors[:, None], masks], axis=1)
        positions = lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        with jax.named_scope("dflash_draft"):
            x = self.embed(tokens, target)
            for layer, segment, kind in zip(self.layers, context, c.layer_types, strict=True):
                x = layer(x, positions, self._in_window(segment, lengths, kind))
            last = None if num_wanted is None else num_wanted + c.first_slot
            x = rms_norm(x[:, c.first_slot : last], self.final_norm[...], c.rms_norm_eps)
            return x, softcap(self.head_logits(x, target), self.softcap)

    def block_logits(self, *args: Any, **options: Any) -> Float[Array, "B G V"]:
        """Return the logits of `block`, which has the arguments."""
        return self.block(*args, **options)[1]

    def embed(self, tokens: Int[Array, "B T"], target: Target) -> Float[Array, "B T D"]:
        """Look tokens of a block up."""
        if not self.config.own_embedding:
            return target.embed(tokens, scaled=self.config.scale_embeddings)
        x = whole_rows(self.embedding[tokens])
        return x * rounded_sqrt(x.shape[-1], x.dtype) if self.config.scale_embeddings else x

    def head_logits(self, x: Float[Array, "B G D"], target: Target) -> Float[Array, "B G V"]:
        """Multiply normed rows of a block by the head."""
        if not self.config.own_head:
            return target.head(x)
        return table_logits(x, self.head[...], rounding=True)


class DFlashWithHead(DFlashDrafter):
    """A DFlash drafter that drafts with a quantised copy of the target's head.

    Embeddings are still the target's. The copy is made when a pair is loaded, see `draft_head`.
    """

    def __init__(self, config: DFlashConfig, *, dtype: jnp.dtype):
        super().__init__(config, dtype=dtype)
        v, d = config.vocab_size, config.hidden_size
        axes = ("vocab", None)
        self.head = param(v, d, dtype=dtype, fan_in=d, axes=axes, contracting_axes=(1,), table=True)

    def head_logits(self, x: Float[Array, "B G D"], target: Target) -> Float[Array, "B G V"]:
        del target
        return table_logits(x, self.head[...], rounding=True)


class DFlashLayer(nnx.Module):
    """A Qwen3-style pre-norm layer whose queries see cached context and their own block."""

    def __init__(
        self,
        config: DFlashConfig,
        index: int,
        *,
        dtype: jnp.dtype,
        activation: Activation = "silu",
        values_are_keys: bool = False,
        norm_values: bool = False,
        score_scale: float | None = None,
        rotary: tuple[float, float] = (1.0, 1.0),
    ):
        """Make a layer.

        Args:
          values_are_keys: whether values are the raw keys (k = v).
          norm_values: whether values are normed, without a weight.
          score_scale: the factor of scores; None for one by the head's size.
          rotary: the last two arguments of `rope_frequencies`.
        """
        d, k, h = config.hidden_size, config.num_kv_heads, config.head_dim
        g = config.num_heads // k
        self.input_norm = param(d, dtype=dtype)
        # The context needs keys and values but no queries, so queries have a matrix of their own.
        # A slice of one fused matrix would be copied in every step.
        self.q = param(d, k, g, h, dtype=dtype, fan_in=d, axes=Q_WEIGHT_AXES, contracting_axes=(0,))
        pair = 1 if values_are_keys else 2
        self.kv = param(
            d, k, pair, h, dtype=dtype, fan_in=d, axes=KV_WEIGHT_AXES, contracting_axes=(0,)
        )
        self.q_norm = param(h, dtype=dtype)
        self.k_norm = param(h, dtype=dtype)
        into: dict[str, Any] = dict(
            fan_in=k * g * h, axes=OUT_WEIGHT_AXES, contracting_axes=(0, 1, 2)
        )
        self.out = param(k, g, h, d, dtype=dtype, **into)
        self.mlp_norm = param(d, dtype=dtype)
        self.mlp = GatedMLP(d, config.intermediate_size, activation=activation, dtype=dtype)
        self.norm_values, self.rotary = norm_values, rotary
        self.score_scale = h**-0.5 if score_scale is None else score_scale
        self.causal = config.causal[index]
        sliding = config.layer_types[index] == "sliding" and not config.window_from_anchor
        self.window = config.sliding_window if sliding else None
        self.theta: float | Array = config.rope_theta
        self.eps = config.rms_norm_eps

    def keys_and_values(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        into: Destination | None = None,
    ) -> tuple[Float[Array, "_ K _ H"], Float[Array, "_ K _ H"]]:
        """Project rows to keys and values.

        Args:
          x: rows of the context, as they are, or of the block, normed.
          into: caches to write keys and values to, which are returned in their place.
        """
        _, k, v = project_qkv(
            x,
            self.kv[...],
            None,
            self.k_norm[...],
            positions,
            self._frequencies(),
            groups=0,
            eps=self.eps,
            norm_values=self.norm_values,
            into=into,
        )
        assert k is not None
        assert v is not None
        return k, v

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], context: KVSegment
    ) -> Float[Array, "B T D"]:
        normed = rms_norm(x, self.input_norm[...], self.eps)
        x = x + self.attention(normed, positions, context)
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps))

    def attention(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], context: KVSegment
    ) -> Float[Array, "B T D"]:
        """Attend from each row of the block to the context and to the block itself."""
        q, _, _ = project_qkv(
            x,
            self.q[...],
            self.q_norm[...],
            None,
            positions,
            self._frequencies(),
            groups=self.out.shape[1],
            eps=self.eps,
        )
        k, v = self.keys_and_values(x, positions)
        assert q is not None
        out = attend(
            q,
            positions,
            (context, KVSegment(k, v, positions)),
            scale=self.score_scale,
            window=self.window,
            causal=self.causal,
        )
        return whole_rows(project(out, self.out[...], inputs=3))

    def _frequencies(self) -> Float[Array, " H2"]:
        return rope_frequencies(self.q_norm.shape[0], self.theta, *self.rotary)
