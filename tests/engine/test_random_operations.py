"""Random operations on an open engine against a plain model of it.

The model knows what each request has to get: the tokens of naive greedy decoding, up to its limit or its stop.
After every operation nothing is lost, nothing told twice, and no slot leaks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import cache
from jaxspec.engine.engine import Engine
from jaxspec.engine.prefix_cache import store
from jaxspec.engine.prefix_cache.copies import RowSizes
from jaxspec.engine.request import Completion, Update
from tests.cases import CACHE_LENGTH, NEW_TOKENS, case, request

NAME = "31b"
SLOTS = 3


class CallbackError(Exception):
    """What a user's callback raises here."""


@dataclass
class Expected:
    """What a request has to get, unless it is cancelled: these tokens, told in order, and this end."""

    tokens: tuple[int, ...]
    reason: str
    told: tuple[int, ...] = ()
    is_cancelled: bool = False


@dataclass
class Trial:
    """An engine under random operations, and the model beside it."""

    engine: Engine
    live: dict[Hashable, Expected] = field(default_factory=dict)
    done: int = 0

    def add(self, rng: random.Random) -> None:
        """Add a request with a random prompt, limit and kind of stop."""
        c, row, limit = case(NAME), rng.randrange(8), rng.randint(1, NEW_TOKENS)
        # Some prompts are others with the first tokens of their reply, as in a next turn.
        said = rng.choice([0, 0, rng.randrange(NEW_TOKENS - limit + 1)])
        prompt, tokens = (
            c.prompts[row] + c.continuation(row, said),
            c.continuation(row, said + limit),
        )
        tokens = tokens[said:]
        at = rng.randrange(limit)
        kind = rng.choice(["limit", "stop id", "stop text", "exception"])
        asked = request(prompt, limit)
        if kind == "limit":
            expected = Expected(tokens, "length")
        elif kind == "stop id":
            end = tokens.index(tokens[at]) + 1
            asked = request(prompt, limit, stop_ids=(tokens[at],))
            expected = Expected(tokens[:end], "stop")
        elif kind == "stop text":
            asked = request(prompt, limit, stop_at=lambda ids: at if len(ids) > at else None)
            expected = Expected(tokens[:at], "stop")
        else:

            def fail(ids: Sequence[int]) -> None:
                raise CallbackError("of the user's")

            asked = request(prompt, limit, stop_at=fail)
            expected = Expected(tokens, "error")
        self.live[self.engine.add(asked)] = expected

    def cancel(self, rng: random.Random) -> None:
        """Cancel some request that is not cancelled yet."""
        names = [name for name, expected in self.live.items() if not expected.is_cancelled]
        if names:
            name = rng.choice(names)
            self.engine.cancel(name)
            self.live[name].is_cancelled = True

    def step(self) -> None:
        """Let the engine go on, and compare what it tells."""
        for event in self.engine.step():
            expected = self.live[event.id]
            assert isinstance(event, Update | Completion)
            got = event.token_ids
            assert got[: len(expected.told)] == expected.told
            if isinstance(event, Update):
                assert len(got) > len(expected.told), "told nothing new"
                assert got == expected.tokens[: len(got)]
                expected.told = got
                continue
            if expected.is_cancelled:
                assert event.finish_reason == "cancelled"
                # A row that was read ahead keeps its first token until it decodes.
                assert got == expected.tokens[: max(len(expected.told), min(len(got), 1))]
            else:
                assert event.finish_reason == expected.reason
                if expected.reason == "error":
                    assert event.error == "stop_at raised CallbackError: of the user's"
                    assert got == expected.tokens[: len(got)]
                else:
                    assert got == expected.tokens
            del self.live[event.id]
            self.done += 1

    def finish(self) -> None:
        """Let it end; nothing may be left."""
        for _ in range(40 * (len(self.live) + 1)):
            if self.engine.is_idle:
                break
            self.step()
        assert self.engine.is_idle, "it does not end"
        assert not self.live
        assert self.engine.num_running == 0


OPERATIONS = ("add", "add", "cancel", "step", "step", "step", "finish", "new weights")
ENGINES: dict[tuple[str | None, int, int | None, str, bool], Engine] = {}
SOME_PREFIXES = 3  # that the store has room for in host memory


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch, wrong_forecasts: None) -> None:
    monkeypatch.setattr(cache, "PAGE", 4)
    monkeypatch.setattr(store, "MIN_TOKENS", 4)


