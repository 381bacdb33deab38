"""Passes in which each row has a number of tokens of its own, against passes that are rectangles."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import attention as models_attention
from jaxspec.models.packing import UNIT, Packing, packed_pass
from jaxspec.models.target import Caches, TargetOutput, init_caches
from jaxspec.shapes import Array, Params
from jaxspec.weights.model_def import ModelDef
from pallas_kernels.attention import attention
from pallas_kernels.qkv import QKV, qkv
from tests.cases import slow, target

WIDTH, PROMPT, LENGTH = 5, 11, 48  # the window is 8


def test_units_stand_one_row_after_the_other() -> None:
    tokens = np.asarray([3, 0, 1, 5], np.int32)
    packing = jax.jit(Packing.of, static_argnums=1)(tokens, 8)
    assert packing.row.tolist() == [0, 0, 2, 3, 3, 3, 3, 3]
    assert packing.first.tolist() == [0, 2, 0, 0, 2, 4, 0, 0]
    assert packing.count.tolist() == [2, 1, 1, 2, 2, 1, 0, 0]
    block = np.arange(20, dtype=np.int32).reshape(4, 5)
    rows = np.asarray(jax.jit(lambda p, x: p.unpack(p.pack(x), 5))(packing, block))
    for row, count in enumerate(tokens.tolist()):
        assert rows[row, :count].tolist() == block[row, :count].tolist()


@functools.partial(jax.jit, static_argnums=(0, 7))
def rectangle(
    model_def: ModelDef,
    params: Params,
    block: Array,
    start: Array,
    count: Array,
    caches: Caches,
    slots: Array | None = None,
    feature_layers: tuple[int, ...] = (),
) -> TargetOutput:
    more: dict[str, Any] = dict(slots=slots, feature_layers=feature_layers)
    return model_def.bind(params)(block, start, count, caches, **more)


@functools.partial(jax.jit, static_argnums=(0, 6, 8))
def packed(
    model_def: ModelDef,
    params: Params,
    block: Array,
    start: Array,
    tokens: Array,
    caches: Caches,
    units: int,
    slots: Array | None,
    feature_layers: tuple[int, ...],
) -> TargetOutput:
    more: dict[str, Any] = dict(units=units, slots=slots, feature_layers=feature_layers)
    return packed_pass(model_def.bind(params), block, start, tokens, caches, **more)


@pytest.mark.parametrize("name", ["26b-a4b", "qwen3-tied", *slow("e2b", "31b")])
@pytest.mark.parametrize("subset", [False, True], ids=["all rows", "some rows"])
def test_a_packed_pass_computes_what_a_rectangle_does(name: str, subset: bool) -> None:
    """Logits, features and the caches, with a ring, experts and layers that share keys and values."""
    model = target(name)
    config = model.config
    rng, rows = np.random.default_rng(0), 4
    vocab = config.vocab_size
    caches = init_caches(config, rows, cache_length=LENGTH, slack=WIDTH, dtype=jnp.float32)
    for begin in range(0, PROMPT, 3):  # chunks that fit a ring
        chunk = rng.integers(vocab, size=(rows, 3)).astype(np.int32)
        start, count = np.full(rows, begin, np.int32), np.full(rows, 3, np.int32)
        caches = rectangle(model.model_def, model.params, chunk, start, count, caches).caches
    lengths = np.asarray([12, 10, 9, 12], np.int32)
    block = rng.integers(vocab, size=(rows, WIDTH)).astype(np.int32)
    tokens = np.asarray([3, 5, 0, 1], np.int32)
    slots = np.asarray([2, 0, 3, 1], np.int32) if subset else None
    layers = (0, config.num_layers - 1)
    of_model, start = (model.model_def, model.params), np.where(tokens > 0, lengths, 0)
    want = rectangle(*of_model, block, start, tokens, caches, slots, layers)
    got = packed(*of_model, block, lengths, tokens, caches, 7, slots, layers)
    assert int(tokens.sum()) < 7 * UNIT  # two units are of no row
    for row, count in enumerate(tokens.tolist()):
        pairs = [
            (got.logits, want.logits),
            (got.hidden, want.hidden),
            *zip(got.features, want.features, strict=True),
        ]
        for one, other in pairs:
            one, other = np.asarray(one)[row, :count], np.asarray(other)[row, :count]
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=5e-5)
    for one, other in zip(jax.tree.leaves(got.caches), jax.tree.leaves(want.caches), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_all_indices_that_reach_kernels_are_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """References clip or drop an index that a kernel would follow out of its array."""
    model = target("12b")  # a ring, a whole cache, and no experts, which take half of the time
    module, config, rows = model.model_def.bind(model.params), model.config, 4
    rng = np.random.default_rng(1)
    seen: dict[str, list[Any]] = {}

    def seen_qkv(projected: Any, *args: Any, **kwargs: Any) -> QKV:
        into = args[-1]
        seen["qkv"].append((into.k.shape, into.index, into.pages))
        return qkv(projected, *args, **kwargs)

    def seen_attention(q: Any, positions: Any, segments: Any, **kwargs: Any) -> Any:
        of_segments = [(segment.k.shape, segment.pages, segment.positions) for segment in segments]
        seen["attention"].append((positions, of_segments))
        return attention(q, positions, segments, **kwargs)

    @jax.jit
    def indices(block: Array, start: Array, count: Array, caches: Caches) -> Any:
        """Return what reaches the kernels. Functions that are compiled inside would not see ours."""
        seen.update(qkv=[], attention=[])
        with jax.disable_jit():
            packed_pass(module, block, start, count, caches, units=8)
        return seen

    monkeypatch.setattr(models_attention, "qkv", seen_qkv)
    monkeypatch.setattr(models_attention, "attention", seen_attention)
    caches = init_caches(config, rows, cache_length=LENGTH, slack=WIDTH, dtype=jnp.float32)
    block = rng.integers(config.vocab_size, size=(rows, WIDTH)).astype(np.int32)
    for tokens, lengths in (
        ([3, 5, 0, 1], [12, 10, 9, 12]),
        ([0, 0, 0, 0], [1, 2, 3, 4]),
        ([1, 5, 5, 1], [0, LENGTH - 5, LENGTH - 6, LENGTH - 1]),  # up to the caches' ends
    ):
        start, count = np.asarray(lengths, np.int32), np.asarray(tokens, np.int32)
        found = jax.tree.map(np.asarray, indices(block, start, count, caches))
        assert len(found["qkv"]) == len(found["attention"]) == config.num_layers
        for (num_pages, _, num_slots, _), index, pages in found["qkv"]:
            assert ((index >= 0) & (index <= num_slots)).all()  # the last one is dropped
            assert ((pages >= 0) & (pages < num_pages)).all()
            kept = index < num_slots
            written = list(zip(pages[kept], index[kept], strict=True))
            assert len(written) == len({*written})  # no two writes race
        for positions, of_segments in found["attention"]:
            for shape, pages, of_keys in of_segments:
                assert ((pages >= 0) & (pages < shape[0])).all()
                assert (of_keys >= -1).all()
            assert (positions >= 0).all()
