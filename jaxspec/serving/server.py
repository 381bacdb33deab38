"""One server process: a socket, the engine's thread, and an orderly end on SIGTERM.

Read `serve`. The socket is bound before models are loaded, so that a port in use is known at once. While programs are
compiled, `/health` says "loading", and requests wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from jaxspec.serving.open_engine import OpenEngine

LOG = logging.getLogger("jaxspec.serving")
HEADER_BYTES = 64 * 1024
CLOSE_S = 2.0
"""How long the device may take to return, once nobody waits for its work."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet.

    Raises:
      OSError: the address cannot be had.
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
    """Raise an error unless a certificate and its key can be used.

    Raises:
      OSError: why not.
    """
    # With no password a key that has one would ask the terminal for it.
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")


class Server(uvicorn.Server):
    """Drains on the first SIGTERM or Ctrl-C, and ends at once on the second."""

    def __init__(self, config: uvicorn.Config, opened: OpenEngine, drain_s: float):
        """Make a server; `drain_s` is how long requests may take to end."""
        super().__init__(config)
        self._opened, self._drain_s = opened, drain_s
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal. Python calls this between two instructions of the main thread."""
        if self._loop is None or self._draining is not None:
            self.should_exit = self.force_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._opened.close, 0)
        else:
            self._loop.call_soon_threadsafe(self._begin_to_drain)

    async def on_tick(self, counter: int) -> bool:
        """Tell whether it is over, ten times a second. A failed engine answers nobody, so that a supervisor starts another."""
        self.should_exit |= self._opened.state == "failed"
        return await super().on_tick(counter)

    def _begin_to_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        LOG.info("draining: %d requests are left", self._opened.num_live)
        done = await asyncio.to_thread(self._opened.drain, self._drain_s)
        if not done:
            LOG.warning("%d requests did not end in time", self._opened.num_live)
            await asyncio.to_thread(self._opened.close, CLOSE_S)
        self.should_exit = True


def run(
    app: Starlette,
    opened: OpenEngine,
    bound: socket.socket,
    *,
    drain_s: float,
    tls_cert: str | None = None,
    tls_key: str | None = None,
) -> None:
    """Serve until a signal ends it."""
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
    server = Server(config, opened, drain_s)
    with contextlib.closing(bound):
        server.run(sockets=[bound])
