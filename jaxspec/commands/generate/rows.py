"""Where the rows of a run go: a file that keeps each of them as it finishes, or a stream in the prompts' order.

Read `RowsFile`. A run writes its rows to the end of the file, each in one piece. Whatever ends the run, they stay,
and the same command goes on with what is missing. A row is known by a digest of all that shapes it
(`identity.row_digest`). When all are there, the file is put into the order of the prompts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jaxspec.commands.output import OutputError, as_json, json_lines, write_line
from jaxspec.weights.atomic_dir import is_at

Key = tuple[int, int | None]
"""Which row: the prompt's index, and which of its samples where there are several."""

_ROW, _SUMMARY = b'{"index": ', b'{"summary": '
"""How lines of ours begin."""


def key_of(row: Mapping[str, Any]) -> Key:
    """Return which row these values are."""
    return row["index"], row.get("sample")


def stays(destination: str | None) -> bool:
    """Tell whether rows are kept there when a run breaks off: in a file, not on a stream."""
    if destination is None or destination == "-":
        return False
    return Path(destination).is_file() or not Path(destination).exists()


@contextlib.contextmanager
def open_rows(destination: str, *, overwrite: bool = False) -> Iterator[RowsFile | RowsStream]:
    """Open the place for rows: a file, or "-" or a pipe, which cannot be gone on with.

    Raises:
      OutputError: it cannot be opened, or another run writes there.
    """
    if not stays(destination) and not Path(destination).is_dir():
        with json_lines(destination) as file:
            yield RowsStream(file)
        return
    rows = RowsFile(Path(destination).resolve(), destination, overwrite=overwrite)
    try:
        yield rows
    finally:
        rows.close()


class RowsStream:
    """Rows on a stream, each when those before it are written."""

    is_complete = is_torn = False

    def __init__(self, file: IO[str]):
        self._file, self.name = file, file.name
        self._due: Iterator[Key] = iter(())
        self._next: Key | None = None
        self._early: dict[Key, dict[str, Any]] = {}

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield rows of an earlier run: there are none."""
        return iter(())

    def take_over(self, digests: Mapping[Key, str], refused: Set[Key] = frozenset()) -> set[Key]:
        """Learn which rows there will be; none is there already."""
        del refused
        self._due = iter(digests)
        self._next = next(self._due, None)
        return set()

    def write(self, row: dict[str, Any]) -> None:
        """Write a row, now or when its turn comes."""
        self._early[key_of(row)] = row
        while self._next in self._early:
            write_line(self._file, self._early.pop(self._next))
            self._next = next(self._due, None)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the last line."""
        write_line(self._file, summary)


@dataclass(frozen=True)
class _Line:
    start: int  # bytes
    size: int
    digest: str
    is_error: bool


