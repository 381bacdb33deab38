"""Draft trees: their shape, and that verifying one changes nothing of what the target says."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Draft, Tree
from jaxspec.drafters.tree import Children, ancestors, check_tree, grow
from jaxspec.engine.engine import Engine, Request
from jaxspec.models.target import TargetOutput, init_caches, keep_rows
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Array, Params
from jaxspec.verify import greedy_verify, tree_verify
from jaxspec.weights.model_def import ModelDef
from tests import tiny
from tests.cases import BLOCK, NEW_TOKENS, SOME_FEATURE_SETS, case, run, slow, target

TREES = {"3 wide": (Tree(3, 4), 9), "5 wide": (Tree(5, 4), 12)}
DEPTH = BLOCK - 1


# --- shape ---------------------------------------------------------------------------------------


def brute_force(log_probs: np.ndarray, topk: int, count: int) -> set[tuple[int, ...]]:
    """Return the best `count` paths of a tree whose children's probabilities depend on the level alone."""
    frontier, pool = [((), 0.0)], []
    for level in log_probs:
        best = sorted(range(len(level)), key=lambda t: -level[t])[:topk]
        nodes = [((*path, t), score + level[t]) for path, score in frontier for t in best]
        pool += nodes
        frontier = sorted(nodes, key=lambda node: -node[1])[:topk]
    return {path for path, _ in sorted(pool, key=lambda node: -node[1])[:count]}


def paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    assert draft.parents is not None
    out: list[tuple[int, ...]] = [()]
    nodes = np.asarray(draft.tokens)[row].tolist(), np.asarray(draft.parents)[row].tolist()
    for token, parent in zip(*nodes, strict=True):
        assert parent < len(out), "a node stands after its parent"
        out.append((*out[parent], token))
    return out[1:]


@pytest.mark.parametrize(("topk", "depth", "count"), [(3, 5, 11), (5, 5, 15), (1, 4, 4), (4, 1, 3)])
def test_grow_keeps_the_best_nodes(topk: int, depth: int, count: int):
    rng = np.random.default_rng(topk)
    logits = rng.normal(size=(2, depth, 20)) * 2
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def expand(level: int, frontier: Array, origins: Array, k: int) -> tuple[int, Children]:
        tokens = np.argsort(-log_probs[:, level], axis=-1)[:, None, :k]
        likely = np.take_along_axis(log_probs[:, level, None], tokens, axis=-1)
        shape = (2, frontier.shape[1], k)
        children = (jnp.asarray(np.broadcast_to(x, shape)) for x in (tokens, likely))
        return level + 1, Children(*children)

    about: dict[str, Any] = dict(tree=Tree(topk, depth), num_draft_tokens=count)
    draft = jax.jit(lambda anchors: grow(expand, 0, anchors, **about))(np.zeros(2, np.int32))
    for row in range(2):
        found = paths(draft, row)
        assert len(found) == count
        assert set(found) == brute_force(log_probs[row], topk, count)


def test_ancestors():
    parents = np.asarray([[0, 0, 1, 3], [0, 1, 2, 3]], np.int32)
    seen = np.asarray(jax.jit(ancestors)(parents))
    assert seen.shape == (2, 5, 5)
    tree = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 3, 4}]
    assert [set(np.flatnonzero(row)) for row in seen[0]] == tree
    np.testing.assert_array_equal(seen[1], np.tril(np.ones((5, 5), bool)))


@pytest.mark.parametrize(
    ("tree", "count", "message"),
    [
        (Tree(3, 5), 4, r"topk 3 and depth 5 needs at least 5 draft tokens, got 4"),
        (Tree(6, 2), 5, r"needs at least 6 draft tokens, got 5: raise .* or narrow"),
        (Tree(2, 2), 7, r"has 6 nodes, fewer than 7 draft tokens: lower .* or widen"),
        (Tree(2, 9), 12, r"tree depth 9: this drafter drafts at most 7"),
        (Tree(0, 2), 2, r"topk and depth of at least 1, got 0 and 2"),
    ],
)
def test_impossible_trees(tree: Tree, count: int, message: str):
    with pytest.raises(ValueError, match=message):
        check_tree(tree, count, 7)


# --- verification ----------------------------------------------------------------------------------


def test_a_chain_as_a_tree_is_judged_alike():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, 4, 5)).astype(np.float32)
    wrong = rng.random((64, 3)) < 0.3
    draft = ((logits.argmax(axis=-1)[:, :3] + wrong) % 5).astype(np.int32)
    parents = np.broadcast_to(np.arange(3, dtype=np.int32), (64, 3))
    sampling = SamplingParams.make(64)
    keys, steps = jax.random.split(jax.random.key(0), 64), np.zeros(64, np.int32)
    expected = jax.jit(greedy_verify)(logits, draft)
    judge = jax.jit(tree_verify, static_argnames="depth")
    got = judge(logits, draft, parents, sampling, keys, steps, depth=3)
    np.testing.assert_array_equal(got.accepted, expected.accepted)
    np.testing.assert_array_equal(got.bonus, expected.bonus)
    assert set(np.asarray(expected.accepted)) == {0, 1, 2, 3}


