"""Where speculative decoding wrote something else than plain decoding, and whether that is a near-tie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxspec.engine.request import Completion

NEAR_TIE_GAP = 1e-4  # float32: closer logits may swap when a pass has another shape
NEAR_TIE_ULPS = 4  # bfloat16: likewise, in units of the last place of the larger logit


@dataclass(frozen=True)
class Differing:
    """Where speculative decoding first wrote something else than plain decoding.

    Attributes:
      position: of the token in its row.
      gap: between the target's logits of the two, on reading the row anew.
      gap_ulps: the same in units of bfloat16's last place.
    """

    row: int
    position: int
    plain_token: int
    speculative_token: int
    plain_logit: float
    speculative_logit: float
    gap: float
    gap_ulps: float
    near_tie: bool

    @classmethod
    def of(
        cls, row: int, position: int, tokens: tuple[int, int], logits: np.ndarray, dtype: str
    ) -> Differing:
        plain, speculative = (float(logits[token]) for token in tokens)
        gap = abs(plain - speculative)
        largest = max(abs(plain), abs(speculative), float(jnp.finfo(jnp.bfloat16).tiny))
        ulps = gap / 2.0 ** (math.floor(math.log2(largest)) - jnp.finfo(jnp.bfloat16).nmant)
        near = gap < NEAR_TIE_GAP if dtype == "float32" else ulps <= NEAR_TIE_ULPS
        return cls(row, position, *tokens, plain, speculative, gap, ulps, near)


def first_differences(
    plain: Sequence[Completion], speculative: Sequence[Completion]
) -> dict[int, int]:
    """Return, for each row that differs, how many tokens agree before that."""
    found = {}
    for row, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            found[row] = next(i for i, (a, b) in enumerate(pairs) if a != b)
    return found
