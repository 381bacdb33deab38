"""The accept decision alone, on logits made by hand."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Array
from jaxspec.verify import (
    AcceptResult,
    greedy_verify,
    rejection_verify,
    synthetic_verify,
    tree_verify,
    verify,
)

VOCAB = 6
ROWS = 512

# One program each in place of one for every operation.
rejection, greedy = jax.jit(rejection_verify), jax.jit(greedy_verify)
verified = jax.jit(verify, static_argnames="block")


def logits_for(choices: list[list[int]]) -> jax.Array:
    """Return logits whose argmax is given, row by row."""
    return jax.device_put(4 * np.eye(VOCAB, dtype=np.float32)[np.asarray(choices)])


def sampling(rows: int, temperature: float) -> SamplingParams:
    return SamplingParams.make(rows, temperature=temperature)


def keys(rows: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), rows)


def only(token: int, rows: tuple[int, ...]) -> np.ndarray:
    """Return logits under which no other token is possible."""
    return np.where(np.arange(VOCAB) == token, np.zeros((*rows, 1), np.float32), -np.inf)


def as_lists(result: AcceptResult) -> tuple[list[int], list[int]]:
    return result.accepted.tolist(), result.bonus.tolist()


def test_greedy_keeps_the_leading_hits():
    choices = [[1, 2, 3, 4]] * 5
    drafts = [[1, 2, 3], [1, 2, 0], [1, 0, 3], [0, 2, 3], [0, 0, 0]]
    result = greedy(logits_for(choices), np.asarray(drafts, np.int32))
    assert as_lists(result) == ([3, 2, 1, 0, 0], [4, 3, 2, 1, 1])


def test_without_drafts_greedy_is_the_argmax():
    result = verified(
        logits_for([[5], [2]]),
        np.zeros((2, 0), np.int32),
        sampling(2, 0.0),
        keys(2),
        np.zeros(2, np.int32),
    )
    assert as_lists(result) == ([0, 0], [5, 2])


def random_batch() -> tuple[jax.Array, jax.Array]:
    """Return logits and drafts for ROWS rows of three drafts."""
    logits = jax.random.normal(jax.random.key(0), (ROWS, 4, VOCAB))
    return logits, jax.random.randint(jax.random.key(1), (ROWS, 3), 0, VOCAB)


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    """A batch with one sampled row takes the other branch; the greedy rows must not notice."""
    logits, draft = random_batch()
    is_sampled = np.arange(ROWS) % 2 == 1
    mixed = SamplingParams.make(ROWS, temperature=is_sampled)
    steps = jnp.ones(ROWS, jnp.int32)
    both = verified(logits, draft, mixed, keys(ROWS), steps)
    alone = greedy(logits, draft)
    sampled = rejection(logits, draft, mixed, keys(ROWS), steps)
    for of in (lambda v: v.accepted, lambda v: v.bonus):
        np.testing.assert_array_equal(of(both), np.where(is_sampled, of(sampled), of(alone)))


def test_a_rejected_token_is_not_drawn_again():
    logits, draft = random_batch()
    steps = jnp.ones(ROWS, jnp.int32)
    result = rejection(logits, draft, sampling(ROWS, 1.0), keys(ROWS), steps)
    accepted, bonus = np.asarray(result.accepted), np.asarray(result.bonus)
    rejected = accepted < 3
    assert 0.5 < rejected.mean() < 1
    refused = np.asarray(draft)[rejected, accepted[rejected]]
    assert (bonus[rejected] != refused).all()


def test_certain_and_impossible_drafts():
    """Probability 1 is always accepted, probability 0 never."""
    logits = only(2, (ROWS, 4))
    args = sampling(ROWS, 1.0), keys(ROWS), jnp.ones(ROWS, jnp.int32)
    certain = rejection(logits, jnp.full((ROWS, 3), 2), *args)
    assert (certain.accepted == 3).all()
    assert (certain.bonus == 2).all()
    impossible = rejection(logits, jnp.full((ROWS, 3), 3), *args)
    assert (impossible.accepted == 0).all()
    assert (impossible.bonus == 2).all()


def test_top_k_1_is_greedy():
    logits, draft = random_batch()
    best = np.argmax(logits, axis=-1).astype(np.int32)
    draft = np.where(np.arange(ROWS)[:, None] % 2 == 0, best[:, :-1], draft)
    top_1 = SamplingParams.make(ROWS, temperature=1.0, top_k=1)
    result = rejection(logits, draft, top_1, keys(ROWS), jnp.ones(ROWS, jnp.int32))
    assert as_lists(result) == as_lists(greedy(logits, draft))


def test_nothing_left_after_a_rejection_keeps_the_draft(monkeypatch):
    """p(d) may round to just under 1 where d is all there is; should d be rejected then, it stands."""
    # Rejects all.
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.ones(shape, dtype))
    logits = only(2, (2, 2))
    args = sampling(2, 1.0), keys(2), jnp.ones(2, jnp.int32)
    run = jax.jit(lambda *args: rejection_verify(*args))  # not traced before
    result = run(logits, jnp.full((2, 1), 2), *args)
    assert as_lists(result) == ([0, 0], [2, 2])


def test_acceptance_has_the_probability_of_the_draft():
    """Of 20000 rows, four standard deviations are 1 in 16000 off."""
    rows = 20_000
    probs = np.asarray([0.5, 0.25, 0.15, 0.06, 0.03, 0.01], np.float32)
    logits = np.broadcast_to(np.log(probs), (rows, 2, VOCAB))
    for token in range(VOCAB):
        result = rejection(
            logits,
            np.full((rows, 1), token, np.int32),
            sampling(rows, 1.0),
            keys(rows, token),
            np.ones(rows, np.int32),
        )
        p = float(probs[token])
        assert abs(np.asarray(result.accepted).mean() - p) < 4 * (p * (1 - p) / rows) ** 0.5


@pytest.mark.parametrize("tau", [1.0, 1.6, 3.0, 4.0])
def test_synthetic_acceptance_has_the_mean_asked_for(tau):
    rows = 20_000
    result = jax.jit(synthetic_verify, static_argnums=2)(
        np.zeros((rows, 4, VOCAB), np.float32),
        np.zeros((rows, 3), np.int32),
        tau,
        keys(rows),
        np.ones(rows, np.int32),
    )
    assert set(result.accepted.tolist()) <= {int(tau) - 1, int(tau)} - {4}
    assert abs(np.asarray(result.accepted).mean() + 1 - tau) < 0.02


QUICK = {(0.0, False, False), (0.8, False, True), (0.8, True, True)}


@pytest.mark.parametrize(
    ("temperature", "block", "drawn"),
    [
        pytest.param(
            *how,
            id=f"{how[0]}-{'block' if how[1] else 'standard'}-{'drawn' if how[2] else 'certain'}",
            marks=[] if how in QUICK else [pytest.mark.slow],
        )
        for how in itertools.product((0.0, 0.8), (False, True), (False, True))
    ],
)
def test_a_row_with_fewer_drafts_is_judged_as_if_there_were_no_others(
    temperature: float, block: bool, drawn: bool
) -> None:
    rng, g = np.random.default_rng(0), 3
    logits = rng.normal(size=(ROWS, g + 1, VOCAB)).astype(np.float32)
    log_q = log_softmax(rng.normal(size=(ROWS, g, VOCAB)).astype(np.float32), axis=-1)
    draft = rng.integers(VOCAB, size=(ROWS, g)).astype(np.int32)
    logits[:, :g] += 2.5 * np.eye(VOCAB, dtype=np.float32)[draft]  # many are accepted
    random = sampling(ROWS, temperature), keys(ROWS), np.zeros(ROWS, np.int32)
    limit = np.arange(ROWS, dtype=np.int32) % (g + 1)
    q = log_q if drawn else None
    got = verified(logits, draft, *random, log_q=q, limit=limit, block=block)
    for size in range(g + 1):
        less = None if q is None else q[:, :size]
        want = verified(
            logits[:, : size + 1], draft[:, :size], *random, log_q=less, block=block and size > 0
        )
        rows = np.flatnonzero(limit == size)
        assert len({*np.asarray(want.accepted)[rows].tolist()}) >= min(size + 1, 2)
        for of in (lambda v: v.accepted, lambda v: v.bonus):
            np.testing.assert_array_equal(np.asarray(of(got))[rows], np.asarray(of(want))[rows])


@pytest.mark.parametrize("rule", ["standard", "block", "tree"])
def test_groups_of_rows_are_judged_as_all_rows_at_once(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Five groups of three rows, of which the last one overlaps the one before."""
    rows, g = 13, 3
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(rows, g + 1, VOCAB)).astype(np.float32)
    draft = rng.integers(VOCAB, size=(rows, g)).astype(np.int32)
    logits[:, :g] += 2 * np.eye(VOCAB, dtype=np.float32)[draft]
    temperature = np.where(np.arange(rows) % 4 == 1, np.float32(0), np.float32(0.9))
    random = SamplingParams.make(rows, temperature=temperature, top_k=4, top_p=0.9), keys(rows)
    random += (np.arange(rows, dtype=np.int32),)

    def judge(logits: Array, draft: Array, *random: Any) -> AcceptResult:
        if rule == "tree":
            parents = jnp.broadcast_to(jnp.asarray([0, 1, 1], jnp.int32), draft.shape)
            return tree_verify(logits, draft, parents, *random, depth=2)
        q = jax.nn.log_softmax(0.5 * logits[:, :g])
        return verify(logits, draft, *random, log_q=q, block=rule == "block")

    want = jax.jit(judge)(logits, draft, *random)
    monkeypatch.setattr("jaxspec.sampling.GROUP_BYTES", 3 * (g + 1) * VOCAB * 4)
    got = jax.jit(lambda *args: judge(*args))(logits, draft, *random)  # is traced again
    assert len({*np.asarray(want.accepted).tolist()}) > 1
    jax.tree.map(np.testing.assert_array_equal, got, want)
