"""DFlash2: DFlash with convolutions inside the block, and a walk over a few candidates of each slot.

A layer mixes neighbours of a block before and after its attention and its MLP, with kernels that depend
on what it mixes. The context is not mixed. The selector takes the likeliest tokens of each slot and
scores each pair of neighbours: a token's own logit, and how well it follows the token before.

Source: vllm-project/vllm#52816.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.cache import KVSegment
from jaxspec.configs.dflash2 import DFlash2Config
from jaxspec.drafters.chain import Choices
from jaxspec.drafters.dflash import DFlashDrafter, DFlashLayer, DFlashWithHead
from jaxspec.drafters.selector import Block, Selector
from jaxspec.mesh import whole_rows
from jaxspec.models.layers import project, rms_norm
from jaxspec.models.target import Target
from jaxspec.models.xla import materialize, top_k
from jaxspec.shapes import Array, Float, Int
from jaxspec.weights.model_def import param


class DFlash2Drafter(DFlashDrafter):
    """A DFlash2 drafter."""

    config: DFlash2Config

    def __init__(self, config: DFlash2Config, *, dtype: jnp.dtype):
        super().__init__(config, dtype=dtype)
        self.selector = CandidateSelector(config, dtype=dtype)

    @property
    def max_children(self) -> int:
        return self.config.selector_top_k

    def layer(self, index: int, *, dtype: jnp.dtype) -> DFlashLayer:
        return DFlash2Layer(self.config, index, dtype=dtype)

    def embed(self, tokens: Int[Array, "B T"], target: Target) -> Float[Array, "B T D"]:
        x = super().embed(tokens, target)
        scale = self.config.input_embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def head_logits(self, x: Float[Array, "B G D"], target: Target) -> Float[Array, "B G V"]:
        return super().head_logits(x, target) * self.config.output_multiplier


class DFlash2WithHead(DFlashWithHead, DFlash2Drafter):
    """A DFlash2 drafter that drafts with a quantised copy of the target's head."""


class DFlash2Layer(DFlashLayer):
    """A layer of DFlash with convolutions around its two parts."""

    def __init__(self, config: DFlash2Config, index: int, *, dtype: jnp.dtype):
        super().__init__(config, index, dtype=dtype)
        self.attention_conv = BlockConvolution(config, dtype=dtype)
        self.mlp_conv = BlockConvolution(config, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], context: KVSegment
    ) -> Float[Array, "B T D"]:
        normed = rms_norm(x, self.input_norm[...], self.eps)
        kernels = self.attention_conv.kernels(normed)
        out = self.attention(convolve(normed, kernels[:, :, 0]), positions, context)
        x = x + convolve(out, kernels[:, :, 1])
        normed = rms_norm(x, self.mlp_norm[...], self.eps)
        kernels = self.mlp_conv.kernels(normed)
        return x + convolve(self.mlp(convolve(normed, kernels[:, :, 0])), kernels[:, :, 1])


class BlockConvolution(nnx.Module):
    """The kernels of two convolutions, before and after a part of a layer."""

    def __init__(self, config: DFlash2Config, *, dtype: jnp.dtype):
        d, taps, g = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.base = param(2, taps, d, dtype=dtype)
        self.dynamic = param(d, 2, taps, d // g, dtype=dtype, fan_in=d)
        self.group = g

    def kernels(self, x: Float[Array, "B T D"]) -> Float[Array, "B T 2 taps D"]:
        """Return the kernels at each position: fixed ones, and what depends on the row there."""
        dynamic = project(x, self.dynamic[...])
        return whole_rows(self.base[...] + jnp.repeat(dynamic, self.group, axis=-1))


def convolve(
    x: Float[Array, "B T D"], kernels: Float[Array, "B T taps D"]
) -> Float[Array, "B T D"]:
    """Sum each row and the ones before it in the block, each channel with weights of its own."""
    out = x * kernels[:, :, 0]
    for tap in range(1, kernels.shape[2]):
        earlier = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]]
        out = out + earlier * kernels[:, :, tap]
    return out


class Candidates(NamedTuple):
    """The candidates of all slots.

    Attributes:
      scores: their logits.
      tokens: their ids.
      queries: what a slot multiplies the vector of the token before with.
      keys: their vectors.
    """

    scores: Float[Array, "B G K"]
    tokens: Int[Array, "B G K"]
    queries: Float[Array, "B G R"]
    keys: Float[Array, "B G K R"]


class CandidateSelector(Selector):
    """Scores the likeliest tokens of a slot by the token before: value + <A[before] * H(hidden), B[token]>.

    The distribution that a draft is drawn from has these tokens alone.
    """

    def __init__(self, config: DFlash2Config, *, dtype: jnp.dtype):
        v, d, r = config.vocab_size, config.hidden_size, config.selector_rank
        table: dict[str, Any] = dict(dtype=dtype, fan_in=r, axes=("vocab", None), lookup=True)
        self.predecessor = param(v, r, **table)
        self.successor = param(v, r, **table)
        self.hidden = param(d, r, dtype=dtype, fan_in=d)
        self.top_k = config.selector_top_k

    def begin(self, block: Block) -> Candidates:
        scores, index = materialize(top_k(materialize(block.logits), self.top_k))
        tokens = index if block.tokens is None else block.tokens[index]
        queries = whole_rows(project(block.hidden, self.hidden[...])).astype(jnp.float32)
        keys = whole_rows(self.successor[...][tokens]).astype(jnp.float32)
        return Candidates(scores, tokens, queries, keys)

    def step(
        self,
        block: Block,
        slot: int,
        carry: Candidates,
        tokens: Int[Array, "B F"],
        origins: Int[Array, "B F"],
    ) -> tuple[Candidates, Choices]:
        del block, origins
        before = whole_rows(self.predecessor[...][tokens]).astype(jnp.float32)
        pairs = jnp.einsum(
            "bfr,bkr->bfk",
            before * carry.queries[:, slot, None],
            carry.keys[:, slot],
            precision=lax.Precision.HIGHEST,
        )
        choices = carry.tokens[:, slot, None]
        ids = jnp.broadcast_to(choices, pairs.shape)
        return carry, Choices(carry.scores[:, slot, None] + pairs, ids)
