"""DSpark: DFlash with a bias on the logits of a slot by the token before it, and confidences.

With e the vector of the token before, h the hidden state of the slot, W the matrix of all biases:

    vanilla   bias = W e
    gated     bias = W (sigmoid(G [h, e]) * e)
    rnn       [g, c, o] = J [s, e, h];  s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c);  bias = W tanh(o)

The bias is added behind the soft cap. The product with W reads as many rows as the head has, once a slot.

Source: deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import KVSegment
from jaxspec.configs.dspark import DSparkConfig
from jaxspec.drafters.base import Draft, Draws
from jaxspec.drafters.chain import Choices
from jaxspec.drafters.dflash import DFlashDrafter, DFlashLayer, DFlashWithHead
from jaxspec.drafters.selector import Block, Independent, Selector
from jaxspec.mesh import whole_rows
from jaxspec.models.layers import project, rms_norm, table_logits
from jaxspec.shapes import Array, Float, Int
from jaxspec.weights.model_def import param


class DSparkDrafter(DFlashDrafter):
    """A DSpark drafter."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, *, dtype: jnp.dtype):
        super().__init__(config, dtype=dtype)
        self.selector = MarkovSelector(config, dtype=dtype)

    def layer(self, index: int, *, dtype: jnp.dtype) -> DFlashLayer:
        made = GemmaDraftLayer if self.config.gemma_layers else DFlashLayer
        return made(self.config, index, dtype=dtype)


class DSparkWithHead(DFlashWithHead, DSparkDrafter):
    """A DSpark drafter that drafts with a quantised copy of the target's head."""


class GemmaDraftLayer(DFlashLayer):
    """A draft layer with the norms, the values and the scalar of a layer of Gemma 4."""

    def __init__(self, config: DSparkConfig, index: int, *, dtype: jnp.dtype):
        super().__init__(
            config,
            index,
            activation="gelu_tanh",
            values_are_keys=config.k_eq_v,
            norm_values=True,
            score_scale=1.0,
            rotary=(config.rotary_factor, config.rope_factor),
            dtype=dtype,
        )
        self.attention_out_norm = param(config.hidden_size, dtype=dtype)
        self.mlp_out_norm = param(config.hidden_size, dtype=dtype)
        self.scalar = param(1, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], context: KVSegment
    ) -> Float[Array, "B T D"]:
        normed = rms_norm(x, self.input_norm[...], self.eps)
        out = self.attention(normed, positions, context)
        x = x + rms_norm(out, self.attention_out_norm[...], self.eps)
        out = self.mlp(rms_norm(x, self.mlp_norm[...], self.eps))
        return (x + rms_norm(out, self.mlp_out_norm[...], self.eps)) * self.scalar[...]


class MarkovSelector(Selector):
    """Adds a bias to the logits of a slot, by the token before."""

    def __init__(self, config: DSparkConfig, *, dtype: jnp.dtype):
        v, d, r = config.vocab_size, config.hidden_size, config.markov_rank
        size = config.draft_vocab_size or v
        self.rank, self.kind = r, config.markov_head_type
        table: dict[str, Any] = dict(dtype=dtype, axes=("vocab", None))
        if r:
            self.before = param(v, r, fan_in=r, lookup=True, **table)
            self.after = param(size, r, fan_in=r, **table)
        if r and self.kind == "gated":
            self.gate = param(d + r, r, dtype=dtype, fan_in=d + r)
            self.gate_bias = param(r, dtype=dtype)
        if r and self.kind == "rnn":
            self.joint = param(2 * r + d, 3 * r, dtype=dtype, fan_in=2 * r + d)
            self.joint_bias = param(3 * r, dtype=dtype)
        self.has_confidence = config.confidence
        self.confident_after = config.confidence and config.confidence_with_markov
        if config.confidence:
            width = d + r * self.confident_after
            self.confidence = param(width, dtype=dtype)
            self.confidence_bias = param(1, dtype=dtype)

    def chain(self, block: Block, draws: Draws | None = None) -> Draft:
        return super().chain(block, draws) if self.rank else Independent().chain(block, draws)

    def begin(self, block: Block) -> Float[Array, "B 1 R"]:
        return jnp.zeros((block.anchors.shape[0], 1, self.rank), jnp.float32)

    def step(
        self,
        block: Block,
        slot: int,
        carry: Float[Array, "B _ R"],
        tokens: Int[Array, "B F"],
        origins: Int[Array, "B F"],
    ) -> tuple[Float[Array, "B _ R"], Choices]:
        logits = block.logits[:, slot, None]
        if not self.rank:
            return carry, Choices(logits, block.tokens)
        e = self._vectors(tokens)
        h = block.hidden[:, slot, None].astype(jnp.float32)
        h = jnp.broadcast_to(h, (*tokens.shape, h.shape[-1]))
        if self.kind == "gated":
            gate = _linear(jnp.concatenate([h, e], axis=-1), self.gate[...], self.gate_bias[...])
            e = jax.nn.sigmoid(gate) * e
        elif self.kind == "rnn":
            s = jnp.take_along_axis(carry, origins[..., None], axis=1)
            joined = jnp.concatenate([s, e, h], axis=-1)
            g, c, o = jnp.split(_linear(joined, self.joint[...], self.joint_bias[...]), 3, axis=-1)
            g = jax.nn.sigmoid(g)
            carry, e = g * s + (1 - g) * jnp.tanh(c), jnp.tanh(o)
        bias = table_logits(e.astype(self.after.dtype), self.after[...])
        return carry, Choices(logits + bias, block.tokens)

    def confidences(self, block: Block, tokens: Int[Array, "B G"]) -> Float[Array, "B G"]:
        """Return the predicted probabilities that drafts are accepted if all before them are.

        Each depends on drafts before it, and not on its own token. A head without confidences leaves
        it to the backbone.

        Args:
          tokens: the drafts of a chain.
        """
        if not self.has_confidence:
            return super().confidences(block, tokens)
        x = block.hidden.astype(jnp.float32)
        if self.confident_after:
            before = jnp.concatenate([block.anchors[:, None], tokens[:, :-1]], axis=1)
            x = jnp.concatenate([x, self._vectors(before)], axis=-1)
        weight, bias = (w[...].astype(jnp.float32) for w in (self.confidence, self.confidence_bias))
        return jax.nn.sigmoid(jnp.sum(x * weight, axis=-1) + bias)

    def _vectors(self, tokens: Int[Array, "B F"]) -> Float[Array, "B F R"]:
        return whole_rows(self.before[...][tokens]).astype(jnp.float32)


def _linear(
    x: Float[Array, "B F X"], weight: Float[Array, "X Y"], bias: Float[Array, " Y"]
) -> Float[Array, "B F Y"]:
    """Multiply in float32, and add a bias."""
    return project(x, weight.astype(jnp.float32)) + bias.astype(jnp.float32)
