"""Prompts that begin alike are read once, and nobody can tell by their tokens or acceptance lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import cache
from jaxspec.engine.engine import Completion, Engine, Request
from jaxspec.engine.prefix_cache import store
from jaxspec.engine.prefix_cache.copies import RowSizes
from jaxspec.engine.slots import Slots
from jaxspec.options import FieldError
from tests import tiny
from tests.cases import case, request, run, slow, target

NAME = "31b"
CACHE = 96
NEW = 12
MANY = 1 << 20  # bytes for as many prefixes as a test makes
PLENTY: dict[str, Any] = dict(prefix_bytes=MANY, prefix_host_bytes=MANY)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PAGE", 4)
    monkeypatch.setattr(store, "MIN_TOKENS", 4)


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(20, tiny.VOCAB_SIZE, count).tolist())


BASE = ids(56)


def engine(name: str = NAME, drafter: str | None = "dflash", **options: Any) -> Engine:
    return case(name).engine(drafter, cache_length=CACHE, batch_size=2, **options)


def one(engine: Engine, prompt: Sequence[int], **options: Any) -> Completion:
    return run(engine, [request(prompt, NEW, **options)])[0]


def assert_alike(hot: Completion, cold: Completion) -> None:
    assert hot.error is None
    assert (hot.token_ids, hot.finish_reason) == (cold.token_ids, cold.finish_reason)
    assert hot.acceptance_lengths == cold.acceptance_lengths
    assert (hot.logprobs, hot.sampled_logprobs) == (cold.logprobs, cold.sampled_logprobs)


def turns() -> list[tuple[tuple[int, ...], int]]:
    """Return prompts, and where the entries of those before let each go on, with a slack of 5 or more.

    Passes have 16 tokens, the target's window 8, and the drafter's 6.
    """
    other = ids(30, seed=1)
    return [
        (BASE[:6], 0),  # inside the window
        (BASE[:6] + other[:9], 6),
        (
            BASE,
            6,
        ),  # and passes end at 22, 38 and 54, of which the prompt's end makes the last useless
        (BASE[:22] + other[:5], 22),
        (BASE[:38] + other[:20], 38),
        (BASE, 55),  # the same again
        (BASE[:52] + other[:2], 52),  # as of a template that renders the end in another way
        (BASE + other[:10], 56),
        (BASE[:30] + other[:10], 22),  # the next one stops where these part
        (BASE[:30] + other[10:20], 28),
        (other[:20], 0),
    ]


EVERY_PAIR = [(name, drafter) for name in tiny.FEATURE_SETS for drafter in ("dflash", "mtp")]
QUICK = [("31b", "dflash")]


@pytest.mark.parametrize("pair", [*QUICK, *slow(*(p for p in EVERY_PAIR if p not in QUICK))])
def test_tokens_and_acceptance_are_those_of_a_cold_run(pair: tuple[str, str]) -> None:
    """At first drafts are drawn, at a temperature at which random models agree on some: their state shows there."""
    name, drafter = pair
    cold = engine(name, drafter, draft_sampling=True)
    hot = engine(name, drafter, draft_sampling=True, **PLENTY)
    accepted = []
    for prompt, cached in turns():
        drawn: dict[str, Any] = dict(temperature=5.0, seed=len(accepted))
        done = one(hot, prompt, **drawn)
        assert done.cached_tokens == cached
        assert_alike(done, one(cold, prompt, **drawn))
        accepted += done.acceptance_lengths
    assert np.mean(accepted) > 1.1
    again = run(hot, [request(prompt, NEW) for prompt, _ in turns()])
    assert all(done.cached_tokens for done in again)
    for done, expected in zip(again, run(cold, [request(p, NEW) for p, _ in turns()]), strict=True):
        assert_alike(done, expected)
    stats = hot.prefix_stats
    assert stats is not None
    assert (stats.evictions, stats.queries) == (0, 2 * len(turns()))
    assert stats.hits == 2 * len(turns()) - 2


def test_with_invariance_a_hit_gives_the_same_bits() -> None:
    """Rows go on where their own passes end, and there alone; log-probabilities show every bit.

    Both engines have pages: rings of other sizes add up in another order. The cold one's store is emptied.
    """
    options: dict[str, Any] = dict(logprobs=True, penalties=True, invariant=True)
    asks: dict[str, Any] = dict(logprobs=True, repetition_penalty=1.3)
    hot, cold = (engine(**PLENTY, **options) for _ in range(2))
    expected = (0, 0, 0, 16, 32, 48, 48, 48, 16, 16, 0)
    for (prompt, _), cached in zip(turns(), expected, strict=True):
        done = one(hot, prompt, **asks)
        assert done.cached_tokens == cached
        cold.target_params = cold.target_params
        expected_done = one(cold, prompt, **asks)
        assert expected_done.cached_tokens == 0
        assert_alike(done, expected_done)


@pytest.mark.slow  # test_random_chains has such prefixes by default
def test_prefixes_come_back_from_host_memory() -> None:
    """The device holds a row and at most three prompts here: each prompt was evicted when it comes again."""
    cold = engine()
    tight: dict[str, Any] = dict(cache_tokens=CACHE, prefix_bytes=min_bytes(cold), read_ahead=0)
    hot = engine(**tight, prefix_host_bytes=MANY)
    prompts = [ids(40, seed) for seed in range(6)]
    for count, prompt in enumerate([*prompts, *prompts]):
        done = one(hot, prompt)
        assert done.cached_tokens == (39 if count >= 6 else 0)
        assert_alike(done, one(cold, prompt))
    stats = hot.prefix_stats
    assert stats is not None
    assert stats.host_hits == 6
    assert stats.offloads >= 6
    assert 1 <= stats.entries <= 4
    assert stats.host_bytes > stats.used_bytes
    forgetful = engine(**tight)
    assert [one(forgetful, prompt).cached_tokens for prompt in [*prompts, *prompts]] == [0] * 12


def min_bytes(engine: Engine) -> int:
    runtime = engine.runtime
    return RowSizes(runtime.spec, runtime.cache_length, runtime.mesh).min_bytes


def test_samples_of_a_prompt_and_what_prompts_share_are_read_once() -> None:
    """They arrive together. Three of a kind wait for the first one, which a longer common beginning cuts."""
    hot, cold = engine(**PLENTY), engine()
    asked = [request(BASE[:40], NEW, temperature=1.0, seed=1) for _ in range(4)]
    done = run(hot, asked)
    assert [d.cached_tokens for d in done] == [0, 39, 39, 39]
    for d, expected in zip(done, run(cold, asked), strict=True):
        assert_alike(d, expected)
    system = ids(26, seed=5)
    asked = [request(system + ids(20, seed=6 + i), NEW) for i in range(3)]
    done = run(hot, asked)
    assert [d.cached_tokens for d in done] == [0, 24, 24]
    for d, expected in zip(done, run(cold, asked), strict=True):
        assert_alike(d, expected)


@pytest.mark.parametrize("read_ahead", [0, *slow(2)])
def test_those_who_wait_for_a_prompt_that_is_cancelled_read_it(read_ahead: int) -> None:
    hot = engine(**PLENTY, max_prefill_tokens=1, steps_per_return=1, read_ahead=read_ahead)
    first, *others = [hot.add(Request(BASE, NEW, id=i)) for i in range(3)]
    hot.step()
    hot.cancel(first)
    done: dict[Any, Completion] = {}
    for _ in range(100):
        done |= {e.id: e for e in hot.step() if isinstance(e, Completion)}
    assert hot.is_idle
    expected = one(engine(), BASE)
    for name in others:
        assert done[name].token_ids == expected.token_ids
        assert done[name].acceptance_lengths == expected.acceptance_lengths
    assert sorted(done[name].cached_tokens for name in others) == [0, 55]


def test_an_id_that_comes_again_brings_its_own_prompt() -> None:
    """One that waited was cancelled. Its prompt was once looked up, and stored, for the next of that id."""
    hot, cold, other = engine(**PLENTY), engine(), ids(50, seed=7)
    assert one(hot, BASE).cached_tokens == 0
    running = [hot.add(request(ids(8, seed=8 + i), NEW)) for i in range(hot.batch_size)]
    hot.add(request(BASE, NEW, id="x"))
    hot.step()
    hot.cancel("x")
    hot.step()
    hot.add(request(other, NEW, id="x"))
    done: dict[Any, Completion] = {}
    while not hot.is_idle:
        done |= {e.id: e for e in hot.step() if isinstance(e, Completion)}
    assert {*running, "x"} <= done.keys()
    assert done["x"].cached_tokens == 0
    assert done["x"].token_ids == one(cold, other).token_ids
    assert one(hot, BASE).token_ids == one(cold, BASE).token_ids


def test_other_weights_empty_the_store() -> None:
    """Also of what rows that began with the old ones were going to store."""
    hot, c = engine(**PLENTY), case(NAME)
    one(hot, BASE)
    other = tiny.random_params(target(NAME).model_def, seed=7)
    expected = one(engine_with(other), BASE)
    hot.target_params = other
    done = one(hot, BASE)
    assert done.cached_tokens == 0
    assert_alike(done, expected)
    assert one(hot, BASE).cached_tokens == 55
    hot.drafter_params = c.drafter("dflash").params
    assert one(hot, BASE).cached_tokens == 0
    hot.add(Request(ids(40, seed=9), NEW))
    hot.step()  # reads a part of it
    hot.target_params = c.target.params
    while not hot.is_idle:
        hot.step()
    assert one(hot, ids(40, seed=9)).cached_tokens == 0


def engine_with(params: Any) -> Engine:
    made = engine()
    made.target_params = params
    return made


def test_nothing_is_stored_of_numbers_that_are_not_finite() -> None:
    hot, params = engine(**PLENTY), case(NAME).target.params
    broken = params["embedder.table"].at[BASE[-1]].set(jnp.nan)
    hot.target_params = params | {"embedder.table": broken}
    assert one(hot, BASE).finish_reason == "error"
    assert hot.prefix_stats
    assert (hot.prefix_stats.entries, hot.prefix_stats.evictions) == (0, 0)


@pytest.mark.slow
def test_a_warm_engine_compiles_nothing_and_its_memory_does_not_grow() -> None:
    nbytes = min_bytes(engine(drafter=None))
    tight: dict[str, Any] = dict(cache_tokens=CACHE, prefix_bytes=nbytes, prefix_host_bytes=MANY)
    hot = engine(drafter=None, **tight, read_ahead=2)
    hot.warm_up()
    known = hot.num_compilations
    prompts = [ids(30, seed) for seed in range(8)]
    for _ in range(2):
        for prompt in prompts:
            one(hot, prompt)
    assert hot.num_compilations == known
    stats = hot.prefix_stats
    assert stats is not None
    assert stats.host_hits == len(prompts)
    arrays = len(jax.live_arrays())
    for prompt in prompts:
        one(hot, prompt)
    assert len(jax.live_arrays()) <= arrays


def test_an_error_in_a_step_drops_the_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = engine(**PLENTY)
    one(hot, BASE)
    with monkeypatch.context() as context:
        context.setattr(hot.runtime, "bind_prefill", lambda *args: 1 / 0)
        hot.add(Request(BASE, NEW))
        with pytest.raises(ZeroDivisionError):
            hot.step()
    hot.reset()
    assert one(hot, BASE).cached_tokens == 0
    assert one(hot, BASE).cached_tokens == 55


def test_a_step_that_was_interrupted_can_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is forgotten then. Requests that came later found a store without pages."""
    hot, expected = engine(**PLENTY), one(engine(), BASE)
    one(hot, BASE)
    names = [
        hot.add(Request(BASE, NEW)) for _ in range(3)
    ]  # of which the last one gets a slot later
    hot.step()
    with monkeypatch.context() as context:
        context.setattr(Slots, "wait", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            hot.step()
    done = {}
    while not hot.is_idle:
        done |= {e.id: e for e in hot.step() if isinstance(e, Completion)}
    assert [done[name].token_ids for name in names] == [expected.token_ids] * 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(prefix_bytes=-1), "prefix_bytes is -1; it must be 0 or more"),
        (dict(prefix_bytes=100), "holds no prefix of a whole slot"),
        (dict(prefix_host_bytes=100), "needs prefix_bytes"),
    ],
)
def test_what_a_store_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FieldError, match=says):
        engine(**options)


def test_without_a_store_nothing_is_cached() -> None:
    cold = engine()
    assert cold.prefix_stats is None
    assert [one(cold, BASE).cached_tokens for _ in range(2)] == [0, 0]
