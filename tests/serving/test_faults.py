"""Faults outside the server's code: endless bodies, half connections, no memory."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxspec.engine.request import Request
from tests.serving.conftest import Live, connect
from tests.serving.fake_engine import FakeEngine

Start = Callable[..., Live]


def sent(path: str, **body: Any) -> bytes:
    """Return the bytes of a request."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


def megabytes_in_memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_a_hundred_megabytes_is_not_kept(fake: Start, chunked: bool) -> None:
    """The server refuses a body at its limit, whatever the headers say, and drops the rest.

    It may not close the connection before: that would reset it, and the client might lose the reply.
    """
    live = fake(max_body_mib=1)
    before = megabytes_in_memory()
    size = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 100000000"
    piece = b"[" * 100_000
    with connect(live) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n%s\r\n\r\n" % size)
        for _ in range(1000):
            connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        assert connection.recv(12) == b"HTTP/1.1 413"
    assert megabytes_in_memory() < before + 30
    assert live.client.get("/health").status_code == 200


def test_a_client_that_closes_its_half_of_a_connection(fake: Start) -> None:
    """A half-closed connection counts as closed: its slot is free."""
    engine = FakeEngine()
    live = fake(engine)
    engine.gate.clear()
    with connect(live) as connection:
        connection.sendall(sent("/v1/completions", prompt="a", max_tokens=100, stream=True))
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.shutdown(socket.SHUT_WR)
        engine.gate.set()
        while connection.recv(65536):
            pass
    live.settle()
    assert live.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_a_client_that_reads_byte_by_byte_holds_up_nobody(fake: Start) -> None:
    live = fake()
    body = {"prompt": "a", "max_tokens": 110, "n": 60, "stream": True, "logprobs": 0}
    with connect(live) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(sent("/v1/completions", **body))
        for _ in range(20):
            assert len(connection.recv(1)) == 1
            time.sleep(0.02)
        live.settle()
        begin = time.monotonic()
        assert live.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200
        assert time.monotonic() - begin < 5
        assert connection.recv(1)


def test_no_memory_while_prompts_are_read(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine is reset. A request without a token has a second try. The error has no details."""
    runtime = live.engine.runtime
    feeding = runtime.bind_prefill
    left = [3]

    def fail(state: Any) -> Any:
        left[0] -= 1
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(
        runtime, "bind_prefill", lambda *args: fail if left[0] > 0 else feeding(*args)
    )
    prompt, replies = [2, 50, 60], []
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    threads = [
        threading.Thread(target=lambda: replies.append(live.post("/v1/completions", **body)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {reply.status_code for reply in replies} <= {200, 500}
    failed = [reply.text for reply in replies if reply.status_code == 500]
    assert failed
    assert all("internal error" in text and "memory" not in text for text in failed)
    assert "RESOURCE_EXHAUSTED" in caplog.text
    live.settle()
    left[0] = 0
    (alone,) = live.alone(
        Request(tuple(prompt), 6, stop_ids=live.serving_model.generation.eos_token_ids)
    )
    reply = live.post("/v1/completions", **body)
    assert tuple(reply.json()["choices"][0]["token_ids"]) == alone.token_ids
