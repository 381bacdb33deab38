"""What a model is: frozen configs, the released presets, and how Hugging Face files map onto them.

Read `TargetConfig` first, then `DFlashConfig` and `MTPConfig`. Hugging Face field names appear only in the `from_hf`
functions at the end of each section. Every convention that implementations disagree on is a field here,
so that it can be printed, stored in a checkpoint's manifest and changed. Nothing here touches an array
or a weight file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

LayerType = Literal["sliding", "full"]
ConfigT = TypeVar("ConfigT", "TargetConfig", "DFlashConfig", "MTPConfig", "GenerationDefaults")

_LAYER_TYPES: dict[str, LayerType] = {"sliding_attention": "sliding", "full_attention": "full"}


class ConfigError(ValueError):
    """A config that is not one of ours: names the field, what was expected and what came."""


# --- targets -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetConfig:
    """The text decoder of a Gemma 4 model.

    `num_kv_heads` and `head_dim` are those of sliding layers; full layers have their own.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    full_num_kv_heads: int
    full_head_dim: int
    intermediate_size: int
    sliding_window: int  # keys a query sees on sliding layers, itself included
    max_positions: int
    k_eq_v: bool = False  # full layers only: values are the raw key projection, normed apart
    double_wide_mlp: bool = False  # layers that share K/V have an MLP of twice the width
    num_kv_shared_layers: int = 0  # the last so many layers read an earlier layer's K/V
    per_layer_input_size: int = 0  # 0: no per-layer inputs
    per_layer_vocab_size: int = 0
    num_experts: int = 0  # 0: dense
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    final_logit_softcap: float | None = 30.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    full_rope_theta: float = 1_000_000.0
    full_partial_rotary_factor: float = 0.25

    def __post_init__(self) -> None:
        for kind, heads in (("sliding", self.num_kv_heads), ("full", self.full_num_kv_heads)):
            if heads < 1 or self.num_heads % heads:
                raise ConfigError(
                    f"num_heads {self.num_heads} is not a multiple of the {heads} kv heads of {kind} layers"
                )
        if not self.layer_types or self.layer_types[-1] != "full":
            raise ConfigError("the last layer of a Gemma 4 target is always a full-attention layer")
        owners = self.layer_types[: self.first_shared_layer]
        for kind in set(self.layer_types[self.first_shared_layer :]):
            if kind not in owners:
                raise ConfigError(
                    f"layers from {self.first_shared_layer} on share K/V, but no earlier {kind} layer owns any"
                )
        if self.num_experts and not 0 < self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_token {self.num_experts_per_token} does not fit {self.num_experts} experts"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def first_shared_layer(self) -> int:
        return self.num_layers - self.num_kv_shared_layers

    def owns_kv(self, layer: int) -> bool:
        return layer < self.first_shared_layer

    def kv_owner(self, layer: int) -> int:
        """Return the layer whose K/V this layer reads: itself, or the last owner of its type."""
        return layer if self.owns_kv(layer) else self.last_kv_owner(self.layer_types[layer])

    def last_kv_owner(self, kind: str) -> int:
        """Return the last layer of a type that has K/V of its own."""
        return max(i for i in range(self.first_shared_layer) if self.layer_types[i] == kind)

    def head_dim_of(self, layer: int) -> int:
        return self.head_dim if self.layer_types[layer] == "sliding" else self.full_head_dim

    def num_kv_heads_of(self, layer: int) -> int:
        return self.num_kv_heads if self.layer_types[layer] == "sliding" else self.full_num_kv_heads

    def mlp_width_of(self, layer: int) -> int:
        wide = self.double_wide_mlp and not self.owns_kv(layer)
        return self.intermediate_size * (2 if wide else 1)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TargetConfig:
        """Read a Hugging Face config.json, of the released shape or as transformers 5.17+ writes it.

        Args:
          config: the parsed file; of a multimodal checkpoint only its text part is read.

        Raises:
          ConfigError: it is not a Gemma 4 text decoder, or uses a feature no released target has.
        """
        text = _gemma4_text_config(config)
        moe = bool(text.get("enable_moe_block", False))
        return cls(
            **_decoder_fields(text),
            k_eq_v=bool(text.get("attention_k_eq_v", False)),
            double_wide_mlp=bool(text.get("use_double_wide_mlp", False)),
            num_kv_shared_layers=_int(text, "num_kv_shared_layers", 0),
            per_layer_input_size=_int(text, "hidden_size_per_layer_input", 0),
            per_layer_vocab_size=(
                _int(text, "vocab_size_per_layer_input", _int(text, "vocab_size"))
                if text.get("hidden_size_per_layer_input")
                else 0
            ),
            num_experts=_int(text, "num_experts") if moe else 0,
            num_experts_per_token=_int(text, "top_k_experts") if moe else 0,
            expert_intermediate_size=_int(text, "moe_intermediate_size") if moe else 0,
            final_logit_softcap=text.get("final_logit_softcapping"),
        )


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint's generation_config.json says about decoding it."""

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
        """Read generation_config.json; end-of-sequence ids fall back to config.json's."""
        generation = generation_config or {}
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = _text_part(config).get("eos_token_id", config.get("eos_token_id"))
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


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _gemma4_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    outer, text = config.get("model_type"), _text_part(config)
    known = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
    if outer in MTP_MODEL_TYPES:
        raise ConfigError(
            f"config.json has model_type {outer!r}: that is an assistant, a drafter, not a target"
        )
    if outer not in known:
        raise ConfigError(
            f"config.json has model_type {outer!r} (architectures {config.get('architectures')}); a target "
            f"must be one of {', '.join(known)}"
        )
    if outer in ("gemma4", "gemma4_unified") and text is config:
        raise ConfigError(f"config.json has model_type {outer!r} but no text_config")
    if config.get("quantization_config"):
        raise ConfigError(
            "config.json has a quantization_config: quantised checkpoints are not supported; "
            "use the bfloat16 release"
        )
    return text


