"""The entries of the registry. Read `Family` first. `Conventions` is for drafters.

An entry is plain data and functions. Its functions import modules and tables of rules when called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxspec.configs.base import TargetConfig
from jaxspec.configs.fields import words_of

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet
    from jaxspec.registry.costs import DraftStep, StepCost
    from jaxspec.shapes import Params

Role = Literal["target", "drafter", "vision"]
"""What a model does: a target; a drafter; a vision part, which embeds images for a target."""

ModelConfig = Any
"""A family's own config, a frozen dataclass.

A target's config is a `TargetConfig`. A drafter's config has a method `check_fits`.
"""


@dataclass(frozen=True, eq=False)
class Family:
    """One kind of model, with everything about it that the rest of jaxspec does not know.

    Attributes:
      name: the family's name in manifests and in `--drafter`.
      title: the name of such a model in messages, with its article: "a DFlash drafter".
      config: the class of its configs. No other family has this class.
      read: makes a config from the parsed config.json and generation_config.json. The latter is
        None if the checkpoint has no such file. Raises `ConfigError` if the files need a feature
        that the module does not have. Of a vision part it returns None if the checkpoint has none.
      module: imports and returns the class that `ModelDef` binds.
      rules: imports and returns the table of conversion rules, for a config and the names of its
        parameters.
      architectures, model_types: the values in config.json, under keys `architectures` and
        `model_type`, that identify the family.
      presets: configs of the released sizes, by name. No other target has these names.
      usual_drafter: for a target, the family of the drafter that it is benchmarked with.
      drafter_for: for a drafter, a function of a target's preset. It returns the drafter's config
        and a description for messages. Raises ValueError if there is no drafter for the preset.
      cost: for a drafter, the cost of drafting and absorbing in one step. It takes the facts of the
        step, the number of rows, and the committed tokens of each row. None if the cost is
        negligible.
      conventions: for a drafter, what it assumes about its target.
      with_head: for a drafter that borrows the target's head, what `module` is for the same drafter
        with a copy of that head, a weight named `head`. It takes the config, and returns None for
        all others.
      method: the name of a drafter's method in `configs.drafter_methods`, where files show it.
      fit_to: returns the config of a checkpoint with tensors of these names, where its config.json
        leaves open which parameters it has.
      randomise: makes random weights behave as real weights do. It takes the weights and their
        seed.
    """

    name: str
    role: Role
    title: str
    config: type[Any]
    read: Callable[[Mapping[str, Any], Mapping[str, Any] | None], ModelConfig]
    module: Callable[[], type[Any]]
    rules: Callable[[ModelConfig, Iterable[str]], RuleSet]
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    presets: Mapping[str, ModelConfig] = dataclasses.field(default_factory=dict)
    usual_drafter: str | None = None
    drafter_for: Callable[[str, TargetConfig], tuple[ModelConfig, str]] | None = None
    cost: Callable[[DraftStep, int, int], StepCost] | None = None
    conventions: Conventions | None = None
    with_head: Callable[[ModelConfig], type[Any] | None] = lambda config: None
    method: str | None = None
    fit_to: Callable[[ModelConfig, Collection[str]], ModelConfig] = lambda config, names: config
    randomise: Callable[[Params, int], Params] = lambda params, seed: params

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether a config.json has a model type or an architecture of this family.

        Raises:
          ConfigError: its `architectures` are no list of words.
        """
        architectures = words_of(config, "architectures")
        return config.get("model_type") in self.model_types or any(
            word in self.architectures for word in architectures
        )


# --- conventions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumption:
    """One convention that a drafter assumes, and on which projects disagree.

    Attributes:
      value, shown: the convention in force, as a JSON value and in words.
      field: the config field that holds the convention. `check` looks up what set this field.
      default: the convention in force if config.json does not set the field.
      origin: what set the convention if it has no field. `{config}` and `{generation}` stand for
        the files that hold the contents of config.json and generation_config.json.
    """

    name: str
    value: Any
    shown: str
    field: str | None = None
    default: str = "none"
    origin: str = "the method: no key changes it"


@dataclass(frozen=True)
class Change:
    """Another value of a config field, with which a drafter may have been trained instead.

    Attributes:
      name: a description of the changed convention.
      needs_tokens: only a text of more tokens than this shows a difference. 0 if every text does.
      derived: values of other fields, which the reader of config.json derives from this one where
        the file is silent. They change with it there.
      in_file: the value as config.json writes it; None if that is `value` itself.
      num_draft_tokens: how many tokens a draft has under it; 0 for as many as before.
    """

    name: str
    field: str
    value: Any
    needs_tokens: int = 0
    derived: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_file: Any = None
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class WeightChange:
    """Weights under another convention that no config field can express.

    Attributes:
      weight: the names of the parameters that differ.
      fix: how to correct them. `{where}` stands for the parameters and their directory.
      apply: returns the parameters after the change. The change is made when it is needed, so that
        only one changed copy of a parameter is in memory.
    """

    name: str
    weight: str
    fix: str
    apply: Callable[[Params], Params]


def _no_weight_changes(target: TargetConfig, params: Params) -> Iterable[WeightChange]:
    del target, params
    return ()


@dataclass(frozen=True)
class Conventions:
    """The conventions of a target and a drafter that `check` prints, and the alternatives it tries.

    Of alternatives that do equally well, `check` names the first. Put the most usual first.

    Attributes:
      keys: the keys of config.json that may set each field, see `configs.base.find_key`; or a
        function of the config that returns them.
      in_force: returns the conventions in force. It takes the configs of target and drafter, and the
        dtype of the target.
      changes: returns other plausible values of config fields. It takes the configs of target and
        drafter, and the special ids of the target's tokenizer.
      weight_changes: returns other plausible weights. It takes the target's config and the
        drafter's parameters, of which it may look at names and shapes.
      traced: returns valid values for the fields of a config that shape no program, always the same
        ones. A program is compiled for these, and the drafter's `assume` gives it the real numbers.
        Feature layers need not even that: they are the order in which `absorb` gets features.
      later_only: the parameter that only drafts after the first depend on; "" if there is none. One of
        `weight_changes`, the only one of this parameter, puts its numbers in another order. That is a
        probe of how much they matter, and never proposed.
      shortened: the key of config.json that holds how many tokens a block has that was trained, its
        anchor included; "" for drafters without blocks.
    """

    keys: Mapping[str, Sequence[str]] | Callable[[ModelConfig], Mapping[str, Sequence[str]]]
    in_force: Callable[[TargetConfig, ModelConfig, str], Iterable[Assumption]]
    changes: Callable[[TargetConfig, ModelConfig, Sequence[int]], Iterable[Change]]
    weight_changes: Callable[[TargetConfig, Params], Iterable[WeightChange]] = _no_weight_changes
    traced: Callable[[ModelConfig], Mapping[str, Any]] = lambda config: {}
    later_only: str = ""
    shortened: str = ""

    def keys_of(self, config: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Return the keys that may set each field of a config."""
        return self.keys(config) if callable(self.keys) else self.keys
