"""The rows of a run, in a file that keeps each, or on a stream in the order of the prompts.

Read `RowsFile`. A run appends its rows to the file, each in one piece. They stay, whatever ends the
run, and the same command continues with the missing ones. A row is recognised by a digest of
everything that shapes it (`row_digest`). When all are there, the file is sorted by prompt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

from jaxspec.commands.output import OutputError, as_json, json_lines, write_line
from jaxspec.weights.atomic_dir import is_at

if TYPE_CHECKING:
    from jaxspec.commands.generate.requests import Key, PromptRequest
    from jaxspec.state import DecodeSpec
    from jaxspec.weights.loading import LoadedModel

ItemT = TypeVar("ItemT")

_ROW, _SUMMARY = b'{"index": ', b'{"summary": '
"""The beginnings of our lines."""


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the key of a row's values."""
    return row["index"], row.get("sample")


def is_resumable(destination: str | None) -> bool:
    """Return whether rows stay there when a run breaks off: in a file, not on a stream."""
    if destination is None or destination == "-":
        return False
    return Path(destination).is_file() or not Path(destination).exists()


@contextlib.contextmanager
def open_rows(destination: str, *, overwrite: bool = False) -> Iterator[RowsFile | RowsStream]:
    """Open a file for rows, or a stream ("-" or a pipe), which no later run can continue.

    Raises:
      OutputError: it cannot be opened, or another run writes there.
    """
    if not is_resumable(destination) and not Path(destination).is_dir():
        with json_lines(destination) as file:
            yield RowsStream(file)
        return
    rows = RowsFile(Path(destination).resolve(), destination, overwrite=overwrite)
    try:
        yield rows
    finally:
        rows.close()


class InOrder(Generic[ItemT]):
    """Items that come as they are ready, and are shown in the order of their keys.

    Args:
      keys: in this order.
      show: called with each item at its turn.
    """

    def __init__(self, keys: Iterable[Key], show: Callable[[ItemT], None]):
        self._due, self._show = iter(keys), show
        self._next = next(self._due, None)
        self._early: dict[Key, ItemT] = {}

    def add(self, key: Key, item: ItemT) -> None:
        """Show an item, and those that waited for it; or keep it until its turn."""
        self._early[key] = item
        while self._next is not None and self._next in self._early:
            self._show(self._early.pop(self._next))
            self._next = next(self._due, None)


