"""Rows stay: what a run has finished is in its file, whatever ends it, and the same command goes on from there."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxspec.commands.generate import run as generation
from jaxspec.commands.generate.rows import RowsFile, fingerprint, open_rows
from jaxspec.commands.output import OutputError
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion
from tests import tiny_pair
from tests.commands.conftest import Outcome, Run

ROOT = Path(__file__).parents[2]
CACHE = "JAX_COMPILATION_CACHE_DIR"
KEPT_PROGRAMS = {CACHE: os.environ[CACHE]} if CACHE in os.environ else {}
"""Where this run keeps compiled programs; the fixtures set another place."""
TEXTS = ("a", "b", "c", "a b", "the")


NON_FINITE = 9  # a prompt that ends with this token comes to nothing while it is decoded


class Broken(Exception):
    """What ends a run in these tests."""


class FakeEngine(Engine):
    """Finishes every second prompt first, and counts what it is asked; it breaks off after `limit` rows."""

    limit = 10**6
    asked = 0

    def run(self, requests: Any) -> Iterator[Completion]:
        for count, request in enumerate([*requests[1::2], *requests[::2]]):
            if count == FakeEngine.limit:
                raise Broken
            FakeEngine.asked += 1
            error = self.check(request)
            if error is not None:
                yield Completion(request.id, error=str(error))
                continue
            if request.prompt_ids[-1] == NON_FINITE:
                yield Completion(request.id, (264,), error="the logits are not finite")
                continue
            tokens = (263 + request.prompt_ids[-1] % 5, 264)
            yield Completion(request.id, tokens, "length", (1, 1))


@pytest.fixture
def fake(generate: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `generate` with the fake engine."""
    monkeypatch.setattr(generation, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "limit", 10**6)

    def run(*args: str, stdin: bytes | None = None, limit: int = 10**6) -> Outcome:
        FakeEngine.limit, FakeEngine.asked = limit, 0
        return generate(*args, stdin=stdin)

    return run


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def broken_off(fake: Run, out: Path, rows: int, *args: str) -> None:
    with pytest.raises(Broken):
        fake(*args, "--json", str(out), limit=rows)


# --- going on ----------------------------------------------------------------------------------------


