"""Limits, timeouts, failures, keys and logs of the server, over an engine without a model."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn

from jaxspec.serving.app import make_app
from jaxspec.serving.event_stream import EventStream
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.server import Server, bind
from tests.serving.conftest import Live, connect, no_scores, run_server
from tests.serving.fake_engine import FakeEngine

Start = Callable[..., Live]
LONG: dict[str, Any] = dict(prompt="a", max_tokens=100)


def ends_soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Slow(FakeEngine):
    """Engine that takes a hundredth of a second for a step."""

    def step(self) -> Any:
        time.sleep(0.01)
        return super().step()


# --- clients that leave or do not read ------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(fake: Start, stream: bool) -> None:
    engine = FakeEngine()
    live = fake(engine)
    engine.gate.clear()
    body = json.dumps({**LONG, "n": 2, "stream": stream}).encode()
    with connect(live) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        ends_soon(engine.in_step.is_set)  # so what leaves now is seen only when the gate opens
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    ends_soon(lambda: len(live.open_engine._leaving) == 2)
    engine.gate.set()
    live.settle()
    assert live.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_a_client_that_does_not_read_holds_no_row(fake: Start) -> None:
    """The engine goes on, and the server closes the connection when its time is over."""
    live = fake(client_timeout=0.3)
    body = json.dumps({"prompt": "a", "max_tokens": 110, "n": 60, "stream": True, "logprobs": 0})
    with connect(live) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body.encode())
        )
        live.settle()
        assert live.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_a_client_that_leaves_before_the_first_event() -> None:
    """The reply's head cannot be sent, so the iterator never begins. Its slot is freed anyway."""
    ended: list[str] = []

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1"

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(60)

    stream = EventStream(events(), timeout_s=60, on_close=lambda: ended.append("end"))
    asyncio.run(stream({"type": "http"}, receive, send))
    assert ended == ["end"]


def test_a_body_that_does_not_come(fake: Start) -> None:
    live = fake(client_timeout=0.2)
    with connect(live) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_a_body_that_is_too_large(fake: Start) -> None:
    live = fake(max_body_mib=1)
    reply = live.post("/tokenize", prompt="a" * 2**20)
    assert reply.status_code == 413
    assert "more than 1 MiB" in reply.json()["error"]["message"]
    assert live.client.get("/health").status_code == 200


def test_a_flood_of_headers(fake: Start) -> None:
    live = fake()
    with connect(live) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"X-Filler: %s\r\n" % (b"x" * 1000) * 200)
        assert connection.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 431")
    assert live.client.get("/health").status_code == 200


# --- too much, too late ---------------------------------------------------------------------------


def test_a_full_queue_is_told_to_come_back(fake: Start) -> None:
    engine = FakeEngine(batch_size=1)
    live = fake(engine, max_waiting=1)
    engine.gate.clear()
    with live.client.stream("POST", "/v1/completions", json={**LONG, "n": 2, "stream": True}):
        reply = live.post("/v1/completions", **LONG)
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["type"] == "rate_limit_error"
        engine.gate.set()
    live.settle()
    assert live.post("/v1/completions", **LONG).status_code == 200


def test_a_refused_request_leaves_no_work(fake: Start) -> None:
    """A refused request's prompt is not scored: the score would have no reader."""
    engine = FakeEngine(batch_size=1)
    live = fake(engine, max_waiting=0)
    engine.gate.clear()
    with live.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
        ends_soon(engine.in_step.is_set)
        assert live.post("/v1/completions", **LONG, echo=True, logprobs=0).status_code == 429
        ((_, future),) = live.open_engine._calls
        assert future.cancelled()
        engine.gate.set()
    live.settle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long(fake: Start, stream: bool) -> None:
    engine = FakeEngine()
    live = fake(engine, timeout=0.2)
    engine.gate.clear()
    reply = live.post("/v1/completions", **LONG, n=2, stream=stream)
    if stream:
        first, *_ = reply.text.splitlines()
        error = json.loads(first.removeprefix("data: "))["error"]
        assert reply.text.endswith("data: [DONE]\n\n")
    else:
        assert reply.status_code == 504
        error = reply.json()["error"]
    assert error["message"] == "the request took longer than 0.2 s"
    engine.gate.set()
    live.settle()