def engine_of(
    drafter: str | None, read_ahead: int, most: int | None, kind: str, *, mixed: bool = False
) -> Engine:
    """Return an engine, the same one for the same options. A lone row has a program of its own where that can be.

    Args:
      kind: of its caches: "whole rows"; "pages" for a little more than one whole row; "stored
        prefixes" in such pages, from which most are evicted.
      mixed: whether rows decode in passes over prompts.
    """
    key = drafter, read_ahead, most, kind, mixed
    if key not in ENGINES:
        options: dict[str, Any] = dict(batch_size=SLOTS, steps_per_return=2)
        options |= dict(read_ahead=read_ahead, max_prefill_tokens=most)
        if kind != "whole rows":
            options["cache_tokens"] = CACHE_LENGTH + 10
        made = case(NAME).engine(drafter, **options)
        if kind == "stored prefixes":
            runtime = made.runtime
            nbytes = RowSizes(runtime.spec, runtime.cache_length, runtime.mesh).min_bytes
            options |= dict(prefix_bytes=nbytes, prefix_host_bytes=SOME_PREFIXES * nbytes)
            made = case(NAME).engine(drafter, **options)
        if drafter is None:
            made.warm_up()
        ENGINES[key] = made
    return ENGINES[key]


def go_through(trial: Trial, count: int, seed: int) -> None:
    """Do so many random operations, and let all end."""
    rng = random.Random(seed)
    if not trial.engine.is_idle:  # an example before this one failed
        trial.engine.reset()
    for _ in range(count):
        match rng.choice(OPERATIONS):
            case "add" if len(trial.live) < 12:
                trial.add(rng)
            case "cancel" if rng.random() < 0.5:
                trial.cancel(rng)
            case "finish" if rng.random() < 0.1:
                trial.finish()
            case "new weights" if rng.random() < 0.2:  # the same ones, but who knows
                trial.engine.target_params = trial.engine.target_params
            case _:
                trial.step()
    trial.finish()
    if (pages := trial.engine._scheduler.slots.pages) is not None:
        prefixes = trial.engine._prefixes
        pages.check([store.holders for store in prefixes])


@settings(max_examples=4, deadline=None)  # each may compile an engine's programs
@given(
    seed=st.integers(0, 2**32),
    drafter=st.sampled_from([None, "mixed"]),
    read_ahead=st.sampled_from([0, 2]),
    most=st.sampled_from([None, 1]),
    kind=st.sampled_from(["whole rows", "stored prefixes", "pages"]),
)
def test_random_operations(
    seed: int, drafter: str | None, read_ahead: int, most: int | None, kind: str
) -> None:
    go_through(Trial(engine_of(drafter, read_ahead, most, kind)), 60, seed)


@pytest.mark.slow
@pytest.mark.parametrize("read_ahead", [0, 2])
@pytest.mark.parametrize("kind", ["whole rows", "stored prefixes", "pages"])
def test_ten_thousand_operations(read_ahead: int, kind: str) -> None:
    """They neither leak slots nor memory nor pages."""
    ten_thousand_operations(engine_of("mixed", read_ahead, None, kind))


@pytest.mark.slow
@pytest.mark.parametrize("read_ahead", [0, 2])
def test_ten_thousand_operations_in_mixed_passes(
    share_passes: Callable[[int], list[int]], mixed_calls: list[int], read_ahead: int
) -> None:
    share_passes(64)
    ten_thousand_operations(engine_of("dflash", read_ahead, None, "stored prefixes", mixed=True))
    assert len(mixed_calls) > 100


def ten_thousand_operations(engine: Engine) -> None:
    """Do ten thousand operations, and count what is left."""
    trial = Trial(engine)
    go_through(trial, 1000, seed=0)
    engine.target_params = engine.target_params  # empties the store, with what is in host memory
    arrays = len(jax.live_arrays())
    for seed in range(1, 10):
        go_through(trial, 1000, seed)
    engine.target_params = engine.target_params
    # The last call's small arrays may be there still. A leak would be thousands.
    assert len(jax.live_arrays()) <= arrays + 10
    assert trial.done > 1000
    if stats := engine.prefix_stats:
        assert min(stats.hits, stats.evictions, stats.host_hits) > 100
