"""Programs for few of many slots: the same tokens from fewer rows, while rows come and go."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from jax.sharding import Mesh

from jaxspec import row_subset
from jaxspec.engine.engine import Completion, Engine
from jaxspec.engine.request import Request
from jaxspec.options import Drafting, Sampling, Tree
from jaxspec.runtime.runtime import make_spec
from tests import fakes
from tests.cases import NEW_TOKENS, case
from tests.runtime.test_prefill import mesh_of


def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let an engine note how many rows each decode call computes."""
    rows: list[int] = []
    decoding = engine.runtime.bind_decode

    def noting(*given: Any, **named: Any) -> Any:
        slots = named.get("slots", given[6] if len(given) > 6 else None)
        rows.append(engine.batch_size if slots is None else len(slots))
        return decoding(*given, **named)

    monkeypatch.setattr(engine.runtime, "bind_decode", noting)
    return rows


def staggered(engine: Engine, requests: list[Request], every: int) -> dict[Any, Completion]:
    """Send a request every so many steps, so that few run at first, more then, and few again."""
    done: dict[Any, Completion] = {}
    left, count = list(requests), 0
    while left or not engine.is_idle:
        if left and count % every == 0:
            engine.add(left.pop(0))
        done |= {e.id: e for e in engine.step() if isinstance(e, Completion)}
        count += 1
    return done


@pytest.mark.parametrize(
    ("name", "drafter", "options"),
    [
        pytest.param("31b", None, {}, marks=pytest.mark.slow),
        pytest.param("31b", "dflash", {"choose_length": "never"}, marks=pytest.mark.slow),
        pytest.param("31b", "dflash", {"choose_length": "exact"}, marks=pytest.mark.slow),
        ("31b", "mtp", {"choose_length": "never", "num_draft_tokens": 1}),
        pytest.param("e2b", "mtp", {"choose_length": "never"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "dflash", "chosen length", "mtp", "shared K/V"],
)
def test_few_rows_get_the_same_tokens(
    name: str, drafter: str | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight slots one, two and all are computed; rings wrap meanwhile, and a row is cancelled."""
    c = case(name)
    engine = c.engine(drafter, batch_size=8, steps_per_return=2, **options)
    engine.warm_up()
    known = engine.num_compilations
    rows = computed(engine, monkeypatch)
    requests = [Request(p, NEW_TOKENS - place, id=place) for place, p in enumerate(c.prompts)]
    done = staggered(engine, requests, every=3)
    for place, request in enumerate(requests):
        assert done[place].token_ids == c.continuation(place, request.max_new_tokens)
    engine.add(Request(c.prompts[3], NEW_TOKENS, id="left"))
    engine.add(Request(c.prompts[4], NEW_TOKENS, id="stays"))
    for _ in range(3):
        engine.step()
    engine.cancel("left")
    done = staggered(engine, [Request(c.prompts[5], NEW_TOKENS, id="late")], every=1)
    assert done["stays"].token_ids == c.continuation(4)
    assert done["late"].token_ids == c.continuation(5)
    assert engine.num_compilations == known
    assert set(rows) == {1, 2, 8}
    rows.clear()
    engine.reset()  # as `run` does, and what goes on after a step that failed
    done = staggered(engine, [Request(c.prompts[0], 3, id="again")], every=1)
    assert done["again"].token_ids == c.continuation(0, 3)
    assert set(rows) == {1}


@pytest.mark.slow  # greedy rows by default
def test_draws_and_what_rows_carry_stay_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, penalties, biases and log-probabilities, in an engine that computes few rows and in one that does not."""
    c = case("31b")
    program_features = dict(penalties=True, num_biases=1, logprobs=True, top_logprobs=2)
    engines = [
        c.engine(
            "dflash", batch_size=4, steps_per_return=2, choose_length="never", **program_features
        )
        for _ in range(2)
    ]
    engines[0].warm_up()
    rows = computed(engines[0], monkeypatch)
    requests = [
        Request(
            p,
            NEW_TOKENS,
            Sampling(
                temperature=1.0,
                repetition_penalty=1.2,
                logit_bias={7: 1.0},
                logprobs=True,
                top_logprobs=2,
            ),
            seed=place,
            id=place,
        )
        for place, p in enumerate(c.prompts[:5])
    ]
    found, expected = (staggered(engine, requests, every=4) for engine in engines)
    assert 1 in rows
    for place in found:
        assert found[place].token_ids == expected[place].token_ids
        assert found[place].acceptance_lengths == expected[place].acceptance_lengths
        np.testing.assert_allclose(
            found[place].logprobs, expected[place].logprobs, rtol=1e-4, atol=1e-4
        )


def test_which_programs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """None where a row must not depend on how many run, and none for trees."""
    c, mesh = case("31b"), mesh_of("gpu")
    spec = make_spec(c.target, c.drafter("dflash"))
    plain = make_spec(c.target, None)
    assert row_subset.counts(plain, 1, mesh, invariant=False) == ()
    assert row_subset.counts(plain, 2, mesh, invariant=False) == (1,)
    assert row_subset.counts(spec, 4, mesh, invariant=False) == (1,)
    assert row_subset.counts(spec, 32, mesh, invariant=False) == (1, 8, 16, 24)
    assert row_subset.counts(spec, 160, mesh, invariant=False) == (1, 40, 80, 100, 120, 140)
    assert row_subset.counts(spec, 32, mesh, invariant=True) == ()
    two = mock.Mock(spec=Mesh, shape={"data": 2})
    assert row_subset.counts(spec, 64, two, invariant=False) == (2, 16, 32, 48)
    assert row_subset.counts(spec, 2, two, invariant=False) == ()
    tree = make_spec(c.target, c.drafter("dflash"), Drafting(4, tree=Tree(topk=2, depth=2)))
    assert row_subset.counts(tree, 32, mesh, invariant=False) == ()
    mixed = make_spec(c.target, c.drafter("mixed"))
    assert row_subset.counts(mixed, 8, mesh, invariant=False) == (1, 2)
    monkeypatch.setattr(fakes.LookupDrafter, "drafts_by_slot", False)
    monkeypatch.setattr(fakes.TableDrafter, "drafts_by_slot", False)
    assert row_subset.counts(mixed, 8, mesh, invariant=False) == ()
    assert not row_subset.addressable(mixed)


def test_the_slots_of_a_program() -> None:
    assert row_subset.fill([5, 2], 4, 8).tolist() == [5, 2, 0, 1]
    assert row_subset.fill([], 2, 8).tolist() == [0, 1]
    # Of each part of a mesh as many, numbered in it.
    assert row_subset.fill([6, 1], 4, 8, 2).tolist() == [1, 0, 2, 0]
    assert row_subset.first(4, 8, 2) == [0, 1, 4, 5]


def test_rows_that_wait_are_computed_last() -> None:
    """A row that was read ahead is active on the device. It would take a step without its grammar and pages."""
    assert row_subset.fill([1, 5], 4, 8).tolist() == [1, 5, 0, 2]
    assert row_subset.fill([1, 5], 4, 8, waiting=[0, 2, 3]).tolist() == [1, 5, 4, 6]
    assert row_subset.fill([1, 5], 4, 8, 2, [0, 2]).tolist() == [1, 3, 1, 0]
    assert row_subset.fill([1], 4, 4, waiting=[0, 2]).tolist() == [1, 3, 0, 2]
