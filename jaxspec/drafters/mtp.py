"""MTP: Gemma 4's assistants, which draft token by token from the target's own keys and values.

An assistant has four layers with queries but without K/V of their own. Its sliding layers read the
cache of the target's last sliding layer that owns K/V. Its full layer reads the cache of the
target's last full layer. These caches do not change during a round, nor does the position of the
query. Only a state of the target's width passes from one draft to the next. The first state is the
target's hidden state of the last token that is in the caches. Each step makes the next state:

    [embedding of the token, state] -> pre_projection -> layers -> norm -> logits
                                                                        -> post_projection -> state

Source: transformers `models/gemma4_assistant`. `MTPConfig` says where engines differ.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec import cache as kv
from jaxspec.cache import KVSegment, Paging
from jaxspec.configs.base import LayerType
from jaxspec.configs.mtp import MTPConfig
from jaxspec.drafters.base import Draft, Drafter, Draws, Kept, TargetView
from jaxspec.drafters.chain import Choices, expand_of, walk
from jaxspec.drafters.tree import grow
from jaxspec.mesh import whole_rows
from jaxspec.models.attention import OUT_WEIGHT_AXES, Q_WEIGHT_AXES, attend, project_qkv
from jaxspec.models.layers import (
    GatedMLP,
    contract,
    norm_for,
    project,
    rope_frequencies,
    sums_of,
    table_logits,
)
from jaxspec.models.residual import Residual, Sum
from jaxspec.models.target import Target
from jaxspec.models.xla import multiply_rows, traced_once
from jaxspec.options import Tree
from jaxspec.quantised.kv import KVStorage
from jaxspec.shapes import Array, DTypeLike, Float, Int
from jaxspec.weights.model_def import param
from pallas_kernels.common.single_row import repeat_if_single
from pallas_kernels.norms import NextNorm
from pallas_kernels.rounding import Rounded, Sums

MTPState = Float[Array, "N D"]
"""The target's post-norm hidden state of the last token that is in its caches."""

# At most so many rows of scores are ranked by counting instead of sorting. For 8 rows both take
# equally long on an H200.
MOST_RANKED = 4

# The longest chain of drafts, which is that of a DFlash block. Assistants themselves have no limit.
MAX_DRAFT_TOKENS = 15


class FrozenKV(NamedTuple):
    """The target's K/V and the last position to read of them. Both stay the same for a round.

    Attributes:
      last: the last position in the caches, n - 1; one for each row, or in training for each node.
      stored: the storage of the target's K/V; None: as computed.
    """

    segments: dict[LayerType, KVSegment]
    last: Int[Array, "B #F"]
    stored: dict[LayerType, KVStorage | None] | None = None


