"""Comparison of hypotheses about a drafter, round by round.

Read `search`. A round compares all hypotheses on a first text. What that leaves open is compared
again on a second text (`text.further`): longer rows, on which nothing was chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.commands.check.hypotheses import Hypothesis, alternatives
from jaxspec.commands.check.reference import Reference, plain_config
from jaxspec.commands.check.replay import Evidence
from jaxspec.commands.check.statistics import (
    FALL,
    FIRST_LEVEL,
    MATERIAL,
    Estimate,
    classify,
    conditional,
    gained,
    row_means,
)
from jaxspec.weights.loading import LoadedModel

MAX_ROUNDS = 3  # conventions that may be wrong at once


@dataclass(frozen=True)
class Comparison:
    """Another hypothesis against the one in force, on the same rows.

    Attributes:
      accepted: drafts per step.
      difference: of `accepted` to the hypothesis in force.
      gain: in tokens per step, as a share; it decides.
      rows: number of rows that both were replayed on.
      better: the gain is certainly above zero, and `MATERIAL`.
      result: "better"; "worse"; "higher" or "lower": too small to matter, or higher and yet no cause
        (a probe, or a longer block that was not trained); "no measurable difference": the interval
        holds 0 and the gain is not material; "undecided": the interval holds 0 and the gain is
        material.
    """

    name: str
    field: str
    fix: str
    accepted: float
    first_accepted: float
    difference: Estimate
    gain: Estimate
    rows: int
    better: bool
    result: str = dataclasses.field(metadata={"json": "found"})

    @classmethod
    def of(
        cls,
        other: Hypothesis,
        accepted: np.ndarray,
        base: np.ndarray,
        mask: np.ndarray,
        level: float,
        num_draft_tokens: int = 0,
    ) -> Comparison:
        """Compare a hypothesis with the one in force, row by row.

        Args:
          accepted, base: drafts that each gets accepted at each anchor, [R, A]; of a hopeless one,
            of the first rows.
          mask: the anchors to compare at.
          num_draft_tokens: of the one in force.
        """
        count = min(len(accepted), len(base))
        rows = mask[:count].any(axis=1)
        drafts, before, at = (x[:count][rows] for x in (accepted, base, mask))
        after, earlier = row_means(drafts, at), row_means(before, at)
        gain = gained(earlier, after, level)
        result = "worse" if count < len(mask) else classify(gain)
        if result == "better" and (
            other.is_probe or outruns_training(accepted, mask, other, num_draft_tokens)
        ):
            result = "higher"
        return cls(
            other.name,
            other.field,
            other.fix,
            float(after.mean()),
            float(row_means(drafts >= 1, at).mean()),
            Estimate.of(after - earlier, level),
            gain,
            len(after),
            better=result == "better",
            result=result,
        )


def outruns_training(
    accepted: np.ndarray, anchors: np.ndarray, hypothesis: Hypothesis, num_draft_tokens: int
) -> bool:
    """Return whether drafts of a longer block fall where it goes beyond the one in force.

    Repetitive text lets untrained drafts gain a little. The block in force is then the trained one.
    """
    if hypothesis.num_draft_tokens <= num_draft_tokens:
        return False
    last = [conditional(accepted, anchors, num_draft_tokens + i, FIRST_LEVEL) for i in (0, 1)]
    return last[1].share.mean < FALL * last[0].share.mean


@dataclass(frozen=True)
class Round:
    """A hypothesis against its alternatives; the next round starts from the best of these.

    Attributes:
      level: of each interval, so that all of them hold at `FIRST_LEVEL`.
      again: the comparisons that are `open`, on the second text; empty without one.
    """

    in_force: str
    comparisons: list[Comparison]
    left_out: list[str]
    level: float
    again: list[Comparison] = dataclasses.field(default_factory=list)

    @property
    def open(self) -> list[int]:
        """The open ones: the best of several, or one that may be better."""
        if better := {i: c for i, c in enumerate(self.comparisons) if c.better}:
            best = _near_best(better)
            return best if len(best) > 1 else []
        return [
            i
            for i, c in enumerate(self.comparisons)
            if c.result == "undecided" and c.gain.mean >= MATERIAL
        ]

    @property
    def better(self) -> dict[int, Comparison]:
        """The better hypotheses, each with the comparison that shows it."""
        first = {i: c for i, c in enumerate(self.comparisons) if c.better}
        second = dict(zip(self.open, self.again, strict=True)) if self.again else {}
        if first:  # the second text only decides which of them is best
            return second or first
        return {i: c for i, c in second.items() if c.better}

    @property
    def as_good(self) -> list[int]:
        """The better hypotheses that are as good as the best, the most usual first."""
        return _near_best(self.better)


def _near_best(better: Mapping[int, Comparison]) -> list[int]:
    tokens = {i: 1 + c.gain.mean for i, c in better.items()}
    enough = (1 - MATERIAL) * max(tokens.values(), default=0.0)
    return [i for i, of in tokens.items() if of >= enough]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search over hypotheses.

    Attributes:
      in_force: the hypothesis that the search began with; `best` the one that it ended with.
      changes: the steps from the one to the other.
    """

    in_force: Hypothesis
    best: Hypothesis
    rounds: list[Round]
    changes: list[Comparison]


