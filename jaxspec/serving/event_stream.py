"""Streams of server-sent events. `EventStream` ends when its client leaves or does not read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from jaxspec.serving.disconnect import cancel_all, listen_for_disconnect

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
COMMENT_S = 15.0
"""Seconds of silence after which a stream has a comment: proxies close connections that are silent."""


def encode_event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event with JSON data, and with a name where the protocol has one."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    # UTF-8 cannot encode a lone surrogate.
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


class EventStream:
    """A reply of server-sent events, as an ASGI application.

    Closes the iterator of events when the client disconnects, or reads nothing for `timeout_s`. A
    comment stands for each `COMMENT_S` in which there was no event.
    """

    def __init__(
        self, events: AsyncIterator[bytes], *, timeout_s: float, on_close: Callable[[], object]
    ):
        """Make a reply.

        Args:
          timeout_s: longest time that the client may take to read an event.
          on_close: frees the reply's resources. An iterator that never began does not run its own
            `finally`.
        """
        self._events = events
        self._timeout_s, self._on_close = timeout_s, on_close
        self._sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        writing = asyncio.ensure_future(self._write(send))
        listening = asyncio.ensure_future(listen_for_disconnect(receive))
        try:
            await asyncio.wait({writing, listening}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await cancel_all(writing, listening)
            with contextlib.suppress(Exception):
                await self._events.aclose()  # type: ignore[attr-defined]
            self._on_close()

    async def _write(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        async with asyncio.timeout(self._timeout_s):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        commenting = asyncio.ensure_future(self._comment(send))
        try:
            async for chunk in self._events:
                await self._send(send, chunk)
        finally:
            await cancel_all(commenting)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, chunk: bytes) -> None:
        async with asyncio.timeout(self._timeout_s):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sent_s = time.monotonic()

    async def _comment(self, send: Send) -> None:
        """Send comments while there are no events."""
        while True:
            wait_s = self._sent_s + COMMENT_S - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self._send(send, COMMENT)


async def merge(iterators: list[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Yield the items of all iterators as they come. Each waits until its last item is taken."""
    if len(iterators) == 1:
        async for item in iterators[0]:
            yield item
        return
    queue: asyncio.Queue[Callable[[], T] | None] = asyncio.Queue(maxsize=1)

    async def pump(iterator: AsyncIterator[T]) -> None:
        try:
            async for item in iterator:
                await queue.put(lambda item=item: item)
            await queue.put(None)
        except Exception as error:
            await queue.put(functools.partial(_raise, error))

    tasks = [asyncio.ensure_future(pump(iterator)) for iterator in iterators]
    try:
        ended = 0
        while ended < len(tasks):
            get_item = await queue.get()
            if get_item is None:
                ended += 1
            else:
                yield get_item()
    finally:
        await cancel_all(*tasks)


def _raise(error: Exception) -> Any:
    raise error
