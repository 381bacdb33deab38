"""Which prefixes are stored and where, without a device: pages here hold positions and tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import cache
from jaxspec.cache import NO_PAGE, pages_for
from jaxspec.engine.pages import PagePool
from jaxspec.engine.prefix_cache.entries import Prompt
from jaxspec.engine.prefix_cache.store import Store

PAGE = 4
FULL, RING, WINDOW = 48, 16, 9  # slots of a row in both kinds of caches
SLACK = RING - WINDOW
PAGE_BYTES, SNAPSHOT_BYTES = {FULL: 10, RING: 3}, 100


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PAGE", PAGE)


class Rows:
    """Rows whose caches hold positions and tokens, and that write as a decoder does."""

    def __init__(self, rows: int, counts: dict[int, int]):
        self.pages = PagePool(rows, counts)
        self.memory: dict[tuple[int, int], list[Any]] = {}
        self.tokens: list[list[int]] = [[] for _ in range(rows)]

    def write(self, row: int, begin: int, tokens: Iterable[int]) -> None:
        """Write tokens from a position on. What is beyond the row's pages is dropped."""
        for position, token in enumerate(tokens, begin):
            for slots, table in self.pages.tables.items():
                slot = position % slots if slots == RING else position
                if slot < slots and (page := int(table[row, slot // PAGE])) != NO_PAGE:
                    held = self.memory.setdefault((slots, page), [None] * PAGE)
                    held[slot % PAGE] = position, token
        self.tokens[row] = self.tokens[row][:begin] + list(tokens)

    def check(self, row: int) -> None:
        """Compare what a query at the end of a row sees with the row's tokens."""
        tokens = self.tokens[row]
        for slots, table in self.pages.tables.items():
            for position in range(
                max(0, len(tokens) - WINDOW) if slots == RING else 0, len(tokens)
            ):
                slot = position % slots
                held = self.memory[slots, int(table[row, slot // PAGE])]
                assert held[slot % PAGE] == (position, tokens[position]), (slots, position)


class FakeCopies:
    """Copies in the memory of `Rows`. A snapshot is the tokens of a row."""

    page_bytes, snapshot_bytes = PAGE_BYTES, SNAPSHOT_BYTES

    def __init__(self, counts: dict[int, int], snapshots: int, slack: int | None):
        self.rings = frozenset({RING} & {*counts})
        self.num_snapshots, self.slack = snapshots, slack
        self.page_bytes = {slots: PAGE_BYTES[slots] for slots in counts}
        self.held: list[Any] = [None] * snapshots

    def copy_pages(self, rows: Rows, pairs: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        for slots, of in pairs.items():
            assert not {one for one, _ in of} & {other for _, other in of}
            for one, other in of:
                rows.memory[slots, other] = list(rows.memory.get((slots, one), [None] * PAGE))

    def keep(self, rows: Rows, row: int, snapshot: int) -> None:
        self.held[snapshot] = list(rows.tokens[row])

    def restore(self, rows: Rows, row: int, snapshot: int, tokens: np.ndarray) -> None:
        assert self.held[snapshot][: len(tokens)] == tokens.tolist()
        rows.tokens[row] = tokens.tolist()

    def lift(self, rows: Rows, slots: int, page: int) -> Any:
        return list(rows.memory.get((slots, page), [None] * PAGE))

    def lower(self, rows: Rows, slots: int, page: int, copy: Any) -> None:
        rows.memory[slots, page] = list(copy)

    def lift_snapshot(self, rows: Rows, index: int) -> Any:
        return self.held[index]

    def lower_snapshot(self, rows: Rows, index: int, copy: Any) -> None:
        self.held[index] = copy

    def warm_up(self, rows: Any, *, with_host: bool) -> None:
        pass

    def drop(self) -> None:
        self.held = [None] * self.num_snapshots


def store_of(
    pages: int = 100,
    ring_pages: int | None = None,
    snapshots: int = 4,
    slack: int | None = 2,
    host: int = 0,
    rows: int = 1,
) -> Store:
    """Return a store of rows with so many pages. Without `ring_pages` there are no rings."""
    counts = {FULL: 1 + pages} | ({} if ring_pages is None else {RING: 1 + ring_pages})
    store = Store(FakeCopies(counts, snapshots, slack), host, min_tokens=PAGE)
    store.attach(Rows(rows, counts))
    return store


def rows_of(store: Store) -> Rows:
    assert isinstance(store.rows, Rows)
    return store.rows


def put(store: Store, ids: Sequence[int], *, is_spare: bool = False) -> None:
    """Store what a row holds after all of these, and end the row."""
    rows = rows_of(store)
    store.enter(0, len(ids), None)
    rows.tokens[0] = []
    rows.write(0, 0, ids)
    store.keep(0, Prompt.of(ids, PAGE), len(ids), is_spare=is_spare)
    rows.pages.release(0)
    check(store)


def cached(store: Store, ids: Sequence[int]) -> int:
    """Return how many tokens of a prompt a row gets from the store, and end the row."""
    hit, _ = store.look_up(Prompt.of(ids, PAGE))
    length = store.enter(0, len(ids), hit)
    rows_of(store).tokens[0] = list(ids[:length])
    rows_of(store).check(0)
    rows_of(store).pages.release(0)
    check(store)
    return length


def check(store: Store) -> None:
    """Nothing is lost, counted twice, or found after it is gone."""
    copies = store.copies
    on_device, on_host = [*store._device], [*store._host]
    assert all(e.index is not None and e.host is None for e in on_device)
    assert all(e.index is None and e.host is not None for e in on_host)
    snapshots: list[Any] = [e.index for e in on_device] + store._free_snapshots
    assert sorted(snapshots) == list(range(copies.num_snapshots))
    used = {page for e in on_device for page in e.all_pages}
    assert {*store._on_device.values()} == used
    assert all(store._on_device[page.slots, page.number] is page for page in used)  # type: ignore[index]
    store.pages.check(store.holders)
    hosted = {page for e in on_host for page in e.all_pages}
    assert all(page.host is not None for page in hosted)
    assert all(page.host is None for page in used - hosted)
    nbytes = len(on_host) * SNAPSHOT_BYTES + sum(PAGE_BYTES[page.slots] for page in hosted)
    assert store._host_used == nbytes <= store.host_bytes
    assert {e for at in store._at.values() for e in at} == {*on_device, *on_host}
    assert {*store._by_key.values()} <= {p for p in used | hosted if p.key is not None}


def test_the_longest_beginning_is_found_and_a_token_is_left_to_read() -> None:
    store, ids = store_of(slack=0), list(range(30))
    put(store, ids[:8])
    put(store, ids[:13])
    assert cached(store, ids) == 13
    assert cached(store, ids[:13]) == 8  # never all of a prompt
    assert cached(store, [*ids[:12], 99, 98]) == 8
    assert cached(store, [99, *ids]) == 0


def test_a_prompt_may_part_from_an_entry_by_its_slack() -> None:
    store, ids = store_of(slack=3), list(range(30))
    put(store, ids[:13])
    assert cached(store, ids[:13]) == 12
    assert cached(store, [*ids[:10], 99, 98, 97, 96]) == 10
    assert cached(store, [*ids[:9], 99, 98, 97, 96]) == 0
    assert cached(store_of(slack=None), ids) == 0
    whole = store_of(slack=None)  # no rings: any beginning of at least a page
    put(whole, ids[:13])
    assert cached(whole, [*ids[:5], 99]) == 5
    assert cached(whole, [*ids[:3], 99]) == 0


def test_entries_that_begin_alike_share_pages() -> None:
    """Also if their rows were prefilled apart."""
    store, ids = store_of(slack=0), list(range(30))
    put(store, ids[:16])
    put(store, ids[:26])
    assert store.stats.used_bytes == 7 * 10 + 2 * 100
    put(store, [*ids[:16], 99])
    assert store.stats.entries == 3
    assert store.stats.used_bytes == 8 * 10 + 3 * 100


def test_a_row_shares_pages_to_which_it_does_not_write() -> None:
    store, ids = store_of(slack=0), list(range(30))
    put(store, ids[:18])
    hit, _ = store.look_up(Prompt.of(ids, PAGE))
    assert hit is not None
    assert store.enter(0, 30, hit) == 18
    numbers = [page.number for page in hit.entry.pages[FULL]]
    mine = store.pages.of_row(0)[FULL]
    assert mine[:4] == numbers[:4]  # whole pages
    assert mine[4] != numbers[4]  # it writes positions 18 and 19 there
    assert len({*mine, *numbers}) == 9


def test_the_least_recently_used_goes_first_and_spare_ones_before() -> None:
    """One long prompt leaves an entry after each of its passes, and would evict every conversation."""
    store = store_of(pages=40, snapshots=3, slack=0)
    turns = [[i, *range(100, 107)] for i in range(3)]
    put(store, turns[0])
    put(store, turns[1])
    for end in (8, 12, 16):
        put(store, range(500, 500 + end), is_spare=True)
    assert store.stats.entries == 3
    assert [cached(store, [*t, 1]) for t in turns] == [8, 8, 0]
    assert cached(store, [*turns[0], 1]) == 8
    put(store, turns[2])  # instead of the spare one
    put(store, [7] * 8)  # instead of turn 1
    assert [cached(store, [*t, 1]) for t in turns] == [8, 0, 8]
    put(store, [8] * 8, is_spare=True)  # evicts nobody
    assert [cached(store, [*t, 1]) for t in turns] == [8, 0, 8]


def test_rows_get_the_pages_of_entries() -> None:
    """A row is admitted as if nothing were stored; the entry that it goes on from stays if it can."""
    store, ids = store_of(pages=10, slack=0), list(range(40))
    put(store, ids[:16])
    put(store, [5] * 16)
    assert store.pages.num_fitting(np.array([[40]])) == 1
    assert cached(store, ids) == 16  # shares four of ten, and the other entry is gone
    assert store.stats.entries == 1
    put(store, [6] * 40)
    assert cached(store, ids) == 0


def test_an_entry_moves_to_host_memory_and_back() -> None:
    store = store_of(pages=5, snapshots=1, slack=0, host=250)
    put(store, [1] * 16)
    put(store, [2] * 16)
    assert (store.stats.entries, store.stats.host_entries) == (1, 1)
    assert cached(store, [1] * 17) == 16  # and the other one goes there
    assert store.stats.host_hits == 1
    assert cached(store, [2] * 17) == 16
    put(store, [3] * 16)  # the host has room for one
    assert (cached(store, [2] * 17), cached(store, [1] * 17)) == (16, 0)


def test_entries_that_are_not_finite_are_forgotten_by_their_pages() -> None:
    store, ids = store_of(slack=0), list(range(30))
    put(store, [9] * 8)
    store.enter(0, 30, None)
    rows_of(store).write(0, 0, ids)
    store.keep(0, Prompt.of(ids, PAGE), 10, is_spare=False)
    store.forget_pages(store.pages.of_row(0))
    store.pages.release(0)
    check(store)
    assert cached(store, ids) == 0
    assert cached(store, [9] * 9) == 8


def test_passes_of_other_widths_make_other_entries() -> None:
    """Under `invariant`: the same tokens, whose numbers are others in their last bits."""
    store, ids = store_of(slack=2), [1] * 16
    made = Prompt.of(ids, PAGE, ((0, 8), (8, 8)))
    store.enter(0, 16, None)
    store.keep(0, made, 8, is_spare=False)
    assert store.find(made)
    assert not store.find(Prompt.of(ids, PAGE, ((0, 4), (4, 16))))
    assert not store.find(Prompt.of(ids[:8], PAGE, ((0, 8),)))  # it would have to go back


def test_cleared_and_useless_entries_are_gone() -> None:
    store = store_of()
    put(store, [1, 2, 3])  # shorter than is worth it
    assert store.stats.entries == 0
    put(store, [1] * 9)
    version = store.version
    store.clear()
    assert store.version > version
    assert cached(store, [1] * 10) == 0
    put(store, [1] * 9)
    store.forget(list(store._device))
    assert cached(store, [1] * 10) == 0


class Decoder:
    """Rows that prefill and decode random prompts over a store, in any order, with drafts that are rejected."""

    def __init__(self, store: Store, rng: random.Random):
        self.store, self.rng, self.rows = store, rng, rows_of(store)
        self.live: dict[int, tuple[list[int], int, int]] = {}  # by row: text, end of prompt, reach
        self.known: list[list[int]] = [[]]

    def begin(self, row: int) -> None:
        rng, begin = self.rng, self.rng.choice(self.known)
        new = (rng.randint(0, 2) for _ in range(rng.randint(1, 9)))
        prompt = [*begin[: rng.randint(0, 40)], *new][: FULL - 8]
        self.known.append(prompt)
        text = prompt + [rng.randint(0, 2) for _ in range(rng.randint(1, FULL - len(prompt) - 3))]
        positions = len(text) + 3
        if not self.store.pages.num_fitting(np.array([[positions]])):
            return
        hit, _ = self.store.look_up(Prompt.of(prompt, PAGE))
        self.rows.tokens[row] = []
        length = self.store.enter(row, positions, hit)
        assert length < len(prompt)
        assert self.rows.tokens[row] == prompt[:length]
        self.rows.check(row)
        self.live[row] = text, len(prompt), hit.entry.reach if hit and length else 0

    def go_on(self, row: int) -> None:
        """Write some tokens, perhaps after others that are rejected; store or end the row where it is time."""
        rng, rows = self.rng, self.rows
        (text, prompt_end, reach), done = self.live[row], len(rows.tokens[row])
        if done == len(text):
            return self.end(row)
        is_prompt = done < prompt_end
        drafts = 0 if is_prompt else rng.randint(0, 3)
        rows.write(row, done, [9] * drafts)
        end = min(done + rng.randint(1, 12 if is_prompt else drafts + 1), len(text))
        end = min(end, prompt_end) if is_prompt else end
        rows.write(row, done, text[done:end])
        rows.tokens[row] = text[:end]
        rows.check(row)
        if is_prompt:
            reach = max(reach, end)
            self.live[row] = text, prompt_end, reach
            if end == prompt_end or rng.random() < 0.5:
                prompt = Prompt.of(text[:prompt_end], PAGE)
                is_spare = end < prompt_end and rng.random() < 0.5
                self.store.keep(row, prompt, end, reach=reach, is_spare=is_spare)

    def end(self, row: int) -> None:
        if self.rng.random() < 0.05:
            self.store.forget_pages(self.rows.pages.of_row(row))
        self.rows.pages.release(row)
        del self.live[row]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    host=st.sampled_from([0, 150, 500]),
    snapshots=st.sampled_from([1, 4, 20]),
    pages=st.integers(12, 60),
    ring_pages=st.none() | st.integers(4, 30),
    goes_back=st.booleans(),
)
def test_random_rows(
    seed: int, host: int, snapshots: int, pages: int, ring_pages: int | None, goes_back: bool
) -> None:
    """Each row sees its own tokens, whatever others write, and whatever was shared, copied, evicted or moved."""
    rng = random.Random(seed)
    slack = 0 if not goes_back else None if ring_pages is None else SLACK
    store = store_of(pages, ring_pages, snapshots, slack, host, rows=4)
    decoder = Decoder(store, rng)
    for _ in range(120):
        row = rng.randrange(4)
        if rng.random() < 0.02:
            store.forget([e for e in (*store._device, *store._host) if rng.random() < 0.5])
        elif row in decoder.live:
            decoder.go_on(row)
        else:
            decoder.begin(row)
        check(store)
    for row in list(decoder.live):
        decoder.end(row)
    store.clear()
    assert store.pages.usage == 0
    assert all(n == store.pages.counts[s] - 1 for s, n in store.pages.num_free.items())


@pytest.mark.parametrize("length", [0, 3, 4, 9])
def test_a_prompt_has_a_key_for_each_whole_page(length: int) -> None:
    assert len(Prompt.of([5] * length, PAGE).keys) == pages_for(length + 1) - 1
