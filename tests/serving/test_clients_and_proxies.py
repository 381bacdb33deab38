"""What clients and proxies of all kinds send and expect, below the protocol."""

from __future__ import annotations

import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxspec.serving import event_stream
from tests.serving.conftest import Live, connect
from tests.serving.fake_engine import FakeEngine
from tests.serving.test_visible_text import BROKEN, CALL, TOOLS, USER, Scripted
from tests.text.chat.models import QWEN

Start = Callable[..., Live]
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
HEADS = {"Content-Type": "application/json"}


def test_a_slash_at_the_end_of_a_path_is_ignored(fake: Start) -> None:
    """A redirect named an absolute http address, which a proxy with TLS does not serve."""
    live = fake()
    assert live.post(f"{COMPLETIONS}/", **BODY).status_code == 200
    assert live.client.get("/v1/models/").json() == live.client.get("/v1/models").json()
    assert live.client.get("/health//").status_code == 200
    assert live.client.get("/v1/nothing/").status_code == 404
    locked = fake(api_key=("secret",))
    assert locked.client.get("/health/").status_code == 200
    assert locked.client.get("/v1/models/").status_code == 401


def test_bodies_may_be_compressed(fake: Start) -> None:
    live = fake(max_body_mib=1)
    plain = json.dumps({**BODY, "prompt": "a " * 20}).encode()
    wanted = live.client.post(COMPLETIONS, content=plain, headers=HEADS).json()["choices"]
    for name, body in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))):
        heads = {**HEADS, "Content-Encoding": name}
        assert (
            live.client.post(COMPLETIONS, content=body, headers=heads).json()["choices"] == wanted
        )
    bomb = gzip.compress(b" " * 2**26)
    for name, body, status, words in (
        ("gzip", bomb, 413, "more than 1 MiB"),
        ("gzip", plain, 400, "not compressed by gzip"),
        ("gzip", gzip.compress(plain)[:-9], 400, "end of the body is missing"),
        ("br", plain, 415, "expected gzip, deflate or identity"),
    ):
        heads = {**HEADS, "Content-Encoding": name}
        reply = live.client.post(COMPLETIONS, content=body, headers=heads)
        assert reply.status_code == status
        assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [(COMPLETIONS, "secret", 413), (COMPLETIONS, "x", 401), ("/x", "secret", 404)],
)
def test_a_refusal_reaches_a_client_that_still_sends(
    fake: Start, path: str, key: str, status: int
) -> None:
    """The connection was reset, and the client saw that and no reply."""
    live = fake(max_body_mib=1, api_key=("secret",))
    size = 24 * 2**20
    heads = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
    with connect(live) as connection:
        connection.sendall(f"{heads}Content-Length: {size}\r\n\r\n".encode())
        for _ in range(size // 2**16):
            connection.sendall(b"x" * 2**16)
        assert connection.recv(12) == b"HTTP/1.1 %d" % status
    with connect(live) as connection:  # it waits for a go-ahead that does not come
        connection.sendall(
            f"{heads}Expect: 100-continue\r\nContent-Length: {size}\r\n\r\n".encode()
        )
        begin = connection.recv(12)
        assert begin == (b"HTTP/1.1 100" if status == 413 else b"HTTP/1.1 %d" % status)
    live.settle()


@pytest.mark.parametrize("route", ["completions", "responses"])
def test_a_stream_that_waits_has_comments(
    fake: Start, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """Proxies close connections on which nothing comes for half a minute."""
    monkeypatch.setattr(event_stream, "COMMENT_S", 0.1)
    engine = FakeEngine()
    live = fake(engine)

    def open_the_gate() -> None:
        engine.in_step.wait(20)
        time.sleep(0.5)
        engine.gate.set()

    engine.gate.clear()
    opener = threading.Thread(target=open_the_gate)
    opener.start()
    body: dict[str, Any] = {"max_output_tokens": 4, "input": "a"} if route == "responses" else BODY
    lines = live.post(f"/v1/{route}", **body, stream=True).text.split("\n\n")
    opener.join()
    assert 2 <= lines.count(": waiting") <= 5
    events = [line for line in lines if line.startswith(("data", "event"))]
    assert len(events) + lines.count(": waiting") + 1 == len(lines)
    engine.gate.clear()
    threading.Thread(target=open_the_gate).start()
    with openai.OpenAI(base_url=f"{live.client.base_url}/v1", api_key="x") as client:
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=2, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


NUMBERS = ["1e400", "-1e400", "NaN", "Infinity"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "field",
    [
        '"temperature": %s',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]',
        '"chat_template_kwargs": {"x": [%s]}',
        '"response_format": {"type": "json_schema", "json_schema": {"schema": {"maximum": %s}}}',
        '"metadata": {"x": %s}',
    ],
)
def test_numbers_that_are_not_finite_are_refused(live: Live, number: str, field: str) -> None:
    """Infinity of them went into prompts and grammars, and JSON has no word for it."""
    for path, more in (("chat/completions", '"messages": []'), ("responses", '"input": "a"')):
        body = "{" + more + "," + field % number + "}"
        reply = live.client.post(f"/v1/{path}", content=body, headers=HEADS)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert "number" in error["message"]
        assert error["param"] == field.split('"')[1]


def test_arguments_with_such_numbers_are_refused(live: Live) -> None:
    function = {"name": "f", "arguments": '{"x": 1e400}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, USER]
    reply = live.post("/v1/chat/completions", messages=messages, max_tokens=2)
    assert reply.status_code == 400
    assert "1e400" in reply.json()["error"]["message"]


def test_a_tool_s_result_may_be_null(scripted: Scripted) -> None:
    live, engine = scripted("the class<|im_end|>")
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": None})
    assert live.post("/v1/chat/completions", messages=messages, tools=TOOLS).status_code == 200
    items: list[Any] = [{"type": "function_call", "call_id": "1", **function}]
    items.append({"type": "function_call_output", "call_id": "1", "output": None})
    assert live.post("/v1/responses", input=items, tools=TOOLS).status_code == 200
    assert "null" not in QWEN.tokenizer.decode(engine.asked[-1].prompt_ids)


def data(reply: httpx.Response) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("max_tokens", [100, 20])
@pytest.mark.parametrize("logprobs", [True, False])
def test_replies_have_all_that_the_client_s_types_require(
    scripted: Scripted, max_tokens: int, logprobs: bool
) -> None:
    """The client itself does not check, and programs that use its types do."""
    reply = QWEN.thought("of the") + "the class" + CALL + BROKEN + "<|im_end|>"
    live, _ = scripted(reply)
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    chat = {"messages": [USER], "tools": TOOLS, "logprobs": logprobs, "max_tokens": max_tokens}
    text = {"prompt": "a", "logprobs": 1 if logprobs else None, "max_tokens": max_tokens}
    include = ["message.output_text.logprobs"] if logprobs else []
    answer = {"input": "a", "tools": [{**TOOLS[0]["function"], "type": "function"}]}
    answer |= {"max_output_tokens": max_tokens, "include": include}
    routes: tuple[tuple[str, Any, Any, Any], ...] = (
        ("chat/completions", chat, ChatCompletion, ChatCompletionChunk),
        ("completions", text, Completion, Completion),
        ("responses", answer, Response, ResponseStreamEvent),
    )
    for path, body, whole, chunk in routes:
        TypeAdapter[Any](whole).validate_python(live.post(f"/v1/{path}", **body).json())
        more = {"stream": True} if path == "responses" else streams
        events = data(live.post(f"/v1/{path}", **body, **more))
        assert len(events) > 1
        for event in events:
            TypeAdapter[Any](chunk).validate_python(event)
    for model in live.client.get("/v1/models").json()["data"]:
        TypeAdapter(Model).validate_python(model)


def test_a_body_in_many_pieces(fake: Start) -> None:
    live = fake()

    def pieces() -> Any:
        for byte in json.dumps(BODY).encode():
            yield bytes([byte])
            time.sleep(0.001)

    assert live.client.post(COMPLETIONS, content=pieces(), headers=HEADS).status_code == 200
