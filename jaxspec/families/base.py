"""What an entry of the registry says about a kind of model. Read `Family`; `Conventions` is for drafters.

An entry is plain data and functions. Modules and tables of rules are imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from jaxspec.configs.base import TargetConfig

if TYPE_CHECKING:
    from checkpoints_convert.rules import RuleSet
    from jaxspec.families.costs import StepCost
    from jaxspec.params import Graph
    from jaxspec.shapes import Params
    from jaxspec.state import DecodeSpec

ModelConfig = Any
"""A family's own config: a frozen dataclass. A target's is a `TargetConfig`; a drafter's has `check_fits`."""


@dataclass(frozen=True, eq=False)
class Family:
    """One kind of model: everything about it that the rest of jaxspec does not know.

    Attributes:
      name: as manifests and `--drafter` say it.
      title: what one is called in messages, with its article: "a DFlash drafter".
      config: the class of its configs. No other family has it.
      read: makes a config of the parsed config.json and generation_config.json (None: there is none).
        It raises `ConfigError` where the files ask for what the module cannot do.
      module: imports and returns the class that `Graph` binds.
      rules: imports and returns the table of its tensors, for a config and the names of its parameters.
      architectures, model_types: the words in config.json that tell it, under these keys.
      presets: configs of released sizes, by a name that no other target has.
      usual_drafter: of a target: the family of the drafter that it is benchmarked with.
      drafter_for: of a drafter: the config that belongs to a target's preset, and what to call it.
        It raises ValueError where there is none.
      cost: of a drafter: what drafting and absorbing cost in one step, for a spec, a number of rows and
        the committed tokens of each. None: nothing that is worth counting.
      conventions: of a drafter: what it takes for granted about its target.
      randomise: makes random weights (which come with their seed) behave as real ones do.
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
        """Tell whether a config.json has this family's words."""
        architectures = config.get("architectures") or ()
        return config.get("model_type") in self.model_types or any(
            word in self.architectures for word in architectures
        )


# --- conventions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumption:
    """One thing that a drafter takes for granted, and on which projects disagree.

    Attributes:
      value, shown: what holds, in JSON and in words.
      field: the config field that holds it. `check` looks up what set it.
      default: what holds where config.json is silent.
      origin: without a field, what set it. `{config}` and `{generation}` stand for the file that has
        what config.json and generation_config.json say.
    """

    name: str
    value: Any
    shown: str
    field: str | None = None
    default: str = "none"
    origin: str = "the method: no key changes it"


@dataclass(frozen=True)
class Change:
    """Another value of a config field, which may have been meant.

    Attributes:
      name: how a drafter that was trained with it differs.
      needs_tokens: only a text of more tokens can show the difference. 0: every text can.
    """

    name: str
    field: str
    value: Any
    needs_tokens: int = 0


@dataclass(frozen=True)
class WeightChange:
    """Weights under another convention which no config field can express.

    Attributes:
      weight: the parameter that differs.
      fix: what to do to it. `{where}` stands for the parameter and the directory that holds it.
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
    """What `check` prints of a pair's conventions, and what it tries instead.

    Attributes:
      keys: where config.json may say a field, by field; see `configs.base.find_key`.
      in_force: what holds, for the graphs of target and drafter.
      changes: other values that are as plausible, for the configs of target and drafter.
      weight_changes: likewise, of weights.
    """

    keys: Mapping[str, Sequence[str]]
    in_force: Callable[[Graph, Graph], Iterable[Assumption]]
    changes: Callable[[TargetConfig, ModelConfig], Iterable[Change]]
    weight_changes: Callable[[Params], Iterable[WeightChange]] = _no_weight_changes
