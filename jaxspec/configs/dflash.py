"""DFlash block drafters in z-lab's layout: their config, its reader, and the released drafters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.configs.base import (
    ConfigError,
    LayerType,
    TargetConfig,
    find_key,
    layer_types_of,
    refuse_unless,
    whole_number,
)

ARCHITECTURES = ("DFlashDraftModel",)


@dataclass(frozen=True)
class DFlashConfig:
    """A block drafter in z-lab's layout, which fills a block of masks in one pass.

    Its context is features of the target.

    Attributes:
      hidden_size: also the target's, because the drafter uses the target's embedding and head.
      causal: for each layer, whether attention inside the block is causal.
      block_size: the anchor and the masks together.
      feature_layers: the target layers whose outputs are the context features, in order.
      sliding_window: w, where position q of a sliding layer sees keys q - w < k <= q.
      scale_embeddings: whether block embeddings are multiplied by the target's embedding scale.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    causal: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    num_target_layers: int
    max_positions: int
    sliding_window: int | None = None
    scale_embeddings: bool = True
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
        # Some engines norm the last layer's output and others do not. No known drafter uses it.
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
        """Read the config.json of a DFlash drafter in z-lab's layout.

        `causal` or `is_causal` says which layers are causal inside the block (`KEYS` says where
        they may stand). Without both, sliding layers are causal and full layers are not (sglang
        #34524, SpecForge masks).

        Raises:
          ConfigError: it is not such a drafter, or it needs a feature that is not supported.
        """
        if not set(ARCHITECTURES) & set(config.get("architectures") or ()):
            raise ConfigError(
                f"config.json has architectures {config.get('architectures')}; a DFlash drafter has "
                "DFlashDraftModel"
            )

        def disputed(field: str) -> Any:
            return find_key(config, KEYS[field])[1]

        layers = whole_number(config, "num_hidden_layers")
        names = config.get("layer_types")
        if names is None and config.get("use_sliding_window"):
            raise ConfigError(
                "config.json has use_sliding_window = True but no layer_types; say in layer_types "
                "which layers are sliding_attention and which full_attention"
            )
        # Only layer_types decides. transformers also requires use_sliding_window. Without that key
        # transformers drops the windows of a drafter that was trained with windows.
        names = names or ["full_attention"] * layers
        layer_types = layer_types_of({**config, "layer_types": names})
        refuse_unless(config, "hidden_act", ("silu",), default="silu")
        refuse_unless(config, "attention_bias", (False, None), default=False)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))  # older files say "type"
        refuse_unless({"rope_type": kind}, "rope_type", ("default",))
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
        heads = whole_number(config, "num_attention_heads")
        scale = disputed("scale_embeddings")
        return cls(
            vocab_size=whole_number(config, "vocab_size"),
            hidden_size=whole_number(config, "hidden_size"),
            layer_types=layer_types,
            causal=tuple(bool(c) for c in causal),
            num_heads=heads,
            num_kv_heads=whole_number(config, "num_key_value_heads"),
            head_dim=whole_number(config, "head_dim", whole_number(config, "hidden_size") // heads),
            intermediate_size=whole_number(config, "intermediate_size"),
            block_size=int(block_size),
            mask_token_id=int(mask_token_id),
            feature_layers=tuple(int(i) for i in ids),
            num_target_layers=int(num_target_layers),
            max_positions=whole_number(config, "max_position_embeddings", 262144),
            sliding_window=whole_number(config, "sliding_window")
            if "sliding" in layer_types
            else None,
            scale_embeddings=True if scale is None else bool(scale),
            final_logit_softcap=disputed("final_logit_softcap"),
            rope_theta=float(theta),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        )

    def check_fits(self, target: TargetConfig) -> None:
        """Check that this drafter was made for a target.

        Raises:
          ConfigError: it was not; the message names every number that differs.
        """
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


KEYS: dict[str, tuple[str, ...]] = {
    "feature_layers": _nested("target_layer_ids"),
    "layer_types": ("layer_types",),
    "causal": _nested("causal", "is_causal"),
    "scale_embeddings": _nested("scale_embeddings"),
    "final_logit_softcap": _nested("final_logit_softcapping"),
    "sliding_window": ("sliding_window",),
    "rope_theta": ("rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta"),
    "mask_token_id": _nested("mask_token_id"),
    "block_size": _nested("block_size"),
    "num_target_layers": _nested("num_target_layers"),
}
"""The keys of config.json that may set each field on which engines disagree. See `find_key`."""


def default_feature_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Return z-lab's default feature layers, for a config.json that names none.

    Args:
      count: the number of feature layers. z-lab's default is the drafter's number of layers.
    """
    if count == 1:
        return (num_target_layers // 2,)
    last = num_target_layers - 4
    return tuple(round(1 + i * last / (count - 1)) for i in range(count))


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


def _b16(hidden: int, mlp: int) -> DFlashConfig:
    """Return the config of a drafter for a Qwen3 target of 36 layers: five layers, none causal."""
    return DFlashConfig(
        vocab_size=151_936,
        hidden_size=hidden,
        layer_types=("full",) * 5,
        causal=(False,) * 5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=mlp,
        block_size=16,
        mask_token_id=151_669,
        feature_layers=(1, 9, 17, 25, 33),
        num_target_layers=36,
        max_positions=40_960,
    )


PRESETS: dict[str, DFlashConfig] = {
    "12b": _zlab(3840, 32, 7680, 48, (1, 10, 19, 27, 36, 45)),
    "26b-a4b": _zlab(2816, 32, 5632, 30, (1, 6, 11, 17, 22, 27)),
    "31b": _zlab(5376, 64, 10_752, 60, (1, 12, 23, 35, 46, 57)),
    "qwen3-4b": _b16(2560, 9728),
    "qwen3-8b": _b16(4096, 12_288),
}
