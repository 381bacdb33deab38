"""Losses of drafters, as sums over the slots behind many anchors.

Read `LossWeights`, then `loss_of`. With p the target's distribution behind a token and q the drafter's, a
slot i behind an anchor adds exp(-i / decay) times

    cross_entropy * -log q(label) + kl * KL(p || q) + total_variation * sum |p - q|

where the label is the text's token. DFlash2 chooses among candidates: the scores that these are taken
from have terms of their own. So have the clusters of an assistant. A predicted confidence adds the
cross-entropy with the probability that a draft is accepted, sum min(p, q). Slots that answers do not
reach add nothing.

Everything is a sum, also the weights that a sum is divided by in the end: parts of a batch add up, in
whichever way they are divided.

Source: deepseek-ai/DeepSpec, sgl-project/SpecForge and vllm-project/speculators, which train with the same
terms; the papers of DFlash for weights that decay along the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import lax

from jaxspec.drafters.base import AnyDrafter
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.dflash2 import DFlash2Drafter
from jaxspec.drafters.dspark import DSparkDrafter
from jaxspec.drafters.mtp import MTPDrafter
from jaxspec.shapes import Array, Bool, Float, Int
from jaxspec.training.options import LossWeights
from jaxspec.training.passes import (
    Predictions,
    Reading,
    Scores,
    frozen_tables,
    num_slots,
    predict,
    prepare,
)

T = TypeVar("T")

ANCHORS_AT_ONCE = 16  # of each text, so that logits of few blocks are held at a time


USUAL: Mapping[type[Any], LossWeights] = {
    DFlash2Drafter: LossWeights(base_kl=1.0),
    DSparkDrafter: LossWeights(cross_entropy=0.1, total_variation=0.9, confidence=1.0),
    DFlashDrafter: LossWeights(),
    MTPDrafter: LossWeights(decay=4.5),
}
"""The weights of each kind of drafter: DeepSpec's for DSpark, and speculators' terms for DFlash2.

An assistant's are those of the bundled one, whose slots weigh 0.8 times as much as the one before.
"""


def usual_weights(module: type[Any]) -> LossWeights:
    """Return the usual weights for drafters of a class."""
    return next(weights for kind, weights in USUAL.items() if issubclass(module, kind))


class Sums(struct.PyTreeNode):
    """Sums over slots and anchors.

    Attributes:
      loss, weight: their ratio is the loss.
      accepted, anchors: the tokens that greedy drafts are right about in a row, behind so many anchors.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    accepted: Float[Array, ""]
    anchors: Float[Array, ""]

    @classmethod
    def zero(cls) -> Sums:
        """Return the sums of nothing."""
        return cls(*(jnp.zeros(()) for _ in range(4)))

    def __add__(self, other: Sums) -> Sums:
        return jax.tree.map(jnp.add, self, other)

    @property
    def mean_loss(self) -> Float[Array, ""]:
        """The loss of a slot of weight 1."""
        return self.loss / jnp.maximum(self.weight, 1e-6)

    @property
    def acceptance_length(self) -> Float[Array, ""]:
        """The tokens a verify step would commit, if drafts are right where they are the text's tokens.

        Anchors are of all places alike. Decoding has more of them where drafts fail, so its own is lower.
        """
        return 1 + self.accepted / jnp.maximum(self.anchors, 1)


# --- anchors -----------------------------------------------------------------------------------------


