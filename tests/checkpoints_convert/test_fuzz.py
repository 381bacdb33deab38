"""Damaged files of users: every one is refused in words, or read as what it says. Counts are reproducible.

The slow tests are the measure: 1,000 configs, and 500 each of safetensors files, images, files of prompts and
conversations with images. The default suite runs the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.fuzzing import configs, headers, images, jsonl, messages
from tests.tools.fuzzing.outcomes import GOOD, Case, Outcome, table

Fuzz = Callable[[Path, int], Iterator[Case]]
KINDS: dict[str, tuple[Fuzz, int, int]] = {  # how many in the slow tests, and in the default suite
    "configs": (configs.fuzz, 1000, 60),
    "headers": (headers.fuzz, 500, 40),
    "images": (images.fuzz, 500, 100),
    "jsonl": (jsonl.fuzz, 500, 60),
    "messages": (messages.fuzz, 500, 100),
}


def _assert_good(cases: list[Case]) -> None:
    faults = [str(case) for case in cases if case.outcome not in GOOD]
    assert not faults, f"{table(cases)}\n" + "\n".join(faults)
    assert {case.outcome for case in cases} == {Outcome.REFUSED, Outcome.RIGHT}, table(cases)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_files(kind: str, tmp_path: Path):
    if kind in ("images", "messages"):
        pytest.importorskip("PIL", reason="images need Pillow")
    fuzz, _, count = KINDS[kind]
    _assert_good(list(fuzz(tmp_path, count)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_file(kind: str, tmp_path: Path):
    fuzz, count, _ = KINDS[kind]
    cases = list(fuzz(tmp_path, count))
    print(f"{kind}: {len(cases)} files, {table(cases)}")
    assert len(cases) == count
    _assert_good(cases)


def test_the_fuzzer_finds_faults():
    """A reader that lets everything through, or stumbles, or says nothing of use, is caught."""
    from tests.tools.fuzzing.outcomes import Fault, judge

    def fault() -> None:
        raise Fault(Outcome.MISREAD, "other numbers")

    def vague() -> None:
        raise ValueError("malformed")

    def clean() -> None:
        raise ValueError("a/config.json: hidden_size is -1")

    def stumbles() -> None:
        [][1]

    expected = {
        fault: Outcome.MISREAD,
        vague: Outcome.VAGUE,
        clean: Outcome.REFUSED,
        stumbles: Outcome.TRACEBACK,
        int: Outcome.RIGHT,
    }
    for run, outcome in expected.items():
        case = judge(
            "x", run, documented=(ValueError,), names=["hidden_size"], places=["config.json"]
        )
        assert case.outcome == outcome
