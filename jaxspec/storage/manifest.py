"""manifest.json: what a directory in jaxspec's format contains, and where it came from."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.hf_io import read_json
from jaxspec import __version__
from jaxspec.configs.base import GenerationDefaults, from_json, to_json
from jaxspec.families import ModelConfig, named
from jaxspec.storage.acceptance import FIELD

MANIFEST = "manifest.json"

_FORMAT = 1
# Old names of families. "target" dates from when there was one family of targets.
_RENAMED = {"target": "gemma4"}


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json.

    Attributes:
      kind: the family's name.
      source: the directory or hub id that was converted.
      revision: the commit of the source in the hub's cache, or else the revision asked for.
      dtype: the dtype of the stored parameters; "mixed" where the source mixes dtypes.
      tensors: every source tensor that was used, with its dtype in the source.
      skipped: the names of source tensors that were not used.
      measured_acceptance: what a drafter's maker measured (`acceptance`); None if nothing was.
    """

    kind: str
    config: ModelConfig
    generation: GenerationDefaults | None
    source: str
    revision: str | None
    dtype: str
    tensors: dict[str, str]
    skipped: list[str]
    measured_acceptance: Any = None

    def write(self, directory: Path) -> None:
        """Write manifest.json. Write it last, because a directory without it does not load."""
        values = {
            "format": _FORMAT,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "config": to_json(self.config),
            "generation": None if self.generation is None else to_json(self.generation),
            "jaxspec_version": __version__,
        }
        if self.measured_acceptance is None:
            del values[FIELD]
        (directory / MANIFEST).write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read a directory's manifest.json.

        Raises:
          CheckpointError: the file is missing, corrupt, or of another format.
        """
        file = directory / MANIFEST
        values = read_json(file)
        if values.pop("format", None) != _FORMAT:
            raise CheckpointError(
                f"{file} is not a jaxspec manifest of format {_FORMAT}; convert again"
            )
        values.pop("jaxspec_version", None)
        try:
            generation, kind = values.pop("generation"), str(values.pop("kind"))
            family = named(_RENAMED.get(kind, kind))
            return cls(
                kind=family.name,
                config=from_json(family.config, values.pop("config")),
                generation=None
                if generation is None
                else from_json(GenerationDefaults, generation),
                **values,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{file} is corrupt: {error}") from None
