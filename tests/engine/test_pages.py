"""Caches in pages: the tokens and numbers of caches in one piece, whatever pages a row gets."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxspec import cache
from jaxspec.cache import Paging, pages_for
from jaxspec.engine.engine import Engine
from jaxspec.engine.length_forecast import FIRST_TOKENS, HISTORY, NUM_TIMES, LengthForecast
from jaxspec.engine.pages import RESERVE, PagePool, Pages
from jaxspec.engine.placement import FreeSpace
from jaxspec.engine.prefix_cache import store
from jaxspec.engine.prefix_cache.copies import RowSizes
from jaxspec.engine.request import Completion, Request
from jaxspec.engine.slots import Slots
from jaxspec.options import FieldError, Tree
from tests import tiny
from tests.cases import case, request, run

CACHE = 120
SHORT_OF_MEMORY = 200  # tokens of pages: between one and two whole rows
PAIRS = [(name, drafter) for name in tiny.FEATURE_SETS for drafter in ("dflash", "mtp")]
PAIRS += [("qwen3-tied", "dflash")]
QUICK = [("31b", "dflash"), ("e2b", "mtp")]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PAGE", 8)


def engine(pair: tuple[str, str | None], **options: Any) -> Engine:
    options = dict(choose_length="never", steps_per_return=2, logprobs=True) | options
    return case(pair[0]).engine(pair[1], cache_length=CACHE, **options)


def prompts(count: int, longest: int, seed: int = 0) -> list[Request]:
    """Return requests of many lengths, some greedy and some sampled."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        new = int(rng.integers(1, 24))
        ids = rng.integers(20, tiny.VOCAB_SIZE, int(rng.integers(1, longest - new))).tolist()
        options: dict[str, Any] = dict(logprobs=True, temperature=float(i % 2))
        requests.append(request(ids, new, seed=i, **options))
    return requests


