"""Examples and the README's snippet run as written, on the bundled pair."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def run(path: Path, folder: Path) -> str:
    """Run a script somewhere else than here, with nothing but the package, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path):
    printed = run(path, tmp_path)
    expected = re.findall(r"^# prints: (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert expected, "an example says at its end what it prints"
    for pattern in expected:
        assert re.search(re.escape(pattern).replace(r"\.\.\.", ".+"), printed), printed


def test_examples_are_numbered_without_gaps():
    assert [path.stem[:2] for path in EXAMPLES] == [f"{i:02}" for i in range(1, len(EXAMPLES) + 1)]
    assert len(EXAMPLES) >= 3


def test_readme_snippet(tmp_path: Path):
    (snippet,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    script = tmp_path / "snippet.py"
    script.write_text(snippet, encoding="utf-8")
    assert run(script, tmp_path).strip()
