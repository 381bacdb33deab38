"""A directory that appears at its place only when it is complete. Read `atomic_directory`.

A directory `NAME` is written as `NAME.partial`, and renamed. The file `NAME.partial.lock` is locked meanwhile, so
that two writers do not meet. The system gives up the lock of a process that is killed. Therefore the next writer
knows that the directory belongs to nobody, and starts again from an empty one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from checkpoints_convert.errors import CheckpointError

_being_written: list[Path] = []
_renaming = threading.Lock()  # a directory is either renamed or abandoned


def partial(destination: Path) -> Path:
    """Return where a directory is written until it is complete."""
    return destination.with_name(f"{destination.name}.partial")


@contextlib.contextmanager
def atomic_directory(destination: Path) -> Iterator[tuple[Path, int]]:
    """Yield an empty directory beside `destination`, which is renamed to `destination` at the end.

    It is removed if anything fails. What a killed process left is removed first: the bytes of it are yielded too.
    `abandon` ends it from another thread.

    Raises:
      CheckpointError: the destination exists, cannot be written, or is being written by another process.
    """
    try:
        _refuse_existing(destination)
        temporary = partial(destination)
        if not temporary.parent.exists():
            temporary.parent.mkdir(parents=True, exist_ok=True)
        with _locked(temporary):
            _refuse_existing(destination)  # another process may just have finished it
            left_behind = _size(temporary)
            _remove(temporary)
            temporary.mkdir()
            _being_written.append(temporary)
            try:
                yield temporary, left_behind
                _refuse_existing(destination)
                with _renaming:
                    if temporary not in _being_written:
                        raise CheckpointError(f"{destination} was abandoned")
                    _being_written.remove(temporary)
                    os.rename(temporary, destination)
            finally:
                with _renaming, contextlib.suppress(ValueError):
                    _being_written.remove(temporary)
                _remove(temporary)
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be written: {error.strerror}") from error


def abandon() -> None:
    """Remove all directories that this process is writing, whatever thread writes them. None is renamed any more."""
    with _renaming:
        directories, _being_written[:] = [*_being_written], []
    for temporary in directories:
        _remove(temporary)
        _lock_of(temporary).unlink(missing_ok=True)


def _refuse_existing(destination: Path) -> None:
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists; name a destination that does not")


@contextlib.contextmanager
def _locked(temporary: Path) -> Iterator[None]:
    """Hold the lock of a directory. Its file is removed at the end, while the lock is still held.

    Some network file systems have no locks. There the file itself is the lock, and stays after a kill.
    """
    path = _lock_of(temporary)
    while True:
        made = _make(path)
        with contextlib.closing(path.open("r+")) as file:
            is_mine = _lock(file.fileno())
            if is_mine is None and not made:
                raise CheckpointError(
                    f"{path} is there, and this file system has no locks that tell whether a process still "
                    f"writes {temporary}; if none does, remove both"
                )
            if is_mine is False:
                raise CheckpointError(
                    f"{temporary} is being written by another process; wait for it, or name another destination"
                )
            if not is_at(file.fileno(), path):  # its last holder removed it after it was opened
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _lock_of(temporary: Path) -> Path:
    return temporary.with_name(f"{temporary.name}.lock")


def _make(path: Path) -> bool:
    """Make an empty file, and tell whether it is new."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _lock(file: int) -> bool | None:
    """Lock an open file. Return False if another process has the lock, None if there are no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, or a file system without locks
        return None
    return True


def is_at(file: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _size(directory: Path) -> int:
    """Return the bytes of all files in a directory, 0 if there is none."""
    if not directory.exists():
        return 0
    return sum(file.lstat().st_size for file in directory.rglob("*") if file.is_file())


def _remove(directory: Path) -> None:
    """Remove a directory, even while an interrupted write still adds a last file to it."""
    for _ in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.05)
