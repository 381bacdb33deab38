"""Masks of grammars inside compiled programs: where they come from, and what they do to logits.

A mask is packed: bit i % 32 of word i // 32 says whether token i may come next.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.experimental import io_callback

from jaxspec.shapes import Array, Bool, Float, Int, UInt32
from jaxspec.text.grammars.guides import NOBODY, answer
from jaxspec.text.grammars.matcher import ALL


class Allowed(struct.PyTreeNode):
    """What the rows of a block may choose.

    Attributes:
      masks: packed.
      states: of an automaton, which the masks are of; None where the host was asked.
    """

    masks: UInt32[Array, "B T words"]
    states: Int[Array, "B T"] | None = None


def words_of(vocab_size: int) -> int:
    """Return how many words a mask has."""
    return -(-vocab_size // 32)


def ask_guides(
    numbers: Int[Array, " B"],
    tokens: Int[Array, "B M"],
    num_tokens: Int[Array, " B"],
    drafts: Int[Array, "B G"],
    *,
    vocab_size: int,
    most_new: int,
    force: bool,
) -> tuple[Int[Array, "B G"], UInt32[Array, "B G+1 words"]]:
    """Ask the host what rows may choose. The program waits for it, unless no row has a guide.

    Args:
      numbers: of guides, `NOBODY` for rows without.
      tokens: what rows have said, the first `num_tokens` of each.
      most_new: tokens that a row can have got since this was last asked.
      force: whether drafts may be replaced.

    Returns:
      The drafts and the masks, as of `guides.answer`.
    """
    words = words_of(vocab_size)
    shapes = (
        jax.ShapeDtypeStruct(drafts.shape, drafts.dtype),
        jax.ShapeDtypeStruct((*_rows(drafts), words), np.uint32),
    )
    columns = num_tokens[:, None] - most_new + jnp.arange(most_new, dtype=jnp.int32)
    recent = jnp.take_along_axis(tokens, jnp.maximum(columns, 0), axis=1)

    def ask() -> Any:
        host = functools.partial(_on_host, words=words, force=force)
        return tuple(io_callback(host, shapes, numbers, num_tokens, recent, drafts))

    def free() -> Any:
        return drafts, jnp.full(shapes[1].shape, ALL)

    with jax.named_scope("grammar"):
        return lax.cond(jnp.any(numbers != NOBODY), ask, free)


def _rows(drafts: Array) -> tuple[int, int]:
    b, g = drafts.shape
    return b, g + 1


def _on_host(*given: Any, **options: Any) -> Any:
    return answer(*map(np.asarray, given), **options)


def unpacked(masks: UInt32[Array, "*at words"], vocab_size: int) -> Bool[Array, "*at V"]:
    """Return packed masks as one boolean a token."""
    bits = masks[..., None] >> jnp.arange(32, dtype=jnp.uint32) & jnp.uint32(1)
    return bits.reshape(*masks.shape[:-1], -1)[..., :vocab_size].astype(bool)


def masked(
    logits: Float[Array, "*at V"], masks: UInt32[Array, "*at words"]
) -> Float[Array, "*at V"]:
    """Return logits with -inf for the tokens that packed masks forbid. Of those that are not sound it makes NaN."""
    may = unpacked(masks, logits.shape[-1])
    # -0.0 changes no number, nor the sign of 0.
    return logits + jnp.where(may, jnp.float32(-0.0), jnp.float32(-jnp.inf))
