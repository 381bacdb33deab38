"""The options of `jaxspec check`. Needs no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxspec.options import Range, at_least, option

MIN_ROWS = 4
"""Least number of rows of text for an interval."""

FLOOR = 0.3
"""Least share of first drafts that must be accepted. With a rate of 0.3 at every position a drafter
adds 0.43 tokens a step, which is about what drafting and verifying cost. Working drafters have 0.6
to 0.9, broken ones less than 0.1."""


@dataclass(frozen=True)
class CheckOptions:
    """The text of a check, and its thresholds."""

    text: Path | None = option(
        None,
        "Text whose pieces the target continues. Default: held-out prompts of the bundled target, "
        "a few prompts of our own for others.",
        metavar="FILE",
    )
    rows: int = option(16, "Pieces of text, at most.", range=at_least(MIN_ROWS))
    new_tokens: int = option(64, "Tokens that the target adds to each.", range=at_least(2))
    floor: float = option(
        FLOOR,
        "Least share of first drafts that must be accepted; of later ones too, where all before "
        "them were.",
        range=Range("in [0, 1]", lambda x: (x >= 0) & (x <= 1)),
    )
    batch_size: int = option(8, "Rows at a time.", range=at_least(1))
    record: bool = option(
        False,
        "Write what was measured into the drafter's config, if the pair is sound. Later checks "
        "compare with it.",
    )
