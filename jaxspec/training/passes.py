"""Run a target and a drafter over finished texts, and predict at many places of each text at once.

A place is an anchor: a token that decoding could draft after. The drafter sees there what it sees when
it decodes: of the text what stands before the anchor, and of the slots before what the text has in them.
Its own modules run, those that decode. `read` runs the target once for all anchors of a text. A
`Predictor` then predicts at any of them.

No mask of a text by itself is made. What an anchor sees is said by the positions of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVSegment
from jaxspec.configs.base import LayerType
from jaxspec.drafters.base import AnyDrafter
from jaxspec.drafters.chain import Choices
from jaxspec.drafters.dflash import DFlashDrafter
from jaxspec.drafters.dflash2 import Candidates, CandidateSelector
from jaxspec.drafters.dspark import MarkovSelector
from jaxspec.drafters.mtp import FrozenKV, MTPDrafter
from jaxspec.drafters.selector import Block, Independent, Selector
from jaxspec.mesh import whole_rows
from jaxspec.models.target import Target, placement_of
from jaxspec.quantised.kv import KVStorage
from jaxspec.sampling import suppress
from jaxspec.shapes import Array, Bool, Float, Int


class Reading(struct.PyTreeNode):
    """The target's pass over whole texts.

    Attributes:
      hidden: hidden states after the final norm. Those of a token give the distribution of the next.
      features: of the layers that the drafter reads.
      segments: the keys and values that each layer's queries saw.
      suppress_tokens: never drafted.
    """

    target: Target
    tokens: Int[Array, "B S"]
    hidden: Float[Array, "B S D"]
    features: tuple[Float[Array, "B S D"], ...]
    segments: tuple[tuple[KVSegment, ...], ...]
    suppress_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def tokens_at(self, places: Int[Array, "B *N"]) -> Int[Array, "B *N"]:
        """Return the tokens of the texts at some places. Behind a text, its last column."""
        flat = jnp.clip(places.reshape(len(places), -1), 0, self.tokens.shape[1] - 1)
        return jnp.take_along_axis(self.tokens, flat, axis=1).reshape(places.shape)

    def logits_at(self, places: Int[Array, "B A G"]) -> Float[Array, "B A G V"]:
        """Return the target's logits of the tokens behind some places."""
        b, a, g = places.shape
        flat = jnp.clip(places.reshape(b, a * g, 1), 0, self.tokens.shape[1] - 1)
        logits = self.target.logits(jnp.take_along_axis(self.hidden, flat, axis=1))
        return suppress(logits, self.suppress_tokens).reshape(b, a, g, -1)


class Scores(NamedTuple):
    """Logits, and the label among them.

    Attributes:
      label: index of the text's token among the logits; -1 where it is none of them.
      tokens: the token of each logit, in each slot or in all alike; None: all tokens, in order.
      in_reach: where decoding scores the label too. Elsewhere it was put in its place for training.
    """

    logits: Float[Array, "B A G C"]
    label: Int[Array, "B A G"]
    tokens: Int[Array, "B A G C"] | Int[Array, " C"] | None
    in_reach: Bool[Array, "B A G"]


class Predictions(NamedTuple):
    """Predictions for the tokens behind some anchors, G slots each.

    Attributes:
      final: the scores by which decoding chooses, after the text's own tokens in the slots before.
      base: the scores of all tokens, where a selector takes the best of these. Otherwise None.
      clusters: the scores of an assistant's clusters, in place of tokens; None if it has none.
      confidence: predicted probabilities that drafts are accepted; None if the drafter has none.
    """

    final: Scores
    base: Scores | None = None
    clusters: Scores | None = None
    confidence: Float[Array, "B A G"] | None = None


Predictor = Callable[[Int[Array, "B A"]], Predictions]
"""A function of the positions of anchors, from 1 on."""


def read(
    target: Target,
    drafter: AnyDrafter,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    suppress_tokens: tuple[int, ...] = (),
) -> Reading:
    """Run the target over texts. No gradient goes through.

    Args:
      lengths: of the texts. What follows is padding, of any valid ids.
    """
    where = placement_of(tokens, jnp.zeros_like(lengths), lengths)
    with jax.named_scope("train_target"):
        x = target.embed(tokens)
        done = target.run_layers(tokens, x, where, None, drafter.feature_layers)
    done = jax.lax.stop_gradient(done)
    return Reading(target, tokens, done.hidden, done.features, done.segments, suppress_tokens)