kept_rows = jax.jit(keep_rows)


@functools.partial(jax.jit, static_argnums=0)
def target_pass(model_def: ModelDef, params: Params, *args: Any) -> TargetOutput:
    *args, mask = args
    return model_def.bind(params)(*args, feature_layers=(0,), ancestors=mask)


@pytest.mark.parametrize("name", SOME_FEATURE_SETS)
def test_a_tree_pass_gives_what_each_path_alone_gives(name: str):
    """Logits, features and then the caches are those of feeding one path, far past the window's ring."""
    loaded = target(name)
    rng = np.random.default_rng(3)
    length = 21
    mask = jax.jit(ancestors)(np.asarray([[0, 0, 1, 1, 3, 5]], np.int32))
    tokens = rng.integers(20, tiny.VOCAB_SIZE, (1, length + 7)).astype(np.int32)
    caches = init_caches(loaded.config, 1, cache_length=64, slack=7, dtype="float32")

    def feed(block: np.ndarray, start: int, count: int, mask: Array | None = None) -> TargetOutput:
        where = (np.asarray([start], np.int32), np.asarray([count], np.int32))
        return target_pass(loaded.model_def, loaded.params, block, *where, caches, mask)

    for begin in range(0, length, 7):
        caches = feed(tokens[:, begin : begin + 7], begin, 7).caches
    tree = feed(tokens[:, length:], length, 7, mask)
    for path in ([0, 2], [0, 1, 4], [0, 1, 3, 5, 6]):
        n = len(path)
        rows = np.asarray([path + [0] * (7 - n)], np.int32)
        alone = feed(np.take_along_axis(tokens[:, length:], rows, axis=1), length, n)
        kept = kept_rows(tree, rows, np.asarray([length], np.int32), np.asarray([n], np.int32))
        kept, alone = jax.device_get((kept, alone))
        got = (kept.logits[:, :n], kept.hidden[:, :n], kept.features[0][:, :n], kept.caches)
        want = (alone.logits[:, :n], alone.hidden[:, :n], alone.features[0][:, :n], alone.caches)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, want)


# --- decoding --------------------------------------------------------------------------------------


def tree_engine(name: str, drafter: str, tree: Tree, count: int) -> Engine:
    return case(name).engine(drafter, cache_length=80, num_draft_tokens=count, tree=tree)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("e2b", "3 wide"),
        pytest.param("26b-a4b", "5 wide", marks=pytest.mark.slow),
        # 31b has the tree of MTP and the one of one branch, below.
        *(
            pytest.param(n, "3 wide", marks=pytest.mark.slow)
            for n in ("e4b", "12b", "26b-a4b", "31b")
        ),
        *(pytest.param(n, "5 wide", marks=pytest.mark.slow) for n in ("e2b", "e4b", "12b", "31b")),
    ],
)
def test_trees_equal_naive(name: str, shape: str):
    """What comes next is on a first branch, on a second, or not in the tree at all."""
    c = case(name)
    asked = [Request(p, NEW_TOKENS) for p in c.prompts]
    done = run(tree_engine(name, "mixed", *TREES[shape]), asked)
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]
    assert {tau for d in done for tau in d.acceptance_lengths} >= {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("name", "drafter", "tree", "count"),
    [
        pytest.param("31b", "dflash", Tree(3, DEPTH), 10, marks=pytest.mark.slow),
        ("31b", "mtp", Tree(3, 3), 7),
        pytest.param("31b", "mtp", Tree(3, 5), 11, marks=pytest.mark.slow),
        pytest.param("e2b", "mtp", Tree(5, 5), 15, marks=pytest.mark.slow),
    ],
)
def test_trees_of_random_drafters_equal_naive(name: str, drafter: str, tree: Tree, count: int):
    c = case(name)
    done = run(tree_engine(name, drafter, tree, count), [Request(p, NEW_TOKENS) for p in c.prompts])
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]


@pytest.mark.parametrize("drafter", ["mixed", *slow("dflash", "mtp")])
def test_a_tree_of_one_branch_is_the_chain(drafter: str):
    c = case("31b")
    asked = [Request(p, NEW_TOKENS) for p in c.prompts]
    chain = run(c.engine(drafter, num_draft_tokens=DEPTH), asked)
    tree = run(tree_engine("31b", drafter, Tree(1, DEPTH), DEPTH), asked)
    for one, other in itertools.zip_longest(chain, tree):
        assert one.token_ids == other.token_ids
        assert one.acceptance_lengths == other.acceptance_lengths


def test_a_tree_needs_its_number_of_drafts():
    c = case("31b")
    with pytest.raises(ValueError, match="a tree needs num_draft_tokens"):
        c.engine("mixed", tree=Tree(2, 2))
    with pytest.raises(ValueError, match="there is no drafter"):
        c.engine(None, tree=Tree(2, 2))
