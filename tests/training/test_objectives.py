"""Losses against loops over tokens, and places of anchors against loops over places."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.dflash2 import DFlash2Config
from jaxspec.shapes import Params
from jaxspec.training import objectives, passes
from jaxspec.training.objectives import LossWeights, Sums
from jaxspec.training.passes import Predictions, Scores
from tests import tiny
from tests.training.test_passes import BASE, drafter_of

B, A, G, V = 2, 3, 4, 11


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


draw = jax.jit(objectives.draw_anchors, static_argnums=2)


def halved(params: Params) -> Params:
    return {n: jax.device_put(np.asarray(x).astype(jnp.bfloat16)) for n, x in params.items()}


def test_anchors_are_tokens_of_answers_with_one_more_behind_them() -> None:
    rng = np.random.default_rng(0)
    answers = rng.random((40, 12)) < 0.6
    answers[0], answers[1] = False, True
    anchors, real = map(np.asarray, draw(jax.random.key(0), answers, 5))
    assert (anchors >= 1).all()
    for row in range(40):
        may = [i for i in range(1, 11) if answers[row, i] and answers[row, i + 1]]
        drawn = anchors[row][real[row]].tolist()
        assert len(drawn) == len(set(drawn)) == min(5, len(may))
        assert set(drawn) <= set(may)
    assert len({tuple(sorted(x)) for x in anchors[real.all(axis=1)].tolist()}) > 3, "not the first"


def test_slots_end_where_the_answer_ends() -> None:
    answers = np.zeros((1, 10), bool)
    answers[0, 3:6] = answers[0, 7:] = True
    anchors = np.asarray([[3, 4, 7, 9]], np.int32)
    reached = jax.jit(objectives.slots_reached, static_argnums=2)(answers, anchors, 4)
    assert np.asarray(reached)[0].sum(axis=-1).tolist() == [2, 1, 2, 0]
    assert np.asarray(reached)[0, 0].tolist() == [True, True, False, False]


def naive(made: Predictions, target: np.ndarray, alive: np.ndarray, w: LossWeights) -> list[float]:
    """Return loss, weight and accepted, slot by slot."""
    loss = weight = accepted = 0.0
    for b, a in np.ndindex(B, A):
        going, chain = True, []
        for g in range(G):
            label = int(made.final.label[b, a, g])
            known = alive[b, a, g] and made.final.in_reach[b, a, g] and label >= 0
            right = softmax(np.asarray(made.final.logits)[b, a, g])[label] if known else 0.0
            chain.append((chain[-1] if chain else 1.0) * right)
        for g in range(G):
            if not alive[b, a, g]:
                break
            size = np.exp(-g / w.decay) if w.decay else 1.0
            before = chain[g - 1] if g else 1.0
            size = (1 - w.survival) * size + w.survival * 2 * before / (1 + sum(chain))
            p, terms = softmax(target[b, a, g]), 0.0

            def scores(x: Scores) -> tuple[np.ndarray, np.ndarray, int]:
                at = (b, a, g)  # noqa: B023
                ids = np.arange(x.logits.shape[-1]) if x.tokens is None else np.asarray(x.tokens)
                ids = ids if ids.ndim == 1 else ids[at]
                return softmax(np.asarray(x.logits)[at]), ids, int(x.label[at])

            q, ids, label = scores(made.final)
            whole = np.zeros(V)
            whole[ids] = q
            terms += w.cross_entropy * (-np.log(q[label]) if label >= 0 else 0)
            terms += w.kl * sum(p[t] * (np.log(p[t]) - np.log(whole[t])) for t in ids)
            terms += w.total_variation * np.abs(p - whole).sum()
            if made.base is not None:
                base, base_ids, label = scores(made.base)
                terms += w.base_cross_entropy * -np.log(base[label])
                terms += w.base_kl * sum(
                    p[t] * (np.log(p[t]) - np.log(x)) for t, x in zip(base_ids, base, strict=True)
                )
            if made.clusters is not None:
                clusters, _, label = scores(made.clusters)
                terms += w.clusters * -np.log(clusters[label])
            if made.confidence is not None:
                c, true = float(made.confidence[b, a, g]), np.minimum(p, whole).sum()
                terms += w.confidence * -(true * np.log(c) + (1 - true) * np.log(1 - c))
            loss, weight = loss + size * terms, weight + size
            q, ids, label = scores(made.final)
            going &= bool(made.final.in_reach[b, a, g]) and int(np.argmax(q)) == label
            accepted += going
    return [loss, weight, accepted]


def random_scores(rng: np.random.Generator, size: int, tokens: Any) -> Scores:
    logits = rng.normal(size=(B, A, G, size)).astype(np.float32)
    # Half of the labels are the likeliest, so that drafts are right for a while.
    label = np.where(
        rng.random((B, A, G)) < 0.5, np.argmax(logits, -1), rng.integers(size, size=(B, A, G))
    )
    in_reach = rng.random((B, A, G)) < 0.9
    return Scores(*jax.device_put((logits, label.astype(np.int32), tokens, in_reach)))


@pytest.mark.parametrize("survival", [0.0, 0.6])
@pytest.mark.parametrize("kind", ["all tokens", "its own vocabulary", "candidates", "clusters"])
def test_a_loss_is_the_sum_over_its_slots(kind: str, survival: float) -> None:
    rng = np.random.default_rng(1)
    ids = np.asarray([0, 3, 4, 8, 10], np.int32)
    each = np.argsort(rng.random((B, A, G, V)))[..., :5].astype(np.int32)
    final = random_scores(
        rng,
        V if kind == "all tokens" else 5,
        {"all tokens": None, "its own vocabulary": ids}.get(kind, each),
    )
    if kind == "its own vocabulary":
        label = np.where(np.arange(G) == 2, -1, final.label)
        final = final._replace(label=jax.device_put(label))
    made = Predictions(
        final,
        random_scores(rng, V, None) if kind == "candidates" else None,
        random_scores(rng, 6, None) if kind == "clusters" else None,
        jax.device_put(rng.uniform(0.1, 0.9, (B, A, G)).astype(np.float32)),
    )
    target = rng.normal(size=(B, A, G, V)).astype(np.float32)
    alive = np.cumprod(rng.random((B, A, G)) < 0.9, axis=-1).astype(bool)
    weights = LossWeights(0.3, 0.5, 0.7, 0.2, 0.9, 1.1, 1.3, decay=2.5, survival=survival)
    run = jax.jit(lambda *args: objectives.loss_of_slots(*args, weights))
    sums = run(made, target, alive, np.ones((B, A), bool))
    expected = naive(made, target, alive, weights)
    np.testing.assert_allclose([sums.loss, sums.weight, sums.accepted], expected, rtol=1e-4)
    assert float(sums.anchors) == B * A


def test_pieces_of_anchors_and_of_texts_add_up_and_every_weight_learns() -> None:
    """Also the gradient, which goes through the context that all anchors of a text share."""
    sizes = {**BASE, "layer_types": ("sliding",), "causal": (False,), "block_size": 3}
    config = DFlash2Config(**sizes, conv_group_size=8, selector_rank=10, selector_top_k=6)
    (target_def, target_params), (model_def, params) = tiny.target("31b"), drafter_of(config)
    rng = np.random.default_rng(0)
    texts = jax.device_put(rng.integers(12, tiny.VOCAB_SIZE, (2, 20)).astype(np.int32))
    answers = jax.device_put(np.arange(20) >= np.asarray([[4], [9]]))
    anchors, real = draw(jax.random.key(1), answers, 5)
    weights = LossWeights(base_kl=1.0)

    def loss(params: Params, real: Any, at_once: int) -> tuple[Any, Sums]:
        drafter, target = model_def.bind(params), target_def.bind(target_params)
        reading = passes.read(target, drafter, texts, jnp.full(2, 20))
        sums = objectives.loss_of(drafter, reading, answers, anchors, real, weights, at_once)
        return sums.loss, sums

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=2)
    whole, sums = run(params, real, 16)
    for name, gradient in whole.items():
        assert np.abs(np.asarray(gradient)).max() > 0, name
    of_text = [np.asarray(real) & (np.arange(2) == i)[:, None] for i in (0, 1)]
    parts, of_parts = zip(*(run(params, part, 2) for part in of_text), strict=True)
    np.testing.assert_allclose(
        jax.tree.leaves(of_parts[0] + of_parts[1]), jax.tree.leaves(sums), rtol=1e-5
    )
    for name, gradient in whole.items():
        both = np.asarray(parts[0][name]) + np.asarray(parts[1][name])
        size = np.abs(np.asarray(gradient)).max()
        np.testing.assert_allclose(both, gradient, atol=1e-4 * size, err_msg=name)


def test_gradients_of_pieces_add_up_in_float32() -> None:
    """The same piece 256 times. In bfloat16 a sum of 256 equal numbers stops growing at 256 times their rounding."""
    config = DFlashConfig(**{**BASE, "layer_types": ("full",), "causal": (False,), "block_size": 3})
    target_def, target_params = tiny.target("31b")
    model_def, params = drafter_of(config)
    params = halved(params)
    model_def = model_def.of_dtype("bfloat16")
    texts = jnp.asarray(np.random.default_rng(0).integers(12, tiny.VOCAB_SIZE, (1, 12)), jnp.int32)
    answers = jnp.asarray(np.arange(12) >= 4)[None]

    @functools.partial(jax.jit, static_argnums=2)
    def gradient(params: Params, target_params: Params, times: int) -> Params:
        target = target_def.of_dtype("bfloat16").bind(target_params)
        anchors, real = jnp.full((1, times), 6), jnp.ones((1, times), bool)

        def loss(params: Params) -> Any:
            drafter = model_def.bind(params)
            reading = passes.read(target, drafter, texts, jnp.full(1, 12))
            args = answers, anchors, real, LossWeights(), 1
            return objectives.loss_of(drafter, reading, *args).loss

        return jax.grad(loss)(params)

    rounded = halved(target_params)
    one, many = (gradient(params, rounded, times) for times in (2, 256))
    for name, x in one.items():
        expected = 128 * np.asarray(x, np.float32)
        far = np.abs(np.asarray(many[name], np.float32) - expected)
        assert np.max(far) < 0.02 * np.max(np.abs(expected)), name
