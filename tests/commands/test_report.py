"""The numbers and bars of a run's summary, and where its lines go."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxspec.commands import output, progress
from jaxspec.commands.generate import report
from jaxspec.options import Drafting, Sampling


def test_acceptance_by_position_counts_the_steps_that_got_that_far() -> None:
    # A step of 1 token accepted no draft; one of 4 accepted all three.
    assert report.acceptance_by_position(Counter([1, 4, 2, 4]), 3) == (0.75, 0.5, 0.5)
    assert report.acceptance_by_position(Counter(), 3) == ()
    assert report.acceptance_by_position(Counter([1, 1]), 0) == ()


def test_bars_have_one_width() -> None:
    bars = [report._bar(n / 100) for n in range(101)]
    assert {len(bar) for bar in bars} == {report._BAR_WIDTH}
    assert (set(bars[0]), set(bars[100])) == ({"·"}, {"█"})


def test_the_bar_of_many_prompts_steps_aside_for_results() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    progress = report.RunProgress(console, {0: 10, 1: 10})
    progress.update(0, 1)
    with progress.hidden():
        assert "compiling" in screen.getvalue()
        hidden = len(screen.getvalue())
    progress.update(1, 3, finished=True)
    progress.close()
    assert "1/2 prompts" in screen.getvalue()[hidden:]
    assert "4 tokens" in screen.getvalue()[hidden:]


def test_lines_go_through_a_pipe_that_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    with output.json_lines(str(pipe)) as lines:
        output.write_line(lines, {"text": "é"})
    assert os.read(reader, 100) == '{"text": "é"}\n'.encode()
    os.close(reader)
    assert pipe.is_fifo()


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    with output.json_lines(str(link)) as lines:
        output.write_line(lines, {})
        assert not (tmp_path / "file").exists()
    assert link.is_symlink()
    assert (tmp_path / "file").read_text() == "{}\n"


def test_a_failed_run_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("older")

    def interrupted_run() -> None:
        with output.json_lines(str(path)) as lines:
            output.write_line(lines, {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_are_not_finite_are_strings() -> None:
    """JSON has none, and a bare NaN breaks its readers. `float` reads the strings."""
    values = {"a": [math.nan, (1.5, -math.inf)], "b": {"c": math.inf}}
    text = output.as_json(values)
    assert text == '{"a": ["NaN", [1.5, "-Infinity"]], "b": {"c": "Infinity"}}'
    assert math.isnan(float(json.loads(text)["a"][0]))


def test_half_a_character_is_written_as_an_escape() -> None:
    """A prompt may hold one, as an escape in JSON. UTF-8 cannot, and the whole run used to end there."""
    assert json.loads(output.as_json({"a": "é\ud800"}).encode()) == {"a": "é\ud800"}
    assert output.as_json({"a": "é"}) == '{"a": "é"}'


def test_a_run_without_a_terminal_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "Ticker", functools.partial(progress.Ticker, every_s=0))
    screen = io.StringIO()
    shown = report.RunProgress(Console(file=screen, width=100), {"a": 10, "b": 10})
    shown.update("a", 1)
    shown.update("a", 4, finished=True)
    shown.close()
    assert screen.getvalue() == "0/2 prompts, compiling\n1/2 prompts, 4 tokens\n"


def described(**changes: Any) -> str:
    """Return the table of a run with the figures of the bundled pair at batch 8 on a CPU, and changes."""
    values: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(report.Summary)}
    values |= dict.fromkeys(("target", "drafter", "dtype", "platform", "device"), "some")
    values |= dict(drafting=Drafting(), sampling=Sampling(), mesh={}, versions={}, ban_tokens=())
    values |= dict(acceptance_length=None, acceptance_by_position=(), steps_by_length={})
    values |= dict(decode_tokens_per_s=1631.0, plain_tokens_per_s=3560.0, plain_measured_s=1.2)
    values |= dict(num_draft_tokens=7, choose_length="exact", batch_size=8, drafter_dtype="float32")
    screen = io.StringIO()
    summary = report.Summary(**{**values, **changes})
    Console(file=screen, width=120).print(report.summary_table(summary))
    return re.sub(r"\s+", " ", screen.getvalue())


def test_a_drafter_that_loses_is_said_with_what_helps() -> None:
    text = described()
    assert "1,631.0 tok/s decoding" in text
    assert "3,560.0 tok/s without the drafter" in text
    assert (
        "speculation loses here: add --drafter none; fewer --num-draft-tokens or a smaller --batch-size may "
        "help, too" in text
    )
    assert "or a smaller" not in described(batch_size=1)
    assert "may help" not in described(batch_size=1, num_draft_tokens=1)


def test_a_quantised_drafter_is_told() -> None:
    assert "some + some · some on some" in described()
    assert "some + some (float32, head int4) · some" in described(
        drafter_dtype="float32, head int4"
    )


def test_a_drafter_that_wins_or_draws_is_not_blamed() -> None:
    assert "loses" not in described(plain_tokens_per_s=900.0)
    assert "loses" not in described(
        plain_tokens_per_s=1650.0
    )  # within what such a measurement is wrong
    assert "without the drafter" not in described(plain_tokens_per_s=None)