def assert_equal(one: list[Completion], other: list[Completion]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.token_ids == b.token_ids
        assert a.acceptance_lengths == b.acceptance_lengths
        assert a.finish_reason == b.finish_reason != "error"
        assert a.sampled_logprobs is not None
        np.testing.assert_allclose(a.sampled_logprobs, b.sampled_logprobs, atol=1e-4)


def assert_no_page_is_lost(engine: Engine) -> None:
    pages = engine._scheduler.slots.pages
    assert pages is not None
    pages.check()
    engine._scheduler.slots.release()
    assert pages.usage == 0


def check_pair(pair: tuple[str, str], **options: Any) -> None:
    requests = prompts(8, CACHE - 12)
    options = dict(batch_size=3, draft_sampling=True) | options
    whole = run(engine(pair, **options), requests)
    paged = engine(pair, cache_tokens=SHORT_OF_MEMORY, **options)
    live: list[float] = []
    done: dict[Any, Completion] = {}
    for i, asked in enumerate(requests):
        paged.add(Request(**{**vars(asked), "id": i, "sample": i}))
    while not paged.is_idle:
        done |= {e.id: e for e in paged.step() if isinstance(e, Completion)}
        live.append(paged.cache_usage)
    assert_equal(whole, [done[i] for i in range(len(requests))])
    assert max(live) > 0.5
    assert_no_page_is_lost(paged)


@pytest.mark.slow  # test_random_chains compares pages with whole rows by default
@pytest.mark.parametrize("pair", QUICK)
def test_pages_give_what_whole_rows_give(pair: tuple[str, str]) -> None:
    check_pair(pair)


@pytest.mark.slow
@pytest.mark.parametrize("read_ahead", [0, 2])
@pytest.mark.parametrize("pair", PAIRS)
def test_pages_of_every_pair(pair: tuple[str, str], read_ahead: int) -> None:
    check_pair(pair, read_ahead=read_ahead)


@pytest.mark.slow
def test_pages_with_a_tree_and_rows_read_ahead() -> None:
    check_pair(
        ("31b", "dflash"), read_ahead=2, draft_sampling=False, num_draft_tokens=5, tree=Tree(2, 3)
    )


@pytest.mark.slow
def test_pages_with_a_plain_target() -> None:
    requests = prompts(5, 60)
    whole = run(engine(("31b", None)), requests)
    paged = engine(("31b", None), cache_tokens=SHORT_OF_MEMORY)
    assert_equal(whole, run(paged, requests))


def with_preemption(pair: tuple[str, str | None], **options: Any) -> tuple[Engine, Engine]:
    """Return an engine with pages for all rows, and one whose pages hold the beginnings of four and the ends of two."""
    options = dict(batch_size=4, penalties=True) | options
    plenty = dict(options, cache_tokens=10 * CACHE)
    return engine(pair, **plenty), engine(pair, cache_tokens=SHORT_OF_MEMORY, **options)


def short_of_memory() -> Engine:
    """Return the engine of few pages that most tests here share: its programs are compiled once."""
    return with_preemption(("31b", "mtp"), draft_sampling=True)[1]


def check_preemption(pair: tuple[str, str | None], **options: Any) -> None:
    roomy, paged = with_preemption(pair, **options)
    count = paged.batch_size + 2
    requests = [
        request(range(20 + i, 36 + i), 70, seed=i, temperature=i % 2, logprobs=True)
        for i in range(count)
    ]
    expected = run(roomy, requests)
    assert roomy.num_preemptions == 0
    scheduler = paged._scheduler
    done: dict[Any, Completion] = {}
    for i, asked in enumerate(requests):
        paged.add(Request(**{**vars(asked), "id": i, "sample": i}))
    while not paged.is_idle:
        done |= {e.id: e for e in paged.step() if isinstance(e, Completion)}
        assert scheduler.slots.pages is not None
        scheduler.slots.pages.check([store.holders for store in paged._prefixes])
    assert paged.num_preemptions >= 2
    assert_equal(expected, [done[i] for i in range(len(requests))])
    if not paged._prefixes:
        assert_no_page_is_lost(paged)


@pytest.mark.usefixtures("rows_outgrow_memory")
def test_rows_that_are_preempted_go_on_as_if_they_had_not_been() -> None:
    check_preemption(("31b", "mtp"), draft_sampling=True)


@pytest.mark.usefixtures("rows_outgrow_memory")
@pytest.mark.slow
@pytest.mark.parametrize("pair", [*PAIRS, ("31b", None)])
@pytest.mark.parametrize(
    "options", [{}, dict(read_ahead=2), dict(max_prefill_tokens=1), dict(batch_size=6, stored=True)]
)
def test_every_pair_is_preempted(
    pair: tuple[str, str | None], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside stored prefixes, which leave first."""
    monkeypatch.setattr(store, "MIN_TOKENS", 8)
    options = dict(options)
    if options.pop("stored", False):
        runtime = engine(pair).runtime
        row = RowSizes(runtime.spec, runtime.cache_length, runtime.mesh)
        options["prefix_bytes"] = row.min_bytes
    check_preemption(pair, draft_sampling=pair[1] is not None, **options)


@pytest.mark.usefixtures("rows_outgrow_memory")
def test_a_preempted_request_can_be_cancelled_and_the_oldest_never_waits() -> None:
    paged = short_of_memory()
    scheduler, order = paged._scheduler, []
    for i in range(4):
        paged.add(request(range(20 + i, 36 + i), 70, id=i))
    while not paged.is_idle:
        order += [(e.id, e.finish_reason) for e in paged.step() if isinstance(e, Completion)]
        assert all(saved.row.request.id != 0 for saved in scheduler.preempted)
        if scheduler.preempted and len(order) == 0:
            paged.cancel(scheduler.preempted[-1].row.request.id)
    assert "cancelled" in {reason for _, reason in order}
    assert len(order) == 4
    assert (0, "length") in order
    assert_no_page_is_lost(paged)


def test_rows_are_admitted_that_have_room_until_they_end() -> None:
    """Without a request that ended before, each is expected to get all the tokens that it may have."""
    paged = short_of_memory()
    for i in range(6):
        paged.add(request(range(20 + i, 36 + i), 70 if i % 2 else 8, id=i))
    most = 0
    while not paged.is_idle:
        paged.step()
        most = max(most, paged.num_running)
    assert paged.num_preemptions == 0
    assert most >= 2
    assert_no_page_is_lost(paged)


def chances(forecast: LengthForecast, limit: int, tokens: int = 0) -> dict[int, float]:
    """Return the chance that a row is there, by the tokens that it has then."""
    times, alive = forecast(np.array([limit]), np.array([tokens]))
    assert len(times) <= NUM_TIMES
    return dict(zip((tokens + times).tolist(), alive[:, 0].tolist(), strict=True))


def test_the_forecast_learns_from_requests_that_ended() -> None:
    forecast = LengthForecast()
    unknown = chances(forecast, 300)  # it gets all tokens that it may have
    assert all(p == (n < 300) for n, p in unknown.items())
    assert max(unknown) == 300
    assert max(chances(forecast, 32000)) == FIRST_TOKENS
    assert max(chances(forecast, 32000, 2000)) == 4000
    for _ in range(HISTORY // 2):
        forecast.learn(32768, 100)
        forecast.learn(32768, 500)
    known = chances(forecast, 32768)
    assert all(p == 1 for n, p in known.items() if n < 100)
    assert all(p == 0.5 for n, p in known.items() if 100 <= n < 500)
    assert known[max(known)] == 0
    longer = chances(forecast, 32768, 200)
    assert all(p == 1 for n, p in longer.items() if n < 500)
    assert max(chances(forecast, 32768, 2000)) == 4000  # nothing is known of such
    assert max(chances(forecast, 300)) == 300  # another kind


def plainly_fitting(pool: PagePool, positions: np.ndarray, alive: np.ndarray, running: int) -> int:
    """Return what `num_fitting` does where no row shares pages, with a loop for each number of rows."""
    (slots,) = pool.counts
    reserve = (pool.counts[slots] - 1) // RESERVE if running else 0
    for rows in range(running + 1, positions.shape[1] + 1):
        for now, chance in zip(positions, alive, strict=True):
            pages = sum(chance[r] * pages_for(min(slots, int(now[r]))) for r in range(rows))
            if pages > pool.counts[slots] - 1 - reserve + 1e-6:
                return rows - 1 - running
    return positions.shape[1] - running


@given(data=st.data())
def test_rows_fit_whose_pages_suffice_at_all_times(data: st.DataObject) -> None:
    pool = PagePool(8, {96: data.draw(st.integers(30, 60))})
    running, new = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    shape = (3, running + new)
    more = data.draw(arrays(np.int64, shape, elements=st.integers(1, 60)))
    alive = data.draw(arrays(float, shape, elements=st.sampled_from([0.0, 0.25, 1.0])))
    alive[0] = 1
    positions = more.cumsum(0)
    for row in range(running):
        pool.take(row, int(positions[0, row]))
    fitting = pool.num_fitting(positions, alive, range(running))
    assert fitting == plainly_fitting(pool, positions, alive, running)


def test_pages_that_another_row_has_stay_when_a_row_ends() -> None:
    pool = PagePool(3, {96: 1 + 8})
    pool.take(0, 48)
    shared = {place: int(page) for place, page in enumerate(pool.tables[96][0][:4])}
    pool.take(1, 40, {96: shared})  # one page is left
    alive = np.array([[1.0, 1, 1], [1, 0, 1]])  # the second row ends
    for new, fits in ((8, 1), (16, 1), (24, 0)):  # with its own page two are free then, not six
        positions = np.array([[48, 40, 8], [48, 40, new]])
        assert pool.num_fitting(positions, alive, [0, 1]) == fits
    assert pool.num_fitting(np.array([[48, 40, 8], [48, 40, 16]]), None, [0, 1]) == 0


def test_short_requests_share_memory_that_one_long_row_would_take() -> None:
    """Four rows of 24 positions fit where rows in one piece are one."""
    paged = short_of_memory()
    assert SHORT_OF_MEMORY // CACHE == 1
    for i in range(4):
        paged.add(request(range(20 + i, 36 + i), 2, seed=i))
    paged.step()
    assert paged.num_running == 4
    while not paged.is_idle:
        paged.step()


def test_a_long_request_is_not_overtaken() -> None:
    """It waits for pages, and those behind it wait for it, though they would fit."""
    paged = short_of_memory()
    order = []
    for name, length in (("first", 100), ("long", 104), ("short", 4)):
        paged.add(request(range(20, 20 + length), 4, id=name))
    while not paged.is_idle:
        order += [e.id for e in paged.step() if isinstance(e, Completion)]
    assert order == ["first", "long", "short"]
    assert_no_page_is_lost(paged)


def test_a_row_that_is_not_finite_leaves_nothing_in_its_pages() -> None:
    """A weight that is NaN ends all rows; with the old weights, other rows get their pages."""
    requests = [request(range(20, 50), 6, logprobs=True)] * 6
    paged = short_of_memory()
    good = run(paged, requests)
    params = paged.target_params
    name = next(n for n in params if n.endswith("final_norm"))
    for i, asked in enumerate(requests):
        paged.add(Request(**{**vars(asked), "id": i, "sample": i}))
    paged.target_params = {**params, name: params[name] * np.nan}
    events: list[Any] = []
    while not paged.is_idle:
        events += paged.step()
    assert {e.finish_reason for e in events if isinstance(e, Completion)} == {"error"}
    paged.target_params = params
    done = {}
    for i, asked in enumerate(requests):
        paged.add(Request(**{**vars(asked), "id": i, "sample": i}))
    while not paged.is_idle:
        done |= {e.id: e for e in paged.step() if isinstance(e, Completion)}
    assert_equal(good, [done[i] for i in range(len(requests))])


@pytest.mark.slow
def test_warm_up_compiles_all_programs_of_pages() -> None:
    paged = engine(
        ("31b", "mtp"), batch_size=4, cache_tokens=400, read_ahead=2, choose_length="exact"
    )
    paged.warm_up()
    count = paged.num_compilations
    for i, asked in enumerate(prompts(6, 60)):
        paged.add(Request(**{**vars(asked), "id": i, "sample": i}))
    while not paged.is_idle:
        paged.step()
    assert paged.num_compilations == count
    assert_no_page_is_lost(paged)


@pytest.mark.usefixtures("rows_outgrow_memory")
@pytest.mark.slow
def test_rows_that_give_up_their_pages_read_no_longer_prompts() -> None:
    """An engine that was warmed up for their prompts alone compiles nothing when they come back."""
    paged = short_of_memory()
    asked = [request(range(20 + i, 36 + i), 70, seed=i, sample=i, id=i) for i in range(6)]
    paged.warm_up([16])
    count = paged.num_compilations
    for one in asked:
        paged.add(one)
    while not paged.is_idle:
        paged.step()
    assert paged.num_preemptions >= 2
    assert paged.num_compilations == count


def test_requests_go_where_most_pages_are_free_or_where_their_prefix_is() -> None:
    """On a mesh of two parts. A part without a free slot gets none, whatever it knows."""
    slots = mock.Mock(spec=Slots, pages=Pages(8, {96: 13}, 2), first_positions=lambda request: 24)
    slots.pages.pools[0].take(0, 40)
    space, asked = FreeSpace(slots, [[1, 2], [4, 5, 6]]), request([20], 4)
    assert space.choose() == 1
    assert space.choose([0]) == 0
    found = []
    while (part := space.choose()) is not None:
        space.take(asked, part)
        found.append(part)
    assert found == [1, 1, 0, 1, 0]  # 12 pages are free of the second, 7 of the first
    slots.pages = None
    space = FreeSpace(slots, [[0], [4, 5]])
    space.take(asked, 0)
    assert space.choose([0]) == 1


def test_parts_of_a_mesh_share_the_tokens_of_pages() -> None:
    one, two = Paging(8, 100), Paging(16, 200, 2)
    assert one.num_pages(96) == two.num_pages(96) == 1 + 13 + 8
    pages = Pages(4, {16: 5}, 2)
    for slot in (0, 3):
        pool, row = pages.of(slot)
        pool.take(row, 16)
    first = list(range(cache.NO_PAGE + 1, 3))  # numbers count the pages of a part
    assert pages.tables[16].tolist() == [first, [0, 0], [0, 0], first]
    assert pages.usage == 0.5
    pages.check()


def test_a_pool_never_gives_a_page_twice() -> None:
    rng = random.Random(0)
    pool = PagePool(6, {64: 30, 24: 13})
    held: dict[int, int] = {}
    for _ in range(2000):
        row = rng.randrange(6)
        if row in held:
            pool.release(row)
            del held[row]
        elif pool.num_fitting(np.array([[positions := rng.randint(1, 64)]])):
            pool.take(row, positions)
            held[row] = positions
            assert (pool.tables[64][row] != cache.NO_PAGE).sum() == -(-positions // 8)
            assert (pool.tables[24][row] != cache.NO_PAGE).sum() == min(-(-positions // 8), 3)
        pool.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(cache_tokens=CACHE - 1), "cache_tokens=119 holds no whole request, which may need"),
        (dict(cache_tokens=0), "cache_tokens"),
    ],
)
def test_pages_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        engine(("31b", "mtp"), **options)
