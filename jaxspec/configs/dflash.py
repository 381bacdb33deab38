"""DFlash block drafters: their config, its reader for z-lab's layout, and the released drafters.

`speculators` reads the config of the same drafters in another container.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxspec.configs.base import (
    LayerType,
    TargetConfig,
    check_ids,
    layer_types,
    layer_types_of,
)
from jaxspec.configs.fields import (
    COUNTS,
    EPS,
    EVEN,
    FLAGS,
    IDS,
    LAYERS,
    MOST_DRAFTS,
    MOST_LAYERS,
    SIZES,
    SOFTCAPS,
    THETAS,
    ConfigError,
    check_fields,
    entries,
    find_key,
    flag,
    limited,
    object_of,
    read,
    read_fields,
    refuse_unless,
    several,
    short_repr,
    size,
    words_of,
)
from jaxspec.configs.known_keys import check_plain_rope, refuse_unknown
from jaxspec.options import REQUIRED, Range, shown, whole

ARCHITECTURES = ("DFlashDraftModel",)
BLOCKS = whole(2, MOST_DRAFTS)  # the anchor, and a slot to draft
LAYER_IDS = whole(0, MOST_LAYERS)
CONTAINERS = ("z-lab", "speculators", "DeepSpec", "ModelOpt")
ConfigT = TypeVar("ConfigT", bound="DFlashConfig")
_CONTAINER = Range(" or ".join(CONTAINERS), lambda x: x in CONTAINERS, kind="a word")


@dataclass(frozen=True, repr=False)
class DFlashConfig:
    """A block drafter, which fills a block of masks in one pass.

    Its context is features of the target.

    Attributes:
      vocab_size: of the target.
      causal: for each layer, whether attention inside the block is causal.
      block_size: the anchor and the masks together.
      feature_layers: the target layers whose outputs are the context features, in order.
      num_target_layers: None where the file does not say.
      sliding_window: w, where position q of a sliding layer sees keys q - w < k <= q.
      window_from_anchor: whether the window begins w keys before the anchor instead, for all
        positions of a block.
      scale_embeddings: whether block embeddings are multiplied by the embedding scale: of the
        target, or sqrt(hidden_size) where the embedding is the drafter's own.
      own_embedding, own_head: whether the drafter has these. It uses the target's otherwise.
      draft_vocab_size: the number of tokens that its own head has logits of. None: all.
      sample_from_anchor: whether the anchor's slot predicts too. Slot i then predicts the token
        after its position, and a block has a draft for each slot.
      target_hidden_size: width of the features. None: hidden_size.
      container: the layout of the files.
    """

    vocab_size: int = size()
    hidden_size: int = size()
    layer_types: tuple[LayerType, ...] = layer_types()
    causal: tuple[bool, ...] = several(FLAGS, limit=MOST_LAYERS)
    num_heads: int = size()
    num_kv_heads: int = size()
    head_dim: int = limited(EVEN)
    intermediate_size: int = size()
    block_size: int = limited(BLOCKS)
    mask_token_id: int = limited(IDS)
    feature_layers: tuple[int, ...] = several(LAYER_IDS, limit=MOST_LAYERS)
    max_positions: int = size()
    num_target_layers: int | None = limited(LAYERS, None)
    sliding_window: int | None = limited(SIZES, None)
    window_from_anchor: bool = flag(False)
    scale_embeddings: bool = flag(True)
    final_logit_softcap: float | None = limited(SOFTCAPS, None)
    rope_theta: float = limited(THETAS, 1_000_000.0)
    rms_norm_eps: float = limited(EPS, 1e-6)
    own_embedding: bool = flag(False)
    own_head: bool = flag(False)
    draft_vocab_size: int | None = limited(SIZES, None)
    sample_from_anchor: bool = flag(False)
    target_hidden_size: int | None = limited(SIZES, None)
    container: str = limited(_CONTAINER, "z-lab")

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.causal) != len(self.layer_types):
            raise ConfigError(
                f"causal names {len(self.causal)} layers, layer_types {len(self.layer_types)}; they must agree"
            )
        if "sliding" in self.layer_types and self.sliding_window is None:
            raise ConfigError("the drafter has sliding layers but no sliding_window")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of {self.num_kv_heads} kv heads"
            )
        check_ids("mask_token_id", (self.mask_token_id,), self.vocab_size)
        if self.draft_vocab_size is not None and not (
            self.own_head and self.draft_vocab_size < self.vocab_size
        ):
            raise ConfigError(
                f"draft_vocab_size {self.draft_vocab_size} is for a head of the drafter's own with fewer "
                f"tokens than vocab_size {self.vocab_size}"
            )
        if self.feature_size != self.hidden_size and not (self.own_embedding and self.own_head):
            raise ConfigError(
                f"target_hidden_size {self.feature_size} is not hidden_size {self.hidden_size}: the "
                "target's embedding and head do not fit such a drafter, which needs its own"
            )
        # Some engines norm the last layer's output and others do not. No known drafter uses it.
        if self.num_target_layers and max(self.feature_layers) >= self.num_target_layers - 1:
            raise ConfigError(
                f"feature_layers {shown(list(self.feature_layers))} do not fit a target of "
                f"{self.num_target_layers} layers: expected numbers from 0 to {self.num_target_layers - 2}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The first slot of a block that predicts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def may_sample_from_anchor(self) -> bool:
        """True if a key of the file says whether the anchor's slot predicts."""
        return self.container == "speculators"

    @property
    def feature_size(self) -> int:
        """The width of one feature, which is the target's."""
        return self.target_hidden_size or self.hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """Read the config.json of a DFlash drafter in z-lab's layout.

        `causal` or `is_causal` says which layers are causal inside the block (`KEYS` says where
        they may stand). Without both, sliding layers are causal and full layers are not (sglang
        #34524, SpecForge masks).

        Raises:
          ConfigError: it is not such a drafter, or it needs a feature that is not supported.
        """
        architectures = words_of(config, "architectures")
        if not set(ARCHITECTURES) & set(architectures):
            raise ConfigError(
                f"config.json has architectures {shown(list(architectures))}; a DFlash drafter has "
                "DFlashDraftModel"
            )
        return read_zlab(cls, config)

    def check_fits(self, target: TargetConfig) -> None:
        """Check that this drafter was made for a target.

        Raises:
          ConfigError: it was not; the message names every number that differs.
        """
        wrong = [
            f"{name}: drafter {ours}, target {theirs}"
            for name, ours, theirs in (
                ("hidden_size", self.feature_size, target.hidden_size),
                ("vocab_size", self.vocab_size, target.vocab_size),
                ("num_target_layers", self.num_target_layers, target.num_layers),
            )
            if ours not in (theirs, None)
        ]
        last = target.num_layers - (1 if self.num_target_layers else 2)  # of the former it is known
        if beyond := [i for i in self.feature_layers if i > last]:
            wrong.append(f"feature layers {beyond}: expected numbers from 0 to {last}")
        if wrong:
            raise ConfigError(f"the drafter does not fit the target: {'; '.join(wrong)}")


