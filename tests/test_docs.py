"""What the documentation shows is true: its code runs, its commands exist, its pictures and tables are up to date.

A page may say in a comment before a block of code what becomes of it here:

    <!-- run -->                shell commands that are run
    <!-- not run: REASON -->    code that is not run, and why

Python blocks without a comment are run, page by page and in order, as a reader would paste them. Shell blocks have one
of the two comments.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec.commands.cli import app
from jaxspec.options import Drafting, Sampling
from tests import short_pair

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND_LINE = "docs/command-line.md"

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
# Runs pages in one process, since starting JAX takes longer than a page. Calls of `load` that ask for the same pair
# get the same one, whose programs are then compiled once. The bundled pair is `short_pair` here: what it writes is
# not compared, and its programs compile in half the time. A file's own lines stand in tracebacks.
RUNNER = """
import functools, json, pathlib, sys, traceback
import jaxspec.api
jaxspec.api.BUNDLED = pathlib.Path("short").absolute()
jaxspec.load = functools.cache(jaxspec.load)
failed = {}
for page, blocks in json.load(open(sys.argv[1])).items():
    names = {"__name__": "__main__"}
    try:
        for line, code in blocks:
            exec(compile("\\n" * line + code, page, "exec"), names)
    except BaseException:
        failed[page] = traceback.format_exc()
json.dump(failed, open(sys.argv[2], "w"))
"""


# `python -m jaxspec` with that pair.
COMMAND = """
import pathlib, runpy
import jaxspec.api
jaxspec.api.BUNDLED = pathlib.Path(__file__).parent.parent / "short"
runpy.run_module("jaxspec", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int  # lines of the page above its code
    language: str
    code: str
    mark: str  # what the comment before it says

    @property
    def reason(self) -> str | None:
        """Why it is not run; None where it is."""
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else None


@functools.cache
def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            str(page.relative_to(ROOT)),
            text[: match.start("code")].count("\n"),
            match["language"],
            match["code"],
            match["mark"] or "",
        )
        for match in BLOCK.finditer(text)
    ]


def all_blocks(*languages: str) -> Iterator[Block]:
    return (b for page in PAGES for b in blocks(page) if b.language in languages)


def commands(code: str) -> Iterator[list[str]]:
    """Yield the words of every call of jaxspec in a shell block, from its command on."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for i, word in enumerate(words):
            if Path(word).name == "jaxspec" and (i == 0 or words[i - 1] in ("srun", "|", "&&")):
                yield words[i + 1 :]


@functools.cache
def options(command: str) -> set[str]:
    """Return the options that a command has, from its own help."""
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 0, f"jaxspec {command}: {result.output}"
    return set(re.findall(r"--[a-z][\w-]*", result.output))


def environment(folder: Path) -> dict[str, str]:
    """Return an environment with a `jaxspec` command that is this source tree's, with a short bundled pair."""
    shim = folder / "bin" / "jaxspec"
    if not shim.exists():
        shim.parent.mkdir()
        short_pair.write(folder / "short")
        (shim.parent / "command.py").write_text(COMMAND, encoding="utf-8")
    command = shlex.join([sys.executable, str(shim.parent / "command.py")])
    shim.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    shim.chmod(0o755)
    path = f"{shim.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def test_no_merge_is_left_unfinished():
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        assert not re.search(r"^(<{7} |={7}$|>{7} )", page.read_text(encoding="utf-8"), re.M), page


def test_every_block_says_what_becomes_of_it():
    for block in all_blocks("sh", "bash", "python"):
        where = f"{block.page}:{block.line}"
        assert block.language != "bash", f"{where}: call it sh"
        known = (
            block.mark == "run" or block.reason or (block.language == "python" and not block.mark)
        )
        assert known, f"{where}: needs <!-- run --> or <!-- not run: REASON -->, has {block.mark!r}"


def test_commands_have_the_options_that_are_shown():
    seen = 0
    for block in all_blocks("sh"):
        for words in commands(block.code):
            if not words or words[0].startswith("-"):
                continue
            flags = {word.split("=")[0] for word in words if word.startswith("--")}
            assert flags <= options(words[0]), f"{block.page}:{block.line}: {shlex.join(words)}"
            seen += 1
    assert seen >= 20


def test_pages_name_every_option_and_no_other():
    """Every `--option` in backquotes is one of some command's, and each of these is on a page."""
    known = {
        flag
        for name in ("generate", "serve", "eval", "check", "bench", "convert", "train-drafter")
        for flag in options(name)
    }
    known |= {"--version", "--help"}
    known |= {"--one-case"}  # of this suite
    of_all: set[str] = set()
    for page in PAGES:
        whole = page.read_text(encoding="utf-8")
        text = BLOCK.sub("", whole)
        named = {
            f for code in re.findall(r"`([^`]+)`", text) for f in re.findall(r"--[a-z][\w-]*", code)
        }
        assert named <= known, f"{page.name}: {sorted(named - known)}"
        of_all.update(re.findall(r"--[a-z][\w-]*", whole))
    assert known - of_all == set()


PYTHON_PAGES: dict[str, list[Block]] = {}
for _block in all_blocks("python"):
    if not _block.reason:
        PYTHON_PAGES.setdefault(_block.page, []).append(_block)
PARTS = 2  # one for each worker


