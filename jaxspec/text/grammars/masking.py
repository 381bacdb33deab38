"""Packed masks of grammars inside compiled programs, and their effect on logits.

Bit i % 32 of word i // 32 of a mask is 1 if token i may come next.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.shapes import Array, Bool, Float, UInt32


def words_of(vocab_size: int) -> int:
    """Return the number of words of a mask."""
    return -(-vocab_size // 32)


def unpacked(masks: UInt32[Array, "*at words"], vocab_size: int) -> Bool[Array, "*at V"]:
    """Return packed masks as one boolean for each token."""
    bits = masks[..., None] >> jnp.arange(32, dtype=jnp.uint32) & jnp.uint32(1)
    return bits.reshape(*masks.shape[:-1], -1)[..., :vocab_size].astype(bool)


def masked(
    logits: Float[Array, "*at V"], masks: UInt32[Array, "*at words"]
) -> Float[Array, "*at V"]:
    """Set the logits of forbidden tokens to -inf. Logits of NaN or +inf become NaN there."""
    may = unpacked(masks, logits.shape[-1])
    # -0.0 changes no number, nor the sign of 0.
    return logits + jnp.where(may, jnp.float32(-0.0), jnp.float32(-jnp.inf))
