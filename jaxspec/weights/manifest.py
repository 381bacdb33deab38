"""manifest.json: what a directory in jaxspec's format contains, and where it came from."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError, listed
from checkpoints_convert.files import read_json
from checkpoints_convert.headers import DTYPES
from jaxspec import quantised
from jaxspec.configs.base import ConfigError, GenerationDefaults, from_json, to_json
from jaxspec.options import shown
from jaxspec.quantised.kv import DTYPES as DTYPES_OF_KV
from jaxspec.registry import ModelConfig, get_family
from jaxspec.version import __version__
from jaxspec.weights.define import model_def_of
from jaxspec.weights.measured_acceptance import FIELD
from jaxspec.weights.model_def import ModelDef

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
      formats: the formats of the quantised weights by name (`jaxspec.quantised`); None if none is.
        `dtype` is then that of the others.
      compute_dtype: the dtype of the numbers that weights were quantised from, in which products
        are meant to be computed; None if none is quantised. Loading may choose another one.
      cache_dtype: the dtype of keys and values: of a model that was saved with another one than its
        compute dtype too. Loading takes the one that it is asked for.
      kv_scales: the scales of keys and of values for each layer that the source had; None for none.
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
    formats: dict[str, str] | None = None
    compute_dtype: str | None = None
    cache_dtype: str | None = None
    kv_scales: tuple[tuple[float, float], ...] | None = None

    def model_def(self, dtype: str) -> ModelDef:
        """Return the model definition of what the directory holds, with weights and products of `dtype`.

        Raises:
          CheckpointError: the manifest gives formats to weights that the model does not have.
        """
        try:
            return model_def_of(self.config, dtype).with_formats(self.formats or {})
        except ValueError as error:
            raise CheckpointError(f"{self.source}: {MANIFEST} is corrupt: {error}") from None

    def write(self, directory: Path) -> None:
        """Write manifest.json. Write it last, because a directory without it does not load."""
        values = {
            "format": _FORMAT,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "config": to_json(self.config),
            "generation": None if self.generation is None else to_json(self.generation),
            "jaxspec_version": __version__,
        }
        for name in (FIELD, *_OF_QUANTISED):
            if values[name] is None:
                del values[name]
        (directory / MANIFEST).write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read a directory's manifest.json.

        Raises:
          CheckpointError: the file is missing, corrupt, or of another format; naming the field.
        """
        file = directory / MANIFEST
        values = read_json(file)
        number = values.pop("format", None)
        if type(number) is not int or number != _FORMAT:
            raise CheckpointError(
                f"{file} is not a jaxspec manifest of format {_FORMAT}; convert again"
            )
        values.pop("jaxspec_version", None)
        try:
            return cls(**_checked(values))
        except ValueError as error:
            raise CheckpointError(f"{file} is corrupt: {error}") from None


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest.

    Raises:
      ValueError: naming the field that is missing, unknown or wrong.
    """
    fields = {f.name: f.default for f in dataclasses.fields(Manifest)}
    absent = {name for name, default in fields.items() if default is dataclasses.MISSING}
    if wrong := sorted((set(values) - set(fields)) | (absent - set(values))):
        raise ValueError(f"it has unknown or missing fields: {shown(wrong)}")
    for name, is_allowed in _ALLOWED.items():
        if name in values and not is_allowed(values[name]):
            raise ValueError(f"{name} is {shown(values[name])}, which no conversion writes")
    for name, dtype in values["tensors"].items():
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"tensors: {listed([name])} has the dtype {shown(dtype)}")
    kind: str = values["kind"]
    family = get_family(_RENAMED.get(kind, kind))
    config, generation = _config(family.config, values, "config"), None
    if values["generation"] is not None:
        generation = _config(GenerationDefaults, values, "generation")
        generation.check_fits(config.vocab_size)
    if values.get("kv_scales") is not None:
        values = {**values, "kv_scales": tuple(map(tuple, values["kv_scales"]))}
    return {**values, "kind": family.name, "config": config, "generation": generation}


def _config(kind: type[Any], values: dict[str, Any], name: str) -> Any:
    try:
        return from_json(kind, values[name])
    except ConfigError as error:
        raise ValueError(f"{name}: {error}") from None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_formats(value: Any) -> bool:
    known = quantised.names()
    return isinstance(value, dict) and all(
        isinstance(format, str) and format in known for format in value.values()
    )


def _are_scales(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(both, list)
        and len(both) == 2
        and all(type(x) is float and 0 < x < math.inf for x in both)
        for both in value
    )


_OF_QUANTISED = ("formats", "compute_dtype", "cache_dtype", "kv_scales")


_ALLOWED: dict[str, Callable[[Any], bool]] = {
    "kind": _is_text,
    "source": _is_text,
    "revision": lambda value: value is None or _is_text(value),
    "dtype": lambda value: value in ("float32", "bfloat16", "float16", "mixed"),
    "tensors": lambda value: isinstance(value, dict),
    "skipped": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "formats": _are_formats,
    "compute_dtype": lambda value: value in ("float32", "bfloat16"),
    "cache_dtype": lambda value: value in DTYPES_OF_KV,
    "kv_scales": lambda value: _are_scales(value),
}
"""What a manifest holds beside configs."""
