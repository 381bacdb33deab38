"""DFlash2 drafters: DFlash with convolutions inside the block, and a selector of candidates.

They come in z-lab's layout and in the speculators container.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.configs import dflash, speculators
from jaxspec.configs.dflash import DFlashConfig, nested, read_zlab
from jaxspec.configs.fields import FACTORS, ConfigError, limited, short_repr, size
from jaxspec.configs.speculators import is_speculators, read_speculators

ARCHITECTURES = ("DFlash2DraftModel",)


@dataclass(frozen=True, repr=False)
class DFlash2Config(DFlashConfig):
    """A DFlash2 drafter.

    Attributes:
      conv_kernel_size: taps of a convolution: a position, and those before it in the block.
      conv_group_size: channels that share a kernel.
      selector_rank: width of the vectors by which the selector compares two tokens.
      selector_top_k: candidates of each slot.
      input_embedding_scale: multiplies embeddings of the block.
      output_multiplier: multiplies logits, before the soft cap.
    """

    conv_kernel_size: int = size(2)
    conv_group_size: int = size(16)
    selector_rank: int = size(256)
    selector_top_k: int = size(16)
    input_embedding_scale: float = limited(FACTORS, 1.0)
    output_multiplier: float = limited(FACTORS, 1.0)

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.conv_group_size:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of conv_group_size "
                f"{self.conv_group_size}"
            )
        if self.selector_top_k > (tokens := self.draft_vocab_size or self.vocab_size):
            raise ConfigError(
                f"selector_top_k {self.selector_top_k} is more than the {tokens} tokens that are drafted"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DFlash2Config:
        """Read the config.json of a DFlash2 drafter.

        Blocks are not causal where the file does not say.

        Raises:
          ConfigError: it is not such a drafter, or it needs a feature that is not supported.
        """
        if is_speculators(config):
            return read_speculators(
                cls, config, more={name: (name,) for name in _FIELDS}, non_causal=True
            )
        return read_zlab(cls, config, more={n: nested(n) for n in _FIELDS}, causal=False)


_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(DFlash2Config)
    if field.name not in DFlashConfig.__dataclass_fields__
)

KEYS = dflash.KEYS | {name: nested(name) for name in _FIELDS}
SPECULATORS_KEYS = speculators.KEYS | {name: (name,) for name in _FIELDS}
"""The keys of config.json that may set each field on which engines disagree. See `find_key`."""


def _of_preset(name: str) -> DFlash2Config:
    """Return the layers of z-lab's DFlash drafter with blocks of 8: no such drafter is released."""
    values = {n: getattr(dflash.PRESETS[name], n) for n in DFlashConfig.__dataclass_fields__}
    causal = (False,) * len(values["layer_types"])
    return DFlash2Config(**{**values, "block_size": 8, "causal": causal})


PRESETS = {name: _of_preset(name) for name in dflash.PRESETS}
