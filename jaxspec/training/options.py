"""The options of training. Nothing here needs JAX, so that the command line can read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxspec.options import SEEDS, FieldError, Range, at_least, check_ranges, option

_POSITIVE = Range("a number above 0", lambda x: 0 < x < float("inf"))
_SHARE = Range("from 0 to 1", lambda x: 0 <= x <= 1)


@dataclass(frozen=True)
class TrainingOptions:
    """The schedule of training. Each field has its help."""

    steps: int = option(1000, "Updates.", range=at_least(1))
    rows: int = option(8, "Texts of an update, or of each of its parts.", range=at_least(1))
    accumulate: int = option(1, "Parts of an update, one after the other.", range=at_least(1))
    anchors: int = option(128, "Places of a text that are drafted after.", range=at_least(1))
    anchors_at_once: int = option(
        16,
        "Of these, how many at a time. More are quicker, and hold more logits.",
        range=at_least(1),
    )
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
    minutes: float | None = option(
        None,
        "End after so many minutes of training, programs and measurements included. The rate then "
        "falls by the clock, and --steps is the most. Default: no limit.",
        range=_POSITIVE,
    )
    updates_per_call: int = option(
        8,
        "Updates that go to the device together. More leave it less idle, and hold more batches.",
        range=at_least(1),
    )
    features: Path | None = option(
        None,
        "Keep the target's features of the texts in this directory, and read them from there. Their "
        "size is said first. Default: computed in every update.",
        metavar="DIR",
    )
    report_every: int = option(10, "Updates between lines of curves.jsonl.", range=at_least(1))
    save_every: int = option(100, "Updates between checkpoints.", range=at_least(1))

    def __post_init__(self) -> None:
        """Refuse values out of range, with FieldError."""
        check_ranges(self)


@dataclass(frozen=True)
class LossWeights:
    """The factors of the terms of a loss, and how they decay.

    Terms that a drafter has nothing for are left out.

    Attributes:
      total_variation: of sum |p - q|, which is twice the total variation.
      base_cross_entropy, base_kl: of all tokens before a selector takes the best.
      clusters: of the cross-entropy of an assistant's clusters.
      confidence: of predicted probabilities of acceptance.
      decay: slots after which the weight of a slot has fallen to 1 / e; None for no decay.
      survival: share of weights that follow what the drafter reaches, in place of the decay: the probability
        that it drafts all slots before rightly, over the tokens that a step from this anchor commits. Decoding
        stands more often at anchors with few.
    """

    cross_entropy: float = 1.0
    kl: float = 0.0
    total_variation: float = 0.0
    base_cross_entropy: float = 0.0
    base_kl: float = 0.0
    clusters: float = 1.0
    confidence: float = 0.0
    decay: float | None = 4.0
    survival: float = 0.0

    @property
    def need_target(self) -> bool:
        """True if a term compares with the target's distribution."""
        return bool(self.kl or self.total_variation or self.base_kl or self.confidence)


TERMS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "ce": ("cross_entropy", "cross-entropy of the text's token", ()),
    "kl": ("kl", "KL to the target's distribution", ()),
    "tv": ("total_variation", "sum of |p - q|", ()),
    "base_ce": ("base_cross_entropy", "ce before candidates are chosen", ("dflash2",)),
    "base_kl": ("base_kl", "kl before that", ("dflash2",)),
    "clusters": ("clusters", "ce of a token's cluster", ("mtp",)),
    "confidence": ("confidence", "of predicted acceptance", ("dspark",)),
    "decay": ("decay", "slots after which weights have fallen to 1/e, or none", ()),
    "survival": ("survival", "share of weights that follow what drafts reach, 0 to 1", ()),
}
"""The terms of `--loss`: the field of `LossWeights`, its meaning, and the kinds that have it; () for all."""


def loss_terms(text: str, kind: str | None = None) -> dict[str, float | None]:
    """Return fields of `LossWeights` from a text such as "kl=0.5,ce=0.5,decay=none".

    Args:
      kind: of the drafter, if it is known: terms of other kinds are refused.

    Raises:
      FieldError: a term is not known, or its value is no weight.
    """
    fields: dict[str, float | None] = {}
    for part in text.split(","):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in TERMS:
            known = ", ".join(TERMS)
            raise FieldError("loss", f"has the term {name or part!r}; the terms are {known}")
        field, _, kinds = TERMS[name]
        if kind is not None and kinds and kind not in kinds:
            raise FieldError("loss", f"has {name}, which {kind} has not: it is of {kinds[0]}")
        if field in fields:
            raise FieldError("loss", f"has {name} twice; leave one out")
        if name == "decay" and value == "none":
            fields[field] = None
            continue
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        low, high = (1e-6 if name == "decay" else 0), (1 if name == "survival" else math.inf)
        if not (low <= number <= high and math.isfinite(number)):
            expected = {"survival": "a number from 0 to 1", "decay": "a number above 0, or none"}
            what = expected.get(name, "a number of 0 or more")
            raise FieldError("loss", f"has {name}={value}; expected {what}, as in {name}=0.5")
        fields[field] = number
    return fields