def as_configured(drafter: LoadedModel) -> Hypothesis:
    """Return the hypothesis that all is as the drafter's config says."""
    return Hypothesis("as configured", "", "", drafter.model_def, drafter.params)


def search(
    drafter: LoadedModel,
    first: Evidence,
    second: Callable[[], Evidence | None],
    special_ids: Sequence[int],
    reference: Reference | None,
) -> SearchResult:
    """Compare the hypothesis in force with its alternatives; go on while one is better.

    Args:
      second: returns the second text, or None if the model has too few positions for one.
      special_ids: of the target's tokenizer.
      reference: the maker's measurement. Of hypotheses that are as good, the one nearest to its
        config is taken.
    """
    in_force = best = as_configured(drafter)
    rounds: list[Round] = []
    changes: dict[str, Comparison] = {}  # a later change of a field replaces an earlier one
    while len(rounds) < MAX_ROUNDS:
        longest = first.text.tokens.shape[1]
        others, left_out = alternatives(first.target, drafter, best, longest, special_ids)
        refusals = list(map(first.refusal, others))
        others = [h for h, reason in zip(others, refusals, strict=True) if not reason]
        left_out += filter(None, refusals)
        comparisons, level = compare(first, best, others)
        round_ = Round(best.name, comparisons, left_out, level)
        if still_open := [others[i] for i in round_.open]:
            text = second()
            if text is not None and not any(map(text.refusal, still_open)):
                again = compare(text, best, still_open)[0]
                round_ = dataclasses.replace(round_, again=again)
        rounds.append(round_)
        if not round_.as_good:
            break
        chosen = min(round_.as_good, key=lambda i: _changed_since(reference, others[i]))
        changes[others[chosen].field] = round_.better[chosen]
        if others[chosen].num_draft_tokens:  # longer drafts would be another text
            break
        best = others[chosen]
    return SearchResult(in_force, best, rounds, list(changes.values()))


def compare(
    evidence: Evidence, hypothesis: Hypothesis, others: Sequence[Hypothesis]
) -> tuple[list[Comparison], float]:
    """Compare other hypotheses with one on a text; return the comparisons and the level of each."""
    evidence.replay((hypothesis, *others))
    level, base = 1 - (1 - evidence.level) / max(len(others), 1), evidence.accepted(hypothesis)
    comparisons = [
        Comparison.of(
            other, evidence.accepted(other), base, evidence.anchors(other), level, evidence.drafts
        )
        for other in others
    ]
    return comparisons, level


def _changed_since(reference: Reference | None, hypothesis: Hypothesis) -> int:
    """Count the fields of a hypothesis's config that differ from those of a record."""
    if reference is None:
        return 0
    then, now = reference.drafter_config, plain_config(hypothesis.model_def.config)
    return sum(name in now and now[name] != value for name, value in then.items())
