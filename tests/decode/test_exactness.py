"""The accept decision on distributions made by hand: what a step emits follows the target, and how much.

Three drafts over three tokens, drawn after each other from q; whatever a step emits is completed to four
tokens from p itself, and all four are counted together. Unlike in test_distribution no model is involved:
a case is a matter of milliseconds, rows are many, and small faults show.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import verify
from jaxspec.sampling import SamplingParams, Stream, draw_drafts, fold_keys
from jaxspec.shapes import Array
from tests.decode.test_distribution import FALSE_ALARM, g_test

VOCAB = 3
DRAFTS = 3
ROWS = 40_000
PREFIXES = [p for n in range(DRAFTS + 1) for p in itertools.product(range(VOCAB), repeat=n)]
FORMS = [(drawn, block) for drawn in (False, True) for block in (False, True)]


@dataclass(frozen=True)
class Pair:
    """Logits of the target and of a drafter after every prefix, in the order of `PREFIXES`."""

    p: np.ndarray
    q: np.ndarray


def pairs() -> dict[str, Pair]:
    rng = np.random.default_rng(0)
    p = rng.normal(size=(len(PREFIXES), VOCAB)) * 1.5
    noise = rng.normal(size=p.shape)
    holes_p, holes_q = p.copy(), p + noise
    holes_p[np.arange(len(p)), rng.integers(0, VOCAB, len(p))] = -np.inf
    holes_q[np.arange(len(p)), rng.integers(0, VOCAB, len(p))] = -np.inf
    return {
        "close": Pair(p, p + 0.3 * noise),
        "other": Pair(p, noise * 1.5),
        "opposite": Pair(p, -p),
        "the same": Pair(p, p),
        "holes": Pair(holes_p, holes_q),
    }


def index_of(tokens: Array, count: int) -> Array:
    """Return where the first `count` tokens of each row stand among `PREFIXES`."""
    index = jnp.zeros(tokens.shape[0], jnp.int32)
    for i in range(count):
        index = index * VOCAB + tokens[:, i]
    return index + (VOCAB**count - 1) // (VOCAB - 1)


@functools.partial(jax.jit, static_argnames=("drawn", "accept"))
def step(
    p: Array, q: Array, seed: Array, *, drawn: bool, accept: Callable[..., verify.AcceptResult]
) -> tuple[Array, Array, Array]:
    """Return each row's four tokens, the accepted drafts, and the drafts.

    Args:
      drawn: drafts are draws from q, else its best tokens.
    """
    keys = jax.random.split(jax.random.key(seed), ROWS)
    steps = jnp.ones(ROWS, jnp.int32)
    sampling = SamplingParams.make(ROWS, temperature=1.0)
    slots = jnp.broadcast_to(jnp.arange(DRAFTS), (ROWS, DRAFTS))
    draft_keys = fold_keys(keys, steps, slots, Stream.DRAFT)
    tokens, log_qs = jnp.zeros((ROWS, 0), jnp.int32), []
    for i in range(DRAFTS):
        logits = q[index_of(tokens, i)][:, None]
        greedy = SamplingParams.make(ROWS, temperature=float(drawn))
        new, log_q = draw_drafts(logits, greedy, draft_keys[:, i, None])
        tokens = jnp.concatenate([tokens, new], axis=1)
        log_qs.append(log_q)
    logits = jnp.stack([p[index_of(tokens, i)] for i in range(DRAFTS + 1)], axis=1)
    log_q = jnp.concatenate(log_qs, axis=1) if drawn else None
    result = accept(logits, tokens, sampling, keys, steps, log_q)
    emitted = jnp.concatenate([tokens, jnp.zeros((ROWS, 1), jnp.int32)], axis=1)
    for i in range(DRAFTS + 1):
        free = jax.random.categorical(jax.random.key(seed + 1000 + i), p[index_of(emitted, i)])
        new = jnp.where(result.accepted == i, result.bonus, free)
        new = jnp.where(i < result.accepted, emitted[:, i], new)
        emitted = emitted.at[:, i].set(new)
    return emitted, result.accepted, tokens


@functools.cache
def run(name: str, *, drawn: bool, accept: Callable[..., Any]) -> tuple[np.ndarray, ...]:
    pair = pairs()[name]
    p, q = (jnp.asarray(x, jnp.float32) for x in (pair.p, pair.q))
    return tuple(np.asarray(x) for x in step(p, q, jnp.int32(7), drawn=drawn, accept=accept))


def probs(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def joint(pair: Pair) -> np.ndarray:
    """Return the target's probability of every four tokens."""
    result, p = np.ones(()), probs(pair.p)
    for i in range(DRAFTS + 1):
        begin = (VOCAB**i - 1) // (VOCAB - 1)
        result = result[..., None] * p[begin : begin + VOCAB**i].reshape(*[VOCAB] * (i + 1))
    return result


def accept_of(block: bool) -> Callable[..., verify.AcceptResult]:
    return verify.block_verify if block else verify.rejection_verify


@pytest.mark.parametrize("name", pairs())
@pytest.mark.parametrize(("drawn", "block"), FORMS)
def test_a_step_follows_the_target(name: str, drawn: bool, block: bool) -> None:
    pair = pairs()[name]
    emitted, accepted, _ = run(name, drawn=drawn, accept=accept_of(block))
    assert g_test(emitted, joint(pair)) > FALSE_ALARM
    if name == "the same" and drawn:
        assert (accepted == DRAFTS).all()
    else:
        assert {0, DRAFTS} <= set(accepted.tolist())


