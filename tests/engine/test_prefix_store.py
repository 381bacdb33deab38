"""Which prefixes are stored and where, without a device: the pool here holds tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine.prefix_cache.entries import Prompt
from jaxspec.engine.prefix_cache.store import Store

BLOCK = 4


class Tokens:
    """A pool whose blocks and snapshots are the tokens that they stand for. A state is a row's tokens."""

    block, block_bytes, snapshot_bytes = BLOCK, 10, 100

    def __init__(self, num_blocks: int, num_snapshots: int, slack: int | None):
        self.num_blocks, self.num_snapshots, self.slack = num_blocks, num_snapshots, slack
        self.held: dict[str, list[Any]] = {
            "block": [None] * num_blocks,
            "snapshot": [None] * num_snapshots,
        }

    def keep(self, state: Any, row: int, blocks: Sequence[Any], snapshot: int) -> None:
        for number, index in blocks:
            self.held["block"][index] = state[number * BLOCK : (number + 1) * BLOCK]
        self.held["snapshot"][snapshot] = state

    def restore(
        self, state: Any, row: int, indices: Sequence[int], snapshot: int, tokens: np.ndarray
    ) -> Any:
        read = [t for index in indices for t in self.held["block"][index]]
        assert read[: len(tokens)] == tokens.tolist()
        whole = self.held["snapshot"][snapshot]
        assert whole[: len(tokens)] == tokens.tolist()
        assert self.slack is None or len(whole) - len(tokens) <= self.slack
        return True

    def lift(self, kind: str, index: int) -> Any:
        return self.held[kind][index]

    def lower(self, kind: str, index: int, copy: Any) -> None:
        assert copy is not None
        self.held[kind][index] = copy

    def warm_up(self, state: Any, *, with_host: bool) -> Any:
        return state

    def drop(self) -> None:
        for kind, indices in self.held.items():
            self.held[kind] = [None] * len(indices)


def store_of(blocks: int = 20, snapshots: int = 4, slack: int | None = 2, host: int = 0) -> Store:
    return Store(Tokens(blocks, snapshots, slack), host, min_tokens=BLOCK)


def put(store: Store, ids: Sequence[int], *, is_spare: bool = False) -> None:
    """Store what a row holds after all of these."""
    prompt = Prompt.of(ids, BLOCK)
    store.keep(list(ids), 0, prompt, len(ids), is_spare=is_spare)


def cached(store: Store, ids: Sequence[int]) -> int:
    """Return how many tokens of a prompt are not read again, and copy them."""
    hit, _ = store.look_up(Prompt.of(ids, BLOCK))
    if hit is None or not store.restore(None, 0, hit):
        return 0
    return hit.length


def check(store: Store) -> None:
    """Nothing is lost, counted twice, or found after it is gone."""
    pool = store.pool
    on_device, on_host = [*store._device], [*store._host]
    assert all(e.index is not None and e.host is None for e in on_device)
    assert all(e.index is None and e.host is not None for e in on_host)
    snapshots: list[Any] = [e.index for e in on_device] + store._free_snapshots
    assert sorted(snapshots) == list(range(pool.num_snapshots))
    used = {b for e in on_device for b in e.blocks}
    indices: list[Any] = [b.index for b in used] + store._free_blocks
    assert sorted(indices) == list(range(pool.num_blocks))
    hosted = {b for e in on_host for b in e.blocks}
    assert all(b.host is not None for b in hosted)
    assert all(b.host is None for b in used - hosted)
    nbytes = len(on_host) * pool.snapshot_bytes + len(hosted) * pool.block_bytes
    assert store._host_used == nbytes <= store.host_bytes
    assert {e for at in store._at.values() for e in at} == {*on_device, *on_host}
    assert {*store._blocks.values()} == {b for b in used | hosted if b.key is not None}


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
    whole = store_of(slack=None)  # no rings: any beginning of at least a block
    put(whole, ids[:13])
    assert cached(whole, [*ids[:5], 99]) == 5
    assert cached(whole, [*ids[:3], 99]) == 0


def test_entries_that_begin_alike_share_blocks() -> None:
    store, ids = store_of(blocks=8, slack=0), list(range(30))
    put(store, ids[:16])
    put(store, ids[:26])
    assert store.stats.used_bytes == 7 * 10 + 2 * 100
    put(store, [*ids[:16], 99])
    assert store.stats.entries == 3
    check(store)


def test_the_least_recently_used_goes_first_and_spare_ones_before() -> None:
    """One long prompt leaves an entry after each of its passes, and would evict every conversation."""
    store = store_of(blocks=40, snapshots=3, slack=0)
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
    check(store)


def test_an_entry_moves_to_host_memory_and_back() -> None:
    store = store_of(blocks=4, snapshots=1, slack=0, host=250)
    put(store, [1] * 16)
    put(store, [2] * 16)
    assert (store.stats.entries, store.stats.host_entries) == (1, 1)
    check(store)
    assert cached(store, [1] * 17) == 16  # and the other one goes there
    assert store.stats.host_hits == 1
    assert cached(store, [2] * 17) == 16
    check(store)
    put(store, [3] * 16)  # the host has room for one
    assert (cached(store, [1] * 17), cached(store, [2] * 17)) == (0, 16)
    check(store)


def test_passes_of_other_widths_make_other_entries() -> None:
    """Under `invariant`: the same tokens, whose numbers are others in their last bits."""
    store, ids = store_of(slack=2), [1] * 16
    made = Prompt.of(ids, BLOCK, ((0, 8), (8, 8)))
    store.keep(ids, 0, made, 8, is_spare=False)
    assert store.find(made)
    assert not store.find(Prompt.of(ids, BLOCK, ((0, 4), (4, 16))))
    assert not store.find(Prompt.of(ids[:8], BLOCK, ((0, 8),)))  # it would have to go back


def test_cleared_and_useless_entries_are_gone() -> None:
    store = store_of()
    put(store, [1, 2, 3])  # shorter than is worth it
    assert store.stats.entries == 0
    put(store, [1] * 9)
    version = store.version
    store.clear()
    assert store.version > version
    assert cached(store, [1] * 10) == 0
    check(store)
    put(store, [1] * 9)
    store.forget(list(store._device))
    assert cached(store, [1] * 10) == 0
    check(store)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slack=st.sampled_from([0, 3, None]),
    host=st.sampled_from([0, 150, 500]),
    snapshots=st.integers(1, 4),
)
def test_random_prompts(seed: int, slack: int | None, host: int, snapshots: int) -> None:
    """What is copied into a row is its own beginning, whatever was evicted, moved or forgotten between."""
    rng = random.Random(seed)
    store = store_of(blocks=8, snapshots=snapshots, slack=slack, host=host)
    known: list[list[int]] = [[]]
    for _ in range(80):
        begin = rng.choice(known)
        ids = [*begin[: rng.randint(0, 30)], *(rng.randint(0, 2) for _ in range(rng.randint(1, 9)))]
        known.append(ids[:32])
        match rng.random():
            case x if x < 0.5:
                put(store, ids[:32], is_spare=rng.random() < 0.3)
            case x if x < 0.97:
                assert cached(store, ids[:32]) < len(ids)
            case _:
                store.forget([e for e in (*store._device, *store._host) if rng.random() < 0.5])
        check(store)


@pytest.mark.parametrize("length", [0, 3, 4, 9])
def test_a_prompt_has_a_key_for_each_whole_block(length: int) -> None:
    assert len(Prompt.of([5] * length, BLOCK).keys) == length // BLOCK
