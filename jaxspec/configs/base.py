"""The common part of all configs: the layers of a target, defaults of decoding, and readers.

Read `LayerSpec` and `TargetConfig`. Caches, memory, costs and drafters know a target only through
these. Hugging Face field names appear only in `from_hf` functions and their helpers. Nothing here
uses arrays or weight files. `fields` says what a field may hold.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from jaxspec.configs.fields import (
    FLAGS,
    IDS,
    LAYERS,
    MOST_LAYERS,
    ConfigError,
    check_fields,
    entries,
    find_key,
    limited,
    read,
    read_fields,
    refusal,
    refuse_unless,
    several,
    words_of,
)
from jaxspec.configs.known_keys import unapplied
from jaxspec.options import RANGES, Range, shown

__all__ = [
    "ConfigError",
    "GenerationDefaults",
    "LayerSpec",
    "LayerType",
    "TargetConfig",
    "find_key",
    "from_json",
    "refuse_unless",
    "to_json",
]

LayerType = Literal["sliding", "full"]
ConfigT = TypeVar("ConfigT")

_LAYER_TYPES: dict[str, LayerType] = {"sliding_attention": "sliding", "full_attention": "full"}
_LAYER_TYPE = Range("sliding or full", lambda x: x in ("sliding", "full"), kind="a word")


# --- targets -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a target, as caches, costs and drafters see it.

    Attributes:
      window: the number of keys that a query sees, its own included; None for all keys.
      kv_owner: the layer whose keys and values this layer reads: itself, or an earlier layer.
    """

    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_owner: int

    @property
    def kind(self) -> LayerType:
        return "full" if self.window is None else "sliding"


class TargetConfig(abc.ABC):
    """The interface of targets' configs. Each family derives a frozen dataclass from this class.

    Attributes:
      num_experts: the number of experts of each layer; 0 for a dense model.
      normed_values: whether values of attention are normed, without a weight.
    """

    vocab_size: int
    hidden_size: int
    max_positions: int
    num_experts: int = 0
    num_experts_per_token: int = 0
    normed_values: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers, in order."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def embedding_scale(self) -> float:
        """The factor by which embeddings are multiplied before the first layer."""
        return 1.0

    def owns_kv(self, layer: int) -> bool:
        return self.layers[layer].kv_owner == layer

    def last_kv_owner(self, kind: str) -> int:
        """Return the last layer of a kind ("sliding" or "full") that has K/V of its own.

        Raises:
          ValueError: no layer of that kind has K/V of its own.
        """
        owners = [
            i for i, layer in enumerate(self.layers) if layer.kind == kind and self.owns_kv(i)
        ]
        if not owners:
            raise ValueError(f"the target has no {kind} layer with K/V of its own")
        return owners[-1]


