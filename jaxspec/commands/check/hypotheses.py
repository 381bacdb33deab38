"""Hypotheses about a drafter: the conventions in force, and other plausible ones.

Projects disagree on these conventions. A drafter with a wrong one still runs, but its drafts are
never accepted. Read `in_force`, then `alternatives`; `search` compares them.
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
    """A convention in force: its value, in JSON and in words, and its origin."""

    name: str
    value: Any
    shown: str
    origin: str


@dataclass(frozen=True)
class Hypothesis:
    """A drafter's weights under one set of conventions.

    Attributes:
      name: the difference to the hypothesis it was derived from.
      field: the convention that differs.
      fix: the edit, and its file, that puts the hypothesis in force.
      loaded: the weights as loaded.
      change: a change of these weights; None for none.
      num_draft_tokens: tokens of a draft; 0 for as many as in force.
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
        """The weights under these conventions, computed on each access."""
        return self.loaded if self.change is None else self.change.apply(self.loaded)

    @property
    def key(self) -> tuple[ModelDef, str]:
        """The identity of this hypothesis among those of one drafter."""
        return self.model_def, "" if self.change is None else self.change.name


class Origins:
    """Origins of the values of a loaded config: its config.json, a default, or our own manifest."""

    def __init__(self, model: LoadedModel, keys: Mapping[str, Sequence[str]]):
        """Read the file that the model was loaded from.

        Args:
          keys: by field, the keys of config.json that may hold it.
        """
        self.directory, self.keys = model.directory, keys
        self.converted = (model.directory / MANIFEST).is_file()
        self.file = MANIFEST if self.converted else "config.json"
        self.values = {} if self.converted else read_json(model.directory / "config.json")

    def of(self, field: str, default: str) -> str:
        """Return what set a field; `default` is its value when the file has none."""
        if self.converted:
            return f"{MANIFEST}: config.{field}"
        key, _ = find_key(self.values, self.keys[field])
        return f"default: {default}" if key is None else f"config.json: {key}"

    def of_assumption(self, assumption: Assumption) -> str:
        """Return what set an assumption of a drafter."""
        if assumption.field is not None:
            return self.of(assumption.field, assumption.default)
        generation = MANIFEST if self.converted else "generation_config.json"
        return assumption.origin.format(config=self.file, generation=generation)

    def has(self, field: str) -> bool:
        """Return whether the file itself sets a field."""
        return self.converted or find_key(self.values, self.keys[field])[0] is not None

    def value(self, field: str) -> Any:
        """Return the file's value of a field that it sets."""
        return find_key(self.values, self.keys[field])[1]

    def fix(self, values: Mapping[str, Any]) -> str:
        """Return an instruction to set fields."""
        parts = [f"{self._key(field)} to {json.dumps(value)}" for field, value in values.items()]
        return f"set {' and '.join(parts)} in {self.directory / self.file}"

    def _key(self, field: str) -> str:
        if self.converted:
            return f"config.{field}"
        return find_key(self.values, self.keys[field])[0] or self.keys[field][0]


def in_force(target: LoadedModel, drafter: LoadedModel) -> list[Convention]:
    """Return every disputed convention of a pair."""
    suppressed = _suppressed(target)
    conventions = _of(drafter)
    if conventions is None:
        return [suppressed]
    origins = Origins(drafter, conventions.keys)
    assumptions = conventions.in_force(target.config, drafter.config, target.model_def.dtype)
    return [
        *(Convention(a.name, a.value, a.shown, origins.of_assumption(a)) for a in assumptions),
        suppressed,
    ]


def alternatives(
    target: LoadedModel,
    drafter: LoadedModel,
    hypothesis: Hypothesis,
    longest_row: int,
    special_ids: Sequence[int] = (),
) -> tuple[list[Hypothesis], list[str]]:
    """Return the hypotheses that differ from `hypothesis` in one convention.

    Args:
      longest_row: tokens of the longest row of the text.
      special_ids: of the target's tokenizer.

    Returns:
      The hypotheses, and the reasons why others are left out.
    """
    conventions = _of(drafter)
    if conventions is None:
        return [], []
    config, origins = hypothesis.model_def.config, Origins(drafter, conventions.keys)
    hypotheses, left_out = [], []
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
            if origins.converted or not origins.has(field):
                values[field] = value
            elif getattr(config, field) is None:  # the config dropped the value of the file
                values[field] = origins.value(field)
            if origins.converted and value != getattr(config, field):
                shown[field] = value
        try:
            changed = dataclasses.replace(config, **values)
        except ConfigError as error:
            left_out.append(f"{change.name}: {error}")
            continue
        hypotheses.append(
            dataclasses.replace(
                hypothesis,
                name=change.name,
                field=change.field,
                fix=origins.fix(shown),
                model_def=dataclasses.replace(hypothesis.model_def, config=changed),
                num_draft_tokens=change.num_draft_tokens,
            )
        )
    if hypothesis.change is None:
        for changed in conventions.weight_changes(target.config, hypothesis.loaded):
            where = f"{changed.weight} in the weights of {drafter.directory}"
            fix = changed.fix.format(where=where)
            hypotheses.append(
                dataclasses.replace(
                    hypothesis, name=changed.name, field=changed.weight, fix=fix, change=changed
                )
            )
    return hypotheses, left_out


def traced_values(hypothesis: Hypothesis) -> tuple[ModelDef, dict[str, float]]:
    """Return the model definition with fixed traced fields, and the hypothesis's values of these.

    The definition shapes the program. The values are its arguments.
    """
    config = hypothesis.model_def.config
    conventions = family_of(config).conventions
    fixed = {} if conventions is None else conventions.traced(config)
    own = {field: getattr(config, field) for field in fixed}
    numbers = {
        field: math.inf if value is None else value
        for field, value in own.items()
        if value is None or isinstance(value, int | float)
    }
    shared = dataclasses.replace(config, **fixed)
    return dataclasses.replace(hypothesis.model_def, config=shared), numbers


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
