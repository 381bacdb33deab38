"""What an entry of the registry holds. Read `Family` first. `Conventions` is for drafters.

An entry is plain data and functions. Its functions import modules and tables of rules when called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from jaxspec.configs.base import TargetConfig
from jaxspec.configs.fields import words_of

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet
    from jaxspec.families.costs import StepCost
    from jaxspec.params import Graph
    from jaxspec.shapes import Params
    from jaxspec.state import DecodeSpec

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
        that the module does not have.
      module: imports and returns the class that `Graph` binds.
      rules: imports and returns the table of conversion rules, for a config and the names of its
        parameters.
      architectures, model_types: the values in config.json, under keys `architectures` and
        `model_type`, that identify the family.
      presets: configs of the released sizes, by name. No other target has these names.
      usual_drafter: for a target, the family of the drafter that it is benchmarked with.
      drafter_for: for a drafter, a function of a target's preset. It returns the drafter's config
        and a description for messages. Raises ValueError if there is no drafter for the preset.
      cost: for a drafter, the cost of drafting and absorbing in one step. It takes a spec, the
        number of rows, and the committed tokens of each row. None if the cost is negligible.
      conventions: for a drafter, what it assumes about its target.
      randomise: makes random weights behave as real weights do. It takes the weights and their
        seed.
    """

    name: str
    role: Literal["target", "drafter"]
    title: str
    config: type[Any]
    read: Callable[[Mapping[str, Any], Mapping[str, Any] | None], ModelConfig]
    module: Callable[[], type[Any]]
    rules: Callable[[ModelConfig, Iterable[str]], RuleSet]
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    presets: Mapping[str, ModelConfig] = field(default_factory=dict)
    usual_drafter: str | None = None
    drafter_for: Callable[[str, TargetConfig], tuple[ModelConfig, str]] | None = None
    cost: Callable[[DecodeSpec, int, int], StepCost] | None = None
    conventions: Conventions | None = None
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
    """

    name: str
    field: str
    value: Any
    needs_tokens: int = 0


@dataclass(frozen=True)
class WeightChange:
    """Weights under another convention that no config field can express.

    Attributes:
      weight: the name of the parameter that differs.
      fix: how to correct that parameter. `{where}` stands for the parameter and its directory.
      params: the parameters after the change.
    """

    name: str
    weight: str
    fix: str
    params: Params


def _no_weight_changes(params: Params) -> Iterable[WeightChange]:
    del params
    return ()


@dataclass(frozen=True)
class Conventions:
    """The conventions of a target and a drafter that `check` prints, and the alternatives it tries.

    Attributes:
      keys: the keys of config.json that may set each field. See `configs.base.find_key`.
      in_force: returns the conventions in force. It takes the graphs of target and drafter.
      changes: returns other plausible values of config fields. It takes the configs of target and
        drafter.
      weight_changes: returns other plausible weights. It takes the drafter's parameters.
    """

    keys: Mapping[str, Sequence[str]]
    in_force: Callable[[Graph, Graph], Iterable[Assumption]]
    changes: Callable[[TargetConfig, ModelConfig], Iterable[Change]]
    weight_changes: Callable[[Params], Iterable[WeightChange]] = _no_weight_changes
