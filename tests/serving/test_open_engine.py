"""Open engine over an engine without a model: threads, cancellations, full queues, failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine.request import Completion, Request, Update
from jaxspec.options import FieldError
from jaxspec.serving.handle import Handle
from jaxspec.serving.open_engine import Closing, OpenEngine, QueueFull
from tests.serving.fake_engine import FakeEngine, answer

WAIT_S = 20.0


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def open_engine(engine: FakeEngine) -> Iterator[OpenEngine]:
    with OpenEngine(engine, max_waiting=3) as running:
        yield running
        engine.gate.set()


def request(prompt: int = 1, count: int = 7, **more: Any) -> Request:
    return Request((prompt,), count, **more)


def working(engine: FakeEngine, open_engine: OpenEngine) -> Handle:
    """Return a request that runs on the device until the gate opens."""
    engine.gate.clear()
    handle = open_engine.submit(request(99))
    assert engine.in_step.wait(WAIT_S)
    return handle


def test_events_come_to_threads(open_engine: OpenEngine) -> None:
    handle = open_engine.submit(request())
    *updates, done = handle
    assert all(isinstance(update, Update) for update in updates)
    counts = [len(event.token_ids) for event in updates]
    assert counts == sorted(set(counts))
    assert isinstance(done, Completion)
    assert done.token_ids == answer(request())
    assert handle.completion is done
    assert handle.first_token_s is not None
    assert list(handle) == [done]  # later readers get what there is


def test_events_come_to_coroutines(open_engine: OpenEngine) -> None:
    async def read(prompt: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        async for event in open_engine.submit(request(prompt, 20)):
            assert event.token_ids[: len(tokens)] == tokens
            tokens = event.token_ids
        return tokens

    async def read_all() -> list[tuple[int, ...]]:
        return list(await asyncio.gather(*(read(prompt) for prompt in range(5))))

    assert asyncio.run(read_all()) == [answer(request(prompt, 20)) for prompt in range(5)]


def test_a_request_that_comes_while_the_device_works_joins_when_it_returns(
    engine: FakeEngine, open_engine: OpenEngine
) -> None:
    first = working(engine, open_engine)
    late = open_engine.submit(request(2))
    engine.gate.set()
    assert late.result(WAIT_S).token_ids == answer(request(2))
    assert first.result(WAIT_S).token_ids == answer(request(99))


def test_a_full_queue_refuses_by_name(engine: FakeEngine, open_engine: OpenEngine) -> None:
    """Two slots and a queue of three take five. Several requests join together, or none."""
    working(engine, open_engine)
    open_engine.submit_all([request(i) for i in range(3)])
    with pytest.raises(QueueFull, match="4 requests run or wait, and at most 5 may"):
        open_engine.submit_all([request(), request()])
    last = open_engine.submit(request())
    with pytest.raises(QueueFull, match="5 requests run or wait"):
        open_engine.submit(request())
    engine.gate.set()
    last.result(WAIT_S)
    assert open_engine.submit(request()).result(WAIT_S).finish_reason == "length"


def test_what_the_engine_cannot_run_is_refused_at_once(open_engine: OpenEngine) -> None:
    with pytest.raises(FieldError, match="prompt_ids is empty"):
        open_engine.submit(Request((), 3))


def test_an_id_may_be_used_again_when_it_is_done(
    engine: FakeEngine, open_engine: OpenEngine
) -> None:
    engine.gate.clear()
    handle = open_engine.submit(request(id="mine"))
    with pytest.raises(FieldError, match="'mine' belongs to a request that is not done"):
        open_engine.submit(request(id="mine"))
    engine.gate.set()
    handle.result(WAIT_S)
    assert open_engine.submit(request(id="mine")).result(WAIT_S).id == "mine"


def test_priorities_come_first_then_arrival(engine: FakeEngine, open_engine: OpenEngine) -> None:
    engine.batch_size = 1
    working(engine, open_engine)
    names = {"low": 5, "first": 0, "urgent": -1}
    handles = [open_engine.submit(request(id=name, priority=p)) for name, p in names.items()]
    engine.gate.set()
    for handle in handles:
        handle.result(WAIT_S)
    assert engine.admitted[1:] == ["urgent", "first", "low"]


def test_several_are_taken_or_none(open_engine: OpenEngine) -> None:
    with pytest.raises(FieldError, match="'a' belongs to a request that is not done"):
        open_engine.submit_all([request(id="a"), request(id="a")])
    assert open_engine.num_live == 0
    unnamed, named = open_engine.submit_all([request(), request(id=0)])
    assert (unnamed.request.id, named.request.id) == (1, 0)
    assert open_engine.drain(WAIT_S)


def test_a_wait_that_was_in_vain_leaves_nobody_waiting(
    engine: FakeEngine, open_engine: OpenEngine
) -> None:
    handle = working(engine, open_engine)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            handle.result(0.001)
    assert handle._waiters == []
    engine.gate.set()
    handle.result(WAIT_S)


def test_cancelling(engine: FakeEngine, open_engine: OpenEngine) -> None:
    """A running request, one that the engine does not have yet, and one that is done."""
    running = working(engine, open_engine)
    unknown = open_engine.submit(request(2))
    running.cancel()
    unknown.cancel()
    engine.gate.set()
    assert unknown.result(WAIT_S).finish_reason == "cancelled"
    done = running.result(WAIT_S)
    assert done.finish_reason == "cancelled"
    assert done.token_ids == answer(request(99))[: len(done.token_ids)]
    running.cancel()
    assert running.result(WAIT_S) is done
    assert open_engine.num_live == 0


def test_a_callback_that_raises_ends_its_request_only(open_engine: OpenEngine) -> None:
    def raises(tokens: Any) -> int | None:
        raise KeyError("a mistake of the caller's")

    bad, good = open_engine.submit_all([request(stop_at=raises), request(2)])
    done = bad.result(WAIT_S)
    assert done.finish_reason == "error"
    assert "stop_at raised KeyError" in str(done.error)
    assert good.result(WAIT_S).token_ids == answer(request(2))


def test_a_step_that_raises_ends_what_ran_and_the_engine_goes_on(
    engine: FakeEngine, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests with tokens fail, and the others run again."""
    engine.batch_size = 1
    raised = []

    def once(engine: FakeEngine) -> None:
        if not raised and any(count for _, count in engine.running.values()):
            raised.append(True)
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nand a long trace")

    engine.failure = once
    ran, waited = open_engine.submit_all([request(1), request(2)])
    done = ran.result(WAIT_S)
    assert done.finish_reason == "error"
    assert done.error == "the model step failed: RuntimeError: RESOURCE_EXHAUSTED: no memory"
    assert done.token_ids == answer(request(1), 2)
    assert waited.result(WAIT_S).token_ids == answer(request(2))
    assert open_engine.state == "ready"
    assert "a model step failed" in caplog.text


