"""Gemma 4's MTP assistants: their config, its reader, and the released sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxspec.configs import gemma4
from jaxspec.configs.base import LayerType, TargetConfig, check_ids, layer_types
from jaxspec.configs.fields import (
    COUNTS,
    DRAFTS,
    EPS,
    EVEN,
    FACTORS,
    FLAGS,
    IDS,
    SHARES,
    SIZES,
    THETAS,
    ConfigError,
    check_fields,
    count,
    limited,
    object_of,
    read,
    read_fields,
    refuse_unless,
    several,
    short_repr,
    size,
)
from jaxspec.configs.gemma4 import decoder_fields
from jaxspec.configs.known_keys import refuse_unknown
from jaxspec.options import Range, shown

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")

_ROPE = "text_config.rope_parameters"

KEYS: dict[str, tuple[str, ...]] = {
    "query_position": ("query_position",),
    "num_window_keys": ("num_window_keys",),
    "rope_theta": (f"{_ROPE}.sliding_attention.rope_theta",),
    "full_rope_theta": (f"{_ROPE}.full_attention.rope_theta",),
    "full_partial_rotary_factor": (f"{_ROPE}.full_attention.partial_rotary_factor",),
    "full_rope_factor": (f"{_ROPE}.full_attention.factor",),
}
"""The keys of config.json that may set each field on which engines disagree. See `find_key`.

