"""Comparison of hypotheses about a drafter, round by round.

Read `search`. A round compares all hypotheses on a first text. What that leaves open is compared
again on a second text (`text.further`): longer rows, on which nothing was chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.commands.check import MIN_ROWS
from jaxspec.commands.check.hypotheses import Hypothesis, alternatives
from jaxspec.commands.check.reference import Reference, plain_config
from jaxspec.commands.check.replay import Replayed, replay_all
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
from jaxspec.commands.check.text import Text
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
      result: "better"; "worse"; "higher" or "lower": too small to matter, or higher by a longer
        block that was not trained (`outruns_training`); "no measurable difference": the interval
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


def compare(
    hypothesis: Hypothesis,
    others: Sequence[Hypothesis],
    accepted: Mapping[Any, np.ndarray],
    masks: Sequence[np.ndarray],
    level: float,
) -> list[Comparison]:
    """Compare other hypotheses with one, row by row.

    Args:
      accepted: by hypothesis, drafts accepted at each anchor, [R, A]; of a hopeless one, of the
        first rows.
      masks: of each other hypothesis, the anchors to compare at.
      level: of each interval.
    """
    comparisons = []
    for other, mask in zip(others, masks, strict=True):
        drafts, base = accepted[other.key], accepted[hypothesis.key]
        count = min(len(drafts), len(base))
        hopeless = count < len(mask)
        rows = mask[:count].any(axis=1)
        drafts, base, at = drafts[:count][rows], base[:count][rows], mask[:count][rows]
        after, before = row_means(drafts, at), row_means(base, at)
        gain = gained(before, after, level)
        result = "worse" if hopeless else classify(gain)
        comparisons.append(
            Comparison(
                other.name,
                other.field,
                other.fix,
                float(after.mean()),
                float(row_means(drafts >= 1, at).mean()),
                Estimate.of(after - before, level),
                gain,
                len(after),
                better=result == "better",
                result=result,
            )
        )
    return comparisons


# --- on a text -----------------------------------------------------------------------------------


class Evidence:
    """A text, and the drafts that each hypothesis gets accepted on it.

    Rows that continue one prompt are evidence of one prompt, and count as one row.
    """

    def __init__(
        self,
        target: LoadedModel,
        text: Text,
        level: float,
        *,
        num_draft_tokens: int,
        batch_size: int,
        notify: Callable[[str], None],
        num_counted: int | None = None,
        rows_per_prompt: int = 1,
        logit_rows: np.ndarray | None = None,
    ):
        """Prepare a text; `replay` replays hypotheses on it.

        Args:
          level: at which all intervals of a round hold together.
          num_counted: number of first rows that count; None for all. The others are read for their
            logits alone.
          rows_per_prompt: number of consecutive rows that continue one prompt.
          logit_rows: of each row, the position whose logits are kept; None for any.
        """
        self.target, self.text, self.level = target, text, level
        self.drafts, self.batch_size, self.notify = num_draft_tokens, batch_size, notify
        self.num_counted = len(text.tokens) if num_counted is None else num_counted
        self.rows_per_prompt = rows_per_prompt
        self.logit_rows = text.starts - 1 if logit_rows is None else logit_rows
        self.replays: list[Replayed] = []
        self._accepted: dict[Any, np.ndarray] = {}

    def anchors(self, hypothesis: Hypothesis | None = None) -> np.ndarray:
        """Return the anchors with a whole draft after them, [prompts, anchors]."""
        anchors = self.text.anchors(self.drafts)[: self.num_counted]
        if hypothesis is not None and hypothesis.num_draft_tokens:
            counts = self.text.ends - self.text.starts - hypothesis.num_draft_tokens
            anchors &= np.arange(anchors.shape[1]) < counts[: self.num_counted, None]
        return self._by_prompt(anchors)

    def accepted(self, hypothesis: Hypothesis) -> np.ndarray:
        """Return accepted drafts, [prompts, anchors]; of a hopeless one, of the first prompts."""
        return self._by_prompt(self._accepted[hypothesis.key][: self.num_counted])

    def _by_prompt(self, rows: np.ndarray) -> np.ndarray:
        prompts = len(rows) // self.rows_per_prompt
        return rows[: prompts * self.rows_per_prompt].reshape(prompts, -1)

    def replay(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Replay the hypotheses that are new; the first of `hypotheses` is in force."""
        new = [h for h in hypotheses if h.key not in self._accepted]
        if not new:
            return
        replayed = replay_all(
            self.target,
            new,
            self.text,
            self.logit_rows,
            num_draft_tokens=self.drafts,
            batch_size=self.batch_size,
            notify=self.notify,
            baseline=self._accepted.get(hypotheses[0].key),
        )
        self.replays.append(replayed)
        self._accepted |= {h.key: a for h, a in zip(new, replayed.accepted, strict=True)}

    def compare(
        self, hypothesis: Hypothesis, others: Sequence[Hypothesis]
    ) -> tuple[list[Comparison], float]:
        """Compare other hypotheses with one; return the comparisons and the level of each."""
        self.replay((hypothesis, *others))
        level = 1 - (1 - self.level) / max(len(others), 1)
        accepted = {h.key: self.accepted(h) for h in (hypothesis, *others)}
        masks = [self.anchors(h) for h in others]
        comparisons = compare(hypothesis, others, accepted, masks, level)
        for i, (other, mask) in enumerate(zip(others, masks, strict=True)):
            if comparisons[i].better and outruns_training(
                accepted[other.key], mask, other, self.drafts
            ):
                comparisons[i] = dataclasses.replace(comparisons[i], better=False, result="higher")
        return comparisons, level

    def refusal(self, hypothesis: Hypothesis) -> str:
        """Return why a hypothesis cannot be compared; "" if it can."""
        rows = int(self.anchors(hypothesis).any(axis=1).sum())
        if rows >= MIN_ROWS:
            return ""
        return f"{hypothesis.name}: {rows} rows are long enough; {MIN_ROWS} are needed"


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


