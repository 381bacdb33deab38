"""Images by address: allowed hosts at public addresses alone, within limits of size and time."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxspec.serving import fetch as fetching
from jaxspec.serving.fetch import fetch
from jaxspec.text.images import ImageError

HOST = "photos.example"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by the path."""

    def do_GET(self) -> None:
        status, headers, body = 200, {}, b"x" * 1000
        if self.path == "/moved":
            status, headers = 302, {"Location": "http://127.0.0.1/secret"}
        elif self.path == "/large":
            body = b"x" * (3 << 20)
        elif self.path == "/cut":
            headers = {"Content-Length": "5000"}
        elif self.path == "/slow":
            time.sleep(5)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.path == "/drip":
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.05)
            return
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        del args


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server on loopback, to which every name leads; and the names that were asked for."""
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[Any]:
        asked.append(f"{host}:{port}")
        return [running.server_address]

    monkeypatch.setattr(fetching, "_resolve", resolve)
    yield asked
    running.shutdown()
    running.server_close()


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_is_public", lambda address: True)


def get(url: str, seconds: float = 10.0) -> bytes:
    end_s = time.monotonic() + seconds
    return fetch("messages[0]", url, {HOST}, max_bytes=2 << 20, end_s=end_s)


@pytest.mark.usefixtures("public")
def test_what_is_there_is_fetched(server: list[str]) -> None:
    assert get(f"http://{HOST}/a.png?size=1") == b"x" * 1000
    assert server == [f"{HOST}:80"]  # once: a second answer could be another


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/moved", "is answered by photos.example with status 302, not 200"),
        ("/large", "has more than 2 MiB at photos.example"),
        ("/cut", "comes without its end from photos.example"),
        ("/slow", "did not come in time from photos.example"),
        ("/drip", "did not come in time from photos.example"),
    ],
)
def test_other_replies_are_refused(server: list[str], path: str, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ImageError, match=message):
        get(f"http://{HOST}{path}", seconds=1.0 if path in ("/slow", "/drip") else 10.0)
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://other.example/a", "is at 'other.example', which this server does not ask"),
        (f"http://{HOST}.evil.example/a", "which this server does not ask"),
        (f"http://{HOST}:8080/a", "expected https://, a host without port"),
        (f"http://me@{HOST}/a", "expected https://, a host without port"),
        (f"ftp://{HOST}/a", "expected https://, a host without port"),
        (f"http://{HOST}/a b", "has a space"),
        (f"http://{HOST}/a\r\nX: y", "has a space|does not ask|is no address"),
        ("http://[::1/a", "is no address"),
    ],
)
def test_other_addresses_are_refused_before_anybody_is_asked(
    server: list[str], url: str, message: str
) -> None:
    with pytest.raises(ImageError, match=message):
        get(url)
    assert server == []


def test_a_host_of_the_own_network_is_refused(server: list[str]) -> None:
    """Whatever an allowed name leads to."""
    with pytest.raises(ImageError, match=r"is at photos\.example, which is no public address"):
        get(f"http://{HOST}/a")
    private = "127.0.0.1 10.1.2.3 192.168.0.1 172.16.0.9 169.254.169.254 0.0.0.0 ::1 fe80::1%eth0"
    private += " fd00::1 ::ffff:10.0.0.1 224.0.0.1 100.64.0.1"
    assert not any(map(fetching._is_public, private.split()))
    assert fetching._is_public("93.184.215.14")
    assert fetching._is_public("2606:4700::1111")


def test_names_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Callable[..., Any]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(fetching, "_resolve", fail)
    with pytest.raises(ImageError, match=r"cannot be fetched from photos\.example: gaierror"):
        get(f"https://{HOST}/a")