def num_slots(drafter: AnyDrafter) -> int:
    """Return how many tokens behind an anchor a drafter is trained to predict."""
    return drafter.default_draft_tokens


def predictor(drafter: AnyDrafter, reading: Reading) -> Predictor:
    """Return a function that predicts at anchors of the texts that were read.

    Raises:
      TypeError: drafters of this class are not trained.
    """
    for kind, make in _PREDICTORS.items():
        if isinstance(drafter, kind):
            return make(drafter, reading)
    raise TypeError(f"there is no training pass for {type(drafter).__name__}")


def can_train(module: type[Any]) -> bool:
    """Return whether `predictor` takes drafters of a class."""
    return issubclass(module, tuple(_PREDICTORS))


# --- blocks: DFlash, DFlash2, DSpark ---------------------------------------------------------------


def _blocks(drafter: DFlashDrafter, reading: Reading) -> Predictor:
    """Predict blocks. The context of a text is projected once, for the blocks of all of its anchors."""
    config, count = drafter.config, num_slots(drafter)
    b, s = reading.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    context = drafter.context(reading.features)
    pairs = [layer.keys_and_values(context, positions) for layer in drafter.layers]
    ids = None if config.draft_vocab_size is None else drafter.ids[...]

    def at_one_anchor(anchors: Int[Array, " B"]) -> Predictions:
        seen = jnp.where(positions < anchors[:, None], positions, -1)
        segments = tuple(KVSegment(k, v, seen) for k, v in pairs)
        tokens = reading.tokens_at(anchors[:, None] + jnp.arange(count + 1, dtype=jnp.int32))
        hidden, logits = drafter.block(
            segments, reading.target, tokens[:, 0], anchors, num_draft_tokens=count
        )
        logits = suppress(logits, reading.suppress_tokens, ids)
        block = Block(tokens[:, 0], hidden, logits, ids, config.vocab_size)
        return _selected(drafter.selector, block, tokens[:, 1:])

    def predict(anchors: Int[Array, "B A"]) -> Predictions:
        with jax.named_scope("train_drafter"):
            made = jax.vmap(at_one_anchor, in_axes=1, out_axes=1)(anchors)
        if ids is None:
            return made
        final, base = made.final, made.base
        if final.tokens is None:
            final = final._replace(tokens=ids)
        return made._replace(final=final, base=base and base._replace(tokens=ids))

    return predict


def _selected(selector: Selector, block: Block, labels: Int[Array, "B G"]) -> Predictions:
    """Score the slots of a block after the text's own tokens. Ids that all slots share are left out."""
    base = _scores_of_all(block.logits, block.tokens, labels)
    if isinstance(selector, CandidateSelector):
        begun, in_reach = _with_labels(selector, selector.begin(block), base, labels)
        choices = follow(selector, block, labels, begun)
        assert choices.tokens is not None
        at = jnp.argmax(choices.tokens == labels[..., None], axis=-1)
        has = jnp.any(choices.tokens == labels[..., None], axis=-1)
        label = jnp.where(has, at, -1).astype(jnp.int32)
        return Predictions(Scores(choices.logits, label, choices.tokens, in_reach), base)
    final, confidence = base, None
    if isinstance(selector, MarkovSelector):
        if selector.rank:
            choices = follow(selector, block, labels, selector.begin(block))
            final = base._replace(logits=choices.logits)
        if selector.has_confidence:
            confidence = selector.confidences(block, labels)
    else:
        assert isinstance(selector, Independent), type(selector)
    return Predictions(final, confidence=confidence)


def follow(selector: Selector, block: Block, tokens: Int[Array, "B G"], begun: Any) -> Choices:
    """Return the choices of all slots where the slots before have these tokens.

    Args:
      begun: what `Selector.begin` returned.
    """
    before = jnp.concatenate([block.anchors[:, None], tokens[:, :-1]], axis=1)
    origin = jnp.zeros((len(tokens), 1), jnp.int32)
    carry, steps = begun, []
    for slot in range(tokens.shape[1]):
        carry, choices = selector.step(block, slot, carry, before[:, slot, None], origin)
        steps.append(choices)
    ids = steps[0].tokens
    if ids is not None and ids.ndim == 3:
        ids = jnp.concatenate([choices.tokens for choices in steps], axis=1)
    return Choices(jnp.concatenate([choices.logits for choices in steps], axis=1), ids)


