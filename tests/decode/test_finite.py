"""Numbers that are not finite: a row ends where they begin, and nothing else notices.

A target with one NaN agreed with itself in every draft: the best token of NaN is a token id like any other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import Sampling, Tree
from jaxspec.rollout.batch import FinishReason
from jaxspec.rollout.sampler import Sampler
from jaxspec.sampling import NO_TOKEN, SamplingParams, argmax, choose, suppress
from jaxspec.verify import AcceptResult, block_verify, rejection_verify, tree_verify, verify
from jaxspec.weights.loading import LoadedModel
from tests.cases import NEW_TOKENS, SLOTS, case, run

NAN, INF = float("nan"), float("inf")
NAME = "e2b"  # its table of per-layer inputs poisons one token, and the head of no other
FAILS_AT = 50  # no position of these tests comes so far unless it should


# --- one step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 64, 1000, 4097])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
def test_one_unsound_value_is_seen_among_many(size: int, bad: float) -> None:
    """XLA's maximum of some thousand values misses a NaN on a CPU."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, size)).astype(np.float32)
    at = [0, size // 2, size - 1]
    logits[[0, 2, 4], at] = bad
    found = jax.jit(choose)(logits)
    best = logits.argmax(axis=1)
    assert found.tolist() == [NO_TOKEN, best[1], NO_TOKEN, best[3], NO_TOKEN, best[5]]
    assert (jax.jit(argmax)(logits) >= 0).all()


def test_where_no_token_is_possible_none_is_chosen() -> None:
    logits = np.asarray([[-INF] * 4, [-INF, -INF, -1e30, -INF]], np.float32)
    assert jax.jit(choose)(logits).tolist() == [NO_TOKEN, 2]


def test_suppressing_hides_nothing_and_changes_nothing() -> None:
    logits = jnp.asarray([[1.0, -0.0, 0.0, 2.0], [1.0, 1.0, NAN, 2.0], [1.0, 1.0, INF, 2.0]])
    chosen = jax.jit(lambda logits: choose(suppress(logits, (2,))))(logits)
    assert chosen.tolist() == [3, NO_TOKEN, NO_TOKEN]
    kept = np.asarray(suppress(logits, (2, 3)))[0, :2]
    np.testing.assert_array_equal(kept, [1.0, -0.0])
    np.testing.assert_array_equal(np.signbit(kept), [False, True])


DRAFTS, VOCAB = 3, 6


def keys(rows: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), rows)


def steps(rows: int) -> jax.Array:
    return jax.device_put(np.ones(rows, np.int32))


@pytest.mark.parametrize("rule", ["greedy", "standard", "block", "drawn", "tree", "drawn tree"])
def test_no_draft_is_accepted_where_the_target_is_unsound(rule: str) -> None:
    """Each row is unsound after another block slot and in another way; the last one is sound. Drafts are right."""
    ways = ([NAN] * VOCAB, [40.0, INF, 0.0, 0.0, 0.0, 0.0], [40.0] * 5 + [NAN], [-INF] * VOCAB)
    rows = len(ways) * (DRAFTS + 1) + 1
    draft = np.broadcast_to(np.asarray([1, 2, 3], np.int32), (rows, DRAFTS))
    right = np.where(np.arange(VOCAB) == np.asarray([1, 2, 3, 4])[:, None], 40.0, 0.0)
    logits = np.tile(right.astype(np.float32), (rows, 1, 1))
    slots = [slot for slot in range(DRAFTS + 1) for _ in ways]
    logits[np.arange(rows - 1), slots] = ways * (DRAFTS + 1)
    sampling = SamplingParams.make(rows, temperature=0.0 if rule in ("greedy", "tree") else 1.0)
    how = (sampling, keys(rows), steps(rows))
    if "tree" in rule:
        parents = np.broadcast_to(np.arange(DRAFTS, dtype=np.int32), draft.shape)
        accept = jax.jit(functools.partial(tree_verify, depth=DRAFTS))
        result = accept(logits, draft, parents, *how)
    else:
        certain = np.where(np.eye(VOCAB, dtype=bool)[draft], np.float32(0), np.float32(-INF))
        log_q = certain if rule == "drawn" else None
        accept = jax.jit(functools.partial(verify, block=rule == "block"))
        result = accept(logits, draft, *how, log_q=log_q)
    assert result.accepted.tolist() == [*slots, DRAFTS]
    assert result.bonus.tolist() == [NO_TOKEN] * (rows - 1) + [4]
    assert result.finite.tolist() == [False] * (rows - 1) + [True]