def test_a_prompt_that_always_fails_is_tried_twice(
    engine: FakeEngine, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def always(engine: FakeEngine) -> None:
        if any(r.prompt_ids == (13,) for r in engine.waiting):
            tries.append(True)
            raise MemoryError("no memory for this prompt")

    engine.failure = always
    done = open_engine.submit(request(13)).result(WAIT_S)
    assert done.error == "the model step failed: MemoryError: no memory for this prompt"
    assert len(tries) == 2
    assert open_engine.submit(request(2)).result(WAIT_S).finish_reason == "length"


def test_an_engine_that_cannot_start_afresh_fails_all(
    engine: FakeEngine, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    engine.failure = engine.reset = fails  # type: ignore[method-assign]
    done = open_engine.submit(request()).result(WAIT_S)
    assert "the engine has failed: the device is gone" in str(done.error)
    with pytest.raises(Closing, match="it is failed"):
        open_engine.submit(request())
    assert open_engine.state == "failed"


def test_draining_refuses_the_new_and_finishes_the_old(
    engine: FakeEngine, open_engine: OpenEngine
) -> None:
    handle = working(engine, open_engine)
    assert not open_engine.drain(0.01)
    assert open_engine.state == "draining"
    with pytest.raises(Closing, match="it is draining"):
        open_engine.submit(request())
    engine.gate.set()
    assert open_engine.drain(WAIT_S)
    assert handle.result(0).token_ids == answer(request(99))


def test_draining_waits_for_calls_too(open_engine: OpenEngine) -> None:
    """Scores of prompts are calls, and a request may want nothing else."""
    started, gate = threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        assert gate.wait(WAIT_S)
        return "scores"

    running, waiting = open_engine.call(slow), open_engine.call(lambda: "more scores")
    assert started.wait(WAIT_S)
    assert not open_engine.drain(0.01)
    gate.set()
    assert open_engine.drain(WAIT_S)
    assert (running.result(0), waiting.result(0)) == ("scores", "more scores")


def test_closing_cancels_what_there_is(engine: FakeEngine) -> None:
    open_engine = OpenEngine(engine)
    handle = working(engine, open_engine)
    waiting = open_engine.submit(request(2))
    open_engine.close(0)  # the device is at work still
    assert handle.completion is None
    engine.gate.set()
    open_engine.close(WAIT_S)
    assert handle.result(0).finish_reason == waiting.result(0).finish_reason == "cancelled"
    assert open_engine.state == "closed"
    open_engine.close()


def test_requests_wait_while_programs_are_compiled(engine: FakeEngine) -> None:
    engine.gate.clear()
    with OpenEngine(engine, warm_up=True) as open_engine:
        assert open_engine.state == "loading"
        handle = open_engine.submit(request())
        engine.gate.set()
        assert handle.result(WAIT_S).finish_reason == "length"
        assert engine.warmed_up
        assert open_engine.state == "ready"


def test_functions_run_between_steps(engine: FakeEngine, open_engine: OpenEngine) -> None:
    working(engine, open_engine)
    thread = open_engine.call(threading.get_ident)
    wrong = open_engine.call(lambda: 1 // 0)
    assert not thread.done()
    engine.gate.set()
    assert thread.result(WAIT_S) == engine.thread
    with pytest.raises(ZeroDivisionError):
        wrong.result(WAIT_S)


def test_a_reader_that_stops_holds_up_nobody(open_engine: OpenEngine) -> None:
    slow = open_engine.submit(request(1, 200))
    reader = iter(slow)
    next(reader)
    assert open_engine.submit(request(2)).result(WAIT_S).token_ids == answer(request(2))
    assert slow.result(WAIT_S).token_ids == answer(request(1, 200))
    assert len(list(slow)) == 1  # updates that nobody read are not kept


def test_a_result_that_does_not_come_in_time(engine: FakeEngine, open_engine: OpenEngine) -> None:
    handle = working(engine, open_engine)
    with pytest.raises(TimeoutError, match=r"was not done in 0\.01 s"):
        handle.result(0.01)
    assert handle.completion is None


async def iterates(handle: Handle) -> None:
    async for _ in handle:
        pass


async def waits(handle: Handle) -> None:
    await handle


@pytest.mark.parametrize("read", [iterates, waits])
@pytest.mark.parametrize("by", ["task.cancel", "wait_for"])
def test_a_task_that_is_cancelled_cancels_its_request(
    engine: FakeEngine, open_engine: OpenEngine, read: Any, by: str
) -> None:
    """The request ran on to its limit, and nobody read it."""
    handle = working(engine, open_engine)

    async def leave() -> None:
        if by == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(handle), 0.01)
            return
        task = asyncio.create_task(read(handle))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    engine.gate.set()
    assert handle.result(WAIT_S).finish_reason == "cancelled"


def test_a_loop_that_is_left_cancels_its_request(open_engine: OpenEngine) -> None:
    handles = open_engine.submit_all([request(1, 10**6), request(2, 10**6)])
    for _ in handles[0]:
        break

    async def leave() -> None:
        async for _ in handles[1]:
            break

    asyncio.run(leave())
    for handle in handles:
        assert handle.result(WAIT_S).finish_reason == "cancelled"


def test_a_request_goes_on_while_anyone_reads_it(open_engine: OpenEngine) -> None:
    handle = open_engine.submit(request(1, 10**6))
    reader = iter(handle)
    next(reader)
    for _ in handle:
        break
    for _ in range(20):
        assert isinstance(next(reader), Update)
    del reader
    assert handle.result(WAIT_S).finish_reason == "cancelled"


def test_a_handle_can_be_awaited(open_engine: OpenEngine) -> None:
    async def ask(prompt: int) -> tuple[int, ...]:
        return (await open_engine.submit(request(prompt, 20))).token_ids

    async def ask_all() -> list[tuple[int, ...]]:
        return await asyncio.gather(*map(ask, range(5)))

    assert asyncio.run(ask_all()) == [answer(request(prompt, 20)) for prompt in range(5)]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "cancel", "fail", "read", "pause"]),
        st.integers(0, 30),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_no_token_is_lost_or_told_twice_whatever_happens(operations: list[tuple[str, int]]) -> None:
    """Random operations from two threads: each request ends once, with its own tokens."""
    engine = FakeEngine(batch_size=3)
    raising = threading.Event()

    def failure(engine: FakeEngine) -> None:
        if raising.is_set():
            raising.clear()
            raise RuntimeError("now and then")

    engine.failure = failure
    handles: list[Handle] = []
    readers: list[threading.Thread] = []
    read: dict[Any, list[int]] = {}

    def follow(handle: Handle) -> None:
        counts = [len(event.token_ids) for event in handle]
        read[handle.request.id] = counts

    with OpenEngine(engine, max_waiting=10) as open_engine:
        for name, number in operations:
            if name == "submit":
                try:
                    handles.append(
                        open_engine.submit(request(number, 1 + number, priority=number % 3))
                    )
                except QueueFull:
                    assert open_engine.num_live <= 13
            elif name == "fail":
                raising.set()
            elif name == "pause":
                time.sleep(number / 1e5)
            elif handles:
                handle = handles[number % len(handles)]
                if name == "cancel":
                    handle.cancel()
                else:
                    readers.append(threading.Thread(target=follow, args=(handle,)))
                    readers[-1].start()
        assert open_engine.drain(WAIT_S)
        for reader in readers:
            reader.join(WAIT_S)
            assert not reader.is_alive()
        assert engine.is_idle
        assert open_engine.num_live == open_engine.num_waiting == 0
    for handle in handles:
        done = handle.result(0)
        whole = answer(handle.request)
        assert done.token_ids == whole[: len(done.token_ids)]
        if done.finish_reason == "length":
            assert done.token_ids == whole
        else:
            assert done.finish_reason in ("cancelled", "error")
    for counts in read.values():
        assert counts == sorted(counts)


def test_an_observer_of_the_old_form_works_with_a_warning(engine: FakeEngine) -> None:
    class Old:
        def __init__(self) -> None:
            self.counts: list[int] = []

        def told(self, handle: Handle, new_tokens: int, since_s: float | None) -> None:
            self.counts.append(new_tokens)

        def done(self, handle: Handle, completion: Completion) -> None:
            pass

    old: Any = Old()
    with (
        pytest.warns(DeprecationWarning, match="new_tokens"),
        OpenEngine(engine, observer=old) as running,
    ):
        running.submit(request()).result(WAIT_S)
    assert sum(old.counts) == 7