def may_anchor(answers: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
    """Return the places of anchors: tokens of answers that are followed by one more."""
    following = jnp.pad(answers[:, 1:], ((0, 0), (0, 1)))
    return answers & following & (jnp.arange(answers.shape[1]) > 0)


def draw_anchors(
    key: Array, answers: Bool[Array, "B S"], count: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Draw anchors of each text, none twice.

    Returns:
      Positions, and which are anchors; the others fill rows of texts with too few places.
    """
    places = may_anchor(answers)
    noise = jnp.where(places, jax.random.uniform(key, places.shape), -1.0)
    highest, anchors = lax.top_k(noise, min(count, places.shape[1]))
    real = highest >= 0
    return jnp.where(real, anchors, 1).astype(jnp.int32), real


def slots_reached(
    answers: Bool[Array, "B S"], anchors: Int[Array, "B A"], count: int
) -> Bool[Array, "B A G"]:
    """Return the slots whose tokens are of the answer, as are all before them."""
    at = anchors[..., None] + jnp.arange(1, count + 1)
    inside = at < answers.shape[1]
    flat = jnp.minimum(at, answers.shape[1] - 1).reshape(len(anchors), -1)
    of_answer = jnp.take_along_axis(answers, flat, axis=1).reshape(at.shape) & inside
    return jnp.cumprod(of_answer, axis=-1).astype(bool)


# --- losses ------------------------------------------------------------------------------------------


def loss_of(
    drafter: AnyDrafter,
    reading: Reading,
    answers: Bool[Array, "B S"],
    anchors: Int[Array, "B A"],
    real: Bool[Array, "B A"],
    weights: LossWeights,
    at_once: int = ANCHORS_AT_ONCE,
) -> Sums:
    """Return the sums of the loss at some anchors of texts that the target has read.

    Logits are made for `at_once` anchors of each text at a time, and made again in the backward pass. The
    gradients of these pieces add up in float32, whatever the dtype of the weights.

    Args:
      real: which are anchors; others count nothing.
    """
    count = num_slots(drafter)
    b, a = anchors.shape
    at_once = min(at_once, a)
    pieces = -(-a // at_once)
    padding = ((0, 0), (0, pieces * at_once - a))
    anchors = jnp.pad(anchors, padding, constant_values=1)
    real = jnp.pad(real, padding)

    def sums(drafter: AnyDrafter, once: Any, anchors: Array, real: Array) -> Sums:
        alive = slots_reached(answers, anchors, count) & real[..., None]
        logits = None
        if weights.need_target:
            at = anchors[..., None] + jnp.arange(count, dtype=jnp.int32)
            logits = reading.logits_at(at)
        return loss_of_slots(predict(drafter, reading, once, anchors), logits, alive, real, weights)

    once = prepare(drafter, reading)
    if pieces == 1:
        return sums(drafter, once, anchors, real)
    # What a loop's body closes over has one dtype, in which its gradients add up.
    graphdef, state = nnx.split(drafter)
    state = nnx.to_flat_state(state)
    fixed = frozen_tables(drafter)
    trained = {path: x for path, x in state if path[-1] not in fixed}
    others = [(path, x) for path, x in state if path[-1] in fixed]
    exact, as_before = _in_float32((trained, once))

    def piece(both: tuple[Int[Array, "B P"], Bool[Array, "B P"]]) -> Sums:
        trained, once = as_before(exact)
        state = nnx.from_flat_state([*trained.items(), *others])
        return sums(nnx.merge(graphdef, state), once, *both)

    def by_piece(x: Array) -> Array:
        return x.reshape(b, pieces, -1).swapaxes(0, 1)

    done = lax.map(jax.checkpoint(piece), (by_piece(anchors), by_piece(real)))
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), done)


def _in_float32(tree: T) -> tuple[T, Callable[[T], T]]:
    """Return a tree with its floating-point arrays in float32, and a function that rounds them as they were."""
    dtypes = jax.tree.map(lambda x: x.dtype, tree)

    def exact(x: Array) -> Array:
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(exact, tree), lambda tree: jax.tree.map(
        lambda x, dtype: x.astype(dtype), tree, dtypes
    )


def loss_of_slots(
    made: Predictions,
    target_logits: Float[Array, "B A G V"] | None,
    alive: Bool[Array, "B A G"],
    real: Bool[Array, "B A"],
    weights: LossWeights,
) -> Sums:
    """Return the sums of the loss of slots.

    Args:
      target_logits: None where no term needs them.
      alive: the slots that count.
      real: which anchors count.
    """
    count = alive.shape[-1]
    decay = jnp.ones(count)
    if weights.decay is not None:
        decay = jnp.exp(-jnp.arange(count, dtype=jnp.float32) / weights.decay)
    if weights.survival:
        decay = (1 - weights.survival) * decay + weights.survival * reached(made.final, alive)
    each = jnp.where(alive, decay, 0.0)
    terms = weights.cross_entropy * cross_entropy(made.final)
    target = None if target_logits is None else jax.nn.softmax(lax.stop_gradient(target_logits))
    if target is not None:
        p = of_tokens(target, made.final)
        if weights.kl:
            terms += weights.kl * divergence(p, made.final.logits)
        if weights.total_variation:
            terms += weights.total_variation * distance(target, made.final)
    if made.base is not None:
        terms += weights.base_cross_entropy * cross_entropy(made.base)
        if weights.base_kl and target is not None:
            terms += weights.base_kl * divergence(of_tokens(target, made.base), made.base.logits)
    if made.clusters is not None:
        terms += weights.clusters * cross_entropy(made.clusters)
    if made.confidence is not None and weights.confidence and target is not None:
        accepted = 1 - distance(target, made.final) / 2
        terms += weights.confidence * binary_cross_entropy(made.confidence, accepted)
    best = jnp.argmax(made.final.logits, axis=-1)
    right = jnp.cumprod((best == made.final.label) & made.final.in_reach & alive, axis=-1)
    return Sums(
        jnp.sum(terms * each),
        jnp.sum(each),
        jnp.sum(right).astype(jnp.float32),
        jnp.sum(real).astype(jnp.float32),
    )


def reached(scores: Scores, alive: Bool[Array, "B A G"]) -> Float[Array, "B A G"]:
    """Return how often decoding needs each slot: the chance to reach it, over the tokens of the step.

    The factor 2 makes it 1 in the first slot of steps of two tokens.
    """
    right = jnp.exp(-lax.stop_gradient(cross_entropy(scores)))
    right = jnp.where(alive & scores.in_reach & (scores.label >= 0), right, 0.0)
    chain = jnp.cumprod(right, axis=-1)
    before = jnp.concatenate([jnp.ones_like(chain[..., :1]), chain[..., :-1]], axis=-1)
    return 2 * before / (1 + jnp.sum(chain, axis=-1, keepdims=True))


def cross_entropy(scores: Scores) -> Float[Array, "B A G"]:
    """Return -log q(label); 0 where the label has no score, or is never drafted."""
    label = jnp.maximum(scores.label, 0)[..., None]
    log_q = jnp.take_along_axis(jax.nn.log_softmax(scores.logits), label, axis=-1)[..., 0]
    return jnp.where((scores.label >= 0) & ~jnp.isneginf(log_q), -log_q, 0.0)


def of_tokens(target: Float[Array, "B A G V"], scores: Scores) -> Float[Array, "B A G C"]:
    """Return the target's probabilities of the tokens that are scored."""
    if scores.tokens is None:
        return target
    if scores.tokens.ndim == 1:
        return target[..., scores.tokens]
    return jnp.take_along_axis(target, scores.tokens, axis=-1)


def divergence(
    p: Float[Array, "B A G C"], logits: Float[Array, "B A G C"]
) -> Float[Array, "B A G"]:
    """Return KL(p || q) of slots. Tokens outside of `p` add a constant, which is left out."""
    log_q = jax.nn.log_softmax(logits)
    terms = p * (jnp.log(jnp.maximum(p, 1e-30)) - jnp.where(p > 0, log_q, 0.0))
    return jnp.sum(jnp.where(jnp.isneginf(log_q), 0.0, terms), axis=-1)


def distance(target: Float[Array, "B A G V"], scores: Scores) -> Float[Array, "B A G"]:
    """Return sum |p - q| over all tokens of the target: 2 - 2 sum min(p, q)."""
    p, q = of_tokens(target, scores), jax.nn.softmax(scores.logits)
    outside = 1 - jnp.sum(p, axis=-1)
    return jnp.sum(jnp.abs(p - q), axis=-1) + jnp.maximum(outside, 0)


def binary_cross_entropy(
    predicted: Float[Array, "B A G"], probability: Float[Array, "B A G"]
) -> Float[Array, "B A G"]:
    """Return the cross-entropy of predicted probabilities with true ones, which get no gradient."""
    probability = lax.stop_gradient(probability)
    predicted = jnp.clip(predicted, 1e-6, 1 - 1e-6)
    return -(probability * jnp.log(predicted) + (1 - probability) * jnp.log1p(-predicted))
