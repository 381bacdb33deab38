"""The tables of the pages on speed: pages say what the data say, and a run fills what is missing."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scripts.tables import __main__ as command
from scripts.tables import data, pages, runner
from scripts.tables.cases import CASES, Case
from scripts.tables.runner import Job, Machine

CARD = "NVIDIA A1"
HERE = Machine(CARD, "gpu", "0.1.0 (abc)", "0.11.2")
STEPS = [case for case in CASES if case.table == "steps" and case.row == "31B plain"]
DAY = "2026-11-27"  # of every cell: a run that began before midnight may end after it


def cell(case: Case, machine: Machine = HERE, **values: Any) -> data.Cell:
    about = machine.card, machine.version, machine.jax, DAY, case.line
    return data.Cell(case.table, case.row, case.column, *about, values)


def test_pages_show_what_the_data_say() -> None:
    for page in pages.PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(pages.MARKED.findall(text)) >= 2
        assert pages.updated(text) == text, f"{page}: python -m scripts.tables write"


def test_kept_cells_have_their_place_in_some_table() -> None:
    places = {(case.table, case.row, case.column) for case in CASES}
    for file in data.DATA.glob("*.json"):
        cells = data.read(file)
        assert cells.keys() <= places, file
        assert {data.file_of(c.card) for c in cells.values()} == {file.name}
        assert all(pages.in_words(c.date) and c.values for c in cells.values())
    assert sum(f.stat().st_size for f in data.DATA.iterdir()) < 300_000


def test_each_place_has_one_case_and_each_table_is_shown() -> None:
    places = [(case.table, case.row, case.column) for case in CASES]
    assert len(places) == len(set(places))
    of = {table.of for table in pages.TABLES.values()}
    assert of == {case.table for case in CASES}
    for table in pages.TABLES.values():
        columns = {case.column for case in CASES if case.table == table.of}
        assert columns == {column for _, column, _ in table.columns}
    text = "".join(page.read_text(encoding="utf-8") for page in pages.PAGES)
    assert {match["name"] for match in pages.MARKED.finditer(text)} == set(pages.TABLES)


def test_a_job_measures_cells_of_one_command() -> None:
    job, *others = runner.jobs_of(STEPS)
    assert not others
    assert job.line.endswith("--batch-size 1 --batch-size 8 --batch-size 32")
    assert STEPS[1].line.endswith("--steps-only --batch-size 8")
    start, each = STEPS[0].seconds
    assert job.within(job.seconds) == job
    assert job.within(start + 2 * each) == Job(tuple(STEPS[:2]))
    assert job.within(start) is None
    (stream,) = runner.jobs_of(c for c in CASES if c.table == "arrivals")
    assert stream.within(stream.seconds - 1) is None
    assert stream.within(stream.seconds) == stream


def reports_of(job: Job, gpus: str | None, seconds: float) -> list[dict[str, Any]]:
    """Return what `jaxspec bench` reports of the batch sizes, each with its own figures."""
    spread = lambda x: dict(median=x, min=x, max=x)  # noqa: E731
    results = [
        dict(
            batch_size=batch,
            mode="plain",
            step_ms=spread(10.0 + batch),
            tokens_per_s=spread(100.0 * batch),
            ttft_ms=None,
            floor_ms=9.87654,
            acceptance_length=None,
        )
        for batch in job.batches
        if batch is not None
    ]
    return [dict(results=results, ceiling=dict(bytes_per_s=4.3e12, flops_per_s=7.5e14))]


def test_a_run_fills_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And again what an older version measured. A second run has nothing to do."""
    ran = []

    def measure(job: Job, *args: Any) -> list[dict[str, Any]]:
        ran.append(job.batches)
        return reports_of(job, *args)

    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(runner, "today", lambda: DAY)
    before = dataclasses.replace(HERE, version="0.1.0 (old)")
    kept = [cell(STEPS[0], step_ms=1.0), cell(STEPS[1], before, step_ms=1.0)]
    path = tmp_path / data.file_of(CARD)
    data.write(path, kept)
    new = runner.run(STEPS, HERE, folder=tmp_path)
    assert ran == [[8, 32]]
    assert [c.column for c in new] == ["batch 8", "batch 32"]
    cells = data.read(path)
    assert len(cells) == 3
    assert cells[new[0].place].values["step_ms"] == 18.0
    assert cells[new[0].place].values["floor_ms"] == 9.877
    assert runner.run(STEPS, HERE, folder=tmp_path) == []
    assert len(runner.run(STEPS, HERE, folder=tmp_path, again=True)) == 3
    table = pages.rendered("steps", CARD, data.read(path))
    assert "| 31B plain | 11.0 (9.88) | 18.0 (9.88) | 42.0 (9.88) |" in table
    assert f"{CARD}, jaxspec 0.1.0 (abc), jax 0.11.2, 27 November 2026. Not run: " in table
    assert capsys.readouterr().out.count(": ok") == 2


