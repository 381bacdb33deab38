"""The acceptance that a drafter's maker measured: a field of config.json, or of our manifest.json.

`jaxspec check --record` writes the field, and `check` compares with it later. Nothing else reads it.
Conversion keeps it, either way. What it holds is `commands.check.reference`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.hf_io import read_json

FIELD = "measured_acceptance"
_FILES = ("manifest.json", "config.json")  # of a converted directory the first is what is read


def config_file(directory: Path) -> Path:
    """Return the file of a checkpoint directory that says how it is read."""
    return next((f for name in _FILES if (f := directory / name).is_file()), directory / _FILES[-1])


def read_acceptance(directory: Path) -> Any:
    """Return what was recorded in a checkpoint directory; None if nothing was."""
    file = config_file(directory)
    return read_json(file).get(FIELD) if file.is_file() else None


def write_acceptance(directory: Path, value: Mapping[str, Any] | None) -> Path:
    """Record what was measured in a checkpoint directory, and return the file that holds it.

    Args:
      value: None removes what was recorded.

    Raises:
      CheckpointError: the file cannot be written.
    """
    file = config_file(directory)
    indent = 1 if file.name == _FILES[0] else 2
    values = {name: x for name, x in read_json(file).items() if name != FIELD}
    if value is not None:
        values[FIELD] = value
    text = json.dumps(values, indent=indent) + "\n"
    temporary = file.with_name(f".{file.name}.partial")
    try:
        temporary.write_text(text)
        temporary.replace(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return file
