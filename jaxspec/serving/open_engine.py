"""An engine that is open: requests join and leave at any time, from any thread or event loop.

    with OpenEngine(engine) as opened:
        handle = opened.submit(Request(ids, max_new_tokens=64))
        for event in handle:              # or `async for`
            print(len(event.token_ids))

Read `OpenEngine._turn`. `engine.Engine` knows one thread. Here that is a worker's, and nobody else touches the engine.
Other threads leave requests and cancellations where the worker finds them when the device returns. A handle holds the
newest state of its request only, so a reader that is slow or gone costs no memory and holds up nobody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from jaxspec.engine.request import Completion, Request, refused
from jaxspec.options import FieldError
from jaxspec.serving.handle import Event, Handle, Waiter, wake

LOG = logging.getLogger("jaxspec.serving")
WAITING = 1024
"""Requests that may wait for a slot, unless asked otherwise."""

T = TypeVar("T")
State = Literal["loading", "ready", "draining", "closed", "failed"]


@runtime_checkable
class Steps(Protocol):
    """What is used of `engine.Engine`."""

    @property
    def batch_size(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def is_idle(self) -> bool: ...
    def check(self, request: Request) -> FieldError | None: ...
    def add(self, request: Request) -> Hashable: ...
    def cancel(self, id: Hashable) -> None: ...
    def step(self) -> list[Event]: ...
    def warm_up(self) -> None: ...
    def reset(self) -> None: ...


@runtime_checkable
class Observer(Protocol):
    """Is told what comes, in the worker's thread. It must be quick."""

    def told(self, handle: Handle, new_tokens: int, since_s: float | None) -> None:
        """A request has more tokens, so many seconds after the last ones; None: they are its first."""
        ...

    def done(self, handle: Handle, completion: Completion) -> None:
        """A request is done."""
        ...


class NotAccepted(RuntimeError):
    """A request cannot be taken now. It may be sent again later, or elsewhere."""


class QueueFull(NotAccepted):
    """As many requests wait as may."""


class Closing(NotAccepted):
    """The engine takes no more requests: it is draining, closed, or failed."""


