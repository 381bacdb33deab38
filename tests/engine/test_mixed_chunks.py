"""Rows that decode in passes over prompts: the tokens and acceptance lengths of passes of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from jaxspec.engine.engine import Completion, Engine, Request
from tests import tiny
from tests.cases import NEW_TOKENS, case


def completions(made: Engine, prompts: Any) -> dict[Any, Completion]:
    asked = [Request(p, NEW_TOKENS, id=i) for i, p in enumerate(prompts)]
    return {e.id: e for e in made.run(asked) if isinstance(e, Completion)}


@pytest.mark.parametrize(
    ("name", "drafter", "read_ahead"),
    [
        ("e4b", "mtp", 0),
        ("26b-a4b", "dflash", 4),
        ("31b", None, 4),
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
    name: str,
    drafter: str | None,
    read_ahead: int,
) -> None:
    share_passes(64)
    c = case(name)
    options: dict[str, Any] = dict(batch_size=4, cache_length=194, cache_tokens=640)
    options |= dict(read_ahead=read_ahead, steps_per_return=2)
    mixed = completions(c.engine(drafter, mixed_chunks=True, **options), c.prompts)
    assert len(mixed_calls) > 1
    mixed_calls.clear()
    apart = completions(c.engine(drafter, **options), c.prompts)
    assert not mixed_calls
    for row, completion in mixed.items():
        assert completion.token_ids == c.continuation(row)
        assert completion.acceptance_lengths == apart[row].acceptance_lengths
