"""Greedy decoding gives the same tokens by every road: naive, plain, and speculative with any drafter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec.engine.engine import Request
from jaxspec.runtime import prefill
from jaxspec.weights.loading import load_drafter, load_target
from tests import fakes
from tests.cases import (
    BLOCK,
    CACHE_LENGTH,
    NEW_TOKENS,
    SLOTS,
    SOME_FEATURE_SETS,
    Case,
    case,
    engine_of,
    run,
    slow,
    until_stop,
)

BUNDLED = Path(jaxspec.__file__).parent / "bundled"


def requests(c: Case, count: int = NEW_TOKENS) -> list[Request]:
    return [Request(p, count) for p in c.prompts]


@pytest.mark.parametrize("name", SOME_FEATURE_SETS)
def test_plain_equals_naive(name):
    """Eight prompts over four slots: unequal lengths, several chunks, past the window, refilled slots."""
    c = case(name)
    for row, done in enumerate(run(c.engine(None), requests(c))):
        assert done.token_ids == c.continuation(row)
        assert done.finish_reason == "length"
        assert done.acceptance_lengths == (1,) * (NEW_TOKENS - 1)
        assert done.logprobs is done.sampled_logprobs is None  # without being asked for


# 31b has batches, chunks and fewer drafts of the mixed one, below.
@pytest.mark.parametrize("name", ["e2b", "26b-a4b", *slow("e4b", "12b", "31b")])
def test_lookup_drafters_equal_naive(name):
    """An oracle has every draft accepted, a hostile drafter none, and in between lies every count."""
    c = case(name)
    seen = {}
    for drafter in ("oracle", "hostile", "mixed"):
        # Rows of a mixed drafter finish one by one; refilling them is shown below, for one feature set.
        count = SLOTS if drafter == "mixed" else len(c.prompts)
        done = run(c.engine(drafter), requests(c)[:count])
        assert [d.token_ids for d in done] == [c.continuation(row) for row in range(count)]
        seen[drafter] = {tau for d in done for tau in d.acceptance_lengths}
    assert seen == {"oracle": {BLOCK}, "hostile": {1}, "mixed": set(range(1, BLOCK + 1))}


@pytest.mark.parametrize("name", ["e2b", *slow("e4b", "12b", "26b-a4b", "31b")])
def test_random_dflash_equals_naive(name):
    c = case(name)
    done = run(c.engine("dflash"), requests(c))
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]


@pytest.mark.parametrize("name", ["e2b", *slow("e4b", "12b", "26b-a4b", "31b")])
def test_random_mtp_equals_naive(name):
    """Its drafts come from the very caches that rejected tokens were written to, and from rings."""
    c = case(name)
    done = run(c.engine("mtp", num_draft_tokens=4), requests(c))
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]


@pytest.mark.parametrize("drafts", slow(1, 2, 3, 5, 6, 7, 8))
def test_mtp_chains_of_every_length(drafts):
    c = case("26b-a4b")
    done = run(c.engine("mtp", num_draft_tokens=drafts, cache_length=80), requests(c))
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]


@pytest.mark.parametrize("count", range(1, SLOTS + 2))
@pytest.mark.parametrize("drafter", ["mixed", *slow(None)])
def test_every_number_of_requests(drafter, count):
    """From one to one more than there are slots; the first prompts take 1, 1, 1 and 3 chunks."""
    c = case("e2b")
    done = run(c.engine(drafter), requests(c)[:count])
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(count)]


@pytest.mark.parametrize("batch_size", [3, *slow(1, 2, 5)])
def test_every_batch_size(batch_size):
    """An engine has as many slots as it was asked for, and one request more than that is decoded."""
    c = case("31b")
    engine = c.engine("mixed", batch_size=batch_size)
    assert engine.batch_size == batch_size
    done = run(engine, requests(c)[: batch_size + 1])
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(batch_size + 1)]


@pytest.mark.parametrize("drafter", [None, "oracle", "mixed"])
def test_limits_and_stops(drafter):
    """Limits of 1, 2 and 3 tokens and stop ids at every place of a block, all in one batch."""
    c = case("e2b")
    asked, expected = [], []
    for row, prompt in enumerate(c.prompts):
        tokens = c.continuation(row)
        for limit in (1, 2, 3):
            asked.append(Request(prompt, limit))
            expected.append((tokens[:limit], "length"))
        for place in range(row % 2, 2 * BLOCK, 2):
            stop_ids = (tokens[place], 7 if 7 not in tokens else 8)
            asked.append(Request(prompt, NEW_TOKENS, stop_ids=stop_ids))
            expected.append((until_stop(tokens, stop_ids), "stop"))
        # A stop id that is also the last token allowed.
        last = until_stop(tokens, (tokens[3],))
        asked.append(Request(prompt, len(last), stop_ids=(tokens[3],)))
        expected.append((last, "stop"))
    done = run(c.engine(drafter), asked)
    assert [(d.token_ids, d.finish_reason) for d in done] == expected
    if drafter == "oracle":  # statistics count whole steps, cut or not
        assert {tau for d in done for tau in d.acceptance_lengths} == {BLOCK}
        steps = [-(-(len(d.token_ids) - 1) // BLOCK) for d in done]
        assert [len(d.acceptance_lengths) for d in done] == steps


@pytest.mark.parametrize("drafter", ["mixed", *slow("dflash")])
def test_fewer_draft_tokens_than_trained(drafter):
    c = case("31b")
    done = run(c.engine(drafter, num_draft_tokens=2), requests(c))
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]
    lengths = {tau for d in done for tau in d.acceptance_lengths}
    assert lengths == {1, 2, 3} if drafter == "mixed" else lengths <= {1, 2, 3}


@pytest.mark.parametrize("chunk", [32, 64])
def test_prefill_chunk_does_not_matter(chunk, monkeypatch):
    """Chunks beyond a ring and its slack: their queries see the old ring and the chunk itself."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", chunk)
    c = case("31b")
    done = run(c.engine("mixed"), requests(c))
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]


@pytest.mark.slow  # `jaxspec check` on the bundled pair shows it too, in `tests/commands`
def test_bundled_dflash_equals_plain():
    if not (BUNDLED / "dflash" / "config.json").exists():
        pytest.skip("the bundled pair is not in this tree")
    target = load_target(str(BUNDLED / "target"), dtype="float32")
    drafter = load_drafter(str(BUNDLED / "dflash"), dtype="float32")
    held_out = json.loads((BUNDLED / "held_out.json").read_text())["prompts"]
    lengths = (3, 16, 30, 9, 24)
    prompts = [tuple(p["ids"][:n]) for p, n in zip(held_out, lengths, strict=False)]
    asked = [Request(p, NEW_TOKENS) for p in prompts]
    plain, speculative = (
        run(engine_of(target, d, batch_size=4, cache_length=CACHE_LENGTH), asked)
        for d in (None, drafter)
    )
    for prompt, one, other in zip(prompts, plain, speculative, strict=True):
        if one.token_ids != other.token_ids:  # only a near-tie may differ
            pairs = zip(one.token_ids, other.token_ids, strict=True)
            common = one.token_ids[: [a == b for a, b in pairs].index(False)]
            gap = fakes.naive_greedy(target, [prompt + common], 1).smallest_gap
            assert gap < 1e-4, (one, other)
    assert np.mean([tau for d in speculative for tau in d.acceptance_lengths]) > 1
