"""Run a target and a drafter over finished texts, and predict at many places of each text at once.

A place is an anchor: a token that decoding could draft after. The drafter sees there what it sees when
it decodes: of the text what stands before the anchor, and of the slots before what the text has in them.
Its own modules run, those that decode. `read` runs the target once for all anchors of a text, or takes
the `Features` that it gave before. A `Predictor` then predicts at any anchors.

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


class Features(struct.PyTreeNode):
    """Results of the target's pass over whole texts. Training reads nothing else of it.

    Attributes:
      hidden: hidden states after the final norm. Those of a token give the distribution of the next. None if
        neither the drafter nor its loss reads them.
      layers: of the layers that the drafter reads.
      keys, values: by the kind of layer, those that an assistant's queries see.
    """

    hidden: Float[Array, "B S D"] | None
    layers: tuple[Float[Array, "B S D"], ...]
    keys: dict[LayerType, Float[Array, "B S K H"]]
    values: dict[LayerType, Float[Array, "B S K H"]]


class Reading(struct.PyTreeNode):
    """Texts, and the target's pass over them.

    Attributes:
      suppress_tokens: never drafted.
    """

    target: Target
    tokens: Int[Array, "B S"]
    features: Features
    suppress_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())

    @property
    def hidden(self) -> Float[Array, "B S D"]:
        """The hidden states after the final norm."""
        assert self.features.hidden is not None
        return self.features.hidden

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
    features = features_of(target, drafter, tokens, lengths)
    return Reading(target, tokens, features, suppress_tokens)


def features_of(
    target: Target,
    drafter: AnyDrafter,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    *,
    need_target: bool = True,
) -> Features:
    """Run the target over texts, and return what training reads of it.

    Args:
      need_target: whether the loss compares with the target's distribution.
    """
    where = placement_of(tokens, jnp.zeros_like(lengths), lengths)
    with jax.named_scope("train_target"):
        x = target.embed(tokens)
        done = target.run_layers(tokens, x, where, None, drafter.feature_layers)
    done = jax.lax.stop_gradient(done)
    is_chain = isinstance(drafter, MTPDrafter)
    segments: dict[LayerType, KVSegment] = {
        kind: done.segments[target.config.last_kv_owner(kind)][-1]
        for kind in (dict.fromkeys(drafter.config.layer_types) if is_chain else ())
    }
    keys: dict[LayerType, Array] = {kind: x.k.swapaxes(1, 2) for kind, x in segments.items()}
    values: dict[LayerType, Array] = {kind: x.v.swapaxes(1, 2) for kind, x in segments.items()}
    hidden = done.hidden if need_target or is_chain else None
    return Features(hidden, done.features, keys, values)


def num_slots(drafter: AnyDrafter) -> int:
    """Return how many tokens behind an anchor a drafter is trained to predict."""
    return drafter.default_draft_tokens


def predictor(drafter: AnyDrafter, reading: Reading) -> Predictor:
    """Return a function that predicts at anchors of the texts that were read.

    Raises:
      TypeError: drafters of this class are not trained.
    """
    once = prepare(drafter, reading)
    return lambda anchors: predict(drafter, reading, once, anchors)


def prepare(drafter: AnyDrafter, reading: Reading) -> Any:
    """Return what a drafter makes of texts once, for all anchors: a pytree that `predict` takes.

    Raises:
      TypeError: drafters of this class are not trained.
    """
    return _pass_of(drafter)[0](drafter, reading)


def predict(
    drafter: AnyDrafter, reading: Reading, once: Any, anchors: Int[Array, "B A"]
) -> Predictions:
    """Predict at anchors.

    Args:
      once: the result of `prepare`.
    """
    return _pass_of(drafter)[1](drafter, reading, once, anchors)


def _pass_of(drafter: AnyDrafter) -> tuple[Callable[..., Any], Callable[..., Predictions]]:
    for kind, functions in _PASSES.items():
        if isinstance(drafter, kind):
            return functions
    raise TypeError(f"there is no training pass for {type(drafter).__name__}")


def can_train(module: type[Any]) -> bool:
    """Return whether `predictor` takes drafters of a class."""
    return issubclass(module, tuple(_PASSES))


# --- blocks: DFlash, DFlash2, DSpark ---------------------------------------------------------------


def frozen_tables(drafter: Any) -> tuple[str, ...]:
    """Return the names of weights that are not trained: a block drafter's own embedding and head.

    Args:
      drafter: with or without weights.
    """
    return ("embedding", "head") if hasattr(drafter.config, "own_head") else ()


Pairs = list[tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]]


def _contexts(drafter: DFlashDrafter, reading: Reading) -> Pairs:
    """Project the context of texts, for the blocks of all of their anchors. Return keys and values of each layer."""
    positions = _positions(reading)
    context = drafter.context(reading.features.layers)
    return [layer.keys_and_values(context, positions) for layer in drafter.layers]


def _blocks(
    drafter: DFlashDrafter, reading: Reading, pairs: Pairs, anchors: Int[Array, "B A"]
) -> Predictions:
    """Predict blocks."""
    config, count = drafter.config, num_slots(drafter)
    positions = _positions(reading)
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

    with jax.named_scope("train_drafter"):
        made = jax.vmap(at_one_anchor, in_axes=1, out_axes=1)(anchors)
    if ids is None:
        return made
    final, base = made.final, made.base
    if final.tokens is None:
        final = final._replace(tokens=ids)
    return made._replace(final=final, base=base and base._replace(tokens=ids))


def _positions(reading: Reading) -> Int[Array, "B S"]:
    return jnp.broadcast_to(
        jnp.arange(reading.tokens.shape[1], dtype=jnp.int32), reading.tokens.shape
    )


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


def _chains(
    drafter: MTPDrafter, reading: Reading, once: None, anchors: Int[Array, "B A"]
) -> Predictions:
    """Predict chains. Each step is fed with the text's token, and with the state of the step before."""
    target, positions, features = reading.target, _positions(reading), reading.features
    segments: dict[LayerType, KVSegment] = {
        kind: KVSegment(keys.swapaxes(1, 2), features.values[kind].swapaxes(1, 2), positions)
        for kind, keys in features.keys.items()
    }
    stored: dict[LayerType, KVStorage | None] = {
        kind: target.stored_kv(target.config.last_kv_owner(kind)) for kind in segments
    }
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


_PASSES: dict[type[Any], tuple[Callable[..., Any], Callable[..., Predictions]]] = {
    DFlashDrafter: (_contexts, _blocks),
    MTPDrafter: (lambda drafter, reading: None, _chains),
}
"""By the class of a drafter: what it makes of texts once, and how it predicts at anchors."""
