"""`jaxspec serve --distributed`: two processes of one CPU behind one server."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import jaxspec
from jaxspec.commands import startup
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.options import Sampling
from jaxspec.serving.processes import from_json, to_json
from jaxspec.serving.reply_end import EndRules, reply_end
from jaxspec.text.images import ImagePatches
from jaxspec.tokenizer import Tokenizer
from tests.commands.conftest import Run, two_processes

SMALL = [
    *("--cache-length", "64", "--slots", "2", "--steps-per-return", "2", "--prefix-gib", "0"),
    *("--no-warm-up", "--no-penalties", "--max-logit-bias", "0", "--port", "0"),
]
PLAIN = ["serve", "target", "--mesh", "data=2,model=1", "--max-logprobs", "0", *SMALL]
PAIR = ["serve", "target", "--drafter", "drafter", "--mesh", "data=1,model=2", *SMALL]
UNFILTERED = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
"""Instead of the checkpoint's own defaults."""
Pair = list[subprocess.Popen[str]]


@contextlib.contextmanager
def served(checkpoints: Path, command: list[str]) -> Iterator[tuple[httpx.Client, Pair]]:
    """Start a server, and yield a client of it when it is ready."""
    with two_processes(checkpoints, command, [], []) as pair:
        errors = pair[0].stderr
        assert errors is not None
        line = next((line for line in errors if line.startswith("serving")), "")
        assert line, pair[1].communicate(timeout=60)
        threading.Thread(target=errors.read, daemon=True).start()  # a full pipe would stop it
        url = line.split(" on ")[1].split("/v1")[0]
        with httpx.Client(base_url=url, timeout=120) as client:
            yield client, pair


