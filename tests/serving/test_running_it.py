"""Container file and systemd unit in examples/serve: their options and paths exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer.main

from jaxspec.commands.cli import app
from jaxspec.commands.serve.network_options import NetworkOptions
from jaxspec.serving.middleware import OPEN_PATHS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "serve"
DOCKERFILE = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
UNIT = (EXAMPLES / "jaxspec.service").read_text(encoding="utf-8")


def read(arguments: list[str]) -> dict[str, object]:
    """Return the parsed options of `jaxspec`; unknown options end the test."""
    assert arguments[0] == "serve"
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return serve.make_context("serve", arguments[1:]).params


def instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    parts = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in parts]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_the_container_copies_what_the_package_is_built_from() -> None:
    copied = {source for rest in of("COPY") for source in rest.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {p.rstrip("*") for p in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    named = {project["project"]["readme"], *project["project"]["license-files"]}
    assert copied == packages | named | {"pyproject.toml"}
    assert all((ROOT / path).exists() for path in copied)
    pip_extras = project["project"]["optional-dependencies"]
    asked = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    named = {extra for value in asked for extra in value.split(",")}
    assert named == {"serve", "grammar", "cuda"} <= set(pip_extras)


def test_the_container_s_command_is_one() -> None:
    (entry,) = of("ENTRYPOINT")
    command, *arguments = json.loads(entry)
    assert command == "jaxspec"
    options = read([*arguments, "/models/target", "--drafter", "/models/drafter"])
    assert (options["host"], str(options["port"])) == ("0.0.0.0", *of("EXPOSE"))
    (check,) = of("HEALTHCHECK")
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert url == (str(options["port"]), "/health")
    assert url[1] in OPEN_PATHS  # it has no key
    compile(json.loads(check[check.index("[") :])[2], "HEALTHCHECK", "exec")


def test_both_wait_for_a_server_that_drains() -> None:
    waits = [
        *re.findall(r"--stop-timeout (\d+)", DOCKERFILE),
        *re.findall(r"TimeoutStopSec=(\d+)", UNIT),
    ]
    assert len(waits) == 2
    assert all(int(wait) > NetworkOptions().drain_timeout for wait in waits)


def test_the_unit_s_command_is_one() -> None:
    (line,) = re.findall(r"^ExecStart=(.+)$", UNIT, re.M)
    path, *arguments = shlex.split(line)
    assert read(arguments)["host"] == "127.0.0.1"
    folder = path.removesuffix("/bin/jaxspec")
    assert f"python3 -m venv {folder}\n" in UNIT


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="this machine has no systemd-analyze"
)
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    """The unit is valid, except for the program's path: it is not installed here."""
    command = tmp_path / "jaxspec"
    command.touch(mode=0o755)
    unit = tmp_path / "jaxspec.service"
    unit.write_text(UNIT.replace("/opt/jaxspec/bin/jaxspec", str(command)))
    result = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("TimeoutStopSec", "TimeoutStopSeconds"))
    result = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True
    )
    assert "TimeoutStopSeconds" in result.stderr  # it would have said so
