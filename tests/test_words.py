"""Words that no name has, words that no docstring begins with, and lines that fit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxspec", "pallas_kernels", "checkpoints_convert")
COLUMNS = 120

# Each has a word of the field in its place; `docs/extend/code.md` has the vocabulary.
BANNED = [
    "announced",
    "aside",
    "ask",
    "asked",
    "door",
    "extras",
    "few",
    "found",
    "given",
    "graph",
    "hear",
    "how",
    "judge",
    "most",
    "news",
    "room",
    "said",
    "say",
    "served",
    "some",
    "sound",
    "spoilt",
    "summed",
    "told",
    "verdict",
    "whose",
    "wish",
    "wishes",
    "written_aside",
]
# Names of before that work for one more release.
FORMER = {
    ("jaxspec/options.py", "say"),
    ("jaxspec/serving/open_engine.py", "told"),
    ("jaxspec/weights/loading.py", "graph"),
}
BEGINNINGS = ["How", "That", "Those", "What", "When", "Where", "Whether", "Which", "Who", "Whose"]


def files(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every Python file."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def names(node: ast.AST) -> list[str]:
    """Return the names that a node defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.arg():
            return [node.arg]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
        case ast.Attribute(ctx=ast.Store()):
            return [node.attr]
        case ast.alias(asname=str()):
            return [node.asname]
    return []


def test_no_name_is_a_banned_word():
    offenders = [
        f"{path}:{node.lineno}: {name}"  # type: ignore[attr-defined]
        for path, text in files(*PACKAGES)
        for node in ast.walk(ast.parse(text))
        for name in names(node)
        if name.strip("_").lower() in BANNED and (path, name) not in FORMER
    ]
    assert not offenders, "\n".join(offenders)


def test_docstrings_begin_with_a_verb_or_a_noun():
    offenders = [
        f"{path}:{getattr(node, 'lineno', 1)}: {first[1]} ..."
        for path, text in files(*PACKAGES)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (first := re.match(r"\W*(\w+)", ast.get_docstring(node) or ""))
        if first[1] in BEGINNINGS
    ]
    assert not offenders, "\n".join(offenders)


def test_lines_fit():
    offenders = [
        f"{path}:{number}: {len(line)} columns"
        for path, text in files(*PACKAGES, "tests", "scripts", "examples", "docs")
        for number, line in enumerate(text.splitlines(), 1)
        if len(re.sub(r"  # pyright: ignore\[\w+\]$", "", line)) > COLUMNS
    ]
    assert not offenders, "\n".join(offenders)
