"""Passes in which each row has a number of tokens of its own, against passes that are rectangles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.target import init_caches
from jaxspec.packing import UNIT, Packing, packed_pass
from tests.cases import target

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


@pytest.mark.parametrize("name", ["31b", "26b-a4b", "e2b", "qwen3-tied"])
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
