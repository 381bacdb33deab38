"""A request that others decode: where its reader finds what is new, in whatever thread or event loop that is.

Read `Handle`. A handle holds the newest state of its request only.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from jaxspec.engine.request import Completion, Request, Update

Event = Update | Completion
Waiter = threading.Event | asyncio.Future[None]


class Handle:
    """A request that was submitted. Iterate over it, with `for` or `async for`.

    What comes are `Update`s with all tokens so far and, last, the `Completion`. A reader that is slower than the engine
    skips updates. It loses no token by that. Several readers may iterate, each from the beginning.

    Attributes:
      request: with the id that the engine knows it by.
      submitted_s, last_s: `time.monotonic()` when it was submitted, and when its newest tokens came.
      first_token_s: from its submission to its first token; None before that.
      newest: what was told last. `was_retried` says that it runs for the second time. Both are the engine's.
    """

    def __init__(self, request: Request, cancel: Callable[[Handle], None]):
        self.request = request
        self.submitted_s = self.last_s = time.monotonic()
        self.first_token_s: float | None = None
        self._cancel = cancel
        self._lock = threading.Lock()
        self.newest: Event | None = None
        self._waiters: list[Waiter] = []
        self.was_retried = False

    @property
    def completion(self) -> Completion | None:
        """How it ended; None before."""
        newest = self.newest
        return newest if isinstance(newest, Completion) else None

    def cancel(self) -> None:
        """End the request at the next return of the device. Its completion says "cancelled".

        A request that is done is left as it is.
        """
        self._cancel(self)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the completion.

        Raises:
          TimeoutError: it did not come in time; the request goes on.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self.completion is None:
            waiter = threading.Event()
            if self.look(None, waiter) is None:
                left = None if end is None else max(0.0, end - time.monotonic())
                if not waiter.wait(left):
                    with self._lock:  # else one is left behind by each call
                        self._waiters = [other for other in self._waiters if other is not waiter]
                    raise TimeoutError(f"request {self.request.id!r} was not done in {timeout_s} s")
        return self.completion

    def __iter__(self) -> Iterator[Event]:
        """Yield what comes; wait for it."""
        seen = 0
        while True:
            waiter = threading.Event()
            event = self.look(seen, waiter)
            if event is None:
                waiter.wait()
                continue
            yield event
            if isinstance(event, Completion):
                return
            seen = len(event.token_ids)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield what comes, to a coroutine."""
        seen = 0
        while True:
            waiter = asyncio.get_running_loop().create_future()
            event = self.look(seen, waiter)
            if event is None:
                await waiter
                continue
            yield event
            if isinstance(event, Completion):
                return
            seen = len(event.token_ids)

    def look(self, seen: int | None, waiter: Waiter) -> Event | None:
        """Return what is newer than so many tokens; else let something wait, and return None.

        Args:
          seen: None: nothing but the completion is new.
        """
        with self._lock:
            newest = self.newest
            if isinstance(newest, Completion):
                return newest
            if newest is not None and seen is not None and len(newest.token_ids) > seen:
                return newest
            self._waiters.append(waiter)
            return None

    def tell(self, event: Event) -> list[Waiter]:
        """Take what is new, and return who waits."""
        with self._lock:
            self.newest = event
            waiters, self._waiters = self._waiters, []
        return waiters


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake threads, and coroutines with one call for each of their loops."""
    of_loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        if isinstance(waiter, threading.Event):
            waiter.set()
        else:
            of_loops.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, futures in of_loops.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
