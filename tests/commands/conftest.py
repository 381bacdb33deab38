"""The tiny pair on disk, and a way to run commands on it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import jaxspec.api  # noqa: F401  (now: its annotations name the class that `invoke` replaces)
from jaxspec.commands.cli import app
from jaxspec.runtime import runtime
from tests import cases, tiny_pair


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of --json -, without the summary."""
        return [json.loads(line) for line in self.stdout.splitlines()][:-1]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.stdout.splitlines()[-1])["summary"]


Run = Callable[..., Outcome]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the target, the drafter, and some that do not fit."""
    path = tmp_path_factory.mktemp("checkpoints")
    tiny_pair.write_target(path / "target")
    tiny_pair.write_target(path / "mute", tokenizer=False)
    tiny_pair.write_drafter(path / "drafter")
    tiny_pair.write_drafter(path / "narrow", hidden_size=16)
    tiny_pair.write_assistant(path / "assistant")
    tiny_pair.write_assistant(path / "other", backbone_hidden_size=48, num_kv_heads=2)
    (path / "empty").mkdir()
    return path


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> Run:
    """Run a command in this process, in the directory of the checkpoints."""
    # Where it is set, the command leaves JAX's own settings alone, which all tests share.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(checkpoints / "compiled"))
    monkeypatch.chdir(checkpoints)
    # Commands run in a process each, which has its own programs; here they share them.
    monkeypatch.setattr(runtime, "Programs", lambda: cases.PROGRAMS)

    def run(*args: str, stdin: bytes | None = None) -> Outcome:
        result = CliRunner().invoke(app, list(args), input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def generate(invoke: Run) -> Run:
    """Run `jaxspec generate` on the tiny pair; small enough numbers that one set of programs does."""

    def run(*args: str, stdin: bytes | None = None) -> Outcome:
        defaults = {
            "--target": "target",
            "--drafter": "drafter",
            "--max-new-tokens": "12",
            "--cache-length": "64",
            "--batch-size": "1",
        }
        arguments = [
            x for name, value in defaults.items() if name not in args for x in (name, value)
        ]
        return invoke("generate", *arguments, *args, stdin=stdin)

    return run


@contextlib.contextmanager
def two_processes(
    checkpoints: Path, command: Sequence[str], *args: Sequence[str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a command with `--distributed` twice, each with its own arguments, as Open MPI's `mpirun` does.

    To a file: on CPUs the library that the processes talk through has a line of its own for standard output.
    """
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
        "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "JAX_COORDINATOR_PORT": str(port),
    }
    with contextlib.ExitStack() as stack:
        pair = []
        for rank, own in enumerate(args):
            of_rank = {
                name: str(rank) for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxspec", *command, "--distributed", *own],
                cwd=checkpoints,
                env=os.environ | environment | of_rank,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            pair.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield pair