class RowsStream:
    """Rows on a stream, each written after those before it."""

    is_complete = is_torn = False

    def __init__(self, file: IO[str]):
        self._file, self.name = file, file.name
        self._rows: InOrder[dict[str, Any]] = InOrder((), self.finish)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of an earlier run: none."""
        return iter(())

    def take_over(self, digests: Mapping[Key, str], refused: Set[Key] = frozenset()) -> set[Key]:
        """Note the rows to come, and return those that are there: none."""
        del refused
        self._rows = InOrder(digests, self.finish)
        return set()

    def write(self, row: dict[str, Any]) -> None:
        """Write a row, or keep it until its turn."""
        self._rows.add(key_of(row), row)

    def finish(self, line: dict[str, Any]) -> None:
        """Write a line, the summary as the last one."""
        write_line(self._file, line)


@dataclass(frozen=True)
class _Line:
    start: int  # bytes
    size: int
    digest: str
    is_error: bool


class RowsFile:
    """A file of rows, which ends with a summary once all are there.

    Call `read`, then `take_over`, then `write`. Nothing in the file changes before the first write.

    Attributes:
      is_complete: the file ends with a summary.
      is_torn: its last line is cut short, as by a power cut or `kill -9`; that row counts as
        missing.
    """

    def __init__(self, path: Path, name: str, *, overwrite: bool):
        """Open a file, or create it.

        Args:
          name: of the file in messages.
          overwrite: ignore its content.

        Raises:
          OutputError: it cannot be opened, or another run writes there.
        """
        self.path, self.name, self.overwrite = path, name, overwrite
        self.is_complete = self.is_torn = False
        self._sorted_path = path.with_name(f".{path.name}.sorted")
        self._lines: dict[Key, _Line] = {}
        self._in_order = True
        self._end = 0  # of the last row
        self._begun, self._is_new = False, not path.exists()
        self._file = self._open()
        while not self._is_at_path():  # another run replaced it before this one had the lock
            self._file.close()
            self._file = self._open()

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of an earlier run without an error. The others are done again.

        Raises:
          OutputError: the file holds something else than rows.
        """
        if self.overwrite:
            return
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                row = _parse(line)
                is_ours = not self.is_complete and (row is None or _is_row(row) or _is_summary(row))
                if is_ours and not line.endswith(b"\n") and _begins_like_a_row(line):
                    self.is_torn = True
                    return
                if row is None or not is_ours:
                    raise self._refusal(f"its line {number} is no row of this command's")
                if _is_summary(row):
                    self.is_complete = True
                    continue
                self._index(key_of(row), _Line(self._end, len(line), row["digest"], "error" in row))
                self._end += len(line)
                if "error" not in row:
                    yield row

    def take_over(self, digests: Mapping[Key, str], refused: Set[Key] = frozenset()) -> set[Key]:
        """Return the rows that are there already, after all of `read`.

        Args:
          digests: of all rows of this run.
          refused: rows that would be errors again.

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
        """Append a row. It is in the file when this returns.

        Raises:
          OutputError: it cannot be written, as on a full disk, and the rows before it stay; or the
            file is gone.
        """
        line = as_json(row).encode() + b"\n"
        start = self._append(line)
        self._index(key_of(row), _Line(start, len(line), row["digest"], "error" in row))

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, and sort the rows by prompt.

        Raises:
          OutputError: it cannot be written. All rows stay, in the order in which they finished.
        """
        if self._in_order:
            self._append(as_json(summary).encode() + b"\n")
            return
        self._check_it_is_at_path()
        try:
            with self._sorted_path.open("wb") as file:
                for key in sorted(self._lines, key=lambda key: (key[0], key[1] or 0)):
                    line = self._lines[key]
                    self._file.seek(line.start)
                    file.write(self._file.read(line.size))
                file.write(as_json(summary).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(self.path, self._sorted_path)
            self._sorted_path.replace(self.path)
        except OSError as error:
            raise OutputError(
                f"cannot write the summary of {self.name}: {error.strerror}; all its rows are "
                "there, in the order in which they finished"
            ) from None

    def close(self) -> None:
        """Close the file, and remove it if this run created it and wrote nothing."""
        with contextlib.suppress(OSError):
            self._sorted_path.unlink(missing_ok=True)  # left by a kill
            is_empty = os.fstat(self._file.fileno()).st_size == 0
            if self._is_new and is_empty and self._is_at_path():
                self.path.unlink()
        self._file.close()

    # --- inside
    # ----------------------------------------------------------------------------------------

    def _open(self) -> IO[bytes]:
        """Open and lock the file."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write {self.name}: {error.strerror}") from None
        # Unbuffered: a row is written whole or not at all, and at once.
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            self._lock(file)
        except OutputError:
            file.close()
            raise
        return file

    def _is_at_path(self) -> bool:
        """Return whether the open file is still the one at its path."""
        return is_at(self._file.fileno(), self.path)

    def _check_it_is_at_path(self) -> None:
        if not self._is_at_path():
            raise OutputError(
                f"{self.name} was removed or replaced while this run wrote to it, and what it "
                "wrote is lost; run the same command again"
            )

    def _lock(self, file: IO[bytes]) -> None:
        """Lock the file against a second run; do nothing on a system without locks."""
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"another run writes {self.name}; wait for it, or name another file"
            ) from None
        except (ImportError, OSError):
            return

    def _index(self, key: Key, line: _Line) -> None:
        last = next(reversed(self._lines), None)
        self._in_order &= last is None or (last[0], last[1] or 0) < (key[0], key[1] or 0)
        self._lines[key] = line  # it replaces an error

    def _append(self, line: bytes) -> int:
        """Write a line after the rows that count, and return its position."""
        start = self._end
        self._check_it_is_at_path()
        try:
            if not self._begun:
                self._file.truncate(
                    self._end
                )  # drops a summary, a cut line, or everything with --overwrite
                self._begun = True
            self._file.seek(start)
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise OutputError(
                f"cannot write {self.name}: {error.strerror}; the rows before it are there, and "
                "the same command goes on from them"
            ) from None
        self._end = start + len(line)
        return start

    def _refusal(self, reason: str) -> OutputError:
        return OutputError(
            f"{self.name} is there already, and {reason}; name another file, or add --overwrite to "
            "lose what it holds"
        )


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse a line as an object; None if it is not JSON, {} if it is no object."""
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


def _begins_like_a_row(line: bytes) -> bool:
    return any(line.startswith(ours) or ours.startswith(line) for ours in (_ROW, _SUMMARY))


# --- digests -------------------------------------------------------------------------------------

_SAMPLES, _SAMPLE_BYTES = 8, 4096


def models_digest(spec: DecodeSpec, target: LoadedModel, drafter: LoadedModel | None) -> str:
    """Return a digest of the models, their dtype, and how they draft."""
    drafting = dataclasses.asdict(spec.drafting) if drafter else None
    directories = [fingerprint(model.directory) for model in (target, drafter) if model]
    quantised = [spec.drafter.storage] if spec.drafter and spec.drafter.formats else []
    return digest_of(
        [1, directories, spec.target.dtypes, *quantised, drafting]
    )  # 1: of this format


def row_digest(models: str, request: PromptRequest) -> str:
    """Return a digest of everything that shapes a row, given `models_digest`.

    What only changes rounding is left out: batch size, cache length, mesh and device. So a run that
    had too little memory continues with a smaller batch.
    """
    prompt, grammar, images = request.prompt, request.request.grammar, request.request.images
    values = dataclasses.asdict(
        dataclasses.replace(request.request, id=None, stop_at=None, grammar=None, images=())
    )
    for name in ("grammar", "images"):  # files from before there were any have rows without them
        del values[name]
    rules = [] if grammar is None else [grammar.source]
    rules += [image.digest.hex() for image in images]
    return digest_of(
        [models, request.key, prompt.id, prompt.extra, values, list(request.stop), *rules]
    )


def fingerprint(directory: Path) -> str:
    """Return a digest of a checkpoint's files: their names, sizes and contents.

    The name of the directory does not count. Eight pieces stand for a file above 32 KiB. Training
    changes all weights, so it changes these pieces too.
    """
    digest = hashlib.sha256()
    for path in sorted(_files(directory)):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(directory)} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for i in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "manifest.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.gguf",
    "params/**/*",
)
"""The files of a model and its tokenizer, without those that a trainer keeps beside them."""

_WRITE_LOGS = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files in which Orbax notes the time and place of writing."""


def _files(directory: Path) -> Iterator[Path]:
    for pattern in _FILES:
        for path in directory.glob(pattern):
            if path.is_file() and path.name not in _WRITE_LOGS:
                yield path


def digest_of(value: Any) -> str:
    """Return a digest of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
