"""Rows that decode in passes over prompts: the tokens and acceptance lengths of passes of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxspec.commands.bench.trace import compilations
from jaxspec.engine.engine import Completion, Engine, Request
from jaxspec.options import Tree
from jaxspec.runtime.runtime import Runtime
from jaxspec.weights.model_def import ModelDef
from tests import tiny
from tests.cases import NEW_TOKENS, case, request
from tests.words import ascii_tokens

OPTIONS: dict[str, Any] = dict(batch_size=4, cache_length=194, cache_tokens=640, steps_per_return=2)


def completions(made: Engine, requests: list[Request]) -> dict[Any, Completion]:
    return {e.id: e for e in made.run(requests) if isinstance(e, Completion)}


@pytest.mark.parametrize(
    ("name", "drafter", "read_ahead"),
    [
        ("26b-a4b", "dflash", 4),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in itertools.product(tiny.FEATURE_SETS, ("dflash", "mtp", None), (0, 4))
        ),
        pytest.param("qwen3-tied", "dflash", 4, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_passes_apart(
    share_passes: Callable[[int], list[int]],
    mixed_calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    drafter: str | None,
    read_ahead: int,
) -> None:
    share_passes(64)
    c = case(name)
    asked = [Request(p, NEW_TOKENS, id=i) for i, p in enumerate(c.prompts)]
    options = dict(OPTIONS, read_ahead=read_ahead)
    engine = c.engine(drafter, **options)
    mixed = completions(engine, asked)
    assert len(mixed_calls) > 1
    mixed_calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(ModelDef, "bind_abstract", None)  # it took 23 ms a step
        assert completions(engine, asked) == mixed
    assert mixed_calls
    mixed_calls.clear()
    monkeypatch.setattr(Runtime, "can_mix", False)
    apart = completions(c.engine(drafter, **options), asked)
    assert not mixed_calls
    for row, completion in mixed.items():
        assert completion.token_ids == c.continuation(row)
        assert completion.acceptance_lengths == apart[row].acceptance_lengths


def test_requests_may_ask_for_all_there_is_and_nothing_is_compiled_late(
    share_passes: Callable[[int], list[int]],
    mixed_calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Penalties, log-probabilities, draws, stops; and a grammar, whose rows decode apart and are read with others."""
    pytest.importorskip("llguidance")
    share_passes(64)
    c = case("31b")
    digits = ascii_tokens(tiny.VOCAB_SIZE).compile("regex", "[0-9]{3}")
    drawn: dict[str, Any] = dict(temperature=0.9, top_p=0.9, frequency_penalty=0.5)
    drawn |= dict(logit_bias={3: 1.0}, logprobs=True, top_logprobs=2)
    asked = [
        request(p, 10, id=i, **({} if i % 2 else drawn), grammar=digits if i == 13 else None)
        for i, p in enumerate((*c.prompts, *c.prompts))
    ]
    features = dict(penalties=True, num_biases=1, logprobs=True, top_logprobs=2, grammars=True)
    options = dict(OPTIONS, read_ahead=4, choose_length="never", draft_sampling=True, **features)
    engine = c.engine("dflash", **options)
    engine.warm_up()
    with compilations() as late:
        mixed = completions(engine, asked)
    assert not late
    assert len(mixed_calls) > 1
    monkeypatch.setattr(Runtime, "can_mix", False)
    apart = completions(c.engine("dflash", **options), asked)
    for row, completion in mixed.items():
        assert completion.token_ids == apart[row].token_ids
        assert completion.acceptance_lengths == apart[row].acceptance_lengths
        assert completion.finish_reason == apart[row].finish_reason
        if not row % 2:
            assert completion.logprobs is not None
            np.testing.assert_allclose(completion.logprobs, apart[row].logprobs, atol=1e-3)
            assert completion.top_logprobs is not None


def test_passes_are_apart_where_none_can_be_mixed(share_passes: Callable[[int], list[int]]) -> None:
    c = case("31b")
    assert not c.engine("dflash", batch_size=4).runtime.can_mix  # small passes only, as on a CPU
    share_passes(64)
    assert c.engine("dflash", **OPTIONS).runtime.can_mix
    for other in (dict(invariant=True), dict(num_draft_tokens=4, tree=Tree(topk=2, depth=2))):
        assert not c.engine("dflash", **OPTIONS, **other).runtime.can_mix
    assert not c.engine("mixed", **OPTIONS).runtime.can_mix  # does not absorb chunks together


def test_one_row_that_runs_is_enough(
    share_passes: Callable[[int], list[int]], mixed_calls: list[int]
) -> None:
    share_passes(64)
    c = case("26b-a4b")
    engine = c.engine("dflash", **OPTIONS, read_ahead=4)
    for row in range(3):
        engine.add(Request(c.prompts[row], NEW_TOKENS, id=row))
        engine.step()
    engine.reset()
    assert mixed_calls == [1, 2]
