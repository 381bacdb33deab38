"""Every form of sampled speculation follows the target's own distribution, whatever shapes it.

As in test_distribution, with the decode programs alone: drafts are drawn or certain, judged singly or as a
block, or a tree, and one batch holds thousands of rows of each filter. The truth is enumerated: the target
runs over all continuations, `plain` shapes each row of logits, and products give the joint distribution.
Counts of the first three tokens together, and of the third to fifth, are passed by a correct sampler but
for 1 in 10000 seeds.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling
from jaxspec.options import Tree
from jaxspec.state import DecodeSpec
from tests import fakes
from tests.cases import by_record
from tests.decode.plain import Settings, columns, log_softmax
from tests.decode.rollout import rollout
from tests.decode.test_distribution import (
    DRAFTS,
    FALSE_ALARM,
    NEW_TOKENS,
    PROMPT,
    VOCAB,
    drafters,
    g_test,
    target,
)

ROWS = 2048  # of each filter
FILTERS = {
    "none": Settings(),
    "top-k": Settings(temperature=0.7, top_k=4),
    "top-p": Settings(temperature=1.6, top_p=0.8),
    "min-p": Settings(temperature=1.2, min_p=0.3),
    "penalties and biases": Settings(
        temperature=0.9,
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.6,
        biases={2: -np.inf, 4: 0.7},
    ),
}
NUM_BIASES = 2


@functools.cache
def exact(name: str) -> np.ndarray:
    """Return the joint distribution of the new tokens, an axis a token."""
    settings = FILTERS[name]
    continuations = np.asarray(list(itertools.product(range(VOCAB), repeat=NEW_TOKENS - 1)))
    prompts = np.broadcast_to(PROMPT, (len(continuations), len(PROMPT)))
    tokens = jnp.asarray(np.concatenate([prompts, continuations], axis=1), jnp.int32)
    logits = fakes.forward(target().model_def, target().params, tokens)
    logits = np.asarray(logits[:, len(PROMPT) - 1 :])
    joint = np.ones(())
    for i in range(NEW_TOKENS):
        every = VOCAB ** (NEW_TOKENS - 1 - i)  # the first row that has each prefix of i tokens
        conditional = [
            np.exp(log_softmax(settings.filtered(settings.adjusted(row, PROMPT, prefix.tolist()))))
            for row, prefix in zip(logits[::every, i], continuations[::every, :i], strict=True)
        ]
        joint = joint[..., None] * np.reshape(conditional, [VOCAB] * (i + 1))
    assert abs(joint.sum() - 1) < 1e-9
    return joint


def sampled(drafter: str | None, seed: int = 1, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of `ROWS` rows of each filter, [F, R, NEW_TOKENS], and their acceptance lengths."""
    model = None if drafter is None else drafters()[drafter]
    if model is not None:
        options = {"num_draft_tokens": DRAFTS, **options}
    model_def = None if model is None else model.model_def
    options |= dict(penalties=True, num_biases=NUM_BIASES)
    spec = DecodeSpec(target().model_def, model_def, **by_record(**options))
    rows = [settings for settings in FILTERS.values() for _ in range(ROWS)]
    state = rollout(
        spec,
        target().params,
        None if model is None else model.params,
        jnp.broadcast_to(jnp.asarray(PROMPT), (len(rows), len(PROMPT))),
        jnp.full(len(rows), len(PROMPT)),
        spec.sampling(len(rows), **columns(rows, NUM_BIASES)),
        new_tokens=NEW_TOKENS,
        seed=seed,
    )
    tokens, taus, steps = jax.device_get((state.tokens, state.acceptance_lengths, state.num_steps))
    taken = np.arange(taus.shape[1])[None, :] < steps[:, None]
    mean = np.where(taken, taus, 0).reshape(len(FILTERS), -1).sum(axis=1)
    mean = mean / steps.reshape(len(FILTERS), -1).sum(axis=1)
    return tokens[:, :NEW_TOKENS].reshape(len(FILTERS), ROWS, -1), mean


def p_values(tokens: np.ndarray) -> dict[str, float]:
    result = {}
    for rows, name in zip(tokens, FILTERS, strict=True):
        joint = exact(name)
        first = g_test(rows[:, :3], joint.sum(axis=(3, 4)))
        result[name] = min(first, g_test(rows[:, 2:], joint.sum(axis=(0, 1))))
    return result


# Drawn drafts; certain ones, judged one by one, are `test_distribution`'s.
QUICK = {("unlikely", True, "block")}  # `test_distribution` has others of them, without penalties


@pytest.mark.parametrize(
    ("drafter", "drawn", "verification"),
    [
        pytest.param(*form, marks=[] if form in QUICK else [pytest.mark.slow])
        for form in itertools.product(
            ("likely", "unlikely", "dflash", "mtp"), (False, True), ("standard", "block")
        )
    ],
)
def test_chains_follow_the_target(drafter: str, drawn: bool, verification: str) -> None:
    tokens, taus = sampled(drafter, draft_sampling=drawn, verification=verification)
    assert ((taus > 1) & (taus < DRAFTS + 0.9)).all()
    assert min(p_values(tokens).values()) > FALSE_ALARM, p_values(tokens)


@pytest.mark.parametrize(
    "drafter",
    [
        # Trees without penalties are in `test_distribution`, greedy ones with penalties in `test_adjustments`.
        pytest.param("likely", marks=pytest.mark.slow),
        pytest.param("unlikely", marks=pytest.mark.slow),
        pytest.param("dflash", marks=pytest.mark.slow),
        pytest.param("mtp", marks=pytest.mark.slow),
    ],
)
def test_trees_follow_the_target(drafter: str) -> None:
    tokens, taus = sampled(drafter, tree=Tree(3, DRAFTS), num_draft_tokens=8)
    assert ((taus > 1) & (taus < DRAFTS + 0.9)).all()
    assert min(p_values(tokens).values()) > FALSE_ALARM, p_values(tokens)


@pytest.mark.slow
def test_plain_decoding_follows_the_target() -> None:
    tokens, _ = sampled(None)
    assert min(p_values(tokens).values()) > FALSE_ALARM, p_values(tokens)


def test_penalties_that_forget_drafts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: penalties by what was committed before the step, for all of its positions."""
    right = sampling.penalize

    def forgetful(logits, adjustments, counts, draft, follows):
        return right(logits, adjustments, counts, draft, follows & False)

    monkeypatch.setattr(sampling, "penalize", forgetful)
    # A function of its own keeps this program apart from the right one.
    tokens, _ = sampled("likely", logits_fn=lambda logits, positions: logits)
    wrong = p_values(tokens)
    assert wrong.pop("penalties and biases") < FALSE_ALARM / 1000
    assert min(wrong.values()) > FALSE_ALARM