def read_zlab(
    cls: type[ConfigT],
    config: Mapping[str, Any],
    *,
    more: Mapping[str, Sequence[str]] | None = None,
    only: Mapping[str, Sequence[Any]] | None = None,
    causal: bool | None = None,
    made: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> ConfigT:
    """Read a drafter's config.json in z-lab's layout, whatever its architecture is called.

    Args:
      more: for fields that `cls` has beyond `DFlashConfig`, the keys that may have them.
      only: values of keys that are not read, beyond or in place of those of DFlash.
      causal: whether layers are causal inside the block where the file does not say. None: sliding
        layers are.
      made: values of fields that no file sets.
      defaults: values of fields that the file may leave out.

    Raises:
      ConfigError: it is no such drafter, or it needs a feature that is not supported.
    """
    windows = read(config, "use_sliding_window", FLAGS, False)
    if windows and config.get("layer_types") is None:
        raise ConfigError(
            "config.json has use_sliding_window = True but no layer_types; say in layer_types "
            "which layers are sliding_attention and which full_attention"
        )
    # Only layer_types decides. transformers also requires use_sliding_window. Without that key
    # transformers drops the windows of a drafter that was trained with windows.
    layer_types = layer_types_of(config, full_every=1)
    refuse_unless(config, "hidden_act", ("silu",), default="silu")
    refuse_unless(config, "attention_bias", (False, None), default=False)
    check_plain_rope(config)
    keys = {**_KEYS, **(more or {})}
    _refuse_other_methods(config, keys, only or {})
    if "sliding" not in layer_types:
        del keys["sliding_window"]
        read(config, "sliding_window", COUNTS, None)
    heads = read(config, _KEYS["num_heads"], SIZES)
    values = read_fields(
        cls,
        config,
        keys,
        head_dim=read(config, "hidden_size", SIZES) // heads,
        max_positions=262_144,
        sliding_window=REQUIRED,
        rope_theta=REQUIRED,
        feature_layers=default_feature_layers(
            read(config, _KEYS["num_target_layers"], LAYERS), len(layer_types)
        ),
        **defaults,
    )
    values |= dict(layer_types=layer_types, causal=_causal(config, layer_types, causal))
    return cls(**values | (dict(made) if made else {}))


def _refuse_other_methods(
    config: Mapping[str, Any],
    keys: Mapping[str, Sequence[str]],
    only: Mapping[str, Sequence[Any]],
) -> None:
    """Refuse keys that change the computation, such as those of other methods in the same layout.

    Args:
      keys: the keys that are read, by field.
      only: as in `read_zlab`.
    """
    read = {*itertools.chain(*keys.values()), *itertools.chain(*KEYS.values())}
    inside = {path[1] for path in (key.split(".") for key in read) if path[0] in OBJECTS}
    same = {name: config.get(key) for name, key in _SAME.items() if config.get(key) is not None}
    only = {**_ONLY, **only, **{name: (value,) for name, value in same.items()}}
    refuse_unknown(config, (*_OTHER_KEYS, *read, *inside), only=only)
    for name in OBJECTS:
        refuse_unknown(object_of(config, name), inside, only=only, within=name)


def _causal(
    config: Mapping[str, Any], layer_types: tuple[LayerType, ...], default: bool | None
) -> tuple[bool, ...]:
    """Read which layers are causal inside the block: one answer for all, or one for each."""
    key, causal = find_key(config, KEYS["causal"])
    if key is None and default is None:
        return tuple(kind == "sliding" for kind in layer_types)
    causal = default if key is None else causal
    if isinstance(causal, bool):
        return (causal,) * len(layer_types)
    field = DFlashConfig.__dataclass_fields__["causal"]
    return entries(field, f"config.json: {key}", causal)


OBJECTS = ("dflash_config", "dflash_architecture_config")


def nested(*keys: str) -> tuple[str, ...]:
    """Return the places of keys that may stand in an object of their own, or on top."""
    return tuple(path for key in keys for path in (*(f"{name}.{key}" for name in OBJECTS), key))


KEYS: dict[str, tuple[str, ...]] = {
    "feature_layers": nested("target_layer_ids"),
    "layer_types": ("layer_types",),
    "causal": nested("causal", "is_causal"),
    "scale_embeddings": nested("scale_embeddings"),
    "final_logit_softcap": nested("final_logit_softcapping"),
    "sliding_window": ("sliding_window",),
    "rope_theta": ("rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta"),
    "mask_token_id": nested("mask_token_id"),
    "block_size": nested("block_size"),
    "num_target_layers": nested("num_target_layers"),
}
"""The keys of config.json that may set each field on which engines disagree. See `find_key`."""

LAYER_KEYS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size",),
    "max_positions": ("max_position_embeddings",),
    "rope_theta": ("rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta"),
    "rms_norm_eps": ("rms_norm_eps",),
}
"""The keys of a config of Qwen3 layers, of which all containers have one."""

_KEYS = {
    **LAYER_KEYS,
    # These two have readers of their own.
    **{field: keys for field, keys in KEYS.items() if field not in ("causal", "layer_types")},
}


_OTHER_KEYS = (
    *("attention_bias", *OBJECTS, "hidden_act", "num_hidden_layers", "rope_parameters"),
    *("rope_scaling", "use_sliding_window"),
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    "input_embedding_scale": (1.0,),
    "is_neox_style": (True,),
    "logit_scale": (1.0,),
    "output_multiplier": (1.0,),
    "sample_from_anchor": (False,),
    "use_swa": (False,),
}
"""Keys by which files of other methods, or of other programs, change what a drafter computes."""

_SAME = {"draft_vocab_size": "vocab_size", "target_hidden_size": "hidden_size"}
"""Keys that may only repeat another one."""


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