def prefix_weights(pair: Pair, tokens: np.ndarray, *, block: bool) -> np.ndarray:
    """Return for each row how likely it is that its first 1, 2 and 3 drafts are accepted, in expectation."""
    p, q = probs(pair.p), probs(pair.q)
    weight, weights = np.ones(len(tokens)), []
    for i in range(DRAFTS):
        at, d = np.asarray(index_of(jnp.asarray(tokens), i)), tokens[:, i]
        ratio = p[at, d] / q[at, d]
        weight = np.minimum(weight * ratio, 1.0) if block else weight * np.minimum(ratio, 1.0)
        weights.append(weight)
    return np.stack(weights, axis=1)


@pytest.mark.parametrize("name", pairs())
def test_block_verification_accepts_more(name: str) -> None:
    """Each prefix is accepted as often as theory says, which is never less often than one by one."""
    pair, means = pairs()[name], {}
    for block in (False, True):
        _, accepted, tokens = run(name, drawn=True, accept=accept_of(block))
        weights = prefix_weights(pair, tokens, block=block)
        for i in range(DRAFTS):
            # Four standard deviations of a coin; the weights' own spread cancels in part.
            assert abs(weights[:, i].mean() - (accepted > i).mean()) < 4 * 0.5 / ROWS**0.5
        means[block] = weights.sum(axis=1).mean()
    assert means[True] >= means[False]
    if name in ("other", "opposite"):
        assert means[True] > 1.02 * means[False]


def test_block_verification_of_the_papers_example() -> None:
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 are accepted singly, 11/9 as a block."""
    rows = 40_000
    log_p, log_q = jnp.log(jnp.asarray([[1, 2], [2, 1]]) / 3)
    keys, steps = jax.random.split(jax.random.key(0), rows), jnp.ones(rows, jnp.int32)
    sampling = SamplingParams.make(rows, temperature=1.0)
    log_qs = jnp.broadcast_to(log_q, (rows, 2, 2))
    slots = jnp.broadcast_to(jnp.arange(2), (rows, 2))
    draft, log_qs = draw_drafts(log_qs, sampling, fold_keys(keys, steps, slots, Stream.DRAFT))
    logits = jnp.broadcast_to(log_p, (rows, 3, 2))
    accept = jax.jit(verify.verify, static_argnames="block")
    for block, expected in ((False, 10 / 9), (True, 11 / 9)):
        result = accept(logits, draft, sampling, keys, steps, log_q=log_qs, block=block)
        assert abs(float(jnp.mean(result.accepted.astype(jnp.float32))) - expected) < 0.02


def forgetful(*args: Any) -> verify.AcceptResult:
    return verify.rejection_verify(*args[:-1])


@pytest.mark.parametrize("name", ["close", "other"])
def test_draws_judged_as_certain_choices_are_exact_but_accepted_less(name: str) -> None:
    """Whatever d is, keeping it with probability p(d) and else drawing p without d follows p."""
    emitted, accepted, _ = run(name, drawn=True, accept=forgetful)
    assert g_test(emitted, joint(pairs()[name])) > FALSE_ALARM
    _, knowing, _ = run(name, drawn=True, accept=verify.rejection_verify)
    assert accepted.mean() < 0.9 * knowing.mean()


# --- negative controls -----------------------------------------------------------------------------


def certain_taken_as_draws(logits, draft, sampling, keys, steps, log_q) -> verify.AcceptResult:
    """Judge the best tokens as if they were draws from an even q."""
    del log_q
    even = jnp.full((*draft.shape, VOCAB), -jnp.log(VOCAB))
    return verify.rejection_verify(logits, draft, sampling, keys, steps, even)


def another_temperature(logits, draft, sampling, keys, steps, log_q) -> verify.AcceptResult:
    """Judge draws from q as if they had been drawn from a cooler one."""
    cooler = jax.nn.log_softmax(log_q / 0.7)
    return verify.rejection_verify(logits, draft, sampling, keys, steps, cooler)


def block_with_plain_residual(logits, draft, sampling, keys, steps, log_q) -> verify.AcceptResult:
    """Draw from max(0, p - q) instead of max(0, w p - q)."""
    right = verify._with_bonus

    def unweighted(accepted, log_scale, *args):
        return right(accepted, jnp.zeros_like(log_scale), *args)

    verify._with_bonus = unweighted
    try:
        return verify.block_verify(logits, draft, sampling, keys, steps, log_q)
    finally:
        verify._with_bonus = right


def block_accepted_by_weight(logits, draft, sampling, keys, steps, log_q) -> verify.AcceptResult:
    """Accept drafts one by one as the standard does, but draw what follows as if in a block."""
    result = verify.rejection_verify(logits, draft, sampling, keys, steps, log_q)
    block = verify.block_verify(logits, draft, sampling, keys, steps, log_q)
    return verify.AcceptResult(result.accepted, block.bonus)


@pytest.mark.parametrize(
    ("wrong", "drawn"),
    [
        (another_temperature, True),
        (certain_taken_as_draws, False),
        (block_with_plain_residual, True),
        (block_accepted_by_weight, True),
    ],
)
def test_wrong_decisions_are_found(wrong: Callable[..., verify.AcceptResult], drawn: bool) -> None:
    emitted, _, _ = run("other", drawn=drawn, accept=wrong)
    assert g_test(emitted, joint(pairs()["other"])) < FALSE_ALARM / 1000