@pytest.mark.parametrize("accept", [rejection_verify, block_verify])
def test_drafts_of_no_distribution_are_none(accept: Any) -> None:
    """A drafter's NaN ends the draft there: the same decisions, and so the same distribution."""
    rows, of, rng = 512, jax.jit(accept), np.random.default_rng(0)
    logits, q = (2 * rng.normal(size=(rows, n, VOCAB)).astype(np.float32) for n in (4, 3))
    log_q = log_softmax(q, axis=-1)
    draft = np.argmax(log_q + rng.gumbel(size=q.shape), axis=-1).astype(np.int32)
    how = (SamplingParams.make(rows, temperature=1.0), keys(rows), steps(rows))
    # A drafter that looks at some tokens only knows that the others have probability 0.
    looked_at = (np.arange(VOCAB) < 2) | np.eye(VOCAB, dtype=bool)[draft]
    some = np.where(looked_at, np.float32(NAN), np.float32(-INF))
    without_drafts = jax.jit(rejection_verify)
    for known, nan in itertools.product(range(DRAFTS), (np.full_like(some, NAN), some)):
        spoiled = log_q.copy()
        spoiled[:, known] = nan[:, known]
        whole: AcceptResult = of(logits, draft, *how, spoiled)
        first = (logits[:, : known + 1], draft[:, :known])
        if known:
            cut: AcceptResult = of(*first, *how, log_q[:, :known])
            assert 0 < (np.asarray(cut.accepted) == known).mean() < 1
        else:
            cut = without_drafts(*first, *how)  # a block has a draft
        np.testing.assert_array_equal(whole.accepted, cut.accepted)
        np.testing.assert_array_equal(whole.bonus, cut.bonus)


# --- engines -----------------------------------------------------------------------------------------