class OpenEngine:
    """Runs an engine in a thread of its own, and takes requests from any other.

    Requests wait by `Request.priority`, then in the order of their submission. One that comes while the device works
    joins when it returns. The engine's `steps_per_return` bounds that wait: give it few, such as 4.

    An exception in a model step ends the requests that have tokens with their error. The engine starts afresh, and those
    without a token get one second try.

    Args:
      engine: nobody else may use it from now on.
      max_waiting: requests beyond the engine's slots that may wait; more are refused.
      warm_up: compile every program first. Requests that come meanwhile wait.
      observer: is told what comes.
    """

    def __init__(
        self,
        engine: Steps,
        *,
        max_waiting: int = WAITING,
        warm_up: bool = False,
        observer: Observer | None = None,
    ):
        self.engine = engine
        self.max_waiting = max_waiting
        self._observer = observer
        self._warm_up = warm_up
        self._state: State = "loading"
        self._changed = threading.Condition()  # guards all below; told when any of it changes
        self._live: dict[Hashable, Handle] = {}  # submitted, not done
        self._arrived: deque[Handle] = deque()  # the engine does not know them yet
        self._leaving: dict[Hashable, Handle] = {}
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._calling = False  # whether one of them is being run
        self._names = itertools.count()
        self._running = 0  # requests with a slot, when the device last returned
        self._thread = threading.Thread(target=self._work, name="jaxspec-engine", daemon=True)
        self._thread.start()

    # --- for any thread ------------------------------------------------------------------------------

    def __enter__(self) -> OpenEngine:
        """Return itself; the end of the block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Cancel what runs, and end the worker."""
        self.close()

    @property
    def state(self) -> State:
        """What it does.

        "loading": programs are being compiled, and requests wait. "draining": it takes no more requests. "closed": its
        worker has ended, or is about to. "failed": it ended by itself, because the engine could not be started afresh.
        """
        return self._state

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return min(self._running, len(self._live))

    @property
    def num_waiting(self) -> int:
        """Requests that have none yet."""
        return max(0, len(self._live) - self._running)

    def submit(self, request: Request) -> Handle:
        """Let a request join.

        Raises:
          FieldError: the engine cannot run it, or its id belongs to a request that is not done.
          QueueFull: too many wait.
          Closing: no more are taken.
        """
        (handle,) = self.submit_all([request])
        return handle

    def submit_all(self, requests: Iterable[Request]) -> list[Handle]:
        """Let several requests join, or none of them; arguments and errors are as in `submit`."""
        given = list(requests)
        for request in given:
            if error := self.engine.check(request):
                raise error
        with self._changed:
            if self._state not in ("loading", "ready"):
                raise Closing(f"the engine takes no more requests: it is {self._state}")
            most = self.engine.batch_size + self.max_waiting
            if len(self._live) + len(given) > most:
                raise QueueFull(
                    f"the queue is full: {len(self._live)} requests run or wait, and at most {most} may; "
                    "try again later, or pass a larger max_waiting"
                )
            handles = [Handle(request, self._cancel) for request in self._named(given)]
            self._live.update({handle.request.id: handle for handle in handles})
            self._arrived.extend(handles)
            self._changed.notify_all()
        return handles

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the worker's thread, between two steps; for what needs the device to itself.

        Raises:
          QueueFull: too many wait.
          Closing: no more is taken.
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
        """Take no more requests, and wait until those there are done, or it is closed; tell whether they are."""
        with self._changed:
            if self._state in ("loading", "ready"):
                self._state = "draining"
            is_done = lambda: not (self._live or self._calls or self._calling)  # noqa: E731
            self._changed.wait_for(
                lambda: is_done() or self._state in ("closed", "failed"), timeout_s
            )
            return is_done()

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel all requests, and end the worker. It ends when the device has returned."""
        with self._changed:
            if self._state != "failed":
                self._state = "closed"
            self._leaving.update(self._live)
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _named(self, requests: Sequence[Request]) -> list[Request]:
        """Return requests with an id each.

        Raises:
          FieldError: an id belongs to a request that is not done, or two of them have it.
        """
        taken = set(self._live)
        for name in (request.id for request in requests if request.id is not None):
            if name in taken:
                said = f"{name!r} belongs to a request that is not done; give another"
                raise FieldError("id", said)
            taken.add(name)
        free = (name for name in self._names if name not in taken)
        names = (next(free) if request.id is None else request.id for request in requests)
        return [dataclasses.replace(r, id=name) for r, name in zip(requests, names, strict=True)]

    def _cancel(self, handle: Handle) -> None:
        with self._changed:
            if self._live.get(handle.request.id) is handle:
                self._leaving[handle.request.id] = handle
                self._changed.notify_all()

    # --- the worker ----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Step until it is closed."""
        error: BaseException | None = None
        try:
            if self._warm_up:
                self.engine.warm_up()
            with self._changed:
                if self._state == "loading":
                    self._state = "ready"
            while self._has_work():
                self._turn()
        except BaseException as failure:
            LOG.exception("the engine has failed, and takes no more requests")
            error = failure
        with self._changed:
            self._state = "closed" if error is None else "failed"
            calls, self._calls = self._calls, deque()
        for _, future in calls:
            future.cancel()
        self._tell(
            Completion(name, finish_reason="error", error=f"the engine has failed: {error}")
            for name in list(self._live)
        )

    def _has_work(self) -> bool:
        """Wait for something to do; False: it is closed, and all is told."""
        with self._changed:
            while not (self._arrived or self._leaving or self._calls or not self.engine.is_idle):
                if self._state == "closed" and not self._live:
                    return False
                self._changed.wait()
            return True

    def _turn(self) -> None:
        """Let requests in and out, then let the device work, and tell what came."""
        with self._changed:
            arrived, self._arrived = self._arrived, deque()
            leaving, self._leaving = self._leaving, {}
            call = self._calls.popleft() if self._calls else None
            self._calling = call is not None
        if call is not None:  # one a turn, so that rows decode on between two
            _run(*call)
            with self._changed:
                self._calling = False
                self._changed.notify_all()
        for handle in arrived:
            name = handle.request.id
            if leaving.pop(name, None):
                self._tell([Completion(name, finish_reason="cancelled")])
            else:
                self._add(handle)
        try:
            for name in leaving:
                with contextlib.suppress(FieldError):  # it is done
                    self.engine.cancel(name)
            events = [] if self.engine.is_idle else self.engine.step()
        except Exception as error:
            LOG.exception("a model step failed; the engine starts afresh")
            self._start_afresh(error, leaving)
        else:
            self._running = self.engine.num_running
            self._tell(events)

    def _add(self, handle: Handle) -> None:
        try:
            self.engine.add(handle.request)
        except FieldError as error:
            self._tell([refused(handle.request, error)])

    def _start_afresh(self, error: Exception, leaving: Container[Hashable]) -> None:
        """End what ran with an error, and let what had no token yet try once more."""
        self.engine.reset()
        self._running = 0
        with self._changed:
            unknown = {handle.request.id for handle in self._arrived}
            known = [h for name, h in self._live.items() if name not in unknown]
        said = f"the model step failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        for handle in known:
            name, newest = handle.request.id, handle.newest
            tokens = newest.token_ids if newest else ()
            if name in leaving:
                self._tell([Completion(name, tokens, "cancelled")])
            elif newest is None and not handle.was_retried:
                handle.was_retried = True
                self._add(handle)
            else:
                self._tell([Completion(name, tokens, "error", error=said)])

    def _tell(self, events: Iterable[Event]) -> None:
        """Hand events to their handles, and wake who waits."""
        waiters: list[Waiter] = []
        now = time.monotonic()
        for event in events:
            handle = self._live[event.id]
            before = handle.newest
            new = len(event.token_ids) - (len(before.token_ids) if before else 0)
            since_s = None if before is None else now - handle.last_s
            if new > 0:
                handle.last_s = now
                if before is None:
                    handle.first_token_s = now - handle.submitted_s
            if isinstance(event, Completion):
                with self._changed:
                    del self._live[event.id]
                    self._leaving.pop(event.id, None)
                    self._changed.notify_all()
            waiters += handle.tell(event)
            self._observe(handle, event, max(new, 0), since_s)
        wake(waiters)

    def _observe(self, handle: Handle, event: Event, new: int, since_s: float | None) -> None:
        if self._observer is None:
            return
        try:
            if new:
                self._observer.told(handle, new, since_s)
            if isinstance(event, Completion):
                self._observer.done(handle, event)
        except Exception:
            LOG.exception("an observer of the engine failed")


def _run(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
