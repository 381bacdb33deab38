"""Cells as they are kept: one file of JSON for each card in docs/data, with a line for each cell."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data"
Place = tuple[str, str, str]


@dataclass(frozen=True)
class Cell:
    """A measured cell.

    Attributes:
      table, row, column: its place.
      card: the GPU by its name, or the cores of a CPU.
      version: of jaxspec, with the commit in brackets.
      date: as 2026-11-27.
      command: a shell line that measures this cell alone.
      values: by name, with units in the names. A pair is a range of several runs. "error" stands
        for all where the command was refused.
    """

    table: str
    row: str
    column: str
    card: str
    version: str
    jax: str
    date: str
    command: str
    values: dict[str, Any]

    @property
    def place(self) -> Place:
        """The table, the row and the column."""
        return self.table, self.row, self.column

    @property
    def run(self) -> tuple[str, str]:
        """The versions: cells that share these are of one run, which may take several days."""
        return self.version, self.jax


def file_of(card: str) -> str:
    """Return the name of a card's file."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".json"


def read(path: Path) -> dict[Place, Cell]:
    """Return the cells of a file; none if there is no such file."""
    if not path.exists():
        return {}
    cells = [Cell(**values) for values in json.loads(path.read_text(encoding="utf-8"))]
    return {cell.place: cell for cell in cells}


def write(path: Path, cells: Iterable[Cell]) -> None:
    """Replace a file by these cells, sorted by their places."""
    lines = (json.dumps(dataclasses.asdict(c)) for c in sorted(cells, key=lambda c: c.place))
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    (new := path.with_suffix(".new")).write_text(text, encoding="utf-8")
    new.replace(path)


def merge(files: Iterable[Path], folder: Path = DATA) -> list[Cell]:
    """Add the cells of files to those of a folder, and return the ones that were taken.

    A cell replaces one of the same place and card that is not newer.
    """
    taken = []
    for file in files:
        for cell in read(file).values():
            path = folder / file_of(cell.card)
            cells = read(path)
            if (old := cells.get(cell.place)) is None or old.date <= cell.date:
                write(path, (cells | {cell.place: cell}).values())
                taken.append(cell)
    return taken
