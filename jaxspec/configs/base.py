"""What all configs share: errors, the layers of a target, defaults of decoding, and readers.

Read `LayerSpec` and `TargetConfig`. Caches, memory, costs and drafters know a target only through
these. Hugging Face field names appear only in `from_hf` functions and their helpers. Nothing here
uses arrays or weight files.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

LayerType = Literal["sliding", "full"]
ConfigT = TypeVar("ConfigT")

_LAYER_TYPES: dict[str, LayerType] = {"sliding_attention": "sliding", "full_attention": "full"}


class ConfigError(ValueError):
    """A config is not supported. The message names the field, and what was expected and given."""


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
    """What other modules know of a target. Each family derives a frozen dataclass from this class.

    Attributes:
      num_experts: the number of experts of each layer; 0 for a dense model.
    """

    vocab_size: int
    hidden_size: int
    max_positions: int
    num_experts: int = 0
    num_experts_per_token: int = 0

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
    """A checkpoint's defaults for decoding, from its generation_config.json."""

    eos_token_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()  # never emitted, in draft and verify alike
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off

    @classmethod
    def from_hf(
        cls, generation_config: Mapping[str, Any] | None, config: Mapping[str, Any]
    ) -> GenerationDefaults:
        """Read generation_config.json. End-of-sequence ids fall back to those of config.json."""
        generation = generation_config or {}
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = text_part(config).get("eos_token_id", config.get("eos_token_id"))
        eos = [] if eos is None else [eos] if isinstance(eos, int) else eos
        sample = bool(generation.get("do_sample", "temperature" in generation))
        return cls(
            eos_token_ids=tuple(int(i) for i in eos),
            suppress_tokens=tuple(int(i) for i in generation.get("suppress_tokens") or ()),
            temperature=float(generation.get("temperature") or 1.0) if sample else 0.0,
            top_k=int(generation.get("top_k") or 0),
            top_p=float(generation.get("top_p") or 1.0),
            min_p=float(generation.get("min_p") or 0.0),
            repetition_penalty=float(generation.get("repetition_penalty") or 1.0),
        )


def to_json(config: Any) -> dict[str, Any]:
    """Return a config as JSON values, for a checkpoint's manifest."""
    return dataclasses.asdict(config)


def from_json(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Rebuild a config from the values of `to_json`.

    Raises:
      ConfigError: a field is unknown or missing.
    """
    kind: Any = cls
    fields = {f.name: f for f in dataclasses.fields(kind)}
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    wrong = sorted(set(values) - set(fields)) + sorted(required - set(values))
    if wrong:
        raise ConfigError(f"stored {cls.__name__} has unknown or missing fields: {wrong}")
    arguments: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
    }
    return kind(**arguments)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def layer_types_of(text: Mapping[str, Any]) -> tuple[LayerType, ...]:
    names, count = text.get("layer_types"), whole_number(text, "num_hidden_layers")
    if names is None:  # the default of early files: every sixth layer is full
        names = [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)
        ]
    if len(names) != count:
        raise ConfigError(f"layer_types lists {len(names)} layers, num_hidden_layers says {count}")
    unknown = sorted(set(names) - set(_LAYER_TYPES))
    if unknown:
        raise ConfigError(f"layer_types has {unknown}; expected {sorted(_LAYER_TYPES)}")
    return tuple(_LAYER_TYPES[name] for name in names)


def find_key(config: Mapping[str, Any], keys: Sequence[str]) -> tuple[str | None, Any]:
    """Return the first of these keys that has a value, and that value.

    The key "a.b" stands for key "b" of object "a". Returns (None, None) if no key has a value.
    """
    for key in keys:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return key, value
    return None, None


def whole_number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json has no {key}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"config.json has {key} = {value!r}; expected a whole number")
    return value


def refuse_unless(
    config: Mapping[str, Any], key: str, allowed: Sequence[Any], default: Any = None
) -> None:
    value = config.get(key, default)
    if value not in allowed:
        raise ConfigError(f"config.json has {key} = {value!r}; only {list(allowed)} is supported")
