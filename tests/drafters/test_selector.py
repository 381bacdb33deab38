"""Selectors by themselves, on logits that no model made."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxspec.drafters.base import Draft, Draws
from jaxspec.drafters.chain import Choices
from jaxspec.drafters.selector import Block, Independent, Selector
from jaxspec.options import Tree
from jaxspec.sampling import SamplingParams, Stream, fold_keys, make_key
from jaxspec.shapes import Array

VOCAB, SLOTS, ROWS = 12, 3, 5
IDS = (1, 3, 4, 8, 10)  # the drafter's vocabulary, where it is reduced


class Bigrams(Selector):
    """Adds a row of a table by the token before."""

    def __init__(self, table: Array):
        self.table = table

    def begin(self, block: Block) -> None:
        del block

    def step(
        self, block: Block, slot: int, carry: None, tokens: Array, origins: Array
    ) -> tuple[None, Choices]:
        del origins
        return carry, Choices(block.logits[:, slot, None] + self.table[tokens], block.tokens)


def block(ids: tuple[int, ...] | None, seed: int = 0) -> Block:
    rng = np.random.default_rng(seed)
    size = VOCAB if ids is None else len(ids)
    logits = rng.normal(size=(ROWS, SLOTS, size)).astype(np.float32)
    anchors = rng.integers(0, VOCAB, ROWS).astype(np.int32)
    tokens = None if ids is None else np.asarray(ids, np.int32)
    hidden = np.zeros((ROWS, SLOTS, 2), np.float32)
    return Block(*jax.device_put((anchors, hidden, logits, tokens)), VOCAB)


def compiled(run: Callable[..., Draft], block: Block, *rest: Any) -> Draft:
    """Run something of a block in one program."""
    whole = jax.jit(lambda arrays, *rest: run(Block(*arrays, VOCAB), *rest))
    return whole(block[:4], *rest)


def table(ids: tuple[int, ...] | None) -> np.ndarray:
    size = VOCAB if ids is None else len(ids)
    return np.random.default_rng(9).normal(size=(VOCAB, size)).astype(np.float32)


@functools.cache
def draws(temperature: float, seed: int = 0) -> Draws:
    slots = jnp.broadcast_to(jnp.arange(SLOTS, dtype=jnp.int32), (ROWS, SLOTS))
    keys = jax.vmap(make_key)(jnp.arange(seed, seed + ROWS))
    keys = fold_keys(keys, jnp.zeros(ROWS, jnp.int32), slots, Stream.DRAFT)
    return Draws(SamplingParams.make(ROWS, temperature=temperature), keys)


def q_of(block: Block, row: int, slot: int, before: int, temperature: float) -> np.ndarray:
    """Return the log-probabilities over the whole vocabulary that `Bigrams` draws a token from."""
    ids = range(VOCAB) if block.tokens is None else IDS
    added = table(None if block.tokens is None else IDS)[before]
    log_q = np.full(VOCAB, -np.inf)
    logits = np.asarray(block.logits)[row, slot].astype(np.float64) + added
    log_q[list(ids)] = log_softmax(logits / temperature)
    return log_q


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_independent_slots_are_drawn_at_once_as_one_by_one(ids: Any, temperature: float) -> None:
    given = draws(temperature)
    at_once = compiled(Independent().chain, block(ids), given)
    one_by_one = compiled(functools.partial(Selector.chain, Independent()), block(ids), given)
    np.testing.assert_array_equal(at_once.tokens, one_by_one.tokens)
    np.testing.assert_array_equal(at_once.log_q, one_by_one.log_q)
    likeliest = compiled(Independent().chain, block(ids))
    assert likeliest.log_q is None
    greedy = compiled(Independent().chain, block(ids), draws(0))
    np.testing.assert_array_equal(likeliest.tokens, greedy.tokens)


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_chain_follows_its_own_tokens(ids: Any, temperature: float) -> None:
    given = block(ids)
    draft = compiled(Bigrams(jnp.asarray(table(ids))).chain, given, draws(temperature))
    tokens, log_q = np.asarray(draft.tokens), np.asarray(draft.log_q)
    for row, slot in itertools.product(range(ROWS), range(SLOTS)):
        before = int(np.asarray(given.anchors)[row]) if slot == 0 else tokens[row, slot - 1]
        expected = q_of(given, row, slot, before, temperature or 1.0)
        if not temperature:
            best = expected.argmax()
            assert tokens[row, slot] == best
            expected = np.where(np.arange(VOCAB) == best, 0.0, -np.inf)
        np.testing.assert_allclose(log_q[row, slot], expected, rtol=1e-5, atol=1e-5)
        assert np.isfinite(expected[tokens[row, slot]])


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
def test_a_tree_has_the_likeliest_children_of_every_node(ids: Any) -> None:
    """A tree of all nodes; the children of each are found by trying all tokens."""
    given, shape = block(ids), Tree(2, SLOTS)
    nodes = shape.topk + (shape.depth - 1) * shape.topk**2
    tree = Bigrams(jnp.asarray(table(ids))).tree
    draft = compiled(lambda block: tree(block, shape, nodes), given)
    assert draft.parents is not None
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    for row in range(ROWS):
        depth = [0]
        for i, parent in enumerate(parents[row]):
            depth.append(depth[parent] + 1)
            before = int(np.asarray(given.anchors)[row]) if parent == 0 else tokens[row, parent - 1]
            best = np.argsort(-q_of(given, row, depth[parent], before, 1.0))[: shape.topk]
            assert tokens[row, i] in best
        assert max(depth) == SLOTS
