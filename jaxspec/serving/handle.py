"""Handles of submitted requests, for readers in any thread or event loop. Read `Handle`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any

from jaxspec.engine.request import Completion, Request, Update

RequestOutput = Update | Completion
Waiter = threading.Event | asyncio.Future[None]


class Handle:
    """A submitted request. Iterate over it, with `for` or `async for`, or `await` its completion.

    Iteration yields `Update`s, each with all tokens so far, and ends with the `Completion`. A
    handle keeps the newest output only. A reader that is slower than the engine skips updates, and
    loses no token. Several readers may iterate, each from the beginning.

    A reader that leaves before the end cancels the request, unless others still read or wait: a
    loop that is left, a task that is cancelled, a wait that `asyncio.wait_for` ends.

    Attributes:
      request: the request, with the id that the engine knows it by.
      submitted_s: `time.monotonic()` at submission.
      last_s: `time.monotonic()` at the arrival of the newest tokens.
      first_token_s: seconds from submission to the first token; None before it.
      newest: the newest output. Only the engine sets it.
      was_retried: whether the request runs for the second time. Only the engine sets it.
    """

    def __init__(self, request: Request, cancel: Callable[[Handle], None]):
        self.request = request
        self.submitted_s = self.last_s = time.monotonic()
        self.first_token_s: float | None = None
        self._cancel = cancel
        self._lock = threading.RLock()  # a reader may be collected while its own thread has it
        self._readers = 0
        self.newest: RequestOutput | None = None
        self._waiters: list[Waiter] = []
        self.was_retried = False

    def __repr__(self) -> str:
        """Return one line."""
        newest = self.newest
        tokens = len(newest.token_ids) if newest else 0
        state = newest.finish_reason if isinstance(newest, Completion) else "not done"
        return f"Handle({self.request.id!r}, {tokens} tokens, {state})"

    @property
    def completion(self) -> Completion | None:
        """Completion of the request; None while it runs."""
        newest = self.newest
        return newest if isinstance(newest, Completion) else None

    def cancel(self) -> None:
        """End the request when the device next returns. Its completion has the reason "cancelled".

        A request that is done stays as it is.
        """
        self._cancel(self)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the completion, and return it.

        Raises:
          TimeoutError: the completion did not come in time; the request goes on.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._reading(leaving_cancels=False):
            while self.completion is None:
                waiter = threading.Event()
                if self.poll(None, waiter) is None:
                    left = None if end is None else max(0.0, end - time.monotonic())
                    if not waiter.wait(left):
                        with self._lock:  # else each call leaves a waiter behind
                            self._waiters = [w for w in self._waiters if w is not waiter]
                        raise TimeoutError(
                            f"request {self.request.id!r} was not done in {timeout_s} s"
                        )
        return self.completion

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield outputs as they come."""
        seen = 0
        with self._reading():
            while True:
                waiter = threading.Event()
                output = self.poll(seen, waiter)
                if output is None:
                    waiter.wait()
                    continue
                yield output
                if isinstance(output, Completion):
                    return
                seen = len(output.token_ids)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Yield outputs as they come, to a coroutine."""
        seen = 0
        with self._reading():
            while True:
                waiter = asyncio.get_running_loop().create_future()
                output = self.poll(seen, waiter)
                if output is None:
                    await waiter
                    continue
                yield output
                if isinstance(output, Completion):
                    return
                seen = len(output.token_ids)

    def __await__(self) -> Generator[Any, None, Completion]:
        """Wait for the completion in a coroutine."""
        return self._completed().__await__()

    async def _completed(self) -> Completion:
        with self._reading():
            while self.completion is None:
                waiter = asyncio.get_running_loop().create_future()
                if self.poll(None, waiter) is None:
                    await waiter
        return self.completion

    @contextlib.contextmanager
    def _reading(self, *, leaving_cancels: bool = True) -> Iterator[None]:
        """Count a reader. Cancel the request if the last one leaves before the end."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                is_last = not self._readers
            if leaving_cancels and is_last and self.completion is None:
                self.cancel()

    def poll(self, seen: int | None, waiter: Waiter) -> RequestOutput | None:
        """Return an output with more than `seen` tokens; else register `waiter` and return None.

        Args:
          seen: None: only the completion counts as new.
        """
        with self._lock:
            newest = self.newest
            if isinstance(newest, Completion):
                return newest
            if newest is not None and seen is not None and len(newest.token_ids) > seen:
                return newest
            self._waiters.append(waiter)
            return None

    def update(self, output: RequestOutput) -> list[Waiter]:
        """Set the newest output, and return the waiters to wake."""
        with self._lock:
            self.newest = output
            waiters, self._waiters = self._waiters, []
        return waiters


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake threads and coroutines. Each event loop gets one call."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        if isinstance(waiter, threading.Event):
            waiter.set()
        else:
            by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, futures in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a closed loop has no coroutines to wake
            loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
