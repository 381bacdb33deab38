"""Event streams, and what to do about clients that leave or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientDisconnected(Exception):
    """The client has closed the connection."""


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return a value as one event of a stream, with a name where the protocol has one."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    # A lone surrogate is no UTF-8.
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Wait for something, as long as the client is there. The request's body must have been read.

    Raises:
      ClientDisconnected: the client left; the work was cancelled.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        await _end(working, leaving)


class EventStream:
    """A reply of events, an ASGI application.

    When the client leaves, or does not read what was written for too long, the source of events is closed.
    """

    def __init__(
        self, events: AsyncIterator[bytes], *, timeout_s: float, end: Callable[[], object]
    ):
        """Make a reply.

        Args:
          timeout_s: how long the client may take to read what was written.
          end: gives back what the reply holds. A source that was never asked does not run its own `finally`.
        """
        self._events = events
        self._timeout_s, self._end = timeout_s, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await _end(writing, leaving)
            with contextlib.suppress(Exception):
                await self._events.aclose()  # type: ignore[attr-defined]
            self._end()

    async def _write(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        async with asyncio.timeout(self._timeout_s):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in self._events:
            body = {"type": "http.response.body", "body": chunk, "more_body": True}
            async with asyncio.timeout(self._timeout_s):
                await send(body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def merged(sources: list[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Yield what comes from several iterators. A source waits until its last item was taken."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield item
        return
    queue: asyncio.Queue[Callable[[], T] | None] = asyncio.Queue(maxsize=1)

    async def pump(source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                await queue.put(lambda item=item: item)
            await queue.put(None)
        except Exception as error:
            await queue.put(functools.partial(_raise, error))

    tasks = [asyncio.ensure_future(pump(source)) for source in sources]
    try:
        ended = 0
        while ended < len(tasks):
            take = await queue.get()
            if take is None:
                ended += 1
            else:
                yield take()
    finally:
        await _end(*tasks)


def _raise(error: Exception) -> Any:
    raise error


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