def test_rows_are_there_as_they_finish_and_the_same_command_goes_on(
    fake: Run, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    fake(*TEXTS, "--json", str(whole))
    broken_off(fake, out, 3, *TEXTS)
    assert [row["index"] for row in lines_of(out)] == [1, 3, 0]
    done = fake(*TEXTS, "--json", str(out))
    assert done.code == 0
    assert FakeEngine.asked == 2
    assert "3 of 5 rows are in" in done.stderr
    *rows, last = lines_of(out)
    *expected, summary = lines_of(whole)
    assert rows == expected
    counts = ("prompts", "prompt_tokens", "new_tokens", "verify_steps", "acceptance_length")
    assert [last["summary"][name] for name in counts] == [
        summary["summary"][name] for name in counts
    ]
    assert (last["summary"]["taken_over"], last["summary"]["decode_tokens"]) == (3, 0)
    assert sorted(tmp_path.iterdir()) == [out, whole]


def test_a_finished_run_is_not_run_again(fake: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    fake(*TEXTS, "", "--json", str(out))
    written = out.read_bytes()
    done = fake(*TEXTS, "", "--json", str(out))
    assert done.code == 1  # one prompt is empty, still
    assert FakeEngine.asked == 0
    assert "6 of 6 rows are in" in done.stderr
    assert out.read_bytes() == written


def test_more_prompts_at_the_end_are_done_and_the_others_kept(fake: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    fake(*TEXTS, "--json", str(out))
    done = fake(*TEXTS, "ab", "--json", str(out))
    assert FakeEngine.asked == 1
    assert done.code == 0
    assert [row.get("index") for row in lines_of(out)] == [0, 1, 2, 3, 4, 5, None]


def test_rows_with_an_error_are_done_again(fake: Run, tmp_path: Path) -> None:
    """The cache was too short for one prompt; it is not the second time."""
    out = tmp_path / "out.jsonl"
    texts = ("a", "a" * 60, "b")
    assert fake(*texts, "--json", str(out)).code == 1
    assert "error" in lines_of(out)[1]
    done = fake(*texts, "--json", str(out), "--cache-length", "128")
    assert (done.code, FakeEngine.asked) == (0, 1)
    assert ["error" in row for row in lines_of(out)] == [False] * 4
    assert lines_of(out)[-1]["summary"]["errors"] == 0


def test_an_error_while_decoding_is_a_row_and_an_exit_code(fake: Run, tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{{"prompt": [2, {NON_FINITE}], "id": "x"}}\n')
    for _ in range(2):
        done = fake("--prompts", str(file), "--json", str(out))
        assert done.code == 1
        assert f"error: {file}:2: the logits are not finite" in done.stderr
        _, failed, last = lines_of(out)
        assert (failed["id"], failed["finish_reason"]) == ("x", "error")
        assert (failed["error"], failed["token_ids"]) == ("the logits are not finite", [264])
        assert (last["summary"]["errors"], last["summary"]["new_tokens"]) == (1, 2)
    assert FakeEngine.asked == 1  # it may come to something the second time


@pytest.mark.parametrize("cut", [1, 8, 30, 150])
def test_a_line_that_was_cut_short_is_done_again(fake: Run, tmp_path: Path, cut: int) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    fake(*TEXTS, "--json", str(whole))
    broken_off(fake, out, 3, *TEXTS)
    content = out.read_bytes()
    end = content.rfind(b"\n", 0, -1) + 1
    out.write_bytes(content[: end + cut])
    done = fake(*TEXTS, "--json", str(out))
    assert FakeEngine.asked == 3
    assert "was cut short; that row is done again" in done.stderr
    assert lines_of(out)[:-1] == lines_of(whole)[:-1]


def test_samples_are_taken_over_one_by_one(fake: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    two = ("--num-samples", "2", "--temperature", "1")
    broken_off(fake, out, 3, *TEXTS, *two)
    fake(*TEXTS, *two, "--json", str(out))
    assert FakeEngine.asked == 7
    keys = [(row["index"], row["sample"]) for row in lines_of(out)[:-1]]
    assert keys == list(itertools.product(range(5), range(2)))


def test_streams_have_the_order_of_the_prompts(fake: Run, tmp_path: Path) -> None:
    assert [row["index"] for row in fake(*TEXTS, "--json", "-").rows] == [0, 1, 2, 3, 4]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    assert fake(*TEXTS, "--json", str(pipe)).code == 0
    read = os.read(reader, 100_000).decode()
    os.close(reader)
    assert [json.loads(line).get("index") for line in read.splitlines()] == [0, 1, 2, 3, 4, None]


def test_ctrl_c_says_that_the_rows_stay(
    fake: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Broken", KeyboardInterrupt)
    out = tmp_path / "out.jsonl"
    done = fake(*TEXTS, "--json", str(out), limit=2)
    assert done.code == 130
    assert f"{out} keeps what is done, and the same command goes on from there" in done.stderr
    assert [row["index"] for row in lines_of(out)] == [1, 3]
    assert "keeps" not in fake(*TEXTS, "--json", "-", limit=2).stderr


# --- what is not ours --------------------------------------------------------------------------------

CHANGES = [
    ("--seed", "1"),
    ("--max-new-tokens", "11"),
    ("--temperature", "1"),
    ("--stop", "a"),
    ("--stop-id", "7"),
    ("--ignore-eos",),
    ("--num-draft-tokens", "2"),
    ("--drafter", "none"),
    ("--num-samples", "2"),
    ("--target", "mute", "--prompt-ids", "2,263"),
]


@pytest.mark.parametrize("change", CHANGES, ids=" ".join)
def test_rows_of_other_options_are_refused(
    fake: Run, tmp_path: Path, change: tuple[str, ...]
) -> None:
    out = tmp_path / "out.jsonl"
    fake("--prompt-ids", "2,263", "--json", str(out))
    written = out.read_bytes()
    done = fake(
        *(change if "--prompt-ids" in change else ("--prompt-ids", "2,263", *change)),
        "--json",
        str(out),
    )
    assert done.code == 2
    assert "1 of its 1 rows belong to other prompts, models or options" in done.stderr
    assert "add --overwrite" in done.stderr
    assert out.read_bytes() == written


def test_what_only_rounds_otherwise_may_change(fake: Run, tmp_path: Path) -> None:
    """A run that was too large for the memory goes on with a smaller batch."""
    out = tmp_path / "out.jsonl"
    broken_off(fake, out, 3, *TEXTS, "--batch-size", "4")
    assert fake(*TEXTS, "--json", str(out), "--batch-size", "1", "--cache-length", "80").code == 0
    assert FakeEngine.asked == 2


@pytest.mark.parametrize(
    "content",
    [
        "older",
        "my notes\n",
        '{"prompt": "a"}\n',
        '{"index": 0, "label": "mine"}',
        '{"index": 0, "label": "mine"}\n',
        '{"summary": {}}\n{"more": 1}\n',
        "[" * 5000,
        "\0\xff\n",
    ],
)
def test_a_file_of_the_users_is_never_lost(fake: Run, tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(content.encode("latin-1"))
    done = fake("a", "--json", str(out))
    assert (done.code, FakeEngine.asked) == (2, 0)
    assert "is no row of this command's; name another file, or add --overwrite" in done.stderr
    assert out.read_bytes() == content.encode("latin-1")
    assert fake("a", "--json", str(out), "--overwrite").code == 0
    assert [next(iter(row)) for row in lines_of(out)] == ["index", "summary"]


def test_overwriting_loses_nothing_before_the_first_row(fake: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("older")
    assert fake("", "--json", str(out), "--overwrite").code == 2  # no prompt can be decoded
    assert out.read_text() == "older"
    assert "--overwrite needs --json PATH" in fake("a", "--overwrite").stderr


def test_results_never_go_where_prompts_are(fake: Run, tmp_path: Path) -> None:
    prompts, link, hard = (tmp_path / name for name in ("prompts.jsonl", "link", "hard"))
    prompts.write_text('{"prompt": "a"}\n')
    link.symlink_to(prompts)
    hard.hardlink_to(prompts)
    for out in (prompts, link, hard, tmp_path / "." / ".." / tmp_path.name / "prompts.jsonl"):
        for more in ((), ("--overwrite",)):
            done = fake("--prompts", str(prompts), "--json", str(out), *more)
            assert done.code == 2
            assert "is the file of --prompts, which would be lost" in done.stderr
    assert prompts.read_text() == '{"prompt": "a"}\n'


def test_results_never_go_to_the_file_on_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("def f(")
    command = [sys.executable, "-m", "jaxspec", "generate", "--json", str(file), "--overwrite"]
    with file.open() as stdin:
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "is the file of standard input" in " ".join(done.stderr.split())
    assert file.read_text() == "def f("


def test_a_second_run_does_not_write_between(tmp_path: Path) -> None:
    out = str(tmp_path / "out.jsonl")
    with open_rows(out), pytest.raises(OutputError, match="another run writes"), open_rows(out):
        pass
    assert list(tmp_path.iterdir()) == []


# --- models ------------------------------------------------------------------------------------------


def test_a_model_is_known_by_its_files_and_not_by_its_place(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        tiny_pair.write_drafter(path)
    assert fingerprint(first) == fingerprint(second)
    (second / "notes.json").write_text("{}")  # a trainer's
    assert fingerprint(first) == fingerprint(second)
    weights = max((f for f in (second / "params").rglob("*") if f.is_file()), key=os.path.getsize)
    content = bytearray(weights.read_bytes())
    content[0] ^= 1
    weights.write_bytes(content)
    assert fingerprint(first) != fingerprint(second)


@pytest.mark.parametrize("name", ["model.safetensors", "gemma-q4_0.gguf"])
def test_training_changes_a_large_file_that_is_read_in_pieces(name: str, tmp_path: Path) -> None:
    file, noise = tmp_path / name, random.Random(0)
    file.write_bytes(noise.randbytes(1_000_000))
    before = fingerprint(tmp_path)
    file.write_bytes(noise.randbytes(1_000_000))
    assert fingerprint(tmp_path) != before


# --- full disks --------------------------------------------------------------------------------------


def rows_file(path: Path) -> RowsFile:
    return RowsFile(path, path.name, overwrite=False)


def row(index: int, text: str = "") -> dict[str, Any]:
    return {
        "index": index,
        "digest": f"{index:x}",
        "prompt_ids": [2],
        "token_ids": [5],
        "acceptance_lengths": [1],
        "text": text,
    }


def digests(rows: list[dict[str, Any]]) -> Mapping[Any, str]:
    return {(r["index"], None): r["digest"] for r in rows}


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files end at 2,000 bytes: the kernel refuses the rest of a write, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_somebody_removes_is_said_and_no_row_is_written_into_nothing(
    tmp_path: Path,
) -> None:
    for begin in ([], [row(0)]):
        out = rows_file(tmp_path / "out")
        for values in begin:
            out.write(values)
        (tmp_path / "out").unlink()
        with pytest.raises(OutputError, match="out was removed or replaced while this run wrote"):
            out.write(row(1))
        with pytest.raises(OutputError, match="out was removed or replaced"):
            out.finish({"summary": {}})
        (tmp_path / "out").touch()  # of another run
        out.close()
        assert (tmp_path / "out").exists()
        (tmp_path / "out").unlink()


def test_a_file_that_another_run_puts_away_meanwhile_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one ends between this one's opening and its lock."""
    lock, ends = RowsFile._lock, [(tmp_path / "out").unlink]

    def lock_late(self: RowsFile, file: Any) -> None:
        if ends:
            ends.pop()()
        lock(self, file)

    monkeypatch.setattr(RowsFile, "_lock", lock_late)
    out = rows_file(tmp_path / "out")
    out.write(row(0))
    out.close()
    assert not ends
    assert lines_of(tmp_path / "out") == [row(0)]


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_keeps_whole_rows(tmp_path: Path) -> None:
    rows = [row(i, "x" * 500) for i in range(9)]
    out = rows_file(tmp_path / "out")
    out.take_over(digests(rows))
    for values in rows[:3]:
        out.write(values)
    with pytest.raises(OutputError, match=r"cannot write out: .*; the rows before it are there"):
        out.write(rows[3])
    out.close()
    assert lines_of(tmp_path / "out") == rows[:3]


@pytest.mark.usefixtures("small_disk")
def test_a_disk_that_is_full_at_the_end_keeps_rows_as_they_finished(tmp_path: Path) -> None:
    rows = [row(i, "x" * 500) for i in (2, 0, 1)]
    out = rows_file(tmp_path / "out")
    for values in rows:
        out.write(values)
    with pytest.raises(OutputError, match="in the order in which they finished"):
        out.finish({"summary": {"more": "x" * 500}})
    out.close()
    assert lines_of(tmp_path / "out") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    again = rows_file(tmp_path / "out")
    assert list(again.read()) == rows
    assert len(again.take_over(digests(rows))) == 3
    again.finish({"summary": {}})
    again.close()
    assert lines_of(tmp_path / "out") == [*sorted(rows, key=lambda r: r["index"]), {"summary": {}}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said(fake: Run) -> None:
    done = fake("a", "--json", "/dev/full")
    assert done.code == 2
    assert "error: cannot write /dev/full: No space left on device" in done.stderr


# --- kills -------------------------------------------------------------------------------------------


def write_prompts(path: Path, count: int, limit: int) -> None:
    """Write prompts with limits of their own, so that they do not finish in order."""
    lines = [
        {"prompt": "ab " * (i % 5) + "a", "max_new_tokens": 1 + i * 7 % limit} for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def killed(
    out: Path, args: list[str], kill: signal.Signals, rows: int, *, after_s: float = 0
) -> int:
    """Start the command in a process of its own, and kill it once so many rows are there; return its code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxspec", "generate", *args, "--json", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **KEPT_PROGRAMS},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 120
        while not out.exists() or out.read_bytes().count(b"\n") < rows:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.002)
        time.sleep(after_s)
        process.send_signal(kill)
        process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode


def test_a_killed_run_is_gone_on_with(generate: Run, tmp_path: Path) -> None:
    """`kill -9` in the middle, and the rest in another process: the rows are those of one run."""
    prompts, out, whole = (tmp_path / name for name in ("prompts.jsonl", "out", "whole"))
    write_prompts(prompts, 100, 30)  # half a second of work after the fourth
    args = ["--prompts", str(prompts), "--temperature", "1"]
    sizes = ["--batch-size", "1", "--cache-length", "64", "--max-new-tokens", "12"]
    models = ["--target", "target", "--drafter", "drafter"]
    assert killed(out, [*args, *models, *sizes], signal.SIGKILL, 4) == -signal.SIGKILL
    kept = out.read_bytes().count(b"\n")
    assert 4 <= kept < 100
    assert generate(*args, "--json", str(whole)).code == 0
    assert generate(*args, "--json", str(out)).code == 0
    *rows, last = lines_of(out)
    assert rows == lines_of(whole)[:-1]
    assert last["summary"]["taken_over"] == kept


@pytest.mark.slow  # eight processes with the bundled pair
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_again_and_again(kill: signal.Signals, tmp_path: Path) -> None:
    prompts, out, whole = (tmp_path / name for name in ("prompts.jsonl", "out", "whole"))
    write_prompts(prompts, 200, 60)
    args = ["--prompts", str(prompts), "--temperature", "1", "--num-draft-tokens", "3"]
    noise, kept = random.Random(kill), 0
    for _ in range(3):
        killed(out, args, kill, kept + 20, after_s=noise.random() / 2)
        kept = out.read_bytes().count(b"\n")
        assert all(json.loads(line) for line in out.read_bytes().splitlines()[:kept])
    assert kept < 200
    for path in (out, whole):
        command = [sys.executable, "-m", "jaxspec", "generate", *args, "--json", str(path)]
        subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    assert lines_of(out)[:-1] == lines_of(whole)[:-1]
    assert lines_of(out)[-1]["summary"]["taken_over"] == kept