@dataclass(frozen=True)
class GenerationDefaults:
    """A checkpoint's defaults for decoding, from its generation_config.json.

    `suppress_tokens` are never emitted, in draft and verify alike.
    """

    eos_token_ids: tuple[int, ...] = several(IDS, (), least=0)
    suppress_tokens: tuple[int, ...] = several(IDS, (), least=0)
    temperature: float = limited(RANGES["temperature"], 1.0)
    top_k: int = limited(RANGES["top_k"], 0)  # 0: off
    top_p: float = limited(RANGES["top_p"], 1.0)
    min_p: float = limited(RANGES["min_p"], 0.0)  # 0: off
    repetition_penalty: float = limited(RANGES["repetition_penalty"], 1.0)  # 1: off

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_hf(
        cls, generation_config: Mapping[str, Any] | None, config: Mapping[str, Any]
    ) -> GenerationDefaults:
        """Read generation_config.json. End-of-sequence ids fall back to those of config.json.

        Raises:
          ConfigError: naming the key that is wrong.
        """
        generation, file = generation_config or {}, "generation_config.json"
        if (eos := generation.get("eos_token_id")) is None:
            # Gemma 4's instruction-tuned releases name 1 and 106, the end of a turn. Their text part names 1.
            eos = config.get("eos_token_id")
            eos = text_part(config).get("eos_token_id") if eos is None else eos
            origin = "config.json"
        else:
            origin = file
        eos = {"eos_token_id": [eos] if isinstance(eos, int) else eos}
        keys = {"eos_token_ids": ("eos_token_id",)}
        names = [f.name for f in dataclasses.fields(cls) if f.name not in keys]
        values = read_fields(cls, eos, keys, origin)
        values |= read_fields(cls, generation, {name: (name,) for name in names}, file)
        if not read(generation, "do_sample", FLAGS, "temperature" in generation, file):
            values["temperature"] = 0.0
        return cls(**values)

    @classmethod
    def unapplied(cls, generation_config: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what a generation_config.json asks of decoding that is not done, by key."""
        names = {f.name for f in dataclasses.fields(cls)}
        return unapplied(generation_config or {}, {*names, "eos_token_id", "do_sample"})

    def check_fits(self, vocab_size: int) -> None:
        """Check that all ids are in a vocabulary.

        Raises:
          ConfigError: naming the ids that are not.
        """
        for name, key in (("eos_token_ids", "eos_token_id"), ("suppress_tokens",) * 2):
            check_ids(key, getattr(self, name), vocab_size)


def check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """Check that ids are in a vocabulary.

    Raises:
      ConfigError: naming those that are not.
    """
    if beyond := [i for i in ids if i >= vocab_size]:
        raise ConfigError(
            f"{name} has {shown(beyond)}, outside the vocabulary; expected 0 to {vocab_size - 1}"
        )


# --- manifests -----------------------------------------------------------------------------------


def to_json(config: Any) -> dict[str, Any]:
    """Return a config as JSON values, for a checkpoint's manifest."""
    return dataclasses.asdict(config)


def from_json(cls: type[ConfigT], values: Any) -> ConfigT:
    """Rebuild a config from the values of `to_json`.

    Raises:
      ConfigError: a field is unknown, missing, or out of its range.
    """
    kind: Any = cls
    if not isinstance(values, Mapping):
        raise ConfigError(f"stored {cls.__name__} is {shown(values)}; it must be an object")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    wrong = sorted(set(values) - set(fields)) + sorted(required - set(values))
    if wrong:
        raise ConfigError(f"stored {cls.__name__} has unknown or missing fields: {shown(wrong)}")
    made = {}
    for name, value in values.items():
        if "entries" in fields[name].metadata:
            made[name] = entries(fields[name], name, value)
            continue
        if message := refusal(fields[name], name, value):
            raise ConfigError(message)
        made[name] = tuple(value) if isinstance(value, list) else value
    return kind(**made)


# --- what several readers need -------------------------------------------------------------------


def layer_types(*, least: int = 1) -> Any:
    """Declare a field that has the type of each layer."""
    return several(_LAYER_TYPE, least=least, limit=MOST_LAYERS)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a config.json, or all of it where it has no parts."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def layer_types_of(config: Mapping[str, Any], full_every: int = 6) -> tuple[LayerType, ...]:
    """Read the types of all layers.

    Args:
      full_every: which layers are full where the file does not say.

    Raises:
      ConfigError: a type is not known, or there are not as many as layers.
    """
    total = read(config, "num_hidden_layers", LAYERS)
    if config.get("layer_types") is None:
        return tuple("sliding" if (i + 1) % full_every else "full" for i in range(total))
    names = words_of(config, "layer_types")
    if len(names) != total:
        raise ConfigError(f"layer_types lists {len(names)} layers, num_hidden_layers says {total}")
    if unknown := sorted(set(names) - set(_LAYER_TYPES)):
        raise ConfigError(f"layer_types has {shown(unknown)}; expected {sorted(_LAYER_TYPES)}")
    return tuple(_LAYER_TYPES[name] for name in names)
