"""What a drafter takes for granted about its target: the conventions in force, and others as plausible.

Projects disagree on these, and a drafter that is run by another one than it was trained with still runs:
its drafts are just never accepted. Read `in_force`, then `alternatives`; `check` measures one against the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.configs.base import ConfigError, find_key
from jaxspec.registry import Assumption, Conventions, WeightChange, family_of
from jaxspec.shapes import Params
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.manifest import MANIFEST, read_json
from jaxspec.weights.model_def import ModelDef


@dataclass(frozen=True)
class Convention:
    """One convention in force: its value, in JSON and in words, and what set it."""

    name: str
    value: Any
    shown: str
    origin: str


@dataclass(frozen=True)
class Reading:
    """A drafter's weights under some set of conventions.

    Attributes:
      name: how it differs from the reading it was derived from.
      field: the convention that differs.
      fix: what to change, and in which file, for it to be in force.
      loaded: the weights as they came.
      change: what is done to them; None for nothing.
      num_draft_tokens: the tokens of a draft under it; 0 for as many as in force.
    """

    name: str
    field: str
    fix: str
    model_def: ModelDef
    loaded: Params
    change: WeightChange | None = None
    num_draft_tokens: int = 0

    @property
    def params(self) -> Params:
        """The weights under these conventions, made anew each time."""
        return self.loaded if self.change is None else self.change.apply(self.loaded)

    @property
    def key(self) -> tuple[ModelDef, str]:
        """What tells it from others of one drafter."""
        return self.model_def, "" if self.change is None else self.change.name


class Origins:
    """Where the values of a loaded config come from: its config.json, a default, or our own manifest."""

    def __init__(self, model: LoadedModel, keys: Mapping[str, Sequence[str]]):
        """Read the file that the model was loaded from.

        Args:
          keys: by field, where config.json may hold it.
        """
        self.directory, self.keys = model.directory, keys
        self.converted = (model.directory / MANIFEST).is_file()
        self.file = MANIFEST if self.converted else "config.json"
        self.values = {} if self.converted else read_json(model.directory / "config.json")

    def of(self, field: str, default: str) -> str:
        """Say what set a field; `default` is what holds where the file is silent."""
        if self.converted:
            return f"{MANIFEST}: config.{field}"
        key, _ = find_key(self.values, self.keys[field])
        return f"default: {default}" if key is None else f"config.json: {key}"

    def behind(self, assumption: Assumption) -> str:
        """Say what set something that a drafter assumes."""
        if assumption.field is not None:
            return self.of(assumption.field, assumption.default)
        generation = MANIFEST if self.converted else "generation_config.json"
        return assumption.origin.format(config=self.file, generation=generation)

    def says(self, field: str) -> bool:
        """Tell whether the file itself sets a field."""
        return self.converted or find_key(self.values, self.keys[field])[0] is not None

    def value(self, field: str) -> Any:
        """Return what the file has for a field that it sets."""
        return find_key(self.values, self.keys[field])[1]

    def fix(self, values: Mapping[str, Any]) -> str:
        """Say how to set fields."""
        parts = [f"{self._key(field)} to {json.dumps(value)}" for field, value in values.items()]
        return f"set {' and '.join(parts)} in {self.directory / self.file}"

    def _key(self, field: str) -> str:
        if self.converted:
            return f"config.{field}"
        return find_key(self.values, self.keys[field])[0] or self.keys[field][0]


def in_force(target: LoadedModel, drafter: LoadedModel) -> list[Convention]:
    """List every disputed convention of a pair."""
    conventions = _of(drafter)
    found = []
    if conventions is not None:
        origins = Origins(drafter, conventions.keys)
        assumptions = conventions.in_force(target.model_def, drafter.model_def)
        found = [Convention(a.name, a.value, a.shown, origins.behind(a)) for a in assumptions]
    return [*found, _suppressed(target)]


def alternatives(
    target: LoadedModel,
    drafter: LoadedModel,
    reading: Reading,
    longest_row: int,
    special_ids: Sequence[int] = (),
) -> tuple[list[Reading], list[str]]:
    """Return the readings that differ from this one in one convention.

    Args:
      longest_row: tokens of the longest text they will be compared on.
      special_ids: of the target's tokenizer.

    Returns:
      The readings, and why others are left out.
    """
    conventions = _of(drafter)
    if conventions is None:
        return [], []
    config, origins = reading.model_def.config, Origins(drafter, conventions.keys)
    readings, left_out = [], []
    for change in conventions.changes(target.config, config, special_ids):
        if longest_row <= change.needs_tokens:
            left_out.append(
                f"{change.name}: no row is longer than the window of {change.needs_tokens} tokens"
            )
            continue
        values = {change.field: change.value}
        shown = dict(values)
        if change.in_file is not None and not origins.converted:
            shown[change.field] = change.in_file
        for field, value in change.derived.items():
            if origins.converted or not origins.says(field):
                values[field] = value
            elif getattr(config, field) is None:  # the reader had no use for what the file says
                values[field] = origins.value(field)
            if origins.converted and value != getattr(config, field):
                shown[field] = value
        try:
            changed = dataclasses.replace(config, **values)
        except ConfigError as error:
            left_out.append(f"{change.name}: {error}")
            continue
        readings.append(
            dataclasses.replace(
                reading,
                name=change.name,
                field=change.field,
                fix=origins.fix(shown),
                model_def=dataclasses.replace(reading.model_def, config=changed),
                num_draft_tokens=change.num_draft_tokens,
            )
        )
    if reading.change is None:
        for changed in conventions.weight_changes(target.config, reading.loaded):
            where = f"{changed.weight} in the weights of {drafter.directory}"
            fix = changed.fix.format(where=where)
            named = dict(name=changed.name, field=changed.weight, fix=fix)
            readings.append(dataclasses.replace(reading, **named, change=changed))
    return readings, left_out


def traced_values(reading: Reading) -> tuple[ModelDef, dict[str, float]]:
    """Tell what of a reading shapes its program, and what the program takes as numbers.

    Returns:
      The reading's model definition with fixed values of all traced fields, and the reading's own numbers.
    """
    config = reading.model_def.config
    conventions = family_of(config).conventions
    fixed = {} if conventions is None else conventions.traced(config)
    own = {field: getattr(config, field) for field in fixed}
    numbers = {
        field: math.inf if value is None else value
        for field, value in own.items()
        if value is None or isinstance(value, int | float)
    }
    shared = dataclasses.replace(config, **fixed)
    return dataclasses.replace(reading.model_def, config=shared), numbers


def _of(drafter: LoadedModel) -> Conventions | None:
    return family_of(drafter.config).conventions


def _suppressed(target: LoadedModel) -> Convention:
    ids = list(target.generation.suppress_tokens) if target.generation else []
    origin = "default: none"
    if (target.directory / MANIFEST).is_file():
        origin = f"target's {MANIFEST}: generation.suppress_tokens"
    elif ids:
        origin = "target's generation_config.json: suppress_tokens"
    return Convention("suppressed ids", ids, ", ".join(map(str, ids)) or "none", origin)