def test_a_run_ends_in_time_and_workers_take_what_suits_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places: list[tuple[str | None, int]] = []

    def measure(job: Job, gpus: str | None, seconds: float) -> list[dict[str, Any]]:
        places.append((gpus, job.cases[0].devices))
        assert job.seconds <= seconds
        if job.cases[0].devices == 2:
            raise TimeoutError("no end after 9 s")
        return reports_of(job, gpus, seconds)

    monkeypatch.setattr(runner, "measure", measure)
    cases = [c for c in CASES if c.table in ("steps", "devices") and c.row[:9] == "31B plain"]
    workers = ("0", "1", "2,3")
    assert runner.run(cases, HERE, folder=tmp_path, workers=workers, budget_s=10) == []
    assert not places
    new = runner.run(cases, HERE, folder=tmp_path, workers=workers, budget_s=200)
    assert {c.column for c in new} == {"batch 1", "batch 8", "batch 32", "1"}  # of two tables
    assert {gpus for gpus, devices in places if devices == 2} == {"2,3"}
    assert {gpus for gpus, devices in places if devices == 1} <= {"0", "1"}
    out = capsys.readouterr().out
    assert "no end after 9 s" in out
    assert "not run: jaxspec bench --random-weights 31b --drafter none --mesh model=4" in out


