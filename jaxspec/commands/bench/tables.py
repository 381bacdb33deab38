"""Tables of a benchmark, each whole on a narrow terminal: `floors` of the cases, and `results` of measuring them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from jaxspec.commands.bench.floor import Ceiling, step_cost, step_costs, step_floor_s
from jaxspec.commands.bench.measure import of_a_group
from jaxspec.commands.bench.pair import Pair
from jaxspec.commands.bench.results import DETAILS, PARTS, SPEED, CaseResult, Column, digits

WIDTH = 80


@dataclass(frozen=True)
class Case:
    """A case that is to be measured: batch size, committed tokens of a row at the start, models."""

    batch: int
    start: int
    pair: Pair


@dataclass(frozen=True)
class Written:
    """A column, as it stands in a table: heading, what the caption says of it, a cell a row."""

    heading: str
    meaning: str
    cells: Sequence[str]


def floors(cases: Sequence[Case], new_tokens: int, ceiling: Ceiling) -> list[Table]:
    """Return the floors of cases, in the middle of the run."""
    rows: list[list[str]] = []
    for case in cases:
        spec, middle = case.pair.spec, case.start + new_tokens // 2
        count, together = of_a_group(case.pair.mesh, case.batch, ceiling)
        cost, draft = step_cost(spec, count, middle), step_costs(spec, count, middle)[1]
        drafting = "" if spec.drafter is None else digits(draft.floor_s(together) * 1e3)
        rows.append(
            [
                f"{middle:,}",
                f"{cost.weight_bytes / 1e6:,.1f}",
                f"{cost.kv_bytes / 1e6:,.1f}",
                digits(cost.flops / 1e9),
                digits(step_floor_s(spec, count, middle, together) * 1e3),
                drafting,
            ]
        )
    headings = {
        "context": "tokens of a row, in the middle of the run",
        "weights MB": "",
        "K/V MB": "",
        "GFLOP": "",
        "floor ms": "",
        "drafting": "the drafter's part of the floor",
    }
    columns = [
        Written(*heading, cells)
        for heading, cells in zip(headings.items(), zip(*rows, strict=True), strict=True)
    ]
    title = (
        f"floor of a step, at {digits(ceiling.bytes_per_s / 1e9)} GB/s read and "
        f"{digits(ceiling.flops_per_s / 1e12)} TFLOP/s, measured just now"
    )
    names = [(str(case.batch), case.pair.label) for case in cases]
    return _tables(title, names, columns)


def results(found: Sequence[CaseResult], repeats: int) -> list[Table]:
    """Return what was measured: what came out, where a step's time goes, what it took."""
    plain = {r.case: r for r in found if r.mode == "plain"}
    names = [(r.case, r.label) for r in found]
    tables = []
    for number in (SPEED, PARTS, DETAILS):
        title = f"measured: median (min-max) of {repeats}, warm-up and compilation excluded"
        columns = [
            Written(c.heading, c.meaning, [_cell(c, name, r, plain[r.case]) for r in found])
            for name, c in _columns_of(number)
        ]
        columns = [c for c in columns if any(c.cells)]
        tables += _tables(title if number == SPEED else "", names, columns)
    return tables


def _columns_of(table: int) -> list[tuple[str, Column]]:
    """Return the columns of a table, each with the quantity it shows."""
    fields = dataclasses.fields(CaseResult)
    return [(f.name, c) for f in fields for c in f.metadata["columns"] if c.table == table]


def _cell(column: Column, name: str, result: CaseResult, plain: CaseResult) -> str:
    value = getattr(result, name)
    return "" if value is None else column.show(value, result, plain)


def _tables(
    title: str, names: Sequence[tuple[str, str]], columns: Sequence[Written]
) -> list[Table]:
    """Lay columns out in as many tables as it takes for each to be whole at `WIDTH`.

    Args:
      names: of the rows: batch and mode.
    """
    tables: list[Table] = []
    begin = 0
    while begin < len(columns):
        end = len(columns)
        while end > begin + 1 and _width(_table("", names, columns[begin:end])) > WIDTH:
            end -= 1
        tables.append(_table(title if begin == 0 else "", names, columns[begin:end]))
        begin = end
    return tables


def _table(title: str, names: Sequence[tuple[str, str]], columns: Sequence[Written]) -> Table:
    known = [c for c in columns if c.meaning]
    table = Table(
        title=title or None,
        caption=" ".join(f"{c.heading}: {c.meaning}." for c in known) or None,
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row, name in enumerate(names):
        table.add_row(*name, *(column.cells[row] for column in columns))
    return table


def _width(table: Table) -> int:
    wide = Console(width=10_000)
    return Measurement.get(wide, wide.options, table).maximum
