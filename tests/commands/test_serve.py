"""Command `jaxspec serve`: user errors, and one life of a server in its own process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from jaxspec.commands.serve.run import make_engine
from jaxspec.options import ChooseLength, Drafting, FieldError
from jaxspec.serving.settings import ProgramOptions, Settings
from tests import cases
from tests import tiny_pair as tiny
from tests.commands.conftest import Run


def test_a_port_in_use_is_known_before_models_are_loaded(invoke: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = invoke("serve", "nowhere", "--port", str(port))
    assert outcome.code == 2
    assert f"--port {port}" in outcome.stderr
    assert "in use" in outcome.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-cert", "a.pem", "--tls-key", "b.pem"], "--tls-cert a.pem: No such file"),
        (["--port", "99999"], "--port"),
        (["target", "--num-draft-tokens", "3"], "--num-draft-tokens needs a drafter"),
        (["target", "--cache-length", "99999"], "--cache-length 99999"),
        (["target", "--prefix-gib", "1e-7"], "--prefix-gib 1e-07 holds no prefix of a whole slot"),
        (
            ["target", "--prefix-gib", "1e6"],
            "--prefix-gib 1000000.0: weights, caches and logits leave",
        ),
        (["target", "--prefix-gib", "0", "--prefix-host-gib", "1"], "--prefix-host-gib"),
        (["mute"], "has no tokenizer.json"),
    ],
)
def test_options_that_make_no_sense(invoke: Run, args: list[str], message: str) -> None:
    if args[0] != "--port":
        args = [*args, "--port", "0"]
    outcome = invoke("serve", *args)
    assert outcome.code == 2, args
    assert message in " ".join(outcome.stderr.split()), outcome.stderr


def test_without_the_extra_it_says_what_to_install(
    invoke: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    outcome = invoke("serve", "target")
    assert outcome.code == 2
    assert "pip install 'jaxspec-decoding[serve]'" in outcome.stderr


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0, 0.005, 0.5])
def test_ctrl_c_while_a_server_warms_up(tmp_path: Path, delay_s: float) -> None:
    """It ended with code 0, seconds later. Right behind the first line there was no handler at all."""
    tiny.write_target(tmp_path / "target")
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxspec", "serve", "target", "--port", "0", "--slots", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any(line.startswith("serving") for line in process.stderr)
        time.sleep(delay_s)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - begin < 2
        assert (process.returncode, errors) == (130, "interrupted\n")
    finally:
        process.kill()


@pytest.mark.slow
def test_a_server_s_life(tmp_path: Path) -> None:
    """The server compiles, answers, and on SIGTERM ends after its last stream."""
    tiny.write_target(tmp_path / "target")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxspec", "serve", "target", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--cache-length", "200", "--slots", "2", "--steps-per-return", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            end = time.monotonic() + 300
            states = set()
            while "ready" not in states:
                assert process.poll() is None
                assert time.monotonic() < end
                try:
                    states.add(client.get("/health").json()["status"])
                except httpx.TransportError:
                    time.sleep(0.1)
            body = {"prompt": [2, 263], "max_tokens": 180, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        first, *log = errors.strip().splitlines()
        assert first.startswith("note: no --drafter was given")
        (line,) = (x for x in map(json.loads, log[1:]) if x.get("path") == "/v1/completions")
        assert line["completion_tokens"] == 180
    finally:
        process.kill()


@pytest.mark.parametrize("choose", ["exact", "always", "never"])
def test_the_engine_gets_the_choice_of_draft_lengths(choose: ChooseLength) -> None:
    c = cases.case("31b")
    programs = ProgramOptions(slots=2, cache_length=64, choose_length=choose, prefix_gib=0)
    engine = make_engine(
        c.target, c.drafter("mixed"), programs, programs.program_features, Drafting()
    )
    assert engine.draft_length.choose == choose
    assert bool(engine.draft_length.used) == (choose != "never")


def test_an_empty_key_is_no_key(
    invoke: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXSPEC_API_KEY", "")
    outcome = invoke("serve", "target", "--port", "0")
    assert outcome.code == 2
    assert "JAXSPEC_API_KEY is empty; give it a key, or unset it" in outcome.stderr
    with pytest.raises(FieldError, match="api_key is empty: most likely a variable was not set"):
        Settings(api_key=("secret", ""))
