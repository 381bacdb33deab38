"""JSON output of commands: a file that appears at the end, or standard output. Needs no JAX."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from jaxspec.commands import interruption
from jaxspec.commands.options import UsageError
from jaxspec.options import option


@dataclass(frozen=True)
class OutputOptions:
    """The output of a report beside the terminal."""

    json_path: str | None = option(
        None,
        "Also write everything as one line of JSON; with - the rest goes to standard error.",
        metavar="PATH|-",
        flag="--json",
    )

    @property
    def console(self) -> Console:
        """The console of the report: standard output, unless JSON goes there."""
        return Console(stderr=self.json_path == "-", highlight=False)

    @contextlib.contextmanager
    def opened(self) -> Iterator[IO[str] | None]:
        """Open the output for JSON; None if none was asked for. See `json_lines`."""
        if self.json_path is None:
            yield None
            return
        with json_lines(self.json_path) as file:
            yield file


class OutputError(ValueError):
    """Results that cannot be written to their destination."""


@contextlib.contextmanager
def json_lines(destination: str) -> Iterator[IO[str]]:
    """Open an output for JSON lines: a path, or "-" for standard output.

    A file appears at its path only when the block succeeds; until then it is written beside it.

    Raises:
      OutputError: it cannot be opened.
    """
    if destination == "-":
        yield sys.stdout
        return
    path = Path(destination)
    special = path.exists() and not path.is_file()  # a pipe or a device: nothing can replace it
    if not special:  # the name of a shell's pipe must not be resolved
        path = path.resolve()
    partial = path if special else path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        file = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {destination}: {error.strerror}") from None
    try:
        try:
            with interruption.leaving(
                tidy=lambda: None if special else partial.unlink(missing_ok=True)
            ):
                yield file
        finally:
            _close(file, destination)
        if not special:
            partial.replace(path)
    finally:
        if not special:
            partial.unlink(missing_ok=True)


def _close(file: IO[str], destination: str) -> None:
    try:
        file.close()  # tries to write the rest once more
    except OSError as error:
        raise OutputError(f"cannot write {destination}: {error.strerror}") from None


def write_line(file: IO[str], value: dict[str, Any]) -> None:
    """Write one line of JSON, and flush it.

    Raises:
      OutputError: it cannot be written, as on a full disk. A closed pipe stays a `BrokenPipeError`.
    """
    try:
        file.write(as_json(value) + "\n")
        file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {file.name}: {error.strerror}") from None


def as_json(value: Any) -> str:
    """Return a value as JSON on one line that UTF-8 can encode.

    JSON has no non-finite numbers. They become the strings "NaN", "Infinity" and "-Infinity", which
    Python's `float` reads: null would not distinguish an impossible token from a broken one.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, from a JSON escape
        text = json.dumps(_finite(value), allow_nan=False)
    return text


def _finite(value: Any) -> Any:
    """Replace non-finite floats by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


PICTURES = (".png", ".pdf", ".svg")


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn in the end.

    Raises:
      ValueError: matplotlib is missing, or the path has another suffix or no directory.
    """
    if path.suffix not in PICTURES:
        raise ValueError(f"--plot {path}: expected a file that ends in {', '.join(PICTURES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no directory {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'jaxspec-decoding[plot]'")


def refuse_inputs(json_path: str | None, *inputs: tuple[str, Path | str | int | None]) -> None:
    """Refuse to write JSON over an input.

    Args:
      inputs: of each, its name, and its path or an open file's number; None for no file.

    Raises:
      UsageError: naming the input that would be lost.
    """
    for name, source in inputs:
        if json_path and source is not None and same_file(json_path, source):
            raise UsageError(
                f"--json {json_path} is the file of {name}, which would be lost; name another one"
            )


def same_file(path: Path | str, other: Path | str | int) -> bool:
    """Return whether both are one file on a disk; `other` may be an open file's number."""
    try:
        one, two = os.stat(path), os.stat(other)
    except OSError:
        return False
    return stat.S_ISREG(one.st_mode) and os.path.samestat(one, two)
