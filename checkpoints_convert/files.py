"""Read the small files of a checkpoint: JSON, and what stands where a file should be.

Nothing here imports JAX or knows what a file means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError

MOST_BYTES = 100_000_000
"""The largest JSON that is read. It is what the safetensors format allows a header."""

_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
      CheckpointError: the file is not readable, or holds something other than a JSON object.
    """
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise CheckpointError(
                f"{file} has {size:,} bytes; a file of settings has at most {MOST_BYTES:,}"
            )
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    refuse_pointer(file, raw)
    try:
        values = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__}, expected a JSON object")
    return values


def parse_json(raw: bytes) -> Any:
    """Parse JSON.

    The literals NaN and Infinity are read, because transformers writes them. Whoever uses a number
    has to check it.

    Raises:
      ValueError: it is no JSON, a key occurs twice in an object, or it is nested too deeply.
    """
    try:
        return json.loads(raw, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} occurs twice, so that either value may be meant")
    return values


def refuse_pointer(file: Path, start: bytes) -> None:
    """Refuse a file that Git LFS has not downloaded yet.

    Args:
      start: the first bytes of the file.

    Raises:
      CheckpointError: they are those of a pointer.
    """
    if start.startswith(_POINTER):
        raise CheckpointError(
            f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in {file.parent}, "
            "or download the file again"
        )