def nan_from_there_on(logits: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.where(positions[..., None] >= FAILS_AT, NAN, logits)


def spoilt(model: LoadedModel, name: str, *index: int) -> LoadedModel:
    weight = np.array(model.params[name])
    weight[index] = NAN
    params = model.params | {name: jax.device_put(weight)}
    return dataclasses.replace(model, params=params)


OPTIONS: dict[str, Any] = dict(logprobs=True, logits_fn=nan_from_there_on)


def plain_engine() -> Engine:
    return case(NAME).engine(None, **OPTIONS)


def drafting_engine() -> Engine:
    return case(NAME).engine("dflash", draft_sampling=True, verification="block", **OPTIONS)


def request(row: int, temperature: float = 0.0, **options: Any) -> Request:
    sampling = Sampling(temperature=temperature)
    return Request(case(NAME).prompts[row], NEW_TOKENS, sampling, seed=7, sample=row, **options)


def same(got: list[Completion], expected: list[Completion]) -> None:
    assert [dataclasses.replace(d, id=0) for d in got] == [
        dataclasses.replace(d, id=0) for d in expected
    ]


def test_a_row_ends_where_plain_decoding_would_fail() -> None:
    """Its tokens until there are right; a row that stops on the way has no error; rows beside it go on."""
    c, row = case(NAME), 3
    count = FAILS_AT - len(c.prompts[row])
    known = c.continuation(row, count)
    stop = next(t for t in reversed(known) if t not in known[: known.index(t)])
    stopped = dataclasses.replace(request(row), stop_ids=(stop,))
    requests = [request(row), request(1), stopped, request(4)]
    for engine in (plain_engine(), drafting_engine()):
        failed, *others = run(engine, requests)
        assert failed.finish_reason == "error"
        assert failed.token_ids == known
        assert failed.error is not None
        assert f"logits at position {FAILS_AT} are not finite" in failed.error
        assert failed.acceptance_lengths == ()
        assert failed.logprobs is not None
        assert np.isfinite(failed.logprobs).all()
        assert len(failed.logprobs) == count
        assert [d.finish_reason for d in others] == ["length", "stop", "length"]
        assert others[0].token_ids == c.continuation(1)
        assert others[1].token_ids == known[: known.index(stop) + 1]


@pytest.mark.parametrize("drafted", [False, True])
def test_a_slot_of_a_failed_row_is_as_good_as_new(drafted: bool) -> None:
    """What a NaN left in the caches has weight 0 for the next row, and 0 times NaN is NaN."""
    engine = drafting_engine() if drafted else plain_engine()
    requests = [request(0), request(2, temperature=1.0), request(7), request(2)]
    assert len(requests) == SLOTS
    expected = run(engine, requests)
    clean = engine.target_params
    engine.target_params = spoilt(engine.target, "layers.0.pre_attention_norm", 0).params
    for r in requests:
        engine.add(r)
    failed: list[Completion] = []
    while not engine.is_idle:
        failed += [e for e in engine.step() if isinstance(e, Completion)]
    assert [(d.finish_reason, d.token_ids) for d in failed] == [("error", ())] * SLOTS
    engine.target_params = clean
    names = [engine.add(r) for r in requests]
    done: dict[Any, Completion] = {}
    while not engine.is_idle:
        done |= {e.id: e for e in engine.step() if isinstance(e, Completion)}
    same([done[name] for name in names], expected)


def test_rows_beside_a_failing_one_go_on() -> None:
    engine, requests = plain_engine(), [request(0), request(4)]
    expected = run(engine, requests)
    used = {t for r, d in zip(requests, expected, strict=True) for t in r.prompt_ids + d.token_ids}
    bad = next(t for t in range(20, 160) if t not in used)
    engine.target_params = spoilt(engine.target, "per_layer.table", bad).params
    failing = dataclasses.replace(requests[0], prompt_ids=(30, bad, 31))
    first, failed, last = run(engine, [requests[0], failing, requests[1]])
    assert (failed.finish_reason, failed.token_ids) == ("error", ())
    same([first, last], expected)


def test_a_drafter_of_nan_changes_no_output() -> None:
    """Its drafts are tokens like others, and are refused; its distributions are none."""
    engine = drafting_engine()
    assert engine.drafter_params is not None
    nan = jax.tree.map(
        lambda w: jax.device_put(np.full(w.shape, NAN, w.dtype)), engine.drafter_params
    )
    requests = [request(0), request(1, temperature=1.0), request(7, 0.8), request(4)]
    expected = run(plain_engine(), requests)
    engine.drafter_params = nan
    done = run(engine, requests)
    assert [d.token_ids for d in done] == [d.token_ids for d in expected]
    assert [d.finish_reason for d in done] == ["length"] * len(done)
    assert {n for d in done for n in d.acceptance_lengths} <= {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["dflash", "mtp"])
@pytest.mark.parametrize(
    "drafting",
    [dict(), dict(num_draft_tokens=7, tree=True), dict(draft_sampling=True)],
    ids=["chain", "tree", "drawn"],
)
def test_any_drafter_of_nan_changes_no_output(drafter: str, drafting: dict[str, Any]) -> None:
    if drafting.pop("tree", False):
        drafting["tree"] = Tree(topk=3, depth=3)
    engine = case(NAME).engine(drafter, **drafting)
    assert engine.drafter_params is not None
    floats = {
        n: jnp.full_like(w, NAN) if jnp.issubdtype(w.dtype, jnp.floating) else w
        for n, w in engine.drafter_params.items()
    }
    engine.drafter_params = floats
    sampled = [] if "tree" in drafting else [request(1, temperature=1.0)]
    requests = [request(0), request(7), *sampled]
    expected = run(case(NAME).engine(None), requests)
    done = run(engine, requests)
    assert [d.token_ids for d in done] == [d.token_ids for d in expected]


# --- the sampler -------------------------------------------------------------------------------------


@pytest.mark.slow  # rows of engines by default
def test_a_sampler_tells_of_failed_rows_and_counts_them_nowhere() -> None:
    """One row fails at its prompt, one after some steps, and one goes on."""
    c = case(NAME)
    drafter = c.drafter("mixed")
    sampler = Sampler(c.target, drafter, max_new_tokens=12)
    prompts = [c.prompts[row] for row in (1, 4, 6)]
    sound = sampler(c.target.params, drafter.params, prompts)
    last = sound.tokens[2].tolist()
    table = c.target.params["per_layer.table"].at[jnp.asarray([24, last[9]])].set(NAN)
    bad = c.target.params | {"per_layer.table": table}
    result = sampler(bad, drafter.params, prompts)
    reasons = [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ERROR]
    assert result.finish_reasons.tolist() == reasons
    assert result.lengths.tolist()[:2] == [12, 0]
    count = int(result.lengths[2])
    assert 1 < count <= 10
    assert int(result.num_steps[2]) > 0
    assert result.tokens[2].tolist() == last[:count] + [0] * (12 - count)
    np.testing.assert_array_equal(result.tokens[0], sound.tokens[0])
    lengths = [n for n in sound.acceptance_lengths[0].tolist() if n]
    assert max(lengths) > 1
    np.testing.assert_allclose(result.acceptance_length(), np.mean(lengths), rtol=1e-6)
    shares = [np.mean([n > depth for n in lengths]) for depth in range(1, result.depth + 1)]
    np.testing.assert_allclose(result.accepted_per_depth(), shares, rtol=1e-6)
