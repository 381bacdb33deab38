"""`jaxspec generate --json-schema FILE | --regex R | --lark FILE`: output that fits, and how it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from jaxspec.text.grammars import matcher
from tests.commands.conftest import Run

pytest.importorskip("llguidance")

SCHEMA = {"enum": [1, 22, ["a", True]]}
LARK = 'start: ("yes" | "no") "!"{1,2}'


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    (tmp_path / "unknown.json").write_text('{"uniqueItems": true, "type": "array"}', "utf-8")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "rule.lark").write_text(LARK, encoding="utf-8")
    (tmp_path / "broken.lark").write_text("start: nothing", encoding="utf-8")
    (tmp_path / "latin.lark").write_bytes(b'start: "\xe9"')
    return tmp_path


def test_output_is_what_was_asked_for(generate: Run, files: Path) -> None:
    """With the drafter, and of each sample. Another one asks for the same grammar, and shares its programs."""
    sampled = ("--temperature", "1", "--num-samples", "3", "--max-new-tokens", "56", "--json", "-")
    for option, wanted in (
        (("--json-schema", str(files / "schema.json")), None),
        (("--regex", "[0-9]{3}-[ab]+;"), "[0-9]{3}-[ab]+;"),
        (("--lark", str(files / "rule.lark")), "(yes|no)!{1,2}"),
    ):
        done = generate("a b", *option, *sampled)
        assert done.code == 0, done.stderr
        whole = [row["text"] for row in done.rows if row["finish_reason"] == "stop"]
        assert whole, done.rows
        for text in whole:
            if wanted is None:
                assert json.loads(text) in SCHEMA["enum"]
            else:
                assert re.fullmatch(wanted, text), text


@pytest.mark.parametrize(
    ("options", "say"),
    [
        (("--json-schema", "{}/broken.json"), "json-schema.*no valid JSON"),
        (("--json-schema", "{}/unknown.json"), "json-schema cannot be used.*uniqueItems"),
        (("--json-schema", "{}/list.json"), "json-schema is .1.; expected a JSON schema"),
        (("--json-schema", "{}/none.json"), "json-schema.*none.json"),
        (("--lark", "{}/none.lark"), "lark.*none.lark"),
        (("--lark", "{}/broken.lark"), "lark cannot be used.*unknown"),
        (("--lark", "{}/latin.lark"), "lark.*is not UTF-8 text.*utf-8"),
        (("--lark", "{}"), "lark.*directory"),
        (("--regex", "(["), "regex cannot be used.*unclosed"),
        (("--regex", ""), "regex.*not empty"),
        (
            ("--regex", "a", "--json-schema", "{}/schema.json"),
            "--json-schema and --regex: give one",
        ),
        (("--regex", "a", "--lark", "{}/rule.lark"), "--regex and --lark: give one"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused(
    generate: Run, files: Path, options: tuple[str, ...], say: str
) -> None:
    done = generate("a b", *(o.format(files) if "{}" in o else o for o in options))
    assert done.code == 2, done.stderr
    assert re.search(say, " ".join(done.stderr.split())), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_without_the_package_the_way_out_is_said(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    matcher._llguidance.cache_clear()
    try:
        done = generate("a b", "--regex", "a")
    finally:
        matcher._llguidance.cache_clear()
    assert done.code == 2
    said = " ".join(done.stderr.split())
    assert "pip install 'jaxspec-decoding[grammar]'" in said
    assert "Traceback" not in said