def _decoder_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Read what targets and their assistants have in common."""
    layer_types = list(_layer_types(text))
    layer_types[-1] = "full"  # as transformers does, with a warning, when the file says otherwise
    kv_heads, head_dim = _int(text, "num_key_value_heads"), _int(text, "head_dim", 256)
    if "per_layer_config" in text:  # wins over both released keys, even when empty
        full_head_dim, full_kv_heads = _full_layer_values(text, layer_types, head_dim, kv_heads)
    else:
        full_head_dim = _int(text, "global_head_dim", 512)
        full_kv_heads = kv_heads
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
            full_kv_heads = _int(text, "num_global_key_value_heads")
    _refuse_unless(text, "hidden_activation", ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    _refuse_unless(text, "attention_bias", (False, None), default=False)
    _refuse_unless(text, "tie_word_embeddings", (True,), default=True)
    _refuse_unless(text, "attn_logit_softcapping", (None,), default=None)
    _refuse_unless(text, "use_bidirectional_attention", (None, "vision"), default=None)
    rope = text.get("rope_parameters") or {}
    sliding_rope, full_rope = rope.get("sliding_attention", {}), rope.get("full_attention", {})
    _refuse_unless(sliding_rope, "rope_type", ("default",), default="default")
    _refuse_unless(full_rope, "rope_type", ("proportional",), default="proportional")
    return dict(
        vocab_size=_int(text, "vocab_size"),
        hidden_size=_int(text, "hidden_size"),
        layer_types=tuple(layer_types),
        num_heads=_int(text, "num_attention_heads"),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        full_num_kv_heads=full_kv_heads,
        full_head_dim=full_head_dim,
        intermediate_size=_int(text, "intermediate_size"),
        sliding_window=_int(text, "sliding_window"),
        max_positions=_int(text, "max_position_embeddings", 131072),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope_theta=float(sliding_rope.get("rope_theta", 10_000.0)),
        full_rope_theta=float(full_rope.get("rope_theta", 1_000_000.0)),
        full_partial_rotary_factor=float(full_rope.get("partial_rotary_factor", 0.25)),
    )


def _layer_types(text: Mapping[str, Any]) -> tuple[LayerType, ...]:
    names, count = text.get("layer_types"), _int(text, "num_hidden_layers")
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


def _full_layer_values(
    text: Mapping[str, Any], layer_types: Sequence[LayerType], head_dim: int, kv_heads: int
) -> tuple[int, int]:
    """Read head dim and kv heads of full layers from `per_layer_config`.

    Its keys are layer indices as strings, zero-padded to the width of the last one: compare as integers.
    """
    try:
        overrides = {int(k): dict(v) for k, v in (text["per_layer_config"] or {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"per_layer_config does not map layer indices to values: {error}"
        ) from None
    values: dict[LayerType, set[tuple[int, int]]] = {"sliding": set(), "full": set()}
    for i, kind in enumerate(layer_types):
        override = overrides.pop(i, {})
        values[kind].add(
            (
                int(override.pop("head_dim", head_dim)),
                int(override.pop("num_key_value_heads", kv_heads)),
            )
        )
        if override:
            raise ConfigError(
                f"per_layer_config of layer {i} overrides {sorted(override)}, which is not known"
            )
    if overrides:
        raise ConfigError(f"per_layer_config names layers {sorted(overrides)}, which do not exist")
    if values["sliding"] - {(head_dim, kv_heads)} or len(values["full"]) != 1:
        raise ConfigError(
            f"per_layer_config must give all layers of a type the same heads, but has {values}"
        )
    return values["full"].pop()


# --- DFlash drafters ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DFlashConfig:
    """A block drafter of z-lab's layout: it fills a block of masks in one pass, from target features."""

    vocab_size: int
    hidden_size: int  # also the target's: the drafter borrows its embedding and head
    layer_types: tuple[LayerType, ...]
    causal: tuple[bool, ...]  # a layer, inside the block
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int  # anchor + masks
    mask_token_id: int
    feature_layers: tuple[
        int, ...
    ]  # target layers whose outputs are the context features, in order
    num_target_layers: int
    max_positions: int
    sliding_window: int | None = None  # keys q - w < k <= q on sliding layers
    scale_embeddings: bool = True  # block embeddings carry the target's embedding scale
    final_logit_softcap: float | None = None
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if len(self.causal) != len(self.layer_types):
            raise ConfigError(
                f"causal names {len(self.causal)} layers, layer_types {len(self.layer_types)}; they must agree"
            )
        if "sliding" in self.layer_types and not self.sliding_window:
            raise ConfigError("the drafter has sliding layers but no sliding_window")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of {self.num_kv_heads} kv heads"
            )
        if self.block_size < 2:
            raise ConfigError(
                f"block_size {self.block_size} leaves no slot to draft; it must be 2 or more"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id {self.mask_token_id} is outside the vocabulary")
        # The last layer's output is normed in some engines and raw in others; no known drafter uses it.
        bad = [i for i in self.feature_layers if not 0 <= i < self.num_target_layers - 1]
        if bad or not self.feature_layers:
            raise ConfigError(
                f"feature layers {list(self.feature_layers)} do not fit a target of "
                f"{self.num_target_layers} layers: expected numbers from 0 to {self.num_target_layers - 2}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """Read the config.json of a z-lab style DFlash drafter.

        Causality follows `is_causal` (top level or in `dflash_config`, there also `causal`) when given; else
        sliding layers are causal inside the block and full layers are not (sglang #34524, SpecForge masks).

        Raises:
          ConfigError: it is not such a drafter, or needs a feature that is not here.
        """
        if "DFlashDraftModel" not in (config.get("architectures") or ()):
            raise ConfigError(
                f"config.json has architectures {config.get('architectures')}; a DFlash drafter has "
                "DFlashDraftModel"
            )

        def disputed(field: str) -> Any:
            return find_key(config, DFLASH_KEYS[field])[1]

        layers = _int(config, "num_hidden_layers")
        names = config.get("layer_types") or ["full_attention"] * layers
        layer_types = _layer_types({**config, "layer_types": names})
        _refuse_unless(config, "hidden_act", ("silu",), default="silu")
        _refuse_unless(config, "attention_bias", (False, None), default=False)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        _refuse_unless(rope, "rope_type", ("default",), default="default")
        theta = config.get("rope_theta") or rope.get("rope_theta")
        if theta is None:
            raise ConfigError(
                "config.json has no rope_theta, neither at the top nor in rope_parameters"
            )
        causal = disputed("causal")
        if causal is None:
            causal = [kind == "sliding" for kind in layer_types]
        elif isinstance(causal, bool):
            causal = [causal] * layers
        num_target_layers = disputed("num_target_layers")
        if num_target_layers is None:
            raise ConfigError("config.json has no num_target_layers")
        ids = disputed("feature_layers")
        if ids is None:
            ids = default_feature_layers(int(num_target_layers), layers)
        mask_token_id, block_size = disputed("mask_token_id"), disputed("block_size")
        if mask_token_id is None or block_size is None:
            missing = "mask_token_id" if mask_token_id is None else "block_size"
            raise ConfigError(f"config.json has no {missing}")
        heads = _int(config, "num_attention_heads")
        scale = disputed("scale_embeddings")
        return cls(
            vocab_size=_int(config, "vocab_size"),
            hidden_size=_int(config, "hidden_size"),
            layer_types=layer_types,
            causal=tuple(bool(c) for c in causal),
            num_heads=heads,
            num_kv_heads=_int(config, "num_key_value_heads"),
            head_dim=_int(config, "head_dim", _int(config, "hidden_size") // heads),
            intermediate_size=_int(config, "intermediate_size"),
            block_size=int(block_size),
            mask_token_id=int(mask_token_id),
            feature_layers=tuple(int(i) for i in ids),
            num_target_layers=int(num_target_layers),
            max_positions=_int(config, "max_position_embeddings", 262144),
            sliding_window=_int(config, "sliding_window") if "sliding" in layer_types else None,
            scale_embeddings=True if scale is None else bool(scale),
            final_logit_softcap=disputed("final_logit_softcap"),
            rope_theta=float(theta),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        )

    def check_fits(self, target: TargetConfig) -> None:
        """Refuse a target this drafter was not made for, naming every number that differs."""
        wrong = [
            f"{name}: drafter {ours}, target {theirs}"
            for name, ours, theirs in (
                ("hidden_size", self.hidden_size, target.hidden_size),
                ("vocab_size", self.vocab_size, target.vocab_size),
                ("num_target_layers", self.num_target_layers, target.num_layers),
            )
            if ours != theirs
        ]
        beyond = [i for i in self.feature_layers if i >= target.num_layers]
        if beyond:
            wrong.append(
                f"feature layers {beyond}: the target has layers 0 to {target.num_layers - 1}"
            )
        if wrong:
            raise ConfigError(f"the drafter does not fit the target: {'; '.join(wrong)}")


def _nested(*keys: str) -> tuple[str, ...]:
    return tuple(place for key in keys for place in (f"dflash_config.{key}", key))


DFLASH_KEYS: dict[str, tuple[str, ...]] = {
    "feature_layers": _nested("target_layer_ids"),
    "causal": _nested("causal", "is_causal"),
    "scale_embeddings": _nested("scale_embeddings"),
    "final_logit_softcap": _nested("final_logit_softcapping"),
    "sliding_window": ("sliding_window",),
    "mask_token_id": _nested("mask_token_id"),
    "block_size": _nested("block_size"),
    "num_target_layers": _nested("num_target_layers"),
}
"""Where config.json may say what engines disagree on, by field; see `find_key`."""


def find_key(config: Mapping[str, Any], keys: Sequence[str]) -> tuple[str | None, Any]:
    """Return the first of these keys that has a value, and that value; a dot goes into an object."""
    for key in keys:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return key, value
    return None, None


def default_feature_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Return z-lab's default feature layers, for files that name none (the count is the layer count)."""
    if count == 1:
        return (num_target_layers // 2,)
    last = num_target_layers - 4
    return tuple(round(1 + i * last / (count - 1)) for i in range(count))


# --- MTP assistants ----------------------------------------------------------------------------------

MTP_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")

MTP_KEYS: dict[str, tuple[str, ...]] = {
    "query_position": ("query_position",),
    "num_window_keys": ("num_window_keys",),
}
"""Where config.json may say what engines disagree on, by field. Released files have neither key."""


@dataclass(frozen=True)
class MTPConfig:
    """A Gemma 4 assistant: a few layers of queries over the target's own keys and values.

    With n positions in the target's caches, and the newest token not among them, engines disagree on two
    things. The query is rotated to position n - 1 (vLLM, SGLang) or n (transformers' generation): "last" or
    "next". Its sliding layers see the last w keys (vLLM, SGLang) or w + 1 (transformers).
    """

    vocab_size: int
    hidden_size: int
    backbone_hidden_size: int  # the target's
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int  # the target's, as are the head dims
    head_dim: int
    full_num_kv_heads: int
    full_head_dim: int
    intermediate_size: int
    sliding_window: int
    max_positions: int
    num_centroids: int = 0  # 0: a dense head
    num_top_centroids: int = 0  # clusters of tokens that a step looks into
    num_draft_tokens: int = 5  # unless asked otherwise
    suppress_tokens: tuple[int, ...] = ()  # beside the target's own
    query_position: Literal["last", "next"] = "last"
    num_window_keys: int = 0  # 0 in a file or call: sliding_window
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    full_rope_theta: float = 1_000_000.0
    full_partial_rotary_factor: float = 0.25

    def __post_init__(self) -> None:
        if not self.num_window_keys:
            object.__setattr__(self, "num_window_keys", self.sliding_window)
        if self.num_window_keys not in (self.sliding_window, self.sliding_window + 1):
            raise ConfigError(
                f"num_window_keys is {self.num_window_keys}; expected the sliding_window of "
                f"{self.sliding_window}, or one more"
            )
        for kind, heads in (("sliding", self.num_kv_heads), ("full", self.full_num_kv_heads)):
            if heads < 1 or self.num_heads % heads:
                raise ConfigError(
                    f"num_heads {self.num_heads} is not a multiple of the {heads} kv heads of {kind} layers"
                )
        if self.num_centroids:
            if self.vocab_size % self.num_centroids:
                raise ConfigError(
                    f"{self.num_centroids} centroids do not divide a vocabulary of {self.vocab_size}"
                )
            if not 1 <= self.num_top_centroids <= self.num_centroids:
                raise ConfigError(
                    f"centroid_intermediate_top_k is {self.num_top_centroids}; expected 1 to "
                    f"{self.num_centroids}, the number of centroids"
                )
        if self.num_draft_tokens < 1:
            raise ConfigError(f"num_draft_tokens is {self.num_draft_tokens}; expected 1 or more")

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> MTPConfig:
        """Read an assistant's config.json, and what its generation_config.json says of drafting.

        Raises:
          ConfigError: it is no assistant, or has what none has: experts, per-layer inputs, a wide MLP.
        """
        if config.get("model_type") not in MTP_MODEL_TYPES:
            raise ConfigError(
                f"config.json has model_type {config.get('model_type')!r}; an assistant has one of "
                f"{', '.join(MTP_MODEL_TYPES)}"
            )
        text = _text_part(config)
        if text is config:
            raise ConfigError("config.json of an assistant has no text_config")
        _refuse_unless(text, "enable_moe_block", (False, None))
        _refuse_unless(text, "use_double_wide_mlp", (False, None))
        _refuse_unless(text, "hidden_size_per_layer_input", (0, None))
        _refuse_unless(text, "final_logit_softcapping", (None,))
        shared = text.get("num_kv_shared_layers")
        if shared and shared != _int(text, "num_hidden_layers"):
            raise ConfigError(
                f"config.json has num_kv_shared_layers = {shared}; all "
                f"{_int(text, 'num_hidden_layers')} layers of an assistant read the target's K/V"
            )
        centroids = bool(config.get("use_ordered_embeddings", False))
        generation = generation_config or {}
        _, position = find_key(config, MTP_KEYS["query_position"])
        _, window = find_key(config, MTP_KEYS["num_window_keys"])
        if position not in (None, "last", "next"):
            raise ConfigError(f"query_position is {position!r}; expected last (n - 1) or next (n)")
        return cls(
            **_decoder_fields(text),
            backbone_hidden_size=_int(config, "backbone_hidden_size"),
            num_centroids=_int(config, "num_centroids", 2048) if centroids else 0,
            num_top_centroids=_int(config, "centroid_intermediate_top_k", 32) if centroids else 0,
            num_draft_tokens=_int(generation, "num_assistant_tokens", 5),
            suppress_tokens=tuple(int(i) for i in generation.get("suppress_tokens") or ()),
            query_position=position or "last",
            num_window_keys=window or 0,
        )

    def check_fits(self, target: TargetConfig) -> None:
        """Refuse a target this assistant was not made for, naming every number that differs."""
        wrong = [
            f"{name}: assistant {ours}, target {theirs}"
            for name, ours, theirs in (
                ("backbone_hidden_size", self.backbone_hidden_size, target.hidden_size),
                ("vocab_size", self.vocab_size, target.vocab_size),
                ("kv heads of sliding layers", self.num_kv_heads, target.num_kv_heads),
                ("head_dim of sliding layers", self.head_dim, target.head_dim),
                ("kv heads of full layers", self.full_num_kv_heads, target.full_num_kv_heads),
                ("head_dim of full layers", self.full_head_dim, target.full_head_dim),
                ("sliding_window", self.sliding_window, target.sliding_window),
            )
            if ours != theirs
        ]
        owners = target.layer_types[: target.first_shared_layer]
        wrong += [
            f"the target has no {kind} layer with K/V of its own"
            for kind in sorted(set(self.layer_types))
            if kind not in owners
        ]
        if wrong:
            raise ConfigError(
                f"the assistant does not fit the target: {'; '.join(wrong)}; use the assistant of the "
                "target's own size"
            )


# --- presets -----------------------------------------------------------------------------------------


def _pattern(num_layers: int, every: int) -> tuple[LayerType, ...]:
    return tuple("full" if (i + 1) % every == 0 else "sliding" for i in range(num_layers))


_COMMON: dict[str, Any] = dict(vocab_size=262_144, head_dim=256, full_head_dim=512)

TARGET_PRESETS: dict[str, TargetConfig] = {
    "e2b": TargetConfig(
        **_COMMON,
        hidden_size=1536,
        layer_types=_pattern(35, 5),
        num_heads=8,
        num_kv_heads=1,
        full_num_kv_heads=1,
        intermediate_size=6144,
        double_wide_mlp=True,
        sliding_window=512,
        num_kv_shared_layers=20,
        per_layer_input_size=256,
        per_layer_vocab_size=262_144,
        max_positions=131_072,
    ),
    "e4b": TargetConfig(
        **_COMMON,
        hidden_size=2560,
        layer_types=_pattern(42, 6),
        num_heads=8,
        num_kv_heads=2,
        full_num_kv_heads=2,
        intermediate_size=10_240,
        sliding_window=512,
        num_kv_shared_layers=18,
        per_layer_input_size=256,
        per_layer_vocab_size=262_144,
        max_positions=131_072,
    ),
    "12b": TargetConfig(
        **_COMMON,
        hidden_size=3840,
        layer_types=_pattern(48, 6),
        num_heads=16,
        num_kv_heads=8,
        full_num_kv_heads=1,
        k_eq_v=True,
        intermediate_size=15_360,
        sliding_window=1024,
        max_positions=262_144,
    ),
    "26b-a4b": TargetConfig(
        **_COMMON,
        hidden_size=2816,
        layer_types=_pattern(30, 6),
        num_heads=16,
        num_kv_heads=8,
        full_num_kv_heads=2,
        k_eq_v=True,
        intermediate_size=2112,
        sliding_window=1024,
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_size=704,
        max_positions=262_144,
    ),
    "31b": TargetConfig(
        **_COMMON,
        hidden_size=5376,
        layer_types=_pattern(60, 6),
        num_heads=32,
        num_kv_heads=16,
        full_num_kv_heads=4,
        k_eq_v=True,
        intermediate_size=21_504,
        sliding_window=1024,
        max_positions=262_144,
    ),
}


def _zlab(hidden: int, heads: int, mlp: int, layers: int, ids: tuple[int, ...]) -> DFlashConfig:
    return DFlashConfig(
        vocab_size=262_144,
        hidden_size=hidden,
        layer_types=("sliding",) * 4 + ("full",),
        causal=(True,) * 4 + (False,),
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=mlp,
        block_size=16,
        mask_token_id=4,
        feature_layers=ids,
        num_target_layers=layers,
        max_positions=262_144,
        sliding_window=2048,
        final_logit_softcap=30.0,
    )


DFLASH_PRESETS: dict[str, DFlashConfig] = {
    "12b": _zlab(3840, 32, 7680, 48, (1, 10, 19, 27, 36, 45)),
    "26b-a4b": _zlab(2816, 32, 5632, 30, (1, 6, 11, 17, 22, 27)),
    "31b": _zlab(5376, 64, 10_752, 60, (1, 12, 23, 35, 46, 57)),
}


def _assistant(size: str, hidden: int, heads: int, mlp: int, **centroids: Any) -> MTPConfig:
    target = TARGET_PRESETS[size]
    return MTPConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        backbone_hidden_size=target.hidden_size,
        layer_types=("sliding",) * 3 + ("full",),
        num_heads=heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        full_num_kv_heads=target.full_num_kv_heads,
        full_head_dim=target.full_head_dim,
        intermediate_size=mlp,
        sliding_window=target.sliding_window,
        max_positions=target.max_positions,
        suppress_tokens=(258_883, 258_882) if size == "12b" else (),
        **centroids,
    )


_CENTROIDS: dict[str, Any] = dict(num_centroids=2048, num_top_centroids=32)

MTP_PRESETS: dict[str, MTPConfig] = {
    "e2b": _assistant("e2b", 256, 4, 2048, **_CENTROIDS),
    "e4b": _assistant("e4b", 256, 4, 2048, **_CENTROIDS),
    "12b": _assistant("12b", 1024, 16, 8192),
    "26b-a4b": _assistant("26b-a4b", 1024, 16, 8192),
    "31b": _assistant("31b", 1024, 32, 8192),
}


# --- stored form and small readers -------------------------------------------------------------------


def to_json(config: TargetConfig | DFlashConfig | MTPConfig | GenerationDefaults) -> dict[str, Any]:
    """Return a config as JSON values, for a checkpoint's manifest."""
    return dataclasses.asdict(config)


def from_json(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Rebuild a config from `to_json` values; an unknown or missing field is a `ConfigError`."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    wrong = sorted(set(values) - set(fields)) + sorted(required - set(values))
    if wrong:
        raise ConfigError(f"stored {cls.__name__} has unknown or missing fields: {wrong}")
    arguments: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
    }
    return cls(**arguments)


def _int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json has no {key}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"config.json has {key} = {value!r}; expected a whole number")
    return value


def _refuse_unless(
    config: Mapping[str, Any], key: str, allowed: Sequence[Any], default: Any = None
) -> None:
    value = config.get(key, default)
    if value not in allowed:
        raise ConfigError(f"config.json has {key} = {value!r}; only {list(allowed)} is supported")
