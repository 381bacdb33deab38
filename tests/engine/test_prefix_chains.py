"""Random chains of requests over a store of prefixes, against an engine without one.

Each chain branches, shortens and extends earlier prompts by a few tokens, within the slack of the rings and beyond
it. Requests end, run beside each other or are cancelled. Pages are so few that requests wait for them, and that most
entries are evicted or move to host memory. Every completion has to have the tokens, the acceptance lengths and the
log-probabilities of an engine that reads every prompt from its first token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    rule,
    run_state_machine_as_test,
)

from jaxspec import cache
from jaxspec.engine.engine import Completion, Engine, Request
from jaxspec.engine.prefix_cache import store
from jaxspec.engine.prefix_cache.copies import RowSizes
from jaxspec.runtime.prefill import Shapes
from tests import tiny
from tests.cases import case, request, run

CACHE = 96
NEW = 8
SLOTS = 2
MANY_SLOTS = 16  # a pass has no more rows than slots
TEMPERATURES = st.sampled_from([0.0, 5.0])
LONGEST = CACHE - NEW - 8
TOKENS = CACHE + 20  # of pages, beside those of a prefix of a whole row
ENTRIES_IN_HOST_MEMORY = 3
TOLERANCE = 1e-3
"""Of log-probabilities. Passes of other shapes move them by 1e-5, a key that is not the position's own by 0.01."""


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch, wrong_forecasts: None) -> None:
    monkeypatch.setattr(cache, "PAGE", 4)
    monkeypatch.setattr(store, "MIN_TOKENS", 4)


@functools.cache
def engines(
    name: str, drafter: str, read_ahead: int, slots: int = SLOTS, mixed: bool = False
) -> tuple[Engine, Engine]:
    """Return an engine with a store, and one without. Where passes can be mixed, shapes differ, so it is another."""
    options: dict[str, Any] = dict(cache_length=CACHE, draft_sampling=True, logprobs=True)
    options |= dict(choose_length="never", steps_per_return=2)
    cold = case(name).engine(drafter, batch_size=1, **options)
    runtime = cold.runtime
    of_slot = RowSizes(runtime.spec, runtime.cache_length, runtime.mesh).min_bytes
    hot = case(name).engine(
        drafter,
        batch_size=slots,
        read_ahead=read_ahead,
        cache_tokens=TOKENS,
        prefix_bytes=of_slot,
        prefix_host_bytes=ENTRIES_IN_HOST_MEMORY * of_slot,
        **options,
    )
    return hot, cold


@functools.cache
def cold_completion(name: str, drafter: str, asked: Request) -> Completion:
    return run(engines(name, drafter, 0)[1], [asked])[0]


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(20, tiny.VOCAB_SIZE, count).tolist())