class RowsFile:
    """A file of rows, and a summary once all are there.

    Read it, then take over what fits, then write. Nothing in the file changes before the first write.

    Attributes:
      is_complete: it ends with a summary.
      is_torn: its last line is cut short, as by a power cut or `kill -9`; that row is not there.
    """

    def __init__(self, path: Path, name: str, *, overwrite: bool):
        """Open a file, or make it.

        Args:
          name: what messages call it.
          overwrite: whatever it holds counts for nothing.

        Raises:
          OutputError: it cannot be opened, or another run writes there.
        """
        self.path, self.name, self.overwrite = path, name, overwrite
        self.is_complete = self.is_torn = False
        self._aside = path.with_name(f".{path.name}.sorted")
        self._lines: dict[Key, _Line] = {}
        self._in_order = True
        self._end = 0  # of the last row
        self._begun, self._is_new = False, not path.exists()
        self._file = self._opened()
        while not self._is_there():  # another run put it away before this one had the lock
            self._file.close()
            self._file = self._opened()

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of an earlier run that count: those without an error, which are done again.

        Raises:
          OutputError: the file holds something else.
        """
        if self.overwrite:
            return
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                row = _parsed(line)
                is_ours = not self.is_complete and (row is None or _is_row(row) or _is_summary(row))
                if is_ours and not line.endswith(b"\n") and _begins_like_ours(line):
                    self.is_torn = True
                    return
                if row is None or not is_ours:
                    raise self._refusal(f"its line {number} is no row of generate's")
                if _is_summary(row):
                    self.is_complete = True
                    continue
                self._know(key_of(row), _Line(self._end, len(line), row["digest"], "error" in row))
                self._end += len(line)
                if "error" not in row:
                    yield row

    def take_over(self, digests: Mapping[Key, str], refused: Set[Key] = frozenset()) -> set[Key]:
        """Return which rows are there already, once `read` is through.

        Args:
          digests: of all rows that there are to be.
          refused: those that would be errors again.

        Raises:
          OutputError: the file holds a row that is none of these.
        """
        done = {key for key, line in self._lines.items() if not line.is_error}
        others = sum(self._lines[key].digest != digests.get(key) for key in done)
        if others:
            raise self._refusal(
                f"{others:,} of its {len(done):,} rows belong to other prompts, models or options"
            )
        again = (refused & self._lines.keys()) - done
        return done | {key for key in again if self._lines[key].digest == digests[key]}

    def write(self, row: dict[str, Any]) -> None:
        """Add a row to the end of the file. It is there when this returns.

        Raises:
          OutputError: the disk is full, say, and the rows before it stay; or somebody removed the file.
        """
        line = as_json(row).encode() + b"\n"
        start = self._append(line)
        self._know(key_of(row), _Line(start, len(line), row["digest"], "error" in row))

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, and put the rows into the order of the prompts.

        Raises:
          OutputError: the disk is full, say. All rows stay, in the order in which they finished.
        """
        if self._in_order:
            self._append(as_json(summary).encode() + b"\n")
            return
        self._check_it_is_there()
        try:
            with self._aside.open("wb") as file:
                for key in sorted(self._lines, key=lambda key: (key[0], key[1] or 0)):
                    line = self._lines[key]
                    self._file.seek(line.start)
                    file.write(self._file.read(line.size))
                file.write(as_json(summary).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(self.path, self._aside)
            self._aside.replace(self.path)
        except OSError as error:
            raise OutputError(
                f"cannot write the summary of {self.name}: {error.strerror}; all its rows are there, in the "
                "order in which they finished"
            ) from None

    def close(self) -> None:
        """Close the file; one that this run made and wrote nothing to goes away."""
        with contextlib.suppress(OSError):
            self._aside.unlink(missing_ok=True)  # one that a kill left
            is_empty = os.fstat(self._file.fileno()).st_size == 0
            if self._is_new and is_empty and self._is_there():
                self.path.unlink()
        self._file.close()

    # --- inside ----------------------------------------------------------------------------------------

    def _opened(self) -> IO[bytes]:
        """Open the file, and lock it."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write {self.name}: {error.strerror}") from None
        # Without a buffer: a row is written whole or not at all, and nothing is left for later.
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            self._lock(file)
        except OutputError:
            file.close()
            raise
        return file

    def _is_there(self) -> bool:
        """Tell whether the open file is still the one at its path."""
        return is_at(self._file.fileno(), self.path)

    def _check_it_is_there(self) -> None:
        if not self._is_there():
            raise OutputError(
                f"{self.name} was removed or replaced while this run wrote to it, and what it wrote is lost; run "
                "the same command again"
            )

    def _lock(self, file: IO[bytes]) -> None:
        """Keep a second run of the same command away; without a word where the system knows no locks."""
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"another run writes {self.name}; wait for it, or name another file"
            ) from None
        except (ImportError, OSError):
            return

    def _know(self, key: Key, line: _Line) -> None:
        last = next(reversed(self._lines), None)
        self._in_order &= last is None or (last[0], last[1] or 0) < (key[0], key[1] or 0)
        self._lines[key] = line  # what was there under this key was an error

    def _append(self, line: bytes) -> int:
        """Write at the end, and return where that was; after the rows that count, the first time."""
        start = self._end
        self._check_it_is_there()
        try:
            if not self._begun:
                self._file.truncate(self._end)  # a summary, a cut line, or all that is overwritten
                self._begun = True
            self._file.seek(start)
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise OutputError(
                f"cannot write {self.name}: {error.strerror}; the rows before it are there, and the same "
                "command goes on from them"
            ) from None
        self._end = start + len(line)
        return start

    def _refusal(self, what: str) -> OutputError:
        return OutputError(
            f"{self.name} is there already, and {what}; name another file, or add --overwrite to lose what it "
            "holds"
        )


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return an object; None for what is not JSON, {} for what is no object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else {}


def _is_row(row: Mapping[str, Any]) -> bool:
    known = {"index": int, "digest": str, "prompt_ids": list}
    if "error" not in row:
        known |= {"token_ids": list, "acceptance_lengths": list}
    return all(isinstance(row.get(name), kind) for name, kind in known.items())


def _is_summary(row: Mapping[str, Any]) -> bool:
    return list(row) == ["summary"]


def _begins_like_ours(line: bytes) -> bool:
    return any(line.startswith(ours) or ours.startswith(line) for ours in (_ROW, _SUMMARY))