# --- the search ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchResult:
    """The result of a search over hypotheses.

    Attributes:
      in_force: the hypothesis that the search began with.
      replayed: of the first round, whose first hypothesis is the one in force.
      accepted: at every anchor, by the hypothesis in force; `best_accepted` by the best one.
      changes: the steps from the one to the other.
    """

    in_force: Hypothesis
    rounds: list[Round]
    replayed: Replayed
    accepted: np.ndarray
    best_accepted: np.ndarray
    changes: list[Comparison]


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
    in_force = hypothesis = Hypothesis("as configured", "", "", drafter.model_def, drafter.params)
    rounds: list[Round] = []
    changes: dict[str, Comparison] = {}  # a later change of a field replaces an earlier one
    while len(rounds) < MAX_ROUNDS:
        longest = first.text.tokens.shape[1]
        others, left_out = alternatives(first.target, drafter, hypothesis, longest, special_ids)
        left_out += [reason for h in others if (reason := first.refusal(h))]
        others = [h for h in others if not first.refusal(h)]
        comparisons, level = first.compare(hypothesis, others)
        round_ = Round(hypothesis.name, comparisons, left_out, level)
        if round_.open:
            again = _compare_again(second(), hypothesis, [others[i] for i in round_.open])
            round_ = dataclasses.replace(round_, again=again)
        rounds.append(round_)
        if not round_.as_good:
            break
        best = min(round_.as_good, key=lambda i: _changed_since(reference, others[i]))
        changes[others[best].field] = round_.better[best]
        if others[best].num_draft_tokens:  # longer drafts would be another text
            break
        hypothesis = others[best]
    return SearchResult(
        in_force,
        rounds,
        first.replays[0],
        first.accepted(in_force),
        first.accepted(hypothesis),
        list(changes.values()),
    )


def _compare_again(
    evidence: Evidence | None, hypothesis: Hypothesis, others: Sequence[Hypothesis]
) -> list[Comparison]:
    """Compare on the second text; return nothing if there is none, or one that is too short."""
    if evidence is None or any(map(evidence.refusal, others)):
        return []
    return evidence.compare(hypothesis, others)[0]


def _changed_since(reference: Reference | None, hypothesis: Hypothesis) -> int:
    """Count the fields of a hypothesis's config that differ from those of a record."""
    if reference is None:
        return 0
    then, now = reference.drafter_config, plain_config(hypothesis.model_def.config)
    return sum(name in now and now[name] != value for name, value in then.items())