class MTPDrafter(Drafter[MTPState]):
    """An MTP assistant. It uses the target's embedding and caches, and has a head of its own."""

    absorbs_again = True
    absorbs_together = True
    drafts_by_slot = True
    reads_last_hidden_only = True

    def __init__(self, config: MTPConfig, *, dtype: jnp.dtype):
        d, backbone, vocab = config.hidden_size, config.backbone_hidden_size, config.vocab_size
        self.config = config
        both = 2 * backbone
        self.pre_projection = param(both, d, dtype=dtype, fan_in=both, contracting_axes=(0,))
        self.layers = nnx.List([MTPLayer(config, kind, dtype=dtype) for kind in config.layer_types])
        self.final_norm = param(d, dtype=dtype)
        self.post_projection = param(d, backbone, dtype=dtype, fan_in=d, contracting_axes=(0,))
        # With centroids a step reads few rows of the head. A sum over devices would cost more than
        # these reads, so the head is not split.
        head_axes = () if config.num_centroids else ("vocab", None)
        self.head = param(
            vocab, d, dtype=dtype, fan_in=d, axes=head_axes, contracting_axes=(1,), table=True
        )
        if config.num_centroids:
            self.centroids = param(d, config.num_centroids, dtype=dtype, fan_in=d)
            self.token_ordering = param(vocab, dtype=jnp.dtype(jnp.int32))

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def max_draft_tokens(self) -> int:
        return MAX_DRAFT_TOKENS

    @property
    def default_draft_tokens(self) -> int:
        return min(self.config.num_draft_tokens, MAX_DRAFT_TOKENS)

    def assume(self, values: Mapping[str, Array]) -> None:
        thetas = {"sliding": values["rope_theta"], "full": values["full_rope_theta"]}
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            layer.attention.theta = nnx.data(thetas[kind])

    def init_state(
        self, batch: int, *, cache_length: int, dtype: DTypeLike, paging: Paging | None = None
    ) -> MTPState:
        del cache_length, paging
        return jnp.zeros((batch, self.config.backbone_hidden_size), dtype)

    def absorb(self, state: MTPState, kept: Kept) -> MTPState:
        with jax.named_scope("mtp_absorb"):
            # Of a prompt only the last token's hidden state was computed.
            last = jnp.clip(kept.count - 1, 0, kept.hidden.shape[1] - 1)[:, None, None]
            hidden = jnp.take_along_axis(kept.hidden, last, axis=1)[:, 0].astype(state.dtype)
            return kept.put(state, hidden)

    def draft(
        self,
        state: MTPState,
        view: TargetView,
        anchors: Int[Array, " B"],
        lengths: Int[Array, " B"],
        *,
        num_draft_tokens: int,
        tree: Tree | None = None,
        draws: Draws | None = None,
    ) -> Draft:
        kinds = dict.fromkeys(self.config.layer_types)
        frozen = FrozenKV(
            {kind: kv.view(view.last_kv(kind), lengths, view.slots) for kind in kinds},
            lengths[:, None] - 1,
            {kind: view.stored_kv(kind) for kind in kinds},
        )
        states = view.rows_of(state)[:, None]

        def step(
            states: Float[Array, "B E D"], tokens: Int[Array, "B F"], origins: Int[Array, "B F"]
        ) -> tuple[Float[Array, "B F D"], Choices]:
            if tree is not None:
                states = jnp.take_along_axis(states, origins[:, :, None], axis=1)
            hidden, states = self.step(view.target, tokens, states, frozen)
            return states, self.choices(hidden, view.suppress_tokens)

        if tree is not None:
            begin = expand_of(step), states, anchors
            return grow(*begin, tree=tree, num_draft_tokens=num_draft_tokens)
        # Each draft follows from those before it alone, so the chain may end early.
        wanted = num_draft_tokens if view.num_verified is None else view.num_verified
        vocab_size = self.config.vocab_size
        options: Any = dict(num_draft_tokens=wanted, vocab_size=vocab_size, draws=draws)
        return walk(step, states, anchors, **options)

    def step(
        self,
        target: Target,
        tokens: Int[Array, "B F"],
        states: Float[Array, "B F D"],
        frozen: FrozenKV,
    ) -> tuple[Float[Array, "B F H"], Float[Array, "B F D"]]:
        """Take one step from F nodes of each row at once. The nodes do not see each other.

        Returns:
          The normed output that `choices` reads, and the states for the next step.
        """
        return repeat_if_single(
            functools.partial(self._step, target),
            tokens,
            states,
            frozen,
            single=tokens.size == 1,
            repeat=lambda t, s, kv: (jnp.repeat(t, 2, axis=1), jnp.repeat(s, 2, axis=1), kv),
            first=lambda both: (both[0][:, :1], both[1][:, :1]),
        )

    def _step(
        self,
        target: Target,
        tokens: Int[Array, "B F"],
        states: Float[Array, "B F D"],
        frozen: FrozenKV,
    ) -> tuple[Float[Array, "B F H"], Float[Array, "B F D"]]:
        c = self.config
        last = jnp.broadcast_to(frozen.last, tokens.shape)
        rotary = last + (1 if c.query_position == "next" else 0)
        with jax.named_scope("mtp_step"):
            x = jnp.concatenate([target.embed(tokens), states], axis=-1)
            x = project(x, self.pre_projection[...])
            norms = [*(layer.norm_before() for layer in self.layers), self.final_norm[...]]
            stream = Residual(x, c.rms_norm_eps).norm(norms[0])
            for i, (layer, kind) in enumerate(zip(self.layers, c.layer_types, strict=True)):
                stored = None if frozen.stored is None else frozen.stored[kind]
                read = frozen.segments[kind], stored
                stream = run_layer(layer, stream, norms[i + 1], rotary, last, *read)
            hidden = stream.normed
            assert isinstance(hidden, Array)  # a head rounds nothing
            return hidden, project(hidden, self.post_projection[...])

    def choices(self, hidden: Float[Array, "B F H"], suppressed: tuple[int, ...] = ()) -> Choices:
        """Return the tokens that may come next and their float32 logits.

        Suppressed tokens have a logit of -inf. With centroids, only the tokens of the best few
        clusters are returned, and no other logit is computed.
        """
        with jax.named_scope("mtp_head"):
            if self.config.num_centroids:
                return self.choices_in(hidden, self.best_clusters(hidden), suppressed)
            b, f, h = hidden.shape
            rows = hidden.reshape(b * f, h)
            logits = multiply_rows(lambda r: table_logits(r, self.head[...]), rows)
            return self._suppressed(Choices(logits.reshape(b, f, -1), None), suppressed)

    def cluster_scores(self, hidden: Float[Array, "B F H"]) -> Float[Array, "B F C"]:
        """Return the score of each cluster of tokens."""
        return contract("bfh,hc->bfc", hidden, self.centroids[...])

    def best_clusters(self, hidden: Float[Array, "B F H"]) -> Int[Array, "B F K"]:
        """Return the clusters of which tokens are scored, the best first."""
        return _top_indices(self.cluster_scores(hidden), self.config.num_top_centroids)

    def cluster_of(self, tokens: Int[Array, "B F"]) -> Int[Array, "B F"]:
        """Return the cluster of each token."""
        size = self.config.vocab_size // self.config.num_centroids
        return (jnp.argsort(self.token_ordering[...]) // size).astype(jnp.int32)[tokens]

    def choices_in(
        self,
        hidden: Float[Array, "B F H"],
        clusters: Int[Array, "B F K"],
        suppressed: tuple[int, ...] = (),
    ) -> Choices:
        """Return the tokens of clusters and their logits, as `choices` does of the best ones."""
        b, f, _ = hidden.shape
        tokens = self.token_ordering[...].reshape(self.config.num_centroids, -1)[clusters]
        tokens = tokens.reshape(b, f, -1)
        logits = contract("bfh,bfch->bfc", hidden, self.head[tokens])
        return self._suppressed(Choices(logits, tokens), suppressed)

    def _suppressed(self, choices: Choices, suppressed: tuple[int, ...]) -> Choices:
        suppressed = tuple(sorted({*suppressed, *self.config.suppress_tokens}))
        if not suppressed:
            return choices
        ids = choices.tokens
        if ids is None:
            ids = jnp.arange(self.config.vocab_size, dtype=jnp.int32)
        banned = jnp.any(ids[..., None] == jnp.asarray(suppressed), axis=-1)
        return choices._replace(logits=jnp.where(banned, -jnp.inf, choices.logits))


def _top_indices(scores: Float[Array, "B F C"], k: int) -> Int[Array, "B F K"]:
    """Return the indices of the k largest scores, the largest score first.

    Of equal scores the lower index comes first. On GPUs `lax.top_k` sorts, which is slow for few
    rows. E4B with 5 drafts at batch 1 on an H200 takes 4.32 ms a step with ranks, and 4.39 ms with
    sorting.
    """

    def by_sorting(scores: Array) -> Array:
        return lax.top_k(scores, k)[1]

    if scores.size > MOST_RANKED * scores.shape[-1]:
        return by_sorting(scores)
    by_rank = functools.partial(ranked_indices, k=k)
    return lax.platform_dependent(scores, cuda=by_rank, default=by_sorting)


def ranked_indices(scores: Float[Array, "B F C"], k: int) -> Int[Array, "B F K"]:
    """Return the indices of `lax.top_k`, found by counting the scores that are ahead of each."""
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    one, other = scores[..., :, None], scores[..., None, :]
    ahead = (other > one) | ((other == one) & (index < index[:, None]))
    rank = jnp.sum(ahead, axis=-1, dtype=jnp.int32)
    placed = rank[..., None, :] == jnp.arange(k, dtype=jnp.int32)[:, None]
    return jnp.max(jnp.where(placed, index, 0), axis=-1)


class MTPLayer(nnx.Module):
    """A Gemma 4 layer whose queries read frozen K/V. Names are as in `gemma4.DecoderLayer`."""

    def __init__(self, config: MTPConfig, kind: LayerType, *, dtype: jnp.dtype):
        d = config.hidden_size
        self.pre_attention_norm = param(d, dtype=dtype)
        self.attention = FrozenAttention(config, kind, dtype=dtype)
        self.post_attention_norm = param(d, dtype=dtype)
        self.pre_mlp_norm = param(d, dtype=dtype)
        self.mlp = GatedMLP(d, config.intermediate_size, activation="gelu_tanh", dtype=dtype)
        self.post_mlp_norm = param(d, dtype=dtype)
        self.scalar = param(1, dtype=dtype)

    def __call__(
        self,
        x: Residual,
        rotary: Int[Array, "B F"],
        last: Int[Array, "B F"],
        segment: KVSegment,
        stored: KVStorage | None,
    ) -> Sum:
        """Return the layer's output.

        Args:
          x: the residual stream, already normed with `pre_attention_norm`.
          rotary, last, segment, stored: as in `FrozenAttention`.
        """
        h = self.attention(x.normed, rotary, last, segment, stored)
        before_mlp = norm_for(self.pre_mlp_norm[...], self.mlp.gate_up[...])
        x = x.add(h, self.post_attention_norm[...]).norm(before_mlp)
        return x.add(self.mlp.sums(x.normed), self.post_mlp_norm[...]).times(self.scalar[...])

    def norm_before(self) -> NextNorm:
        """Return the norm of the stream that the layer reads."""
        return norm_for(self.pre_attention_norm[...], self.attention.qkv[...])


@traced_once
def run_layer(layer: MTPLayer, x: Residual, next_norm: NextNorm, *args: Any) -> Residual:
    """Run a layer, then norm its output for the next layer or for the head."""
    return layer(x, *args).norm(next_norm)


class FrozenAttention(nnx.Module):
    """Grouped-query attention to the target's keys and values. It has none of its own."""

    def __init__(self, config: MTPConfig, kind: LayerType, *, dtype: jnp.dtype):
        sliding = kind == "sliding"
        d = config.hidden_size
        k = config.num_kv_heads if sliding else config.full_num_kv_heads
        h = config.head_dim if sliding else config.full_head_dim
        g = config.num_heads // k
        self.qkv = param(
            d, k, g, h, dtype=dtype, fan_in=d, axes=Q_WEIGHT_AXES, contracting_axes=(0,)
        )
        self.q_norm = param(h, dtype=dtype)
        into: dict[str, Any] = dict(
            fan_in=k * g * h, axes=OUT_WEIGHT_AXES, contracting_axes=(0, 1, 2)
        )
        self.out = param(k, g, h, d, dtype=dtype, **into)
        self.window = config.num_window_keys if sliding else None
        self.theta: float | Array = config.rope_theta if sliding else config.full_rope_theta
        self.partial_factor = 1.0 if sliding else config.full_partial_rotary_factor
        self.rope_factor = 1.0 if sliding else config.full_rope_factor
        self.eps = config.rms_norm_eps

    def __call__(
        self,
        x: Float[Array, "B F H"] | Rounded,
        rotary: Int[Array, "B F"],
        last: Int[Array, "B F"],
        segment: KVSegment,
        stored: KVStorage | None,
    ) -> Float[Array, "B F H"] | Sums:
        """Attend from some nodes to the target's keys and values.

        Args:
          rotary: the position of each query in the rotary embedding.
          last: the last position that each query sees. A window counts back from it.
          stored: the storage of these keys and values; None: as computed.
        """
        frequencies = rope_frequencies(
            self.q_norm.shape[0], self.theta, self.partial_factor, self.rope_factor
        )
        groups = self.out.shape[1]
        q, _, _ = project_qkv(
            x,
            self.qkv[...],
            self.q_norm[...],
            None,
            rotary,
            frequencies,
            groups=groups,
            eps=self.eps,
            stored=stored,
        )
        assert q is not None
        out = attend(q, last, (segment,), scale=1.0, window=self.window, stored=stored)
        return whole_rows(sums_of(out, self.out[...], inputs=3))
