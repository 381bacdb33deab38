"""The numbers and bars of a run's summary, and where its lines go."""

from __future__ import annotations

import functools
import io
import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from jaxspec.commands import output, progress
from jaxspec.commands.generate import report


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
    with progress.aside():
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
