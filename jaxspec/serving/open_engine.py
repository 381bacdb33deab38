"""Open engine: requests join and leave at any time, from any thread or event loop.

    engine = Engine(*pair, batch_size=8, cache_length=2048, steps_per_return=4)
    with OpenEngine(engine, warm_up=True) as open_engine:
        handle = open_engine.submit(Request(ids, max_new_tokens=64))
        for output in handle:              # or `async for`, or `await handle`
            print(len(output.token_ids))

Read `OpenEngine._turn`. `engine.Engine` is for one thread, so only a worker thread uses it. Other
threads queue requests and cancellations, and the worker takes them when the device returns. A
handle holds the newest output of its request only, so a slow reader costs no memory and delays no
other request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from jaxspec.engine.request import Completion, Request, refused
from jaxspec.options import FieldError
from jaxspec.serving.handle import Handle, RequestOutput, Waiter, wake

LOG = logging.getLogger("jaxspec.serving")
WAITING = 1024
"""Default number of requests that may wait for a slot."""

T = TypeVar("T")
State = Literal["loading", "ready", "draining", "closed", "failed"]


@runtime_checkable
class EngineProtocol(Protocol):
    """Members of `engine.Engine` that an `OpenEngine` uses."""

    @property
    def batch_size(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def cache_usage(self) -> float: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def is_idle(self) -> bool: ...
    def validate(self, request: Request) -> Request: ...
    def add(self, request: Request) -> Hashable: ...
    def cancel(self, id: Hashable) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def warm_up(self) -> None: ...
    def reset(self) -> None: ...


@runtime_checkable
class Observer(Protocol):
    """Observer of an engine's outputs. Its methods run in the worker, so they must be quick."""

    def new_tokens(self, handle: Handle, count: int, since_s: float | None) -> None:
        """Observe new tokens, `since_s` after the last ones; None: they are the first."""
        ...

    def done(self, handle: Handle, completion: Completion) -> None:
        """Observe the end of a request."""
        ...


@runtime_checkable
class OldObserver(Protocol):
    """Observer with the method names of version 0.1."""

    def told(self, handle: Handle, new_tokens: int, since_s: float | None) -> None: ...
    def done(self, handle: Handle, completion: Completion) -> None: ...


class NotAccepted(RuntimeError):
    """The engine does not take a request now. A later try, or another engine, may succeed."""


class QueueFull(NotAccepted):
    """`max_waiting` requests wait already."""


class Closing(NotAccepted):
    """The engine takes no more requests: it is draining, closed, or failed."""


