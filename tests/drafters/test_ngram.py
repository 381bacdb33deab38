"""Drafts from a row's own text, against a plain search through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from checkpoints_convert.errors import CheckpointError
from jaxspec.configs.base import ConfigError
from jaxspec.configs.ngram import NGramConfig
from jaxspec.drafters.base import Kept
from jaxspec.drafters.ngram import NGramDrafter, look_up
from jaxspec.options import FieldError, Tree
from jaxspec.weights.conversion import convert
from jaxspec.weights.loading import load_drafter
from jaxspec.weights.model_def import ModelDef
from tests import cases, fakes, short_pair

LENGTH = 40


def searched(text: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """Look up as a person would: the longest end first, from the end of the text to its beginning."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for place in range(len(text) - 2, size - 2, -1):
            if text[place - size + 1 : place + 1] == text[-size:]:
                followed = text[place + 1 :]
                return [followed[i % len(followed)] for i in range(count)]
    return [text[-1]] * count


@pytest.mark.parametrize(("longest", "shortest"), [(4, 1), (3, 3), (1, 1), (8, 2)])
def test_look_up_equals_a_plain_search(longest: int, shortest: int) -> None:
    rng = np.random.default_rng(longest)
    lengths = rng.integers(1, LENGTH + 1, 300)
    text = rng.integers(0, 4, (300, LENGTH))  # the rest of a row is old text, which must not count
    options = dict(longest=longest, shortest=shortest)
    last = jnp.asarray(lengths - 1, jnp.int32)
    found = np.asarray(look_up(jnp.asarray(text, jnp.int32), last, 9, **options))
    for row, n in enumerate(lengths):
        assert found[row].tolist() == searched(text[row, :n].tolist(), 9, longest, shortest)


def test_absorbing_in_parts_and_into_slots() -> None:
    """What is past a row's count never enters, and a row of padding writes nowhere."""
    drafter = NGramDrafter(NGramConfig(), dtype=jnp.dtype(jnp.float32))
    state = drafter.init_state(3, cache_length=8, dtype=jnp.float32)
    nothing = jnp.zeros((2, 1, 1), jnp.float32)

    def kept(tokens: list[list[int]], start: list[int], count: list[int], slots: list[int]) -> Kept:
        of = (jnp.asarray(x, jnp.int32) for x in (tokens, start, count, slots))
        tokens_, start_, count_, slots_ = of
        return Kept(tokens_, nothing, (), start_, count_, slots_)

    state = drafter.absorb(state, kept([[1, 2, 3], [4, 5, 6]], [0, 0], [3, 2], [2, 0]))
    state = drafter.absorb(state, kept([[7, 8, 9], [1, 1, 1]], [2, 0], [2, 3], [0, 3]))
    expected = [[4, 5, 7, 8, 0, 0, 0, 0], [0] * 8, [1, 2, 3, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(state, expected)


@pytest.mark.parametrize(
    "options",
    [
        dict(num_draft_tokens=5, draft_sampling=True, verification="block"),
        *cases.slow(dict(num_draft_tokens=5), dict(num_draft_tokens=3, tree=Tree(1, 3))),
    ],
    ids=["drawn", "chain", "tree"],
)
def test_output_is_that_of_plain_decoding(options: dict[str, Any]) -> None:
    c = cases.case("31b")
    drafter = fakes.loaded(ModelDef(NGramDrafter, NGramConfig(), "float32"), {})
    engine = cases.engine_of(c.target, drafter, batch_size=4, cache_length=64, **options)
    done = cases.run(engine, [cases.request(p, cases.NEW_TOKENS) for p in c.prompts])
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]


def test_trees_that_branch_are_refused() -> None:
    c = cases.case("31b")
    drafter = fakes.loaded(ModelDef(NGramDrafter, NGramConfig(), "float32"), {})
    with pytest.raises(FieldError, match="topk 2: this drafter chooses among 1 tokens"):
        cases.engine_of(c.target, drafter, num_draft_tokens=4, tree=Tree(2, 2))


def test_it_is_loaded_by_its_name_and_drafts_what_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxspec.api.BUNDLED", short_pair.write(tmp_path / "short"))
    pair = jaxspec.load(drafter="ngram", dtype="float32")
    assert pair.drafter is not None
    assert not pair.drafter.params
    engine = cases.engine_of(
        pair.target, pair.drafter, batch_size=2, cache_length=256, prefix_bytes=1 << 20
    )
    plain = cases.engine_of(pair.target, None, batch_size=2, cache_length=256)
    rng = np.random.default_rng(0)
    once = rng.integers(20, 400, 12).tolist()
    requests = [cases.request((once * 6)[:n], 32) for n in (70, 66)]
    for request, other in zip(cases.run(engine, requests), cases.run(plain, requests), strict=True):
        assert request.token_ids == other.token_ids
    again = cases.run(engine, requests)  # from stored prefixes, whose text they keep
    assert [d.token_ids for d in again] == [d.token_ids for d in cases.run(plain, requests)]
    assert max(np.mean(d.acceptance_lengths) for d in again) > 1.3
    with pytest.raises(CheckpointError, match="or one of dflash, mtp, ngram, none"):
        jaxspec.load(drafter="ngrams")


@pytest.mark.slow
def test_pages_change_nothing() -> None:
    c = cases.case("31b")
    drafter = fakes.loaded(ModelDef(NGramDrafter, NGramConfig(), "float32"), {})
    options: dict[str, Any] = dict(batch_size=4, cache_length=64, num_draft_tokens=5)
    whole = cases.engine_of(c.target, drafter, **options)
    paged = cases.engine_of(c.target, drafter, cache_tokens=100, **options)
    requests = [cases.request(p, cases.NEW_TOKENS) for p in c.prompts]
    for done, other in zip(cases.run(paged, requests), cases.run(whole, requests), strict=True):
        assert done.token_ids == other.token_ids
        assert done.acceptance_lengths == other.acceptance_lengths


def test_a_directory_of_ones_own(tmp_path: Path) -> None:
    """Other numbers in config.json. There is nothing to convert."""
    source = jaxspec.api.BUNDLED / "ngram"
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    text = (source / "config.json").read_text().replace('"max_ngram": 4', '"max_ngram": 8')
    (hf / "config.json").write_text(text)
    assert load_drafter(str(hf), dtype="float32").config.max_ngram == 8
    with pytest.raises(CheckpointError, match="has no weights to convert; use it as it is"):
        convert(hf, tmp_path / "ours")
    for change, message in (
        ('"min_ngram": 9', "min_ngram 9 is more than max_ngram 8"),
        ('"min_ngram": 0', "min_ngram is 0"),
        ('"min_ngram": 1, "window": 3', "window = 3"),
    ):
        (hf / "config.json").write_text(text.replace('"min_ngram": 1', change))
        with pytest.raises(ConfigError, match=message):
            load_drafter(str(hf), dtype="float32")