class Chains(RuleBasedStateMachine):
    """Chains of prompts on one engine with a store.

    Args:
      pair: names of the target's feature set and of the drafter.
      read_ahead: rows beside the slots.
      slots: of the engine.
      mixed: whether rows decode in passes over prompts.
    """

    prompts = Bundle("prompts")
    running = Bundle("running")

    def __init__(self, pair: tuple[str, str], read_ahead: int, slots: int, mixed: bool):
        super().__init__()
        self.pair = pair
        self.hot, _ = engines(*pair, read_ahead, slots, mixed)
        self.hot.reset()
        self.hot.target_params = self.hot.target_params  # empties the store
        self.asked: dict[Hashable, Request] = {}
        self.cancelled: set[Hashable] = set()
        self.count = 0

    @rule(target=prompts, length=st.integers(1, LONGEST), seed=st.integers(0, 3))
    def new(self, length: int, seed: int) -> tuple[int, ...]:
        """A prompt that may begin as an earlier one of the same seed."""
        return ids(LONGEST, seed)[:length]

    @rule(
        target=prompts,
        prompt=prompts,
        cuts=st.lists(st.integers(3, 5), min_size=2, max_size=4)
        | st.lists(st.integers(0, 60), min_size=1, max_size=2),
        tail=st.integers(1, 2) | st.integers(3, 30),
        seed=st.integers(10, 12),
        temperature=TEMPERATURES,
    )
    def branch(
        self, prompt: tuple[int, ...], cuts: list[int], tail: int, seed: int, temperature: float
    ) -> tuple[int, ...]:
        """Part from a prompt before its end, and from that one, and so on; decode each to its end."""
        for step, cut in enumerate(cuts):
            kept = prompt[: max(1, len(prompt) - cut)]
            prompt = (kept + ids(tail, seed + 3 * step))[:LONGEST]
            self.add(prompt, 1, temperature)
            self.finish()
        return prompt

    @rule(prompt=prompts, temperature=TEMPERATURES)
    def ask(self, prompt: tuple[int, ...], temperature: float) -> None:
        """Decode a prompt to the end."""
        self.add(prompt, 1, temperature)
        self.finish()

    @rule(
        target=running,
        prompt=prompts,
        samples=st.integers(1, 3),
        temperature=TEMPERATURES,
    )
    def add(self, prompt: tuple[int, ...], samples: int, temperature: float) -> Hashable:
        """Add some samples of a prompt; return the id of the last one."""
        for sample in range(samples):
            self.count += 1
            asked = request(prompt, NEW, temperature=temperature, logprobs=True, sample=sample)
            self.asked[self.hot.add(dataclasses.replace(asked, id=self.count))] = asked
        return self.count

    @rule(several=st.lists(prompts, min_size=2, max_size=4), temperature=TEMPERATURES)
    def add_in_turn(self, several: list[tuple[int, ...]], temperature: float) -> None:
        """Add prompts, and let the engine go on for a step after each."""
        for prompt in several:
            self.add(prompt, 1, temperature)
            self.step(1)

    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        """Let the engine go on."""
        for _ in range(steps):
            for event in self.hot.step():
                if isinstance(event, Completion):
                    self.check(event)

    @rule(id=consumes(running))
    def cancel(self, id: Hashable) -> None:
        """Cancel a request, wherever it is."""
        if id in self.asked:
            self.hot.cancel(id)
            self.cancelled.add(id)

    @rule()
    def finish(self) -> None:
        """Let all requests end."""
        for _ in range(200):
            if self.hot.is_idle:
                break
            self.step(1)
        assert not self.asked
        scheduler, prefixes = self.hot._scheduler, self.hot._prefixes
        assert prefixes
        assert scheduler.slots.pages is not None
        scheduler.slots.pages.check([store.holders for store in prefixes])

    def check(self, done: Completion) -> None:
        """Compare with an engine that has no store."""
        asked = self.asked.pop(done.id)
        if done.id in self.cancelled:
            return
        cold = cold_completion(*self.pair, asked)
        assert done.token_ids == cold.token_ids
        assert done.acceptance_lengths == cold.acceptance_lengths
        assert done.sampled_logprobs is not None
        np.testing.assert_allclose(done.sampled_logprobs, cold.sampled_logprobs, atol=TOLERANCE)

    def teardown(self) -> None:
        if not self.hot.is_idle:
            self.finish()


EVERY_PAIR = [(name, drafter) for name in tiny.FEATURE_SETS for drafter in ("dflash", "mtp")]
EVERY_PAIR.append(("qwen3-tied", "dflash"))  # here the drafter alone has a ring
QUICK = [("31b", "dflash"), ("e2b", "mtp")]
CHAINS, MANY_CHAINS = 6, 60
"""By default of each quick pair, and as a slow test of every pair. Hypothesis draws the same ones each time."""


def run_chains(
    pair: tuple[str, str], read_ahead: int, chains: int, slots: int = SLOTS, mixed: bool = False
) -> None:
    """Run so many random chains of up to 20 operations, each on an empty store."""
    run_state_machine_as_test(
        lambda: Chains(pair, read_ahead, slots, mixed),
        settings=settings(
            max_examples=chains,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # to shrink a chain takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(
    ("pair", "read_ahead"), [(QUICK[0], 0), pytest.param(QUICK[1], 2, marks=pytest.mark.slow)]
)
def test_random_chains(pair: tuple[str, str], read_ahead: int) -> None:
    run_chains(pair, read_ahead, CHAINS)


@pytest.mark.parametrize(
    ("pair", "chains"),
    [
        (("26b-a4b", "mtp"), CHAINS),
        *(pytest.param(pair, MANY_CHAINS, marks=pytest.mark.slow) for pair in EVERY_PAIR),
    ],
)
def test_random_chains_whose_pieces_share_passes(
    share_passes: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    chains: int,
) -> None:
    """Chunks share passes wherever they can, and rings have slots to spare for it."""
    shared = share_passes(32)
    monkeypatch.setattr(Shapes, "_cost_of_chunks", lambda *_: 1.0)
    run_chains(pair, 2, chains, MANY_SLOTS)
    assert len(shared) > 1


@pytest.mark.parametrize(
    ("pair", "chains"),
    [pytest.param(pair, MANY_CHAINS, marks=pytest.mark.slow) for pair in EVERY_PAIR],
)
def test_random_chains_whose_rows_decode_in_passes_over_prompts(
    share_passes: Callable[[int], list[int]],
    mixed_calls: list[int],
    pair: tuple[str, str],
    chains: int,
) -> None:
    share_passes(64)
    run_chains(pair, 2, chains, mixed=True)
    assert len(mixed_calls) > 1


@pytest.mark.slow
@pytest.mark.parametrize("read_ahead", [0, 2])
@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_many_random_chains(pair: tuple[str, str], read_ahead: int) -> None:
    run_chains(pair, read_ahead, MANY_CHAINS)
