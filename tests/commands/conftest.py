"""The tiny pair on disk, and a way to run commands on it."""

from __future__ import annotations

import json
from collections.abc import Callable
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
