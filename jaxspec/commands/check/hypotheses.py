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

from jaxspec.commands.check.text import generation_of
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
      is_probe: it is no convention; what it shows is how much a weight matters.
    """

    name: str
    field: str
    fix: str
    model_def: ModelDef
    loaded: Params
    change: WeightChange | None = None
    num_draft_tokens: int = 0
    is_probe: bool = False

    @property
    def params(self) -> Params:
        """The weights under these conventions, computed on each access."""
        return self.loaded if self.change is None else self.change.apply(self.loaded)

    @property
    def key(self) -> tuple[ModelDef, str]:
        """The identity of this hypothesis among those of one drafter."""
        return self.model_def, "" if self.change is None else self.change.name


class Origins:
    """Origins of the values of a loaded config: its config.json, a default, or our own manifest.

    Attributes:
      keys: by field, the keys of config.json that may hold it.
    """

    def __init__(self, model: LoadedModel, keys: Mapping[str, Sequence[str]]):
        """Read the file that the model was loaded from."""
        self.keys = keys
        self.converted = (model.directory / MANIFEST).is_file()
        self.path = model.directory / (MANIFEST if self.converted else "config.json")
        self.values = {} if self.converted else read_json(self.path)

    def find(self, field: str) -> tuple[str | None, Any]:
        """Return the key of the file that sets a field, and its value there; None for no key.

        A manifest has every field, with the value that was read.
        """
        if self.converted:
            return f"config.{field}", None
        return find_key(self.values, self.keys[field])

    def of(self, assumption: Assumption) -> str:
        """Return what set an assumption of a drafter."""
        if assumption.field is not None:
            key, _ = self.find(assumption.field)
            return f"default: {assumption.default}" if key is None else f"{self.path.name}: {key}"
        generation = MANIFEST if self.converted else "generation_config.json"
        return assumption.origin.format(config=self.path.name, generation=generation)

    def fix(self, values: Mapping[str, Any]) -> str:
        """Return an instruction to set fields."""
        parts = (
            f"{self.find(field)[0] or self.keys[field][0]} to {json.dumps(value)}"
            for field, value in values.items()
        )
        return f"set {' and '.join(parts)} in {self.path}"


def in_force(target: LoadedModel, drafter: LoadedModel) -> list[Convention]:
    """Return every disputed convention of a pair."""
    assumed: list[Convention] = []
    if conventions := conventions_of(drafter):
        origins = Origins(drafter, conventions.keys_of(drafter.config))
        assumed = [
            Convention(a.name, a.value, a.shown, origins.of(a))
            for a in conventions.in_force(target.config, drafter.config, target.model_def.dtype)
        ]
    ids = list(generation_of(target).suppress_tokens)
    origin = "default: none"
    if (target.directory / MANIFEST).is_file():
        origin = f"target's {MANIFEST}: generation.suppress_tokens"
    elif ids:
        origin = "target's generation_config.json: suppress_tokens"
    shown = ", ".join(map(str, ids)) or "none"
    return [*assumed, Convention("suppressed ids", ids, shown, origin)]


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
    conventions = conventions_of(drafter)
    if conventions is None:
        return [], []
    config, origins = (
        hypothesis.model_def.config,
        Origins(drafter, conventions.keys_of(drafter.config)),
    )
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
            key, in_file = origins.find(field)
            if origins.converted or key is None:
                values[field] = value
            elif getattr(config, field) is None:  # the config dropped the value of the file
                values[field] = in_file
            if origins.converted and value != getattr(config, field):
                shown[field] = value
        try:
            model_def = dataclasses.replace(
                hypothesis.model_def, config=dataclasses.replace(config, **values)
            )
        except ConfigError as error:
            left_out.append(f"{change.name}: {error}")
            continue
        hypotheses.append(
            dataclasses.replace(
                hypothesis,
                name=change.name,
                field=change.field,
                fix=origins.fix(shown),
                model_def=model_def,
                num_draft_tokens=change.num_draft_tokens,
            )
        )
    if hypothesis.change is None:
        hypotheses += [
            dataclasses.replace(
                hypothesis,
                name=changed.name,
                field=changed.weight,
                fix=changed.fix.format(
                    where=f"{changed.weight} in the weights of {drafter.directory}"
                ),
                change=changed,
                is_probe=changed.weight == conventions.later_only,
            )
            for changed in conventions.weight_changes(target.config, hypothesis.loaded)
        ]
    return hypotheses, left_out


def conventions_of(drafter: LoadedModel) -> Conventions | None:
    """Return the conventions of a drafter's family; None if it has none."""
    return family_of(drafter.config).conventions


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
