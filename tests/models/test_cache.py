"""Caches: any way of feeding a sequence gives what one pass over all of it gives.

The rings here are as small as they may be (no rounding up), so that every boundary is met.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import cache as kv
from jaxspec.cache import KVCache, KVSegment
from jaxspec.models.target import Caches, TargetOutput, init_caches
from jaxspec.shapes import Array, Params
from jaxspec.weights.model_def import ModelDef
from pallas_kernels.qkv import write_kv
from tests import tiny


@pytest.fixture(autouse=True, scope="module")
def smallest_rings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "RING_MULTIPLE", 1)
        yield


# --- one layer's cache: which positions are seen, and with which values -------------------------------

B, CACHE_LENGTH = 3, 60


@jax.jit
def write_then_view(
    cache: KVCache, values: Array, start: Array, count: Array
) -> tuple[KVCache, tuple[KVSegment, ...]]:
    k, v, into = values, -values, kv.early_destination(cache, values.shape[2], start, count)
    if into is not None:
        k, v = write_kv(into, k, v)
    how = cache, into, k, v, start, count
    return kv.keep_pass(*how), kv.segments_of_pass(*how)


def empty(window: int | None, slack: int) -> KVCache:
    return kv.init_cache(
        B, 1, 1, cache_length=CACHE_LENGTH, window=window, slack=slack, dtype=jnp.float32
    )


def check_view(
    segments: tuple[KVSegment, ...],
    committed: list[list[float]],
    count: np.ndarray,
    window: int | None,
) -> None:
    """Check that each new query finds every position in its window once, with the newest value there.

    Args:
      committed: each row's values by position, with those of this pass.
    """
    for row, values in enumerate(committed):
        positions = np.concatenate([s.positions[row] for s in segments])
        keys = np.concatenate([s.k[row, 0, :, 0] for s in segments])
        held = np.concatenate([s.v[row, 0, :, 0] for s in segments])
        for query in range(len(values) - count[row], len(values)):
            first = 0 if window is None else max(0, query - window + 1)
            seen = (positions >= first) & (positions <= query)
            assert sorted(positions[seen]) == list(range(first, query + 1))
            expected = [values[p] for p in positions[seen]]
            np.testing.assert_array_equal(keys[seen], expected)
            np.testing.assert_array_equal(held[seen], np.negative(expected))


@pytest.mark.parametrize("window", [None, 1, 7], ids=["full", "window-1", "window-7"])
@pytest.mark.parametrize("width", [1, 4, 23], ids=["one", "slack", "longer-than-ring"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_passes_of_random_length_see_their_window(
    window: int | None, width: int, data: st.DataObject
) -> None:
    """Prefill: rows of one batch feed different numbers of tokens, all of which count."""
    cache, committed, fresh = empty(window, 4), [[] for _ in range(B)], iter(range(1, 10**6))
    for _ in range(data.draw(st.integers(1, 8))):
        start = np.array([len(c) for c in committed])
        room = np.minimum(width, CACHE_LENGTH - start)
        count = np.array([data.draw(st.integers(0, int(r))) for r in room])
        values = np.array([[next(fresh) for _ in range(width)] for _ in range(B)], np.float32)
        cache, segments = write_then_view(
            cache, values[:, None, :, None], start.astype(np.int32), count.astype(np.int32)
        )
        for row in range(B):
            committed[row] += values[row, : count[row]].tolist()
        check_view(jax.device_get(segments), committed, count, window)


@pytest.mark.parametrize("window", [None, 1, 7], ids=["full", "window-1", "window-7"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rejected_writes_hide_nothing(window: int | None, data: st.DataObject) -> None:
    """Decoding: each round writes as many tokens as the slack, and keeps from 1 to all of them.

    A rejected write lands in the slot of a key one ring earlier, which no later query may look for. Rings
    are one slot larger than that needs; with two fewer this fails.
    """
    slack = 4
    cache, committed, fresh = empty(window, slack), [[] for _ in range(B)], iter(range(1, 10**6))
    count = np.full(B, slack)
    for _ in range(data.draw(st.integers(1, 14))):
        start = np.array([len(c) for c in committed])
        values = np.array([[next(fresh) for _ in range(slack)] for _ in range(B)], np.float32)
        cache, segments = write_then_view(
            cache, values[:, None, :, None], start.astype(np.int32), count.astype(np.int32)
        )
        written = [c + v for c, v in zip(committed, values.tolist(), strict=True)]
        check_view(jax.device_get(segments), written, count, window)
        kept = [data.draw(st.integers(1, slack)) for _ in range(B)]
        committed = [w[: s + k] for w, s, k in zip(written, start, kept, strict=True)]


def test_a_ring_is_window_plus_slack_and_full_when_that_is_no_smaller() -> None:
    assert empty(None, 4).k.shape == (B, 1, CACHE_LENGTH, 1)
    ring = empty(7, 4)
    assert (ring.k.shape[2], ring.ring_slack) == (11, 4)
    assert empty(56, 4).ring_slack is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "RING_MULTIPLE", 16)
        rounded = empty(7, 4)
    assert (rounded.k.shape[2], rounded.ring_slack) == (16, 9)
    assert kv.cache_bytes((rounded, None)) == 2 * B * 16 * 4


# --- a whole model: any feeding equals one pass without caches ----------------------------------------

LENGTH, SLACK = 56, 5


def check_close(got: np.ndarray, expected: np.ndarray) -> None:
    """Compare norm-wise: orders of adding differ by 1e-5 at most, one key too many or few by 1e-2."""
    assert np.linalg.norm(got - expected) <= 1e-4 * np.linalg.norm(expected)


@functools.partial(jax.jit, static_argnums=0)
def forward(
    model_def: ModelDef,
    params: Params,
    tokens: Array,
    start: Array,
    count: Array,
    caches: Caches | None,
    slots: Array | None = None,
) -> TargetOutput:
    features = (model_def.config.num_layers - 2,)
    return model_def.bind(params)(
        tokens, start, count, caches, slots=slots, feature_layers=features
    )


class Setting:
    """A target, token sequences, and its outputs for them in one pass without caches."""

    def __init__(self, name: str):
        self.model_def, self.params = tiny.target(name)
        self.rng = np.random.default_rng(3)
        self.tokens = self.rng.integers(0, tiny.VOCAB_SIZE, (B, LENGTH)).astype(np.int32)
        zeros = np.zeros(B, np.int32)
        self.expected = jax.device_get(self.run(self.tokens, zeros, zeros + LENGTH, None))

    def run(self, tokens: np.ndarray, start: np.ndarray, count: np.ndarray, *rest: object):
        arrays = (np.asarray(x, np.int32) for x in (tokens, start, count))
        return forward(self.model_def, self.params, *arrays, *rest)

    def caches(self, batch: int = B) -> Caches:
        return init_caches(
            self.model_def.config, batch, cache_length=64, slack=SLACK, dtype=jnp.float32
        )

    def feed(self, caches: Caches, start: np.ndarray, count: np.ndarray, width: int) -> Caches:
        """Feed each row's next `count` tokens with garbage after them, all written when `width` fits."""
        tokens = self.rng.integers(0, tiny.VOCAB_SIZE, (B, width))
        for row in range(B):
            tokens[row, : count[row]] = self.tokens[row, start[row] : start[row] + count[row]]
        # A verify step writes its whole block, whatever of it is then kept; prefill only real tokens.
        out = self.run(tokens, start, np.full(B, width) if width <= SLACK else count, caches)
        logits, features = np.asarray(out.logits), np.asarray(out.features[0])
        for row in range(B):
            new = slice(start[row], start[row] + count[row])
            check_close(logits[row, : count[row]], self.expected.logits[row, new])
            check_close(features[row, : count[row]], self.expected.features[0][row, new])
        return out.caches