class OpenEngine:
    """Runs an engine in a worker thread, and takes requests from all threads.

    Requests wait by `Request.priority`, then in the order of their submission. A request that comes
    while the device works joins when the device returns. The engine's `steps_per_return` bounds
    that wait: choose a small number, such as 4.

    An exception in a model step ends requests that have tokens with an error. The engine is reset,
    and requests without a token get a second try.

    Args:
      engine: an engine that nothing else uses.
      max_waiting: requests beyond the engine's slots that may wait; more are refused.
      warm_up: compile every program first. Requests that come meanwhile wait. What the process holds
        then is kept from Python's garbage collector.
      observer: its methods are called with all outputs.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        *,
        max_waiting: int = WAITING,
        warm_up: bool = False,
        observer: Observer | OldObserver | None = None,
    ):
        self.engine = engine
        self.max_waiting = max_waiting
        self._observer = observer
        if isinstance(observer, OldObserver):
            message = "Observer.told is now Observer.new_tokens; rename it"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            self._observe_tokens = observer.told
        elif observer is not None:
            self._observe_tokens = observer.new_tokens
        self._warm_up = warm_up
        self._state: State = "loading"
        self._changed = threading.Condition()  # guards all below; notified of each change
        self._live: dict[Hashable, Handle] = {}  # submitted and not done
        self._arrived: deque[Handle] = deque()  # not yet added to the engine
        self._leaving: dict[Hashable, Handle] = {}
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._calling = False  # whether one of them runs
        self._ids = itertools.count()
        self._running = 0  # requests with a slot, when the device last returned
        self._thread = threading.Thread(target=self._work, name="jaxspec-engine", daemon=True)
        self._thread.start()

    # --- for any thread ---------------------------------------------------------------------------

    def __enter__(self) -> OpenEngine:
        """Return the engine. The end of the block closes it."""
        return self

    def __repr__(self) -> str:
        """Return one line."""
        running, waiting = self.num_running, self.num_waiting
        return f"OpenEngine({self._state}, {running} running, {waiting} waiting, {self.engine!r})"

    def __exit__(self, *error: object) -> None:
        """Cancel all requests, and end the worker."""
        self.close()

    @property
    def state(self) -> State:
        """State of the engine.

        | State | Meaning |
        |---|---|
        | "loading" | programs are being compiled, and requests wait |
        | "ready" | requests run |
        | "draining" | no more requests are taken |
        | "closed" | the worker has ended, or is about to end |
        | "failed" | the worker has ended, because the engine could not be reset |
        """
        return self._state

    @property
    def is_working(self) -> bool:
        """True until the worker has ended."""
        return self._thread.is_alive()

    @property
    def num_live(self) -> int:
        """Number of requests that wait or run."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot."""
        return min(self._running, len(self._live))

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return max(0, len(self._live) - self._running)

    def submit(self, request: Request) -> Handle:
        """Submit a request.

        Raises:
          FieldError: the engine cannot run it, or its id belongs to a request that is not done.
          QueueFull: too many requests wait.
          Closing: the engine takes no more requests.
        """
        (handle,) = self.submit_all([request])
        return handle

    def submit_all(self, requests: Iterable[Request]) -> list[Handle]:
        """Submit several requests, all or none; errors are as in `submit`."""
        requests = [self.engine.validate(request) for request in requests]
        with self._changed:
            if self._state not in ("loading", "ready"):
                raise Closing(f"the engine takes no more requests: it is {self._state}")
            limit = self.engine.batch_size + self.max_waiting
            if len(self._live) + len(requests) > limit:
                raise QueueFull(
                    f"the queue is full: {len(self._live)} requests run or wait, and at most "
                    f"{limit} may; try again later, or pass a larger max_waiting"
                )
            handles = [Handle(request, self._cancel) for request in self._with_ids(requests)]
            self._live.update({handle.request.id: handle for handle in handles})
            self._arrived.extend(handles)
            self._changed.notify_all()
        return handles

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the worker, between two steps. It has the device to itself.

        Raises:
          QueueFull: too many functions wait.
          Closing: the engine takes no more work.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._state not in ("loading", "ready"):
                raise Closing(f"the engine takes no more work: it is {self._state}")
            if len(self._calls) > self.max_waiting:
                raise QueueFull(
                    f"{len(self._calls)} functions wait for the engine; try again later"
                )
            self._calls.append((function, future))
            self._changed.notify_all()
        return future

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, and wait until all are done or the engine is closed.

        Returns:
          Whether all requests are done.
        """
        with self._changed:
            if self._state in ("loading", "ready"):
                self._state = "draining"
            is_done = lambda: not (self._live or self._calls or self._calling)  # noqa: E731
            self._changed.wait_for(
                lambda: is_done() or self._state in ("closed", "failed"), timeout_s
            )
            return is_done()

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel all requests, and end the worker when the device has returned."""
        with self._changed:
            if self._state != "failed":
                self._state = "closed"
            self._leaving.update(self._live)
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def fail(self, reason: str) -> None:
        """End all requests with an error, while the device may never return."""
        with self._changed:
            if self._state in ("closed", "failed"):
                return
            self._state = "failed"  # of two that fail, the first one has its say
        LOG.error("the engine has failed: %s", reason)
        self._end("failed", reason)

    def _with_ids(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests, each with an id.

        Raises:
          FieldError: an id belongs to a request that is not done, or to two of these.
        """
        taken = set(self._live)
        for id in (request.id for request in requests if request.id is not None):
            if id in taken:
                message = f"{id!r} belongs to a request that is not done; give another"
                raise FieldError("id", message)
            taken.add(id)
        free = (id for id in self._ids if id not in taken)
        ids = (next(free) if request.id is None else request.id for request in requests)
        return [dataclasses.replace(r, id=id) for r, id in zip(requests, ids, strict=True)]

    def _cancel(self, handle: Handle) -> None:
        with self._changed:
            if self._live.get(handle.request.id) is handle:
                self._leaving[handle.request.id] = handle
                self._changed.notify_all()

    # --- the worker -------------------------------------------------------------------------------

    def _work(self) -> None:
        """Step until the engine is closed."""
        error: BaseException | None = None
        try:
            if self._warm_up:
                warm_up(self.engine)
            with self._changed:
                if self._state == "loading":
                    self._state = "ready"
            while self._has_work():
                self._turn()
        except BaseException as failure:
            LOG.exception("the engine has failed, and takes no more requests")
            error = failure
        self._end("closed" if error is None else "failed", error)

    def _end(self, state: State, error: object) -> None:
        """End with a state, and all requests and calls that are left with an error."""
        with self._changed:
            self._state = state
            calls, self._calls = self._calls, deque()
            self._changed.notify_all()
        for _, future in calls:
            future.cancel()
        self._publish(
            Completion(id, finish_reason="error", error=f"the engine has failed: {error}")
            for id in list(self._live)
        )

    def _has_work(self) -> bool:
        """Wait for work. Return False if the engine is closed and all requests are done."""
        with self._changed:
            while not (self._arrived or self._leaving or self._calls or not self.engine.is_idle):
                if self._state == "closed" and not self._live:
                    return False
                self._changed.wait()
            return True

    def _turn(self) -> None:
        """Add and cancel requests, run a step, and publish its outputs."""
        with self._changed:
            arrived, self._arrived = self._arrived, deque()
            leaving, self._leaving = self._leaving, {}
            call = self._calls.popleft() if self._calls else None
            self._calling = call is not None
        if call is not None:  # one in each turn, so that rows decode between two of them
            _run_call(*call)
            with self._changed:
                self._calling = False
                self._changed.notify_all()
        for handle in arrived:
            id = handle.request.id
            if leaving.pop(id, None):
                self._publish([Completion(id, finish_reason="cancelled")])
            else:
                self._add(handle)
        try:
            for id in leaving:
                with contextlib.suppress(FieldError):  # the request is done
                    self.engine.cancel(id)
            outputs = [] if self.engine.is_idle else self.engine.step()
        except Exception as error:
            LOG.exception("a model step failed; the engine starts afresh")
            self._reset(error, leaving)
        else:
            self._running = self.engine.num_running
            self._publish(outputs)

    def _add(self, handle: Handle) -> None:
        try:
            self.engine.add(handle.request)
        except FieldError as error:
            self._publish([refused(handle.request, error)])

    def _reset(self, error: Exception, leaving: Container[Hashable]) -> None:
        """Reset the engine. End requests with tokens with an error, and retry the others once."""
        self.engine.reset()
        self._running = 0
        with self._changed:
            unknown = {handle.request.id for handle in self._arrived}
            known = [h for id, h in self._live.items() if id not in unknown]
        first_line = str(error).partition("\n")[0]
        message = f"the model step failed: {type(error).__name__}: {first_line}"
        for handle in known:
            id, newest = handle.request.id, handle.newest
            tokens = newest.token_ids if newest else ()
            if id in leaving:
                self._publish([Completion(id, tokens, "cancelled")])
            elif newest is None and not handle.was_retried:
                handle.was_retried = True
                self._add(handle)
            else:
                self._publish([Completion(id, tokens, "error", error=message)])

    def _publish(self, outputs: Iterable[RequestOutput]) -> None:
        """Give outputs to their handles, wake the readers, and call the observer."""
        waiters: list[Waiter] = []
        now = time.monotonic()
        for output in outputs:
            if (handle := self._live.get(output.id)) is None:  # `fail` has ended it
                continue
            before = handle.newest
            new = len(output.token_ids) - (len(before.token_ids) if before else 0)
            since_s = None if before is None else now - handle.last_s
            if new > 0:
                handle.last_s = now
                if before is None:
                    handle.first_token_s = now - handle.submitted_s
            if isinstance(output, Completion):
                with self._changed:
                    self._live.pop(output.id, None)
                    self._leaving.pop(output.id, None)
                    self._changed.notify_all()
            waiters += handle.update(output)
            self._observe(handle, output, max(new, 0), since_s)
        wake(waiters)

    def _observe(
        self, handle: Handle, output: RequestOutput, new: int, since_s: float | None
    ) -> None:
        if self._observer is None:
            return
        try:
            if new:
                self._observe_tokens(handle, new, since_s)
            if isinstance(output, Completion):
                self._observer.done(handle, output)
        except Exception:
            LOG.exception("an observer of the engine failed")


def warm_up(engine: EngineProtocol) -> None:
    """Compile every program of an engine, and keep what is left of it from Python's garbage collector.

    Python walked over all of that for 0.4 to 0.8 s each time.
    """
    engine.warm_up()
    gc.collect()
    gc.freeze()


def _run_call(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
