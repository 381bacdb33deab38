"""Server process: a socket, uvicorn, and an orderly end on a signal.

Read `Server`. The caller binds the socket before it loads models, so that a port in use is reported
at once, and gives signals to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from jaxspec.serving.open_engine import OpenEngine

LOG = logging.getLogger("jaxspec.serving")
HEADER_BYTES = 64 * 1024
CLOSE_S = 1.0
"""Seconds that the device may take to return when all requests are cancelled."""


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet.

    Raises:
      OSError: the address is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.set_inheritable(True)
    return bound


def check_tls(cert: str, key: str) -> None:
    """Check that a certificate and its key can be used.

    Raises:
      OSError: a file cannot be read, or the key does not fit the certificate.
    """
    # Without a password here, OpenSSL would ask the terminal for an encrypted key's.
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")


class Server(uvicorn.Server):
    """Drains on the first signal, and ends at once on the second. `handle_signal` gets them.

    Attributes:
      signal: the first signal; 0 for none.
      num_unfinished: requests that had not ended when the server did.
    """

    def __init__(self, config: uvicorn.Config, engine: OpenEngine, drain_s: float):
        """Make a server. `drain_s`: seconds that requests may take to end."""
        super().__init__(config)
        self._engine, self._drain_s = engine, drain_s
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.signal = self.num_unfinished = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: `handle_signal` gets them."""
        yield

    def handle_signal(self, number: int) -> bool:
        """Handle a signal, in any thread.

        Returns:
          Whether the server sees to its end. False: nothing runs yet, so the process may end.
        """
        loop = self._loop
        if loop is None or loop.is_closed() or self._engine.state == "loading":
            return False
        if not self.signal:
            self.signal = number
            loop.call_soon_threadsafe(self._begin_to_drain)
            return True
        if self.force_exit:  # the third signal
            return False
        self.should_exit = self.force_exit = True
        loop.call_soon_threadsafe(self._give_up)
        return True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to exit, which is so if the engine failed. Called ten times a second."""
        self.should_exit |= self._engine.state == "failed"
        return await super().on_tick(counter)

    def _begin_to_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        LOG.info("draining: %d requests are left", self._engine.num_live)
        done = await asyncio.to_thread(self._engine.drain, self._drain_s)
        if not done:
            self._give_up()
            await asyncio.to_thread(self._engine.close, CLOSE_S)
        self.should_exit = True

    def _give_up(self) -> None:
        """End the requests that are left, and say how many."""
        if number := self._engine.num_live:
            self.num_unfinished = max(self.num_unfinished, number)
            LOG.warning("%d request%s not finished", number, " was" if number == 1 else "s were")
        self._engine.close(0)


def make_server(
    app: Starlette,
    engine: OpenEngine,
    *,
    drain_s: float,
    tls_cert: str | None = None,
    tls_key: str | None = None,
) -> Server:
    """Return a server that does not run yet."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http="h11",
        ws="none",
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        loop="asyncio",
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    return Server(config, engine, drain_s)