def _scores_of_all(
    logits: Float[Array, "B G C"], ids: Int[Array, " C"] | None, labels: Int[Array, "B G"]
) -> Scores:
    """Return the scores of a drafter's whole vocabulary."""
    if ids is not None:  # of a part of the target's
        same = labels[..., None] == ids
        labels = jnp.where(jnp.any(same, axis=-1), jnp.argmax(same, axis=-1), -1).astype(jnp.int32)
    return Scores(logits, labels, None, labels >= 0)


def _with_labels(
    selector: CandidateSelector, best: Candidates, base: Scores, labels: Int[Array, "B G"]
) -> tuple[Candidates, Bool[Array, "B G"]]:
    """Put the text's token in the place of the last candidate, in slots that lack it.

    Source: vllm-project/speculators, whose loss of DFlash2 does the same.

    Returns:
      The candidates, and the slots that had the token already.
    """
    in_reach = jnp.any(best.tokens == labels[..., None], axis=-1)
    put = ~in_reach & (base.label >= 0)
    score = jnp.take_along_axis(base.logits, jnp.maximum(base.label, 0)[..., None], axis=-1)
    key = whole_rows(selector.successor[...][labels]).astype(best.keys.dtype)
    return (
        best._replace(
            tokens=best.tokens.at[..., -1].set(jnp.where(put, labels, best.tokens[..., -1])),
            scores=best.scores.at[..., -1].set(jnp.where(put, score[..., 0], best.scores[..., -1])),
            keys=best.keys.at[..., -1, :].set(
                jnp.where(put[..., None], key, best.keys[..., -1, :])
            ),
        ),
        in_reach,
    )


# --- chains: MTP -----------------------------------------------------------------------------------


def _chains(drafter: MTPDrafter, reading: Reading) -> Predictor:
    """Predict chains. Each step is fed with the text's token, and with the state of the step before."""
    config, target = drafter.config, reading.target
    segments: dict[LayerType, KVSegment] = {}
    stored: dict[LayerType, KVStorage | None] = {}
    for kind in config.layer_types:
        owner = target.config.last_kv_owner(kind)
        segments[kind], stored[kind] = reading.segments[owner][-1], target.stored_kv(owner)

    def predict(anchors: Int[Array, "B A"]) -> Predictions:
        frozen = FrozenKV(segments, anchors - 1, stored)
        last = jnp.maximum(anchors - 1, 0)[:, :, None]
        states = jnp.take_along_axis(reading.hidden, last, axis=1)
        tokens = reading.tokens_at(anchors)
        steps = []
        for i in range(num_slots(drafter)):
            labels = reading.tokens_at(anchors + i + 1)
            with jax.named_scope("train_drafter"):
                hidden, states = drafter.step(target, tokens, states, frozen)
                steps.append(_scored(drafter, hidden, labels, reading.suppress_tokens))
            tokens = labels
        join = lambda *x: jnp.stack(x, axis=2)  # noqa: E731
        return jax.tree.map(join, *steps)

    return predict


def _scored(
    drafter: MTPDrafter,
    hidden: Float[Array, "B A H"],
    labels: Int[Array, "B A"],
    suppress_tokens: tuple[int, ...],
) -> Predictions:
    """Score one step of chains. The cluster of the text's token is always among those that are scored."""
    if not drafter.config.num_centroids:
        logits = drafter.choices(hidden, suppress_tokens).logits
        return Predictions(Scores(logits, labels, None, jnp.ones_like(labels, bool)))
    cluster, best = drafter.cluster_of(labels), drafter.best_clusters(hidden)
    in_reach = jnp.any(best == cluster[..., None], axis=-1)
    best = best.at[..., -1].set(jnp.where(in_reach, best[..., -1], cluster))
    choices = drafter.choices_in(hidden, best, suppress_tokens)
    assert choices.tokens is not None
    label = jnp.argmax(choices.tokens == labels[..., None], axis=-1).astype(jnp.int32)
    clusters = Scores(drafter.cluster_scores(hidden), cluster, None, jnp.ones_like(in_reach))
    final = Scores(choices.logits, label, choices.tokens, in_reach)
    return Predictions(final, clusters=clusters)


_PREDICTORS: dict[type[Any], Callable[[Any, Reading], Predictor]] = {
    DFlashDrafter: _blocks,
    MTPDrafter: _chains,
}
