"""What a directory of ours says about itself: manifest.json."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.hf_io import read_json
from jaxspec import __version__
from jaxspec.configs.base import GenerationDefaults, from_json, to_json
from jaxspec.families import ModelConfig, named

MANIFEST = "manifest.json"

_FORMAT = 1
_RENAMED = {"target": "gemma4"}  # families as they were called when there was one of targets


@dataclass(frozen=True)
class Manifest:
    """What a directory of ours says about itself."""

    kind: str  # the family's name
    config: ModelConfig
    generation: GenerationDefaults | None
    source: str
    revision: str | None
    dtype: str  # of the stored parameters; "mixed" where the source mixes them
    tensors: dict[str, str]  # every source tensor that was used, with its dtype there
    skipped: list[str]

    def write(self, directory: Path) -> None:
        """Write manifest.json, without which a directory does not load: the last file to write."""
        values = {
            "format": _FORMAT,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "config": to_json(self.config),
            "generation": None if self.generation is None else to_json(self.generation),
            "jaxspec_version": __version__,
        }
        (directory / MANIFEST).write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read a directory's manifest.json.

        Raises:
          CheckpointError: it is not one of ours, or of another format.
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
