"""The tables as pages show them, between comments that name a table and a card.

    <!-- table: steps, NVIDIA H200 -->
    ...
    <!-- end of table -->

Read `TABLES` and `rendered`. Below each table stand the run that its cells are of, and the commands.
Cells of several runs are told apart by a column. A page is never edited between these comments.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.commands.bench.results import digits
from scripts.tables.cases import CASES, Case, shell_line
from scripts.tables.data import DATA, ROOT, Cell, Place, file_of, read

PAGES = tuple(ROOT / "docs" / name for name in ("benchmarks.md", "weight-format-speed.md"))
MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<name>[\w-]+), (?P<card>[^>]+) -->\n).*?(?P<end><!-- end of table -->)",
    re.S,
)
Cells = Mapping[Place, Cell]
Values = Mapping[str, Any]
Show = Callable[[Values], str]


@dataclass(frozen=True)
class Table:
    """How a table of cells is shown.

    Attributes:
      of: the table of the cells.
      first: the headings of what names a row.
      columns: heading, column of the cell, and how its values are shown.
      commands: that stand below it: "all", the "first" one alone, or "none".
    """

    of: str
    first: tuple[str, ...]
    columns: tuple[tuple[str, str, Show], ...]
    commands: str = "all"


# --- how values are shown ------------------------------------------------------------------------


def figures(value: float) -> str:
    """Return a number with three digits, and below 100 with a point."""
    text = digits(value)
    return text if "." in text or abs(value) >= 100 else f"{text}.0"


def number(name: str, unit: str = "") -> Show:
    """Show a value with three digits, or the ends of a range."""

    def show(values: Values) -> str:
        if (value := values.get(name)) is None:
            return ""
        ends = value if isinstance(value, list) else [value]
        return " to ".join(figures(end) for end in ends) + unit

    return show


def nested(name: str, part: str) -> Show:
    """Show a part of a value."""
    return lambda values: figures(values[name][part]) if part in values.get(name, {}) else ""


def whole(name: str) -> Show:
    """Show a count, or a rate without a fraction from 100 on."""

    def show(values: Values) -> str:
        value = values.get(name)
        whole = isinstance(value, int) or (value or 0) >= 100
        return "" if value is None else f"{value:,.0f}" if whole else figures(value)

    return show


def beside_floor(name: str, floor: str) -> Show:
    """Show a value with its floor in brackets."""

    def show(values: Values) -> str:
        least = f" ({figures(values[floor])})" if floor in values else ""
        return number(name)(values) + least

    return show


def share(values: Values) -> str:
    """Show a step's time as a share of one device's, which `rendered` adds."""
    one = values.get("step_ms_of_one")
    return f"{values['step_ms'] / one:.2f}" if one and "step_ms" in values else ""


step = beside_floor("step_ms", "floor_ms")
product = beside_floor("us", "floor_us")
BATCHES = tuple(f"batch {batch}" for batch in (1, 8, 32))
PROMPTS = tuple(f"{n} × {length:,}" for n, length in ((1, 512), (4, 512), (1, 8192)))
PERCENTILES = (("50 %", "p50"), ("95 %", "p95"), ("99 %", "p99"), ("most", "max"))

TABLES = {
    "steps": Table("steps", ("",), tuple((b, b, step) for b in BATCHES)),
    "tokens": Table("steps", ("",), tuple((b, b, whole("tokens_per_s")) for b in BATCHES), "none"),
    "formats": Table("formats", ("", ""), tuple((b, b, step) for b in BATCHES), "first"),
    "long-context": Table(
        "long-context",
        ("", "Rows × context"),
        (("Step", "", number("step_ms")), ("Floor", "", number("floor_ms"))),
    ),
    "graphs": Table(
        "graphs",
        ("Steps", "Rows", "Steps a call"),
        tuple((f"{c[0].upper()}{c[1:]}", c, step) for c in ("a graph a step", "one graph")),
        "first",
    ),
    "streams": Table(
        "streams",
        ("", "Options"),
        (
            ("Requests", "", whole("requests")),
            ("Tokens a second", "", whole("tokens_per_s")),
            ("Seconds (floor)", "", beside_floor("wall_s", "floor_s")),
            ("Reading prompts", "", number("prefill_s")),
            ("Decoding", "", number("decode_s")),
            ("Rest", "", number("host_s")),
            ("Slots in use", "", number("slots_in_use")),
            ("Longest pause", "", number("longest_pause_ms", unit=" ms")),
        ),
    ),
    "first-token": Table(
        "arrivals", ("",), tuple((head, "", nested("ttft_ms", p)) for head, p in PERCENTILES)
    ),
    "token": Table(
        "arrivals", ("",), tuple((head, "", nested("tpot_ms", p)) for head, p in PERCENTILES)
    ),
    "lone": Table(
        "lone",
        ("", "Slots"),
        (
            ("First token", "", nested("ttft_ms", "p50")),
            ("Each further token", "", nested("tpot_ms", "p50")),
        ),
    ),
    "prompts": Table("prompts", ("",), tuple((p, p, number("ttft_ms")) for p in PROMPTS)),
    "start-up": Table(
        "start-up",
        ("",),
        (
            ("From the command to the first token", "0", number("first_token_s")),
            ("of which random weights", "0", number("load_s")),
            ("With a warm compilation cache", "1", number("first_token_s")),
            ("of which random weights", "1", number("load_s")),
        ),
    ),
    "devices": Table(
        "devices",
        ("", "Rows"),
        (
            ("One device", "1", step),
            ("`model=2`", "2", step),
            ("share", "2", share),
            ("`model=4`", "4", step),
            ("share", "4", share),
        ),
        "first",
    ),
    "products": Table(
        "products",
        ("", "Rows"),
        tuple(
            (f if f == "bfloat16" else f"`{f}`", f, product)
            for f in ("int4", "int8", "fp8", "fp8-dynamic", "bfloat16")
        ),
        "first",
    ),
    "bundled-gpu": Table(
        "bundled-gpu",
        ("Batch 1",),
        (
            ("Step", "", step),
            ("Tokens a second against plain", "", number("speedup", unit="×")),
        ),
    ),
    "bundled-cpu": Table(
        "bundled-cpu",
        ("",),
        tuple((b, b, number("speedup")) for b in ("batch 1", "batch 2", "batch 4")),
    ),
    "threads": Table(
        "threads",
        ("Threads",),
        (("Plain step", "plain", step), ("Step with DFlash", "DFlash", step)),
    ),
    "acceptance": Table(
        "acceptance",
        ("Drafter", "Drafts a step"),
        tuple(
            (c.capitalize(), c, number("acceptance_length")) for c in ("greedy", "temperature 1")
        ),
    ),
}


# --- tables --------------------------------------------------------------------------------------


def rendered(name: str, card: str, cells: Cells) -> str:
    """Return a table with the runs of its cells and their commands.

    A row without a cell is left out, and named below.
    """
    table = TABLES[name]
    cases = [case for case in CASES if case.table == table.of]
    columns = dict.fromkeys(column for _, column, _ in table.columns)
    rows = {
        row: {column: cells.get((table.of, row, column)) for column in columns}
        for row in dict.fromkeys(case.row for case in cases)
    }
    if table.of == "devices":
        rows = {row: _with_one_device(of_row) for row, of_row in rows.items()}
    there = [cell for row in rows.values() for cell in row.values() if cell is not None]
    runs = _days_of_runs(there)
    heads = [*table.first, *(heading for heading, _, _ in table.columns)]
    lines, before = [], ""
    for row, of_row in rows.items():
        if not any(of_row.values()):
            continue
        names = row.split(" · ")
        shown = [_shown(of_row[column], show) for _, column, show in table.columns]
        words = ["" if names[0] == before and len(names) > 1 else names[0], *names[1:], *shown]
        if len(runs) > 1:
            words.append(_runs_of(of_row, [*runs], table))
        lines.append(_line(words))
        before = names[0]
    if len(runs) > 1:
        heads.append("Run")
    if not lines:
        return f"Nothing of this was run on {card}."
    lines = [_line(heads), "|" + "---|" * len(heads), *lines, ""]
    notes = [_described(card, runs)]
    if any(any(row.values()) and None in row.values() for row in rows.values()):
        notes.append("Empty cells were not run.")
    if absent := [
        row.replace(" · ", ", ") for row, cells in rows.items() if not any(cells.values())
    ]:
        notes.append(f"Not run: {'; '.join(absent)}.")
    if table.commands == "first":
        notes.append(f"The [data]({DATA.name}/{file_of(card)}) have the command of each cell.")
    shown_cases = [case for case in cases if rows[case.row][case.column] is not None]
    return "\n".join([*lines, " ".join(notes), *_commands(shown_cases, table.commands, card)])


def _with_one_device(of_row: Mapping[str, Cell | None]) -> dict[str, Cell | None]:
    """Return a row whose cells know the step of one device, where that is of the same run."""
    one, added = of_row["1"], dict(of_row)
    if one is None or "step_ms" not in one.values:
        return added
    for column, cell in of_row.items():
        if cell is not None and cell is not one and cell.run == one.run:
            values = cell.values | {"step_ms_of_one": one.values["step_ms"]}
            added[column] = dataclasses.replace(cell, values=values)
    return added


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |".replace("|  |", "| |").replace("|  |", "| |")


def _shown(cell: Cell | None, show: Show) -> str:
    if cell is None:
        return ""
    return cell.values.get("error") or show(cell.values)


def _runs_of(of_row: Mapping[str, Cell | None], runs: Sequence[Any], table: Table) -> str:
    """Return the number of the run of a row, or of each of its columns where they differ."""
    numbers = {c: runs.index(cell.run) + 1 for c, cell in of_row.items() if cell is not None}
    if len(set(numbers.values())) < 2:
        return "".join(map(str, set(numbers.values())))
    headings = dict.fromkeys((heading, column) for heading, column, _ in table.columns)
    return ", ".join(f"{heading}: {numbers[c]}" for heading, c in headings if c in numbers)


def _days_of_runs(cells: Sequence[Cell]) -> dict[tuple[str, str], list[str]]:
    """Return the days of each run, in the order in which the runs began."""
    days: dict[tuple[str, str], set[str]] = {}
    for cell in cells:
        days.setdefault(cell.run, set()).add(cell.date)
    ordered = sorted(days, key=lambda run: (min(days[run]), *run[::-1]))
    return {run: sorted(days[run]) for run in ordered}


def _described(card: str, runs: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Return the card, the versions and the days of runs as a sentence each."""
    parts = []
    for number_, ((version, jax), days) in enumerate(runs.items(), 1):
        run = f"Run {number_}: " if len(runs) > 1 else f"{card}, "
        ends = " to ".join(map(in_words, dict.fromkeys((days[0], days[-1]))))
        parts.append(f"{run}jaxspec {version}, jax {jax}, {ends}.")
    return " ".join([*([f"{card}."] if len(runs) > 1 else []), *parts])


def in_words(date: str) -> str:
    """Return a date as in 27 November 2026."""
    day = datetime.date.fromisoformat(date)
    return f"{day.day} {day:%B %Y}"


def _commands(cases: Sequence[Case], which: str, card: str) -> list[str]:
    """Return a block of shell lines, one for each job."""
    jobs: dict[tuple[str, str], list[int | None]] = {}
    for case in cases:
        jobs.setdefault((case.env, case.command), []).append(case.batch)
    lines = [shell_line(env, command, batches) for (env, command), batches in jobs.items()]
    lines = {"all": lines, "first": lines[:1], "none": []}[which]
    mark = f"<!-- not run: it was measured on {card} -->"
    return ["", mark, "```sh", *lines, "```"] if lines else []


# --- pages ---------------------------------------------------------------------------------------


def updated(text: str, folder: Path = DATA) -> str:
    """Return a page with its tables anew.

    Raises:
      KeyError: there is no such table.
    """

    def table(match: re.Match[str]) -> str:
        name, card = match["name"], match["card"]
        words = rendered(name, card, read(folder / file_of(card)))
        return f"{match['begin']}\n{words}\n\n{match['end']}"

    return MARKED.sub(table, text)