# e2b has shared K/V, per-layer inputs and one kv head; 26b-a4b has k = v and experts.
@pytest.fixture(scope="module", params=["e2b", "26b-a4b"])
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param)


@pytest.mark.parametrize("prefill", [0, 3, 20], ids=["from-nothing", "below-window", "past-ring"])
def test_rounds_of_random_acceptance_equal_one_pass(setting: Setting, prefill: int) -> None:
    """Prefill, then blocks of 5 of which 1 to 5 tokens are right and the rest garbage, to the end.

    The ring holds 8 + 5 positions, so that the sequence passes it four times.
    """
    rng = np.random.default_rng(prefill)
    caches, start = setting.caches(), np.zeros(B, np.int32)
    if prefill:
        count = np.array([prefill, prefill - 2, prefill + 1])
        caches = setting.feed(caches, start, count, 24)
        start = start + count
    rounds = 0
    while (start + SLACK <= LENGTH).all():
        count = rng.integers(1, SLACK + 1, B)
        caches = setting.feed(caches, start, count, SLACK)
        start, rounds = start + count, rounds + 1
    assert rounds >= 8


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_split_into_chunks_equals_one_pass(setting: Setting, data: st.DataObject) -> None:
    """Chunks of up to 24 tokens: past the window, and longer than the ring."""
    caches, start = setting.caches(), np.zeros(B, np.int32)
    while (start < LENGTH).any():
        room = np.minimum(24, LENGTH - start)
        count = np.array([data.draw(st.integers(min(1, int(r)), int(r))) for r in room])
        caches = setting.feed(caches, start, count, 24)
        start = start + count


def test_slots_equal_direct_rows(setting: Setting) -> None:
    """Rows go to slots 4, 0 and, as padding, past the last one; no other slot changes."""
    count = np.array([24, 11, 0])
    tokens, start = setting.tokens[:, :24], np.zeros(B, np.int32)
    direct = setting.run(tokens, start, count, setting.caches())
    busy = jax.device_put(jax.tree.map(lambda x: np.asarray(x) + 7, setting.caches(5)))
    slots = jnp.asarray([4, 0, 5])
    scattered = setting.run(tokens, start, count, busy, slots)
    for row in (0, 1):
        got, want = (np.asarray(x.logits)[row, : count[row]] for x in (scattered, direct))
        check_close(got, want)
    after = jax.tree.leaves(scattered.caches)
    for old, new in zip(jax.tree.leaves(busy), after, strict=True):
        np.testing.assert_array_equal(np.asarray(new)[1:4], np.asarray(old)[1:4])
    # The next pass reads what was scattered.
    step, one = setting.tokens[:, 24:29], np.array([5, 0, 0])
    got = setting.run(step, count, one, scattered.caches, slots).logits
    check_close(np.asarray(got)[0], setting.expected.logits[0, 24:29])
