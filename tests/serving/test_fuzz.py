"""Random broken requests. Each gets a reply of the protocol, or a closed connection."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxspec.serving.errors import ApiError
from jaxspec.serving.parse_request import ServingModel
from jaxspec.serving.protocol import (
    ApiRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    parse_body,
)
from jaxspec.serving.responses import parse_responses
from tests.serving.conftest import Live, connect

SECONDS = float(os.environ.get("JAXSPEC_FUZZ_S", "3"))
SEED = int(os.environ.get("JAXSPEC_FUZZ_SEED", "0"))
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/models/%00",
    "/metrics",
    "/health",
]
BODIES: list[dict[str, Any]] = [
    {"prompt": "a b", "max_tokens": 3, "logprobs": 1, "stop": ["x"], "logit_bias": {"5": 1}},
    {"prompt": [[2, 263], [5]], "echo": True, "n": 2, "seed": 5, "stream": True},
    {"prompt": ["a"], "stream": True, "stream_options": {"include_usage": True}, "top_k": 3},
    {
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "max_tokens": 3,
        "chat_template_kwargs": {"enable_thinking": True},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "logprobs": True,
    },
    {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
        ],
        "max_output_tokens": 3,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "parallel_tool_calls": False,
    },
    {
        "prompt": "a",
        "max_tokens": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "array", "items": {"enum": [1, "a"]}}},
        },
        "structured_outputs": {"choice": None, "regex": None},
    },
    {"tokens": [2, 263, 300]},
]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 10**30, -(10**30), 1.5, 1e308, "", "a", "\x00", "é" * 50),
    *("\ud800", [], {}, [[]], [None], {"": None}, {"type": "text"}, [1, "a"], "🙂" * 3, 2**31),
]


def mutated(value: Any, rng: random.Random) -> Any:
    """Return a value with some parts of it replaced, left out or wrapped."""
    if rng.random() < 0.06:
        return rng.choice(ODD)
    if isinstance(value, dict):
        kept = {k: mutated(v, rng) for k, v in value.items() if rng.random() > 0.05}
        if rng.random() < 0.1:
            other = rng.choice(rng.choice(BODIES).copy().popitem())
            kept[other if isinstance(other, str) else "n"] = rng.choice(ODD)
        return kept
    if isinstance(value, list):
        made = [mutated(v, rng) for v in value]
        return made * 2 if rng.random() < 0.05 else made
    return value


def test_a_body_is_understood_or_refused(serving_model: ServingModel) -> None:
    """Parsing without a server tries many more bodies in a second."""
    understand: list[tuple[type[ApiRequest], Callable[..., Any]]] = [
        (CompletionRequest, serving_model.parse_completion),
        (ChatCompletionRequest, serving_model.parse_chat),
        (ResponsesRequest, functools.partial(parse_responses, serving_model)),
    ]
    rng = random.Random(SEED)
    understood = refused = 0
    tries, end = 0, time.monotonic() + min(SECONDS, 60) / 2
    # A busy machine may try few in this time; then it has more of it.
    while time.monotonic() < end or (tries < 1000 and min(understood, refused) <= 20):
        tries += 1
        body = json.dumps(mutated(rng.choice(BODIES), rng)).encode()
        for kind, parse in understand:
            try:
                parse(parse_body(kind, body))
                understood += 1
            except ApiError:
                refused += 1
            except Exception as error:
                raise AssertionError(body) from error
    assert min(understood, refused) > 20


def request(rng: random.Random) -> bytes:
    """Return the bytes of a request, whose framing may be wrong too."""
    body = json.dumps(mutated(rng.choice(BODIES), rng)).encode()
    if rng.random() < 0.2:
        corrupted = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            corrupted[rng.randrange(len(corrupted) or 1) : rng.randrange(len(corrupted) or 1)] = (
                rng.randbytes(2)
            )
        body = bytes(corrupted)
    if rng.random() < 0.05:
        body = rng.choice((b"[", b'{"a":', b'{"prompt":[')) * rng.randint(1, 20_000)
    method = rng.choice(("POST",) * 8 + ("GET", "PUT", "OPTIONS", "BREW"))
    length = len(body) + (rng.choice((-3, 7, 10**12)) if rng.random() < 0.05 else 0)
    head = [
        f"{method} {rng.choice(PATHS)} HTTP/1.1",
        "Host: a",
        "Connection: close",
        f"Content-Length: {length}",
    ]
    if rng.random() < 0.1:
        head.insert(
            rng.randint(1, 3), rng.choice(("X: \x01", "Transfer-Encoding: chunked", ": a", "é"))
        )
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


def reply_to(live: Live, sent: bytes, rng: random.Random) -> bytes:
    with connect(live) as connection:
        connection.settimeout(20)
        try:
            connection.sendall(sent)
            if rng.random() < 0.1:
                return b""  # left without reading
            if rng.random() < 0.1:
                with contextlib.suppress(OSError):  # the server has closed it
                    connection.shutdown(socket.SHUT_WR)
            received = b""
            while piece := connection.recv(65536):
                received += piece
        except (ConnectionError, BrokenPipeError):
            return b""
        return received


def test_no_request_brings_it_down(
    fake: Callable[..., Live], caplog: pytest.LogCaptureFixture
) -> None:
    live = fake(client_timeout=0.1, timeout=5)
    rng = random.Random(SEED)
    statuses: dict[bytes, int] = {}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        sent = request(rng)
        received = reply_to(live, sent, rng)
        assert b"Traceback" not in received, sent
        assert b"internal error" not in received, sent
        status = received[9:12]
        assert status in (b"", b"200", b"400", b"404", b"405", b"408", b"413", b"429"), (
            sent,
            received,
        )
        statuses[status] = statuses.get(status, 0) + 1
    assert not [r for r in caplog.records if r.exc_info], caplog.text
    assert min(statuses.get(s, 0) for s in (b"200", b"400")) > 5, statuses
    live.settle()
    assert live.client.get("/health").json() == {"status": "ready"}