def test_draining(fake: Start) -> None:
    """Running requests end, new ones get 503, and /health says why."""
    engine = FakeEngine()
    live = fake(engine)
    engine.gate.clear()
    with live.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as reply:
        drained = threading.Thread(target=live.open_engine.drain)
        drained.start()
        ends_soon(lambda: live.open_engine.state == "draining")
        health = live.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        refused = live.post("/v1/completions", **LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        engine.gate.set()
        assert reply.read().endswith(b"data: [DONE]\n\n")
    drained.join(20)


class Running:
    """A server as `jaxspec serve` runs it, in a thread."""

    def __init__(self, live: Live, drain_s: float):
        bound = bind("127.0.0.1", 0)
        self.address = bound.getsockname()[:2]
        app = make_app(live.serving_model, live.open_engine, no_scores, Metrics("m"))
        config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5)
        self.server = Server(config, live.open_engine, drain_s)
        run = self.server.run
        self.thread = threading.Thread(target=run, kwargs={"sockets": [bound]}, daemon=True)
        self.thread.start()
        ends_soon(lambda: self.server.started)

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post("http://{}:{}/v1/completions".format(*self.address), json=body)


@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_end_in_time_is_told_so(
    fake: Start, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The server ends when its time to drain is over, not when the last request does."""
    engine = FakeEngine()
    live = fake(engine)
    engine.gate.clear()
    running = Running(live, drain_s=0.1)
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(running.post, **LONG, stream=stream)
        ends_soon(engine.in_step.is_set)
        assert running.server.handle_signal(signal.SIGTERM)
        ends_soon(lambda: live.open_engine.state == "closed")
        engine.gate.set()
        text = reply.result(20).text
    assert '"code":"cancelled"' in text
    assert text.endswith("data: [DONE]\n\n") == stream
    running.thread.join(20)
    assert running.server.num_unfinished == 1
    assert "1 request was not finished" in caplog.text
    assert not running.thread.is_alive()


def test_an_engine_that_is_beyond_repair_ends_the_server(fake: Start) -> None:
    """A supervisor restarts a server that has ended, not one that replies with errors."""

    class Broken(Slow):
        def reset(self) -> None:
            if self.thread is not None:
                raise MemoryError("no room for the caches")
            super().reset()

    engine = Broken()
    live = fake(engine)
    running = Running(live, drain_s=60)
    engine.failure = lambda engine: 1 // 0
    assert running.post(**LONG).status_code == 500
    running.thread.join(20)
    assert not running.thread.is_alive()
    assert live.open_engine.state == "failed"


def test_a_second_signal_ends_requests_in_the_protocol_s_form(fake: Start) -> None:
    engine = FakeEngine()
    live = fake(engine)
    engine.gate.clear()
    running = Running(live, drain_s=60)
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(running.post, **LONG)
        ends_soon(lambda: live.open_engine.num_live == 1)
        assert running.server.handle_signal(signal.SIGTERM)
        ends_soon(lambda: live.open_engine.state == "draining")
        assert running.server.handle_signal(signal.SIGTERM)
        response = reply.result(20)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "cancelled")
    running.thread.join(20)
    assert not running.thread.is_alive()


def test_a_signal_while_programs_are_compiled_is_not_the_server_s(
    serving_model: ServingModel,
) -> None:
    """Nothing runs yet that could be finished, so the process ends at once. It waited for the compiler."""
    engine = FakeEngine()
    engine.gate.clear()
    for live in run_server(serving_model, engine, warm_up=True):
        running = Running(live, drain_s=60)
        assert live.open_engine.state == "loading"
        assert not running.server.handle_signal(signal.SIGINT)
        engine.gate.set()
        ends_soon(lambda live=live: live.open_engine.state == "ready")
        assert running.server.handle_signal(signal.SIGINT)
        running.thread.join(20)
        assert not running.thread.is_alive()
        assert (running.server.signal, running.server.num_unfinished) == (signal.SIGINT, 0)
        assert not running.server.handle_signal(signal.SIGINT)  # it is over


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_raises(fake: Start, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The request fails without details; the server goes on."""
    engine = FakeEngine()
    live = fake(engine)

    def failure(engine: FakeEngine) -> None:
        raise RuntimeError("a secret of the machine")

    engine.failure = failure
    reply = live.post("/v1/completions", **LONG, stream=stream)
    assert "internal error" in reply.text
    assert "secret" not in reply.text
    assert "Traceback" not in reply.text
    assert reply.status_code == (200 if stream else 500)
    assert "a secret of the machine" in caplog.text
    engine.failure = lambda engine: None
    assert live.post("/v1/completions", **LONG).status_code == 200


def test_a_mistake_of_the_server_is_no_traceback(
    fake: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live = fake()
    monkeypatch.setattr(type(live.serving_model), "parse_completion", lambda self, request: 1 // 0)
    reply = live.post("/v1/completions", **LONG)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" not in reply.text
    assert "ZeroDivisionError" in caplog.text


# --- keys, origins, logs --------------------------------------------------------------------------


def test_api_keys(fake: Start) -> None:
    live = fake(api_key=("first", "second"))
    for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
        reply = live.client.get("/v1/models", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
    for value in ("Bearer first", "bearer second", "Bearer  second"):
        headers = {"Authorization": value}
        assert live.client.get("/v1/models", headers=headers).status_code == 200
    assert live.client.get("/health").status_code == 200


def test_origins(fake: Start) -> None:
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    closed, opened = fake(), fake(cors_origin=("https://page.example",), api_key=("key",))
    name = "access-control-allow-origin"
    assert name not in closed.client.options("/v1/models", headers=ask).headers
    reply = opened.client.options("/v1/models", headers=ask)
    assert (reply.status_code, reply.headers[name]) == (200, "https://page.example")
    refused = opened.client.get("/v1/models", headers=ask)
    assert (refused.status_code, refused.headers[name]) == (401, "https://page.example")
    shown = refused.headers["access-control-expose-headers"].lower()
    assert {"x-request-id", "retry-after"} <= set(shown.split(", "))
    other = opened.client.options("/v1/models", headers={**ask, "Origin": "https://evil.example"})
    assert name not in other.headers


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_has_no_text_unless_asked(
    fake: Start, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    live = fake(log_prompts=log_prompts)
    with caplog.at_level(logging.INFO, "jaxspec.serving"):
        headers = {"X-Request-Id": "my-request"}
        body = {"prompt": "ab the ab", "max_tokens": 3}
        reply = live.client.post("/v1/completions", json=body, headers=headers)
        assert reply.headers["x-request-id"] == "my-request"
        odd = live.client.get("/v1/models", headers={"X-Request-Id": "two\twords"})
        assert len(odd.headers["x-request-id"]) == 32
    lines = [getattr(record, "fields", {}) for record in caplog.records]
    (line,) = (x for x in lines if x.get("request_id") == "my-request")
    assert (line["status"], line["completion_tokens"]) == (200, 3)
    assert ("ab the ab" in str(lines)) == log_prompts


@pytest.mark.parametrize("log_prompts", [False, True])
def test_neither_replies_nor_refusals_bring_text_into_the_log(
    scripted: Any, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    """Messages of wrong values may quote them, so the log leaves them out by default."""
    live, _ = scripted("the reply", log_prompts=log_prompts)
    body = {"messages": [{"role": "user", "content": [{"type": "a secret"}]}]}
    with caplog.at_level(logging.INFO, "jaxspec.serving"):
        refused = live.post("/v1/chat/completions", **body)
        assert "a secret" in refused.json()["error"]["message"]
        body["messages"] = [{"role": "user", "content": "a"}]
        assert live.post("/v1/chat/completions", stream=True, **body).status_code == 200
        ends_soon(lambda: sum(record.message == "request" for record in caplog.records) == 2)
    lines = [getattr(record, "fields", {}) for record in caplog.records]
    assert [x["param"] for x in lines if x.get("status") == 400] == ["messages[0].content[0].type"]
    assert ("a secret" in str(lines)) == log_prompts
    assert ("the reply" in str(lines)) == log_prompts


def test_many_clients_of_whom_some_leave(fake: Start) -> None:
    """The other clients get each token once."""
    live = fake(Slow(batch_size=4))
    failed: list[BaseException] = []

    def ask(i: int) -> None:
        body = {"prompt": [i + 1], "max_tokens": 30, "return_token_ids": True, "stream": True}
        try:
            with (
                httpx.Client(base_url=live.client.base_url, timeout=60) as client,
                client.stream("POST", "/v1/completions", json=body) as reply,
            ):
                tokens: list[int] = []
                for line in reply.iter_lines():
                    if not line or line == "data: [DONE]":
                        continue
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                    if i % 3 == 0:
                        return
            assert tokens == [hash(((i + 1,), index)) % 1000 for index in range(30)]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    live.settle()
