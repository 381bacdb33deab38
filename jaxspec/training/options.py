"""The options of training. Nothing here needs JAX, so that the command line can read them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.options import SEEDS, Range, at_least, check_ranges, option

_POSITIVE = Range("a number above 0", lambda x: 0 < x < float("inf"))
_SHARE = Range("from 0 to 1", lambda x: 0 <= x <= 1)


@dataclass(frozen=True)
class TrainingOptions:
    """The schedule of training. Each field has its help."""

    steps: int = option(1000, "Updates.", range=at_least(1))
    rows: int = option(8, "Texts of an update, or of each of its parts.", range=at_least(1))
    accumulate: int = option(1, "Parts of an update, one after the other.", range=at_least(1))
    anchors: int = option(128, "Places of a text that are drafted after.", range=at_least(1))
    learning_rate: float = option(6e-4, "Of AdamW, after the warm-up.", range=_POSITIVE)
    warmup: float = option(
        0.04,
        "Share of the steps in which the rate rises from 0. Then it falls, by a cosine.",
        range=_SHARE,
    )
    weight_decay: float = option(0.0, "Of matrices.", range=_SHARE)
    clip: float = option(1.0, "The largest norm of a gradient.", range=_POSITIVE)
    seed: int = option(0, "Of the order of texts and of the places of anchors.", range=SEEDS)

    def __post_init__(self) -> None:
        """Refuse values out of range, with FieldError."""
        check_ranges(self)


@dataclass(frozen=True)
class RunOptions:
    """The length of texts, and what is measured and kept during a run."""

    max_length: int = option(1024, "Tokens of a text; the rest is cut off.", range=at_least(8))
    held_out: int = option(
        16, "Prompts to measure acceptance with, at most a quarter of the texts.", range=at_least(0)
    )
    evaluate_every: int = option(100, "Updates between measurements.", range=at_least(1))
    evaluated_tokens: int = option(64, "New tokens of a measured prompt.", range=at_least(2))
    patience: int | None = option(
        None,
        "Stop after so many measurements without a better one. Default: never.",
        range=at_least(1),
    )
    report_every: int = option(10, "Updates between lines of curves.jsonl.", range=at_least(1))
    save_every: int = option(100, "Updates between checkpoints.", range=at_least(1))

    def __post_init__(self) -> None:
        """Refuse values out of range, with FieldError."""
        check_ranges(self)