def test_what_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A command of several batch sizes runs once for each then."""

    def measure(job: Job, *args: Any) -> list[dict[str, Any]]:
        if 32 in job.batches:
            raise RuntimeError("error: 32 rows need 90 GiB, and the device has 70 GiB: 20 fits")
        return reports_of(job, *args)

    monkeypatch.setattr(runner, "measure", measure)
    runner.run(STEPS, HERE, folder=tmp_path)
    table = pages.rendered("steps", CARD, data.read(tmp_path / data.file_of(CARD)))
    assert "| 31B plain | 11.0 (9.88) | 18.0 (9.88) | does not fit |" in table


def test_cells_of_several_runs_are_told_apart() -> None:
    old = dataclasses.replace(HERE, version="0.1.0 (old)")
    cells = [cell(STEPS[0], step_ms=11.0), cell(STEPS[1], old, step_ms=12.0, floor_ms=8.0)]
    table = pages.rendered("steps", CARD, {c.place: c for c in cells})
    assert "| 31B plain | 11.0 | 12.0 (8.0) | | batch 1: 1, batch 8: 2 |" in table
    assert "Run 1: jaxspec 0.1.0 (abc), " in table
    assert "Empty cells were not run." in table
    assert table.count("--batch-size") == 2  # of the cells that are there
    assert pages.rendered("steps", CARD, {}) == f"Nothing of this was run on {CARD}."


def test_a_run_may_take_several_days() -> None:
    later = dataclasses.replace(cell(STEPS[1], step_ms=12.0), date="2026-11-30")
    cells = [cell(STEPS[0], step_ms=11.0), later]
    table = pages.rendered("steps", CARD, {c.place: c for c in cells})
    assert "| 31B plain | 11.0 | 12.0 | |" in table
    assert "jax 0.11.2, 27 November 2026 to 30 November 2026. " in table
    assert "Run" not in table


def test_the_share_of_one_device_is_of_the_same_run() -> None:
    one, two, four = (
        next(c for c in CASES if (c.table, c.row, c.column) == ("devices", "31B plain · 1", n))
        for n in "124"
    )
    old = dataclasses.replace(HERE, version="0.1.0 (old)")
    cells = [cell(one, step_ms=10.0), cell(two, step_ms=7.0), cell(four, old, step_ms=4.0)]
    table = pages.rendered("devices", CARD, {c.place: c for c in cells})
    assert "| 31B plain | 1 | 10.0 | 7.0 | 0.70 | 4.0 | |" in table


def test_files_are_merged_cell_by_cell(tmp_path: Path) -> None:
    first, second, third = STEPS
    older = dataclasses.replace(cell(third, step_ms=5.0), date="2026-01-01")
    data.write(tmp_path / "a.json", [cell(first, step_ms=3.0), older])
    data.write(tmp_path / "b.json", [cell(second, step_ms=4.0)])
    folder = tmp_path / "data"
    data.write(folder / data.file_of(CARD), [cell(first, step_ms=1.0), cell(third, step_ms=2.0)])
    taken = data.merge([tmp_path / "a.json", tmp_path / "b.json"], folder)
    assert [c.values["step_ms"] for c in taken] == [3.0, 4.0]
    cells = data.read(folder / data.file_of(CARD))
    assert [cells[cell(case).place].values["step_ms"] for case in STEPS] == [3.0, 4.0, 2.0]


def test_a_real_command_is_measured(tmp_path: Path) -> None:
    """And ended when its time is over."""
    words = "jaxspec bench --drafter none --prompt-length 8 --new-tokens 4 --repeats 1 --steps-only"
    case = Case("start-up", "", "1", words, 1, run=0, platform="cpu")
    job = Job((case,))
    (report,) = runner.measure(job, None, 120)
    values = runner.values_of(case, [report])
    assert values.keys() == {
        *("step_ms", "tokens_per_s", "ttft_ms", "floor_ms", "first_token_s", "load_s"),
    }
    assert report["results"][0]["verify_ms"] is None
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="no end after"):
        runner.measure(job, None, 1)
    assert time.monotonic() - begin < 10
    wrong = dataclasses.replace(case, command="jaxspec bench --drafter nobody")
    with pytest.raises(RuntimeError, match="nobody"):
        runner.measure(Job((wrong,)), None, 60)


def test_products_and_streams_are_kept() -> None:
    (product, *_) = (c for c in CASES if c.table == "products" and c.batch == 8)
    lines = [dict(rows=rows, us=1.23456 * rows, floor_us=1.0) for rows in (1, 8)]
    assert runner.values_of(product, lines) == {"us": 9.876, "floor_us": 1.0}
    (arrivals,) = (c for c in CASES if c.table == "arrivals")
    ends = dict(p50=1.0, p95=2.0, p99=3.0, max=4.0)
    report = dict.fromkeys(runner.STREAM, 7) | dict(ttft_ms=ends, tpot_ms=ends, floor_s=None)
    values = runner.values_of(arrivals, [report])
    assert values["ttft_ms"] == ends
    assert values["longest_pause_ms"] == 7
    assert "floor_s" not in values


def test_the_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = CliRunner().invoke(
        command.app, ["run", "--plan", "--only", "threads", "--platform", "cpu"]
    )
    assert plan.exit_code == 0, plan.output
    assert plan.output.count("jaxspec bench") == 2
    halves = [
        CliRunner().invoke(command.app, ["run", "--plan", "--platform", "cpu", "--part", part])
        for part in ("1/2", "2/2", "1/1")
    ]
    first, second, whole = (half.output.splitlines() for half in halves)
    assert sorted(first + second) == sorted(whole)
    for wrong in (["--only", "nothing"], ["--part", "3/2"]):
        assert CliRunner().invoke(command.app, ["run", *wrong]).exit_code == 2
    assert CliRunner().invoke(command.app, ["merge", str(tmp_path / "no.json")]).exit_code == 2
    assert json.loads((data.DATA / "lone-requests.jsonl").read_text().splitlines()[0])
