"""Detection of clients that disconnect, for whole replies (`app`) and streams (`event_stream`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed the connection."""


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects.

    Args:
      request: its body must have been read.

    Raises:
      ClientDisconnected: the client closed the connection; the work is cancelled.
    """
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(listen_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        await cancel_all(working, listening)


async def listen_for_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    """Wait until ASGI's `receive` reports that the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
