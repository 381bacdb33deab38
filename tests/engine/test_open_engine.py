"""The engine while it runs: requests that come late, requests that are cancelled, and whose draws are whose."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxspec.engine.engine import Completion, Engine, Request
from jaxspec.options import FieldError
from tests.cases import NEW_TOKENS, case, request, run

NAME = "31b"


@pytest.fixture
def engine() -> Engine:
    return case(NAME).engine("mixed", batch_size=2, steps_per_return=1)


def finish(engine: Engine) -> dict[Any, Completion]:
    done = {}
    while not engine.is_idle:
        done |= {e.id: e for e in engine.step() if isinstance(e, Completion)}
    return done


def test_a_request_added_while_others_decode(engine: Engine) -> None:
    """It takes the free slot at once, and neither it nor the other notices."""
    c = case(NAME)
    first = engine.add(Request(c.prompts[1], NEW_TOKENS))
    engine.step()
    engine.step()
    late = engine.add(Request(c.prompts[2], 3))
    assert [e.id for e in engine.step()] == [first]  # what the device did meanwhile
    assert [e.id for e in engine.step()] == [late]  # its prompt is read: prefill's token
    done = finish(engine)
    assert done[first].token_ids == c.continuation(1)
    assert done[late].token_ids == c.continuation(2, 3)
    assert engine.step() == []


def test_a_cancelled_request_frees_its_slot(engine: Engine) -> None:
    c = case(NAME)
    running, other, waiting, next_one = (
        engine.add(Request(c.prompts[i], NEW_TOKENS, id=name))
        for i, name in enumerate(("running", "other", "waiting", "next"))
    )
    for _ in range(4):  # read both prompts, decode once, look
        engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    events = engine.step()
    ended = {e.id: e for e in events if isinstance(e, Completion)}
    assert {name: e.finish_reason for name, e in ended.items()} == dict.fromkeys(
        ("waiting", "running"), "cancelled"
    )
    assert ended["waiting"].token_ids == ()
    told = ended["running"].token_ids
    assert 1 < len(told) < NEW_TOKENS
    assert told == c.continuation(0)[: len(told)]
    assert engine.num_running == 2  # the next one was admitted by that very step
    done = finish(engine)
    assert done.keys() == {"other", "next"}
    assert done[other].token_ids == c.continuation(1)
    assert done[next_one].token_ids == c.continuation(3)
    with pytest.raises(FieldError, match="'other' belongs to no request that waits or runs"):
        engine.cancel("other")


def test_priorities_leave_the_queue_first(engine: Engine) -> None:
    """A smaller number is sooner; equal numbers keep their order."""
    c = case(NAME)
    engine.add(Request(c.prompts[0], NEW_TOKENS, id="one"))
    engine.add(Request(c.prompts[1], NEW_TOKENS, id="two"))
    engine.step()
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        engine.add(Request(c.prompts[2], 2, id=name, priority=priority))
    order = []
    while not engine.is_idle:
        order += [e.id for e in engine.step() if isinstance(e, Completion)]
    waited = [name for name in order if name not in ("one", "two")]
    assert waited == ["urgent", "first", "second", "late"]
    assert str(engine.check(Request((1,), 1, priority=2**40))).startswith("priority is")


def test_cancelling_the_last_one_ends_the_run(engine: Engine) -> None:
    name = engine.add(Request(case(NAME).prompts[0], NEW_TOKENS))
    engine.step()
    engine.cancel(name)
    assert not engine.is_idle
    (done,) = engine.step()
    assert isinstance(done, Completion)
    assert done.finish_reason == "cancelled"
    assert engine.is_idle


def test_draws_follow_the_seed_and_the_sample_not_the_place(engine: Engine) -> None:
    c = case(NAME)
    asked = [request(c.prompts[1], 12, temperature=1.0, seed=5)] * 3
    expected = run(engine, asked)
    assert len({d.token_ids for d in expected}) == 3
    numbered = [dataclasses.replace(r, sample=i, id=f"sample {i}") for i, r in enumerate(asked)]
    done = {e.id: e for e in engine.run(numbered[::-1]) if isinstance(e, Completion)}
    assert [done[f"sample {i}"].token_ids for i in range(3)] == [d.token_ids for d in expected]
    alone = engine.add(dataclasses.replace(numbered[2], id=None))
    assert finish(engine)[alone].token_ids == expected[2].token_ids


def test_what_an_open_engine_refuses(engine: Engine) -> None:
    """More stop ids than it was made for would compile all programs anew: `add` refuses, `run` makes room."""
    many = Request(case(NAME).prompts[0], 2, stop_ids=tuple(range(100, 106)), id="many")
    with pytest.raises(FieldError, match=r"stop_ids names 6 tokens, .* pass num_stop_ids=6") as e:
        engine.add(many)
    assert e.value.field == "stop_ids"
    assert run(engine, [dataclasses.replace(many, id=0)])[0].error is None
    engine.add(many)
    with pytest.raises(FieldError, match="'many' belongs to a request that is not done"):
        engine.add(many)
    with pytest.raises(ValueError, match="run needs an idle engine"):
        next(engine.run([many]))
    engine.reset()
    with pytest.raises(FieldError, match="id is the same in two requests"):
        next(engine.run([many, many]))


def test_a_run_that_is_left_in_the_middle_leaves_nothing(engine: Engine) -> None:
    c = case(NAME)
    events = engine.run([Request(p, NEW_TOKENS) for p in c.prompts])
    next(events)
    events.close()
    assert engine.is_idle
    assert run(engine, [Request(c.prompts[4], 5)])[0].token_ids == c.continuation(4, 5)
