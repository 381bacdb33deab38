"""The vision part of Gemma 4 checkpoints: its config, its reader, and the released sizes.

There are two kinds. E2B, E4B, 26B-A4B and 31B have a tower, a transformer over patches of 16
pixels. 12B has none: one product embeds patches of 48 pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.configs import gemma4
from jaxspec.configs.base import text_part
from jaxspec.configs.fields import (
    EPS,
    IDS,
    LAYERS,
    MOST_LAYERS,
    SIZES,
    THETAS,
    ConfigError,
    check_fields,
    count,
    flag,
    limited,
    object_of,
    read,
    read_fields,
    refuse_unless,
    short_repr,
    size,
)
from jaxspec.configs.known_keys import refuse_unknown
from jaxspec.options import Range, shown, whole

IMAGE_TOKENS = (70, 140, 280, 560, 1120)
"""The most tokens that an image may become: one of these."""

QUERY_BLOCK = 512
"""The most queries whose scores are in memory together: 1,120 tokens have 10,080 patches, whose
scores would be 6.5 GB a layer."""

BUDGETS = Range(
    f"one of {', '.join(map(str, IMAGE_TOKENS))}",
    lambda x: x in IMAGE_TOKENS,
    kind="a whole number",
)

_WHERE = "vision_config"


@dataclass(frozen=True, repr=False)
class Gemma4VisionConfig:
    """The vision part of a Gemma 4 checkpoint.

    Attributes:
      text_hidden_size: the width of the target.
      hidden_size: the width of the tower; of 12B, that of the embedding before the last product.
      num_positions: the entries of the position table along each axis.
      patch_size: the side of a patch in pixels.
      pool_size: the side of the square of patches that becomes one token.
      num_layers: of the tower; 0: there is none, as in 12B. Heads and MLP then have no size.
      clipped: whether products of the tower clip what goes in and what comes out.
      standardized: whether its output is shifted and scaled.
      two_way: whether the tokens of an image see each other in the target's sliding layers.
      image_tokens: the most tokens that an image becomes, where nothing else is asked for.
      image_token_id, begin_token_id, end_token_id: the placeholder of one token of an image, and
        the tokens around an image.
    """

    text_hidden_size: int = size()
    hidden_size: int = size()
    num_positions: int = size()
    patch_size: int = limited(whole(1, 256), 16)
    pool_size: int = limited(whole(1, 16), 3)
    num_layers: int = limited(whole(0, MOST_LAYERS), 0)
    num_heads: int = count()
    head_dim: int = count()
    intermediate_size: int = count()
    clipped: bool = flag(False)
    standardized: bool = flag(False)
    two_way: bool = flag(False)
    rope_theta: float = limited(THETAS, 100.0)
    rms_norm_eps: float = limited(EPS, 1e-6)
    image_tokens: int = limited(BUDGETS, 280)
    image_token_id: int = limited(IDS, 258_880)
    begin_token_id: int = limited(IDS, 255_999)
    end_token_id: int = limited(IDS, 258_882)

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.num_layers:
            return
        for name in ("num_heads", "head_dim", "intermediate_size"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is 0; a tower of {self.num_layers} layers needs one")
        if self.head_dim % 4:
            raise ConfigError(
                f"head_dim is {self.head_dim}; expected a multiple of 4, whose halves turn by x and by y"
            )

    @property
    def pixels_a_token(self) -> int:
        """The side in pixels of the square that becomes one token."""
        return self.patch_size * self.pool_size

    @property
    def activation_bytes(self) -> int:
        """An estimate of the bytes of activations for the largest image, in float32."""
        patches = IMAGE_TOKENS[-1] * self.pool_size**2
        products = 2 * self.intermediate_size + 3 * self.patch_size**2 + 6 * self.hidden_size
        scores = 2 * QUERY_BLOCK * self.num_heads  # and their softmax
        return 4 * patches * (products + scores)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4VisionConfig | None:
        """Read a Hugging Face config.json. Return None if it has no vision part.

        Raises:
          ConfigError: the vision part uses a feature that no released one has.
        """
        vision = object_of(config, _WHERE)
        if not vision or config.get("model_type") not in gemma4.MODEL_TYPES:
            return None
        kind = vision.get("model_type", "gemma4_vision")
        if kind not in _READERS:
            raise ConfigError(
                f"config.json has {_WHERE}.model_type {shown(kind)}; expected one of "
                f"{', '.join(_READERS)}"
            )
        text = text_part(config)
        refuse_unless(text, "use_bidirectional_attention", (None, "vision"), default=None)
        values = _READERS[kind](cls, vision)
        keys = dict(
            image_token_id=("image_token_id",),
            begin_token_id=("boi_token_id",),
            end_token_id=("eoi_token_id",),
        )
        return cls(
            text_hidden_size=read(text, "hidden_size", SIZES),
            two_way=text.get("use_bidirectional_attention") == "vision",
            **values,
            **read_fields(cls, config, keys),
        )


_TOWER_KEYS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "patch_size": ("patch_size",),
    "pool_size": ("pooling_kernel_size",),
    "num_positions": ("position_embedding_size",),
    "num_heads": ("num_attention_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size",),
    "clipped": ("use_clipped_linears",),
    "standardized": ("standardize",),
    "rope_theta": ("rope_parameters.rope_theta",),
    "rms_norm_eps": ("rms_norm_eps",),
    "image_tokens": ("default_output_length",),
}
# What transformers takes for a key that the file leaves out.
_TOWER_DEFAULTS: dict[str, Any] = dict(
    hidden_size=768,
    num_positions=10_240,
    num_heads=12,
    head_dim=64,
    intermediate_size=3072,
)
_EMBEDDER_KEYS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("mm_embed_dim",),
    "num_positions": ("mm_posemb_size",),
    "rms_norm_eps": ("rms_norm_eps",),
    "image_tokens": ("num_soft_tokens",),
}


def _names(keys: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {name.partition(".")[0] for names in keys.values() for name in names}


def _tower(cls: type[Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    only = dict(
        num_channels=(3,),
        attention_bias=(False,),
        hidden_activation=("gelu_pytorch_tanh",),
    )
    known = {*_names(_TOWER_KEYS), "num_hidden_layers", "num_key_value_heads"}
    known.add("max_position_embeddings")  # positions in two dimensions have a table of their own
    refuse_unknown(vision, known, only=only, within=_WHERE)
    rope = object_of(vision, "rope_parameters")
    refuse_unknown(rope, ("rope_theta", "rope_type", "type"), within=f"{_WHERE}.rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "axial"))
    # Files say "default" and mean the one kind there is, which turns halves by x and by y.
    refuse_unless({"rope_type": kind}, "rope_type", ("axial", "default"))
    values = read_fields(cls, vision, _TOWER_KEYS, f"config.json: {_WHERE}", **_TOWER_DEFAULTS)
    heads = read(vision, "num_key_value_heads", SIZES, values["num_heads"])
    if heads != values["num_heads"]:
        raise ConfigError(
            f"config.json: {_WHERE} has {heads} key and value heads for {values['num_heads']} heads; "
            "expected as many"
        )
    return values | dict(num_layers=read(vision, "num_hidden_layers", LAYERS, 16))


def _embedder(cls: type[Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    own = ("patch_size", "pooling_kernel_size", "model_patch_size", "output_proj_dims")
    refuse_unknown(vision, {*_names(_EMBEDDER_KEYS), *own}, within=_WHERE)
    defaults = dict(hidden_size=3840, num_positions=1120)
    values = read_fields(cls, vision, _EMBEDDER_KEYS, f"config.json: {_WHERE}", **defaults)
    parts = [read(vision, key, SIZES, usual) for key, usual in zip(own[:2], (16, 3), strict=True)]
    side = parts[0] * parts[1]
    refuse_unless(vision, "model_patch_size", (side,), default=side)
    width = values["hidden_size"]
    refuse_unless(vision, "output_proj_dims", (width,), default=width)
    return values | dict(patch_size=side, pool_size=1)


_READERS = {"gemma4_vision": _tower, "gemma4_unified_vision": _embedder}


def _of_tower(text_hidden_size: int, small: bool) -> Gemma4VisionConfig:
    width = 768 if small else 1152
    return Gemma4VisionConfig(
        text_hidden_size=text_hidden_size,
        hidden_size=width,
        num_positions=10_240,
        num_layers=16 if small else 27,
        num_heads=12 if small else 16,
        head_dim=64 if small else 72,
        intermediate_size=3072 if small else 4304,
        clipped=small,
        standardized=not small,
        two_way=not small,
    )


PRESETS: dict[str, Gemma4VisionConfig] = {
    "e2b": _of_tower(1536, small=True),
    "e4b": _of_tower(2560, small=True),
    "12b": Gemma4VisionConfig(
        text_hidden_size=3840,
        hidden_size=3840,
        patch_size=48,
        pool_size=1,
        num_positions=1120,
        two_way=True,
    ),
    "26b-a4b": _of_tower(2816, small=False),
    "31b": _of_tower(5376, small=False),
}