def ids(client: httpx.Client, prompt: list[int], **body: Any) -> list[list[int]]:
    """Return the tokens of the choices of a completion."""
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, **UNFILTERED, **body}
    reply = client.post("/v1/completions", json=body | {"prompt": prompt, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


def leave_a_stream(client: httpx.Client) -> None:
    """Begin a long reply, and disconnect."""
    body = {"prompt": [2, 9], "max_tokens": 50, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        assert any(line.startswith("data: {") for line in reply.iter_lines())


def end(pair: Pair) -> str:
    """End the first process by a signal, and return what the second one printed."""
    pair[0].send_signal(signal.SIGTERM)
    _, errors = pair[1].communicate(timeout=60)
    assert [pair[0].wait(60), pair[1].returncode] == [0, 0], errors
    return errors


def alone(checkpoints: Path, drafter: str | None, *requests: Request) -> list[list[int]]:
    """Return the tokens that one process gives."""
    pair = jaxspec.load(str(checkpoints / "target"), drafter and str(checkpoints / drafter))
    engine = Engine(*pair, batch_size=2, cache_length=64, steps_per_return=2)
    runs = [[*engine.run([request])] for request in requests]  # each alone, as below
    return [list(events[-1].token_ids) for events in runs]


def test_two_processes_reply_as_one_does(checkpoints: Path) -> None:
    tokenizer = Tokenizer.load(checkpoints / "target")
    prompt, stop = (2, 5, 9), "?"  # the second token
    ends = reply_end(tokenizer, prompt, EndRules((stop,)))
    greedy, sampled, stopped = alone(
        checkpoints,
        None,
        Request(prompt, 12),
        Request(prompt, 12, Sampling(temperature=0.8), seed=7),
        Request(prompt, 12, stop_at=ends),
    )
    assert 0 < len(stopped) < len(greedy)
    with served(checkpoints, PLAIN) as (client, pair):
        assert ids(client, [2, 5, 9]) == [greedy]
        assert ids(client, [2, 5, 9], temperature=0.8, seed=7) == [sampled]
        leave_a_stream(client)
        assert ids(client, [2, 5, 9], stop=stop) == [stopped]
        for wrong in ({"max_tokens": 999}, {"response_format": {"type": "json_object"}}):
            reply = client.post("/v1/completions", json={"prompt": [2], **wrong})
            assert reply.status_code == 400, reply.text
        assert "several processes" in reply.text
        assert ids(client, [2, 5, 9]) == [greedy]
        assert "process 1 follows process 0, and serves no HTTP" in end(pair)


@pytest.mark.slow  # two more processes that compile
def test_two_processes_draft_and_score_as_one_does(checkpoints: Path) -> None:
    """A stop text of a chat has rules of its own, and a prompt is scored on the devices of both."""
    sampled = Request((2, 5, 9), 30, Sampling(temperature=0.8), seed=7)
    (expected,) = alone(checkpoints, "drafter", sampled)
    with served(checkpoints, PAIR) as (client, pair):
        for _ in range(2):
            assert ids(client, [2, 5, 9], max_tokens=30, temperature=0.8, seed=7) == [expected]
            leave_a_stream(client)
        echo = {"prompt": [2, 5, 9], "max_tokens": 1, "echo": True, "logprobs": 1}
        reply = client.post("/v1/completions", json=echo).json()
        assert len(reply["choices"][0]["logprobs"]["token_logprobs"]) == 4
        messages = [{"role": "user", "content": "a"}]
        chat = {"messages": messages, "max_tokens": 20, "stop": ["a", "b"], "seed": 3}
        replies = [client.post("/v1/chat/completions", json=chat).json() for _ in range(2)]
        assert replies[0]["choices"] == replies[1]["choices"]
        end(pair)


@pytest.mark.slow  # two more processes
@pytest.mark.parametrize(("gone", "number"), [(0, 9), (1, 9), (1, signal.SIGSTOP)])
def test_a_process_that_ends_or_hangs_ends_the_server(
    checkpoints: Path, gone: int, number: int
) -> None:
    with served(checkpoints, PLAIN) as (client, pair):
        ids(client, [2])
        body = {"prompt": [2], "max_tokens": 50, "ignore_eos": True, "stream": True, "n": 20}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            pair[gone].send_signal(number)
            begin = time.monotonic()
            try:
                rest = "".join(lines)
            except httpx.TransportError:  # the first process is gone itself
                rest = ""
        assert ("error" in rest) == (gone == 1)
        assert pair[1 - gone].wait(60) not in (0, None)
        assert time.monotonic() - begin < startup.HEARTBEAT_S


@pytest.mark.slow  # two more processes
def test_processes_that_disagree_do_not_serve(checkpoints: Path) -> None:
    with two_processes(checkpoints, PLAIN, [], ["--slots", "4"]) as pair:
        outputs = [process.communicate(timeout=120)[1] for process in pair]
    assert [process.returncode for process in pair] == [2, 2], outputs
    assert all("options of process 1 are not those of process 0" in text for text in outputs)


@pytest.mark.slow  # two more processes
def test_a_port_in_use_ends_all_processes(checkpoints: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = ["--port", str(taken.getsockname()[1])]
        with two_processes(checkpoints, PLAIN, own, []) as pair:
            first, second = (process.communicate(timeout=120)[1] for process in pair)
    assert [process.returncode for process in pair] == [2, 2], first + second
    assert "in use" in first
    assert "process 0 cannot start; it says why" in second


def test_distributed_needs_a_mesh(invoke: Run) -> None:
    outcome = invoke("serve", "target", "--distributed", "--port", "0")
    assert outcome.code == 2
    assert "--distributed needs --mesh" in outcome.stderr


def test_a_request_is_the_same_in_another_process(checkpoints: Path) -> None:
    tokenizer = Tokenizer.load(checkpoints / "target")
    sampling = Sampling(temperature=0.1 + 0.2, logit_bias={5: -float("inf"), 7: 0.5}, top_k=3)
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 12)
    image = ImagePatches(pixels, np.array([[0, 0], [1, 0]], np.int32), 1)
    request = Request(
        prompt_ids=(2, 5),
        max_new_tokens=9,
        sampling=sampling,
        stop_ids=(1,),
        seed=2**32 - 1,
        sample=3,
        id=4,
        stop_at=reply_end(tokenizer, (2, 5), EndRules(("b",))),
        priority=-1,
        images=(image,),
    )
    copy = from_json(json.loads(json.dumps(to_json(request))), tokenizer)
    (copied,) = copy.images
    assert copied.digest == image.digest
    np.testing.assert_array_equal(copied.positions, image.positions)
    same = {"stop_at": None, "images": ()}
    assert vars(copy) | same == vars(request) | same
    assert copy.stop_at is not None
    assert copy.stop_at([7, tokenizer.encode("b")[-1], 7]) == 2
