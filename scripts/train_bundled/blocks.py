"""Many draft blocks of one text at once, through the very functions that decoding calls.

The context of a row is projected once, and the block at each of its anchors sees the part before it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.cache import KVSegment
from jaxspec.drafters.base import TargetView
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.models.gemma4 import Gemma4
from jaxspec.params import Graph
from jaxspec.shapes import Array, Float, Int, Params
from scripts.train_bundled import recipe
from scripts.train_bundled.optimize import cross_entropy


def dflash_graph(dtype: str) -> Graph:
    return Graph(DFlashDrafter, recipe.DFLASH, dtype)


def initial_params(graph: Graph, seed: int) -> Params:
    """Return float32 weights; what layers add to the residual stream begins small."""
    params = Graph(graph.module, graph.config, "float32").random_params(seed)
    return {
        name: value * 0.5 if name.endswith((".out", ".down")) else value
        for name, value in params.items()
    }


def block_logits(
    target: Gemma4,
    drafter: DFlashDrafter,
    features: tuple[Float[Array, "B S D"], ...],
    text: Int[Array, "B S"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "A B G V"]:
    """Return the draft logits of the blocks whose anchors are these positions of the text.

    Args:
      features: the target's, over the whole text.
    """
    positions = jnp.broadcast_to(jnp.arange(text.shape[1]), text.shape)
    context = drafter.context(features)
    keys_and_values = [layer.keys_and_values(context, positions) for layer in drafter.layers]

    def draft(lengths: Int[Array, " B"]) -> Float[Array, "B G V"]:
        visible = jnp.where(positions < lengths[:, None], positions, -1)
        segments = tuple(
            KVSegment(k.swapaxes(1, 2), v.swapaxes(1, 2), visible) for k, v in keys_and_values
        )
        return drafter.block_logits(
            segments,
            TargetView(embedder=target.embedder),
            jnp.take_along_axis(text, lengths[:, None], axis=1)[:, 0],
            lengths,
            num_draft_tokens=drafter.max_draft_tokens,
        )

    return jax.vmap(draft)(anchors.T)


def block_loss(
    logits: Float[Array, "A B G V"], text: Int[Array, "B S"], anchors: Int[Array, "B A"]
) -> tuple[Array, Array]:
    """Return the weighted loss of draft blocks against the text, and the acceptance length it gives."""
    a, b, g, _ = logits.shape
    at = anchors.T[:, :, None] + jnp.arange(g + 1)
    tokens = jnp.take_along_axis(text[None], at.reshape(a, b, -1), axis=2)
    labels = tokens[:, :, 1:]
    alive = jnp.cumprod(tokens[:, :, :-1] != recipe.EOS, axis=-1)  # nothing is drafted past the end
    weights = jnp.exp(-jnp.arange(g) / recipe.POSITION_DECAY) * alive
    loss = jnp.sum(cross_entropy(logits, labels) * weights) / jnp.sum(weights)
    right = jnp.cumprod((jnp.argmax(logits, axis=-1) == labels) * alive, axis=-1)
    return loss, 1 + jnp.mean(jnp.sum(right, axis=-1))
