"""Greedy decoding of Qwen3 is lossless: with random, oracle and hostile drafters, and with trees."""

from __future__ import annotations

import functools

import pytest

from jaxspec.configs.dflash import DFlashConfig
from jaxspec.engine.engine import Request
from jaxspec.options import Tree
from jaxspec.weights.define import model_def_of
from jaxspec.weights.loading import LoadedModel
from tests import cases, fakes, tiny
from tests.cases import BLOCK, NEW_TOKENS, Case, run, slow


class QwenCase(Case):
    """A case whose DFlash drafter is like z-lab's: full layers, none causal, no soft cap."""

    def drafter(self, name: str) -> LoadedModel:
        return b16(self.target) if name == "dflash" else super().drafter(name)


def b16(target: LoadedModel) -> LoadedModel:
    """Return a drafter as the released ones for Qwen3, small, with random weights."""
    c = target.config
    config = DFlashConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        layer_types=("full",) * 2,
        causal=(False,) * 2,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        block_size=BLOCK,
        mask_token_id=4,
        feature_layers=(0, 1),
        num_target_layers=c.num_layers,
        max_positions=c.max_positions,
        rope_theta=c.rope_theta,
    )
    model_def = model_def_of(config, "float32")
    return fakes.loaded(model_def, tiny.random_params(model_def, 3))


@functools.cache
def case(name: str) -> Case:
    made = cases.case(name)
    return QwenCase(made.target, made.prompts, made.sequences)


def requests(c: Case) -> list[Request]:
    return [Request(prompt, NEW_TOKENS) for prompt in c.prompts]


def expected(c: Case) -> list[tuple[int, ...]]:
    return [c.continuation(row) for row in range(len(c.prompts))]


# The tied one, whose trees are decoded below, differs in its head alone.
FEATURE_SETS = ["qwen3-untied", *slow("qwen3-tied")]


@pytest.mark.parametrize("name", FEATURE_SETS)
def test_plain_equals_naive(name: str):
    """Unequal lengths, prompts of several chunks, slots that are used again."""
    c = case(name)
    assert [d.token_ids for d in run(c.engine(None), requests(c))] == expected(c)
    assert len({t for tokens in expected(c) for t in tokens}) > 40


@pytest.mark.parametrize("name", FEATURE_SETS)
def test_lookup_drafters_equal_naive(name: str):
    """An oracle has all drafts accepted, a hostile drafter none. A mixed one has every count."""
    c = case(name)
    seen = {}
    for drafter in ("oracle", "hostile", "mixed"):
        done = run(c.engine(drafter), requests(c))
        assert [d.token_ids for d in done] == expected(c)
        seen[drafter] = {tau for d in done for tau in d.acceptance_lengths}
    assert seen == {"oracle": {BLOCK}, "hostile": {1}, "mixed": set(range(1, BLOCK + 1))}


@pytest.mark.parametrize("name", FEATURE_SETS)
def test_a_random_dflash_equals_naive(name: str):
    c = case(name)
    assert [d.token_ids for d in run(c.engine("dflash"), requests(c))] == expected(c)


@pytest.mark.parametrize("drafter", ["dflash", *slow("mixed")])
def test_trees_equal_naive(drafter: str):
    c = case("qwen3-tied")
    engine = c.engine(drafter, cache_length=80, num_draft_tokens=9, tree=Tree(3, 4))
    done = run(engine, requests(c))
    assert [d.token_ids for d in done] == expected(c)
    if drafter == "mixed":
        assert {tau for d in done for tau in d.acceptance_lengths} >= {1, 2, 3, 4}
