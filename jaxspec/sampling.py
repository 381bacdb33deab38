"""From logits to tokens: filters, row-wise randomness, and the draws themselves.

Nothing here sorts the vocabulary: top-k and top-p each find a threshold by fixing the bits of a float
from the highest down, one pass of comparing and adding a bit.

Randomness belongs to rows. A draw is named by the row's key, the row's step number, the slot in the step
and a stream; no name is used twice, and no draw depends on the rest of the batch.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxspec.shapes import Array, Float, Int


class SamplingParams(struct.PyTreeNode):
    """How each row samples. Plain values on the device: changing them compiles nothing."""

    temperature: Float[Array, " B"]  # 0: greedy
    top_k: Int[Array, " B"]  # 0: off
    top_p: Float[Array, " B"]  # in (0, 1]; 1: off


class Logprobs(struct.PyTreeNode):
    """Natural logs of the probabilities of tokens."""

    target: Float[
        Array, "B M"
    ]  # under the target as it is: no temperature, no filter, nothing suppressed
    sampled: Float[Array, "B M"]  # under the distribution that was sampled from; 0 in greedy rows


class Stream(enum.IntEnum):
    """What a draw is for."""

    ACCEPT = 0
    TOKEN = 1  # the bonus token: after a rejection from the residual distribution


def suppress(logits: Float[Array, "... V"], tokens: tuple[int, ...]) -> Float[Array, "... V"]:
    """Make tokens impossible."""
    if not tokens:
        return logits
    banned = np.zeros(logits.shape[-1], bool)
    banned[list(tokens)] = True
    return jnp.where(banned, -jnp.inf, logits)


def shape_logits(logits: Float[Array, "B T V"], sampling: SamplingParams) -> Float[Array, "B T V"]:
    """Apply temperature, then top-k, then top-p; what is filtered out becomes -inf.

    The softmax of the result is the distribution that decoding follows. Ties at a threshold all stay.
    Rows of temperature 0 keep temperature 1 here; they never look at it.
    """
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # Relative to the best: however small the temperature, nothing overflows but to -inf.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = logits / temperature[:, None, None]
    ordered = _ordered_bits(logits)
    vocab = logits.shape[-1]

    k = jnp.where((sampling.top_k > 0) & (sampling.top_k < vocab), sampling.top_k, vocab)[:, None]
    at_least_k = _largest_threshold(
        lambda t: jnp.sum(ordered >= t[..., None], axis=-1) >= k,
        logits.shape[:2],
        needed=jnp.any(k < vocab),
    )
    kept = ordered >= at_least_k[..., None]

    top_p = sampling.top_p[:, None]
    weights = jnp.where(kept, jnp.exp(logits), 0.0)
    # The best token has weight 1 and stays, even when top-p is 0 in float32.
    mass = jnp.maximum(jnp.sum(weights, axis=-1) * top_p, jnp.finfo(jnp.float32).tiny)
    at_least_p = _largest_threshold(
        lambda t: jnp.sum(jnp.where(ordered >= t[..., None], weights, 0.0), axis=-1) >= mass,
        logits.shape[:2],
        needed=jnp.any(top_p < 1),
    )
    # Rounding in the sums must not cut anything where top-p is off.
    kept &= (ordered >= at_least_p[..., None]) | (top_p >= 1)[..., None]
    return jnp.where(kept, logits, -jnp.inf)


def logprobs_of(
    tokens: Int[Array, "B T"],
    logits: Float[Array, "B T V"],
    suppressed: tuple[int, ...],
    sampling: SamplingParams,
) -> Logprobs:
    """Return what each token's own row of logits says of it."""

    def of(logits: Float[Array, "B T V"]) -> Float[Array, "B T"]:
        chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=-1)[:, :, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    def shaped() -> Float[Array, "B T"]:
        sampled = of(shape_logits(suppress(logits, suppressed), sampling))
        return jnp.where(sampling.temperature[:, None] > 0, sampled, 0.0)

    any_samples = jnp.any(sampling.temperature > 0)
    none = jnp.zeros(tokens.shape, jnp.float32)
    return Logprobs(of(logits), lax.cond(any_samples, shaped, lambda: none))


def _ordered_bits(x: Float[Array, "..."]) -> Array:
    """Map float32 to uint32 so that order is kept."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return bits ^ jnp.where(bits >> 31 == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))


def _largest_threshold(holds, shape: tuple[int, ...], *, needed: Array) -> Array:
    """Return the largest uint32 t for which `holds(t)`, which must fall from true to false once.

    Where no row needs it the loop does not run, and the answer is 0, which keeps everything.
    """

    def fix_bit(i: Array, t: Array) -> Array:
        candidate = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, t)

    return lax.fori_loop(0, jnp.where(needed, 32, 0), fix_bit, jnp.zeros(shape, jnp.uint32))


def argmax(x: Float[Array, "... V"]) -> Int[Array, "..."]:
    """Return the first index of the largest value.

    Two plain reductions: `jnp.argmax` is one over pairs, which XLA's CPU backend does not vectorise.
    """
    largest = jnp.max(x, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x == largest, index, x.shape[-1] - 1), axis=-1)


def fold_keys(
    keys: Array, steps: Int[Array, " B"], slots: Int[Array, "B R"], stream: Stream
) -> Array:
    """Return a key for each row and slot of this step: [B, R] typed keys."""

    def one(key: Array, step: Array, slot: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), slot), stream)

    return jax.vmap(jax.vmap(one, in_axes=(None, None, 0)))(keys, steps, slots)


def sample(logits: Float[Array, "B V"], keys: Array) -> Int[Array, " B"]:
    """Draw a token from softmax(logits) for each row, with that row's key (Gumbel-max)."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    return argmax(logits + noise)
