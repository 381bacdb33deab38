"""The config of drafting by look-up in a row's own text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.configs.base import TargetConfig
from jaxspec.configs.fields import ConfigError, check_fields, limited, read_fields, short_repr
from jaxspec.configs.known_keys import refuse_unknown
from jaxspec.options import whole

MODEL_TYPES = ("jaxspec_ngram",)
MAX_DRAFT_TOKENS = 31
_NGRAMS = whole(1, 32)


@dataclass(frozen=True, repr=False)
class NGramConfig:
    """The sizes of a look-up, which fits every target.

    Attributes:
      max_ngram: the longest end of the text that is looked for.
      min_ngram: the shortest one that counts.
      num_draft_tokens: drafts of a step, where the caller does not say.
    """

    max_ngram: int = limited(_NGRAMS, 4)
    min_ngram: int = limited(_NGRAMS, 1)
    num_draft_tokens: int = limited(whole(1, MAX_DRAFT_TOKENS), 7)

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_ngram > self.max_ngram:
            raise ConfigError(f"min_ngram {self.min_ngram} is more than max_ngram {self.max_ngram}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NGramConfig:
        """Read a config.json.

        Raises:
          ConfigError: a value is out of range, or a key is not known.
        """
        keys = {name: (name,) for name in cls.__dataclass_fields__}
        refuse_unknown(config, (*keys, "model_type"))
        return cls(**read_fields(cls, config, keys))

    def check_fits(self, target: TargetConfig) -> None:
        """Check nothing: every target has text."""
        del target
