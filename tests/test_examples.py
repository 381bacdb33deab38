"""Examples run as written, on the bundled pair or two layers of it. Blocks of the README and the docs: `test_docs`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import short_pair
from tests.conftest import XLA_FLAGS

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
# These compute more than they compile, so they run with the compiler's own options and not the tests'.
LONG = ("04_policy_gradient", "07_adapt_drafter", "08_moving_policy")
# And these compile more than they compute: their bundled pair has two layers.
SHORT = ("03_own_program", "05_evaluate")
RUNNER = """
import pathlib, runpy, sys
import jaxspec.api
jaxspec.api.BUNDLED = pathlib.Path("short").absolute()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(path: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a script somewhere else than here, with nothing but the package."""
    more = {"XLA_FLAGS": XLA_FLAGS} if path.stem in LONG else {}
    runner = ["-c", RUNNER] if (folder / "short").exists() else []
    return subprocess.Popen(
        [sys.executable, "-W", "error", *runner, str(path), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(path: Path, folder: Path, *arguments: str) -> str:
    """Run a script to its end and return what it printed."""
    process = start(path, folder, *arguments)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    return printed


def example(name: str) -> Path:
    (path,) = (path for path in EXAMPLES if path.stem[3:] == name)
    return path


# Most of a minute, or minutes. `test_docs` runs rollouts, their scores and gradients of a policy, and
# `rollout/test_images` embeddings of images that a program makes.
SLOW = ("04_policy_gradient", "06_images", "07_adapt_drafter", "08_moving_policy")


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow if p.stem in SLOW else ()) for p in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_example(path: Path, tmp_path: Path):
    if path.stem in SHORT:
        short_pair.write(tmp_path / "short")
    printed = run(path, tmp_path)
    expected = re.findall(r"^# prints: (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert expected, "an example says at its end what it prints"
    for pattern in expected:
        assert re.search(re.escape(pattern).replace(r"\.\.\.", ".+"), printed), printed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_policy_gradient_with_other_seeds(seed: int, tmp_path: Path):
    printed = run(example("policy_gradient"), tmp_path, str(seed))
    assert "better by three standard errors: True" in printed, printed
    assert "compilations after the first iteration: 0" in printed, printed


@pytest.mark.slow
def test_evaluation_resumes(tmp_path: Path):
    """Killed, and its last line cut in half, it goes on, and ends as if nothing had happened."""
    script, prompts = example("evaluate"), tmp_path / "prompts.jsonl"
    texts = ["def f(", "class A:\n", "import os\n", "for i in ", "if x:\n", "    return ", "raise "]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    results = tmp_path / "results.jsonl"
    with start(script, tmp_path, str(prompts), str(results)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0 of 7 prompts are done already\n"
        assert process.stdout.readline() == "6 of 7 done\n"
        process.kill()
    os.truncate(results, results.stat().st_size - 20)
    resumed = run(script, tmp_path, str(prompts), str(results))
    assert resumed.startswith(("5 of 7 prompts are done already\n", "6 of 7"))
    whole = run(script, tmp_path, str(prompts), str(tmp_path / "whole.jsonl"))
    assert results.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert resumed.splitlines()[-4:] == whole.splitlines()[-4:]

    prompts.write_text(json.dumps({"prompt": "another"}) + "\n")
    process = start(script, tmp_path, str(prompts), str(results))
    assert "has results of other prompts; name another file" in process.communicate()[1]


def test_examples_are_numbered_without_gaps():
    assert [path.stem[:2] for path in EXAMPLES] == [f"{i:02}" for i in range(1, len(EXAMPLES) + 1)]
    assert len(EXAMPLES) >= 5
