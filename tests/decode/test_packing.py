"""Passes in which each row has a number of tokens of its own, against passes that are rectangles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import attention as models_attention
from jaxspec.models.target import init_caches
from jaxspec.packing import UNIT, Packing, packed_pass
from pallas_kernels.attention import attention
from pallas_kernels.qkv import QKV, qkv
from tests.cases import slow, target

WIDTH, PROMPT, LENGTH = 5, 11, 48  # the window is 8


def test_units_stand_one_row_after_the_other() -> None:
    tokens = jnp.asarray([3, 0, 1, 5], jnp.int32)
    packing = Packing.of(tokens, 8)
    assert packing.row.tolist() == [0, 0, 2, 3, 3, 3, 3, 3]
    assert packing.first.tolist() == [0, 2, 0, 0, 2, 4, 0, 0]
    assert packing.count.tolist() == [2, 1, 1, 2, 2, 1, 0, 0]
    block = jnp.arange(20, dtype=jnp.int32).reshape(4, 5)
    rows = np.asarray(packing.unpack(packing.pack(block), 5))
    for row, count in enumerate(tokens.tolist()):
        assert rows[row, :count].tolist() == block[row, :count].tolist()


@pytest.mark.parametrize("name", ["26b-a4b", "qwen3-tied", *slow("e2b", "31b")])
@pytest.mark.parametrize("subset", [False, True], ids=["all rows", "some rows"])
def test_a_packed_pass_computes_what_a_rectangle_does(name: str, subset: bool) -> None:
    """Logits, features and the caches, with a ring, experts and layers that share keys and values."""
    model = target(name)
    module, config = model.model_def.bind(model.params), model.config
    rng, rows = np.random.default_rng(0), 4
    vocab = config.vocab_size
    caches = init_caches(config, rows, cache_length=LENGTH, slack=WIDTH, dtype=jnp.float32)
    start = jnp.zeros(rows, jnp.int32)
    for begin in range(0, PROMPT, 3):  # chunks that fit a ring
        chunk = jnp.asarray(rng.integers(vocab, size=(rows, 3)), jnp.int32)
        caches = module(chunk, start + begin, jnp.full(rows, 3, jnp.int32), caches).caches
    lengths = jnp.asarray([12, 10, 9, 12], jnp.int32)
    block = jnp.asarray(rng.integers(vocab, size=(rows, WIDTH)), jnp.int32)
    tokens = jnp.asarray([3, 5, 0, 1], jnp.int32)
    slots = jnp.asarray([2, 0, 3, 1], jnp.int32) if subset else None
    layers = (0, config.num_layers - 1)
    want = module(
        block, jnp.where(tokens > 0, lengths, 0), tokens, caches, slots=slots, feature_layers=layers
    )
    got = packed_pass(
        module, block, lengths, tokens, caches, units=7, slots=slots, feature_layers=layers
    )
    assert int(tokens.sum()) < 7 * UNIT  # two units are of no row
    for row, count in enumerate(tokens.tolist()):
        pairs = [
            (got.logits, want.logits),
            (got.hidden, want.hidden),
            *zip(got.features, want.features, strict=True),
        ]
        for one, other in pairs:
            np.testing.assert_allclose(one[row, :count], other[row, :count], rtol=1e-5, atol=5e-5)
    for one, other in zip(jax.tree.leaves(got.caches), jax.tree.leaves(want.caches), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_all_indices_that_reach_kernels_are_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """References clip or drop an index that a kernel would follow out of its array."""
    model = target("12b")  # a ring, a whole cache, and no experts, which take half of the time
    module, config, rows = model.model_def.bind(model.params), model.config, 4
    rng = np.random.default_rng(1)
    seen = {"qkv": 0, "attention": 0}

    def checked_qkv(projected: Any, *args: Any, **kwargs: Any) -> QKV:
        into = args[-1]
        pages, slots = into.k.shape[0], into.k.shape[2]
        assert ((into.index >= 0) & (into.index <= slots)).all()  # the last one is dropped
        assert ((into.pages >= 0) & (into.pages < pages)).all()
        kept = np.asarray(into.index < slots)
        written = list(zip(np.asarray(into.pages)[kept], np.asarray(into.index)[kept], strict=True))
        assert len(written) == len({*written})  # no two writes race
        seen["qkv"] += 1
        return qkv(projected, *args, **kwargs)

    def checked_attention(q: Any, positions: Any, segments: Any, **kwargs: Any) -> Any:
        for segment in segments:
            assert ((segment.pages >= 0) & (segment.pages < segment.k.shape[0])).all()
            assert (segment.positions >= -1).all()
        assert (positions >= 0).all()
        seen["attention"] += 1
        return attention(q, positions, segments, **kwargs)

    monkeypatch.setattr(models_attention, "qkv", checked_qkv)
    monkeypatch.setattr(models_attention, "attention", checked_attention)
    caches = init_caches(config, rows, cache_length=LENGTH, slack=WIDTH, dtype=jnp.float32)
    block = jnp.asarray(rng.integers(config.vocab_size, size=(rows, WIDTH)), jnp.int32)
    with jax.disable_jit():
        for tokens, lengths in (
            ([3, 5, 0, 1], [12, 10, 9, 12]),
            ([0, 0, 0, 0], [1, 2, 3, 4]),
            ([1, 5, 5, 1], [0, LENGTH - 5, LENGTH - 6, LENGTH - 1]),  # up to the caches' ends
        ):
            start, count = jnp.asarray(lengths, jnp.int32), jnp.asarray(tokens, jnp.int32)
            packed_pass(module, block, start, count, caches, units=8)
    assert seen["qkv"] == seen["attention"] == 3 * config.num_layers