Released files have neither of the first two.
"""

_OWN_KEYS = (
    *("backbone_hidden_size", "centroid_intermediate_top_k", "num_centroids", "num_window_keys"),
    *("query_position", "text_config", "use_ordered_embeddings"),
)
_GENERATION_KEYS: dict[str, tuple[str, ...]] = {
    "num_draft_tokens": ("num_assistant_tokens",),
    "suppress_tokens": ("suppress_tokens",),
}
POSITIONS = Range("last (n - 1) or next (n)", lambda word: word in ("last", "next"), kind="a word")


@dataclass(frozen=True, repr=False)
class MTPConfig:
    """A Gemma 4 assistant: a few layers of queries over the target's own keys and values.

    Engines disagree on the position of the query and on the window. Let the target's caches hold n
    positions, without the newest token. vLLM and SGLang rotate the query to position n - 1, and
    transformers' generation rotates it to n. On sliding layers the query sees the last w keys in
    vLLM and SGLang, and w + 1 keys in transformers.

    Attributes:
      backbone_hidden_size: the target's hidden size.
      num_kv_heads, head_dim, full_num_kv_heads, full_head_dim: the target's.
      num_centroids: the number of token clusters; 0 for a dense head.
      num_top_centroids: the number of clusters whose tokens a step scores.
      num_draft_tokens: the default length of a chain.
      suppress_tokens: never drafted. The target's own suppressed tokens are not drafted either.
      query_position: "last" for position n - 1, "next" for n.
      full_rope_factor: what positions are divided by in the rotary embedding of full layers.
      num_window_keys: w or w + 1, where w is `sliding_window`. A given 0 is replaced by w.
    """

    vocab_size: int = size()
    hidden_size: int = size()
    backbone_hidden_size: int = size()
    layer_types: tuple[LayerType, ...] = layer_types()
    num_heads: int = size()
    num_kv_heads: int = size()
    head_dim: int = limited(EVEN)
    full_num_kv_heads: int = size()
    full_head_dim: int = limited(EVEN)
    intermediate_size: int = size()
    sliding_window: int = size()
    max_positions: int = size()
    num_centroids: int = count()
    num_top_centroids: int = count()
    num_draft_tokens: int = limited(DRAFTS, 5)
    suppress_tokens: tuple[int, ...] = several(IDS, (), least=0)
    query_position: Literal["last", "next"] = limited(POSITIONS, "last")
    num_window_keys: int = count()
    rms_norm_eps: float = limited(EPS, 1e-6)
    rope_theta: float = limited(THETAS, 10_000.0)
    full_rope_theta: float = limited(THETAS, 1_000_000.0)
    full_partial_rotary_factor: float = limited(SHARES, 0.25)
    full_rope_factor: float = limited(FACTORS, 1.0)

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.num_window_keys:
            object.__setattr__(self, "num_window_keys", self.sliding_window)
        if self.num_window_keys not in (self.sliding_window, self.sliding_window + 1):
            raise ConfigError(
                f"num_window_keys is {self.num_window_keys}; expected the sliding_window of "
                f"{self.sliding_window}, or one more"
            )
        for kind, heads in (("sliding", self.num_kv_heads), ("full", self.full_num_kv_heads)):
            if self.num_heads % heads:
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
                    f"num_top_centroids is {self.num_top_centroids}; expected 1 to "
                    f"{self.num_centroids}, the num_centroids"
                )
        check_ids("suppress_tokens", self.suppress_tokens, self.vocab_size)

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> MTPConfig:
        """Read an assistant's config.json, and the drafting defaults of its generation_config.json.

        Raises:
          ConfigError: it is not an assistant, or it has a feature that no released assistant has,
            such as experts, per-layer inputs, or a wide MLP.
        """
        if config.get("model_type") not in MODEL_TYPES:
            raise ConfigError(
                f"config.json has model_type {shown(config.get('model_type'))}; an assistant has "
                f"one of {', '.join(MODEL_TYPES)}"
            )
        if not (text := object_of(config, "text_config")):
            raise ConfigError("config.json of an assistant has no text_config")
        refuse_unless(text, "enable_moe_block", (False, None))
        refuse_unless(text, "use_double_wide_mlp", (False, None))
        refuse_unless(text, "hidden_size_per_layer_input", (0, None))
        refuse_unless(text, "final_logit_softcapping", (None,))
        values = decoder_fields(cls, text)
        shared, layers = read(text, "num_kv_shared_layers", COUNTS, 0), len(values["layer_types"])
        if shared and shared != layers:
            raise ConfigError(
                f"config.json has num_kv_shared_layers = {shared}; all {layers} layers of an "
                "assistant read the target's K/V"
            )
        centroids = dict(  # assistants with a dense head may have them too
            num_centroids=read(config, "num_centroids", SIZES, 2048),
            num_top_centroids=read(config, "centroid_intermediate_top_k", SIZES, 32),
        )
        if read(config, "use_ordered_embeddings", FLAGS, False):
            values |= centroids
        refuse_unknown(config, _OWN_KEYS, only={"tie_word_embeddings": (True,)})
        keys = ("backbone_hidden_size", "query_position", "num_window_keys")
        values |= read_fields(cls, config, {key: (key,) for key in keys})
        values |= read_fields(
            cls, generation_config or {}, _GENERATION_KEYS, "generation_config.json"
        )
        return cls(**values)

    def check_fits(self, target: TargetConfig) -> None:
        """Check that this assistant was made for a target.

        Raises:
          ConfigError: it was not; the message names every number that differs.
        """
        pairs = [
            ("backbone_hidden_size", self.backbone_hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ]
        absent = []
        for kind in ("sliding", "full"):
            if kind not in self.layer_types:
                continue
            sliding = kind == "sliding"
            try:
                read = target.layers[target.last_kv_owner(kind)]
            except ValueError as error:
                absent.append(str(error))
                continue
            heads = self.num_kv_heads if sliding else self.full_num_kv_heads
            head_dim = self.head_dim if sliding else self.full_head_dim
            pairs += [
                (f"kv heads of {kind} layers", heads, read.num_kv_heads),
                (f"head_dim of {kind} layers", head_dim, read.head_dim),
            ]
            if sliding:
                assert read.window is not None
                pairs.append(("sliding_window", self.sliding_window, read.window))
        wrong = [
            f"{name}: assistant {ours}, target {theirs}"
            for name, ours, theirs in pairs
            if ours != theirs
        ]
        wrong += absent
        if wrong:
            raise ConfigError(
                f"the assistant does not fit the target: {'; '.join(wrong)}; use the assistant of the "
                "target's own size"
            )


def _assistant(size: str, hidden: int, heads: int, mlp: int, **centroids: Any) -> MTPConfig:
    target = gemma4.PRESETS[size]
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

PRESETS: dict[str, MTPConfig] = {
    "e2b": _assistant("e2b", 256, 4, 2048, **_CENTROIDS),
    "e4b": _assistant("e4b", 256, 4, 2048, **_CENTROIDS),
    "12b": _assistant("12b", 1024, 16, 8192),
    "26b-a4b": _assistant("26b-a4b", 1024, 16, 8192),
    "31b": _assistant("31b", 1024, 32, 8192),
}