@pytest.mark.parametrize("part", range(PARTS))
def test_python_blocks_run(part: int, tmp_path: Path):
    assert len(PYTHON_PAGES) >= 5
    longest_first = sorted(PYTHON_PAGES, key=lambda page: -len(PYTHON_PAGES[page]))
    pages = {
        str(ROOT / page): [(block.line, block.code) for block in PYTHON_PAGES[page]]
        for page in longest_first[part::PARTS]
    }
    (tmp_path / "run.py").write_text(RUNNER, encoding="utf-8")
    (tmp_path / "pages.json").write_text(json.dumps(pages), encoding="utf-8")
    process = subprocess.run(
        [sys.executable, "-W", "error", "run.py", "pages.json", "failed.json"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    failed = json.loads((tmp_path / "failed.json").read_text())
    assert not failed, "\n".join(failed.values())


SHELL_PAGES = sorted({b.page for b in all_blocks("sh") if b.mark == "run"})


@pytest.mark.parametrize("page", SHELL_PAGES)
def test_shell_blocks_run(page: str, tmp_path: Path):
    for block in blocks(ROOT / page):
        if block.language == "sh" and block.mark == "run":
            process = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.code],
                cwd=tmp_path,
                env=environment(tmp_path),
                capture_output=True,
                text=True,
            )
            assert process.returncode == 0, f"{page}:{block.line}\n{process.stderr[-4000:]}"
    if page == COMMAND_LINE:
        check_documented_keys(tmp_path / "out.jsonl")


def check_documented_keys(path: Path) -> None:
    """Hold the tables of keys against what `generate --json` wrote."""
    *lines, last = map(json.loads, path.read_text().splitlines())
    text = (ROOT / COMMAND_LINE).read_text(encoding="utf-8")
    of_line, of_summary = (
        set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", section, re.M))))
        for section in re.findall(r"^### (?:A line for|The summary).*?(?=^##)", text, re.M | re.S)
    )
    assert set(last["summary"]) == of_summary
    optional = {"sample", "error", "top_logprobs", "extra"}
    assert of_line - optional == set(lines[0])


def option_row(field: dataclasses.Field) -> str:
    """Return the row of the reference that says what a record's field is."""
    default = field.default_factory() if callable(field.default_factory) else field.default
    allowed = field.metadata["range"]
    cells = (f"`{field.name}`", f"`{default!r}`", field.metadata["help"], allowed and allowed.words)
    return f"| {' | '.join((cell or '').replace('|', '/') for cell in cells)} |\n"


@pytest.mark.parametrize("record", [Sampling, Drafting])
def test_every_option_has_its_row(record: type):
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    wanted = "".join(map(option_row, dataclasses.fields(record)))
    assert wanted in page, f"docs/reference/api.md should have these rows:\n{wanted}"


@pytest.fixture(scope="module")
def diagrams() -> Any:
    """Return the script that draws the pictures."""
    spec = importlib.util.spec_from_file_location("diagrams", ROOT / "docs" / "diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_picture_shows_a_real_run(diagrams: Any):
    pair = jaxspec.load()
    done = pair.generate(diagrams.PROMPT, max_new_tokens=64)
    assert tuple(pair.text_by_step(done)) == diagrams.TEXT_BY_STEP
    assert len(pair.plain().generate(diagrams.PROMPT, max_new_tokens=64).acceptance_lengths) == 63


def test_pictures_are_drawn_by_their_script(diagrams: Any):
    drawn = {f"{draw.__name__}.svg": draw().svg() for draw in diagrams.PICTURES}
    there = {f.name: f.read_text(encoding="utf-8") for f in (ROOT / "docs/images").glob("*.svg")}
    assert there == drawn, "python docs/diagrams.py draws them anew"


def test_the_map_of_the_code_names_what_there_is():
    text = (ROOT / "docs/extend/code.md").read_text(encoding="utf-8")
    defined = re.findall(r"`([\w/]+\.py)`: `(\w+)`", text)
    assert len(defined) >= 10
    for file, name in defined:
        code = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(async )?(def|class) {name}\b", code, re.M), f"{file}: {name}"
    packages = text.split("## Packages")[1].split("## ")[0]
    for cell in re.findall(r"^\| ([^|]+) \|", packages, re.M):
        for name in re.findall(r"`([\w/.]+)`", cell):
            assert (ROOT / name).exists() or (ROOT / "jaxspec" / name).exists(), name


def test_pages_have_the_titles_of_the_navigation():
    """A page has one title, in the navigation and at its head, and no two pages share one."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    entries = re.findall(r"^ +- (\"?)(.+)\1: (\S+\.md)$", navigation, re.M)
    titles = {path: title for _, title, path in entries if path != "index.md"}
    heads = {p: (ROOT / "docs" / p).read_text(encoding="utf-8").split("\n")[0] for p in titles}
    assert heads == {path: f"# {title}" for path, title in titles.items()}
    assert len(set(titles.values())) == len(titles)


def test_pages_are_in_the_navigation_and_pictures_on_pages():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs") for p in PAGES if (ROOT / "docs") in p.parents]
    assert [str(p) for p in pages if f": {p}\n" not in navigation] == []
    shown = " ".join(p.read_text(encoding="utf-8") for p in PAGES)
    assert [
        f.name for f in (ROOT / "docs/images").glob("*") if f"images/{f.name}" not in shown
    ] == []
