"""Readings of a drafter held against each other, round by round.

Read `search`. A round compares all readings on a first text. What that leaves open is compared again, on a second
text: longer rows, which no choice was made on (`second_text`). The numbers are those of `statistics`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.commands.check import FEWEST_ROWS
from jaxspec.commands.check.conventions import Reading, alternatives
from jaxspec.commands.check.reference import Reference, plain_config
from jaxspec.commands.check.replay import Replayed, Text, replay_all
from jaxspec.commands.check.statistics import (
    FALL,
    FIRST_LEVEL,
    Comparison,
    Round,
    compare,
    conditional,
)
from jaxspec.weights.loading import LoadedModel

MOST_ROUNDS = 3  # conventions that may be wrong at once


class Page:
    """A text, and what is known of readings on it.

    Rows that continue one prompt are evidence of one prompt: they count as one row wherever rows are counted.
    """

    def __init__(
        self,
        target: LoadedModel,
        text: Text,
        level: float,
        *,
        num_draft_tokens: int,
        batch_size: int,
        say: Callable[[str], None],
        judged: int | None = None,
        rows_per_prompt: int = 1,
        logit_rows: np.ndarray | None = None,
    ):
        """Prepare a text; `read` replays it.

        Args:
          level: at which all intervals of a round hold together.
          judged: how many rows count, the first ones; None for all. Others are read for their logits alone.
          rows_per_prompt: how many rows after each other continue one prompt.
          logit_rows: of each row, the position whose logits are kept; None for any.
        """
        self.target, self.text, self.level = target, text, level
        self.drafts, self.batch_size, self.say = num_draft_tokens, batch_size, say
        self.judged = len(text.tokens) if judged is None else judged
        self.rows_per_prompt = rows_per_prompt
        self.logit_rows = text.starts - 1 if logit_rows is None else logit_rows
        self.replays: list[Replayed] = []
        self._accepted: dict[Any, np.ndarray] = {}

    def anchors(self, reading: Reading | None = None) -> np.ndarray:
        """Return the anchors after which a reading's drafts have room, [prompts, anchors]."""
        anchors = self.text.anchors(self.drafts)[: self.judged]
        if reading is not None and reading.num_draft_tokens:
            counts = (self.text.ends - self.text.starts - reading.num_draft_tokens)[: self.judged]
            anchors &= np.arange(anchors.shape[1])[None, :] < counts[:, None]
        return self._by_prompt(anchors)

    def accepted(self, reading: Reading) -> np.ndarray:
        """Return the accepted drafts at every anchor, [prompts, anchors]; of the first prompts if it is hopeless."""
        return self._by_prompt(self._accepted[reading.key][: self.judged])

    def _by_prompt(self, rows: np.ndarray) -> np.ndarray:
        prompts = len(rows) // self.rows_per_prompt
        whole = rows[: prompts * self.rows_per_prompt]
        return whole.reshape(prompts, -1)

    def read(self, readings: Sequence[Reading]) -> None:
        """Replay the readings that were not; the first one is in force."""
        new = [r for r in readings if r.key not in self._accepted]
        if not new:
            return
        replay = replay_all(
            self.target,
            new,
            self.text,
            self.logit_rows,
            num_draft_tokens=self.drafts,
            batch_size=self.batch_size,
            say=self.say,
            against=self._accepted.get(readings[0].key),
        )
        self.replays.append(replay)
        for reading, accepted in zip(new, replay.accepted, strict=True):
            self._accepted[reading.key] = accepted

    def compare(
        self, reading: Reading, others: Sequence[Reading]
    ) -> tuple[list[Comparison], float]:
        """Hold other readings against one; return what came of it, and the level of each interval."""
        self.read((reading, *others))
        level = 1 - (1 - self.level) / max(len(others), 1)
        accepted = {r.key: self.accepted(r) for r in (reading, *others)}
        masks = [self.anchors(r) for r in others]
        found = compare(reading, others, accepted, masks, level)
        for i, (other, mask) in enumerate(zip(others, masks, strict=True)):
            if found[i].better and outruns_training(accepted[other.key], mask, other, self.drafts):
                found[i] = dataclasses.replace(found[i], better=False, found="higher")
        return found, level

    def has_room(self, reading: Reading) -> str:
        """Say why a reading cannot be compared; nothing if it can."""
        rows = int(self.anchors(reading).any(axis=1).sum())
        if rows >= FEWEST_ROWS:
            return ""
        return f"{reading.name}: {rows} rows are long enough; {FEWEST_ROWS} are needed"


def outruns_training(
    accepted: np.ndarray, anchors: np.ndarray, reading: Reading, num_draft_tokens: int
) -> bool:
    """Tell whether drafts of a longer block fall where it goes beyond the one in force.

    Text that repeats itself lets untrained drafts gain a little. The block in force is then the one that was trained.
    """
    if reading.num_draft_tokens <= num_draft_tokens:
        return False
    last = [conditional(accepted, anchors, num_draft_tokens + i, FIRST_LEVEL) for i in (0, 1)]
    return last[1].share.mean < FALL * last[0].share.mean


@dataclass(frozen=True)
class Found:
    """What a search over readings came to.

    Attributes:
      in_force: the reading that the search began with.
      replayed: of the first round, whose first reading is the one in force.
      accepted: at every anchor, by the reading in force; `best_accepted` by the best that was found.
      changes: the steps from one to the other.
    """

    in_force: Reading
    rounds: list[Round]
    replayed: Replayed
    accepted: np.ndarray
    best_accepted: np.ndarray
    changes: list[Comparison]


def search(
    drafter: LoadedModel,
    first: Page,
    second: Callable[[], Page | None],
    special_ids: Sequence[int],
    reference: Reference | None,
) -> Found:
    """Compare the reading in force with its alternatives; go on from the best while one is better.

    Args:
      second: makes the second text, or returns it if it is made; None if there is no room for one.
      special_ids: of the target's tokenizer.
      reference: what the drafter's maker measured; of readings that are as good, the one is taken whose config is
        nearest to that one's.
    """
    in_force = reading = Reading("as configured", "", "", drafter.model_def, drafter.params)
    rounds: list[Round] = []
    changes: dict[str, Comparison] = {}  # a later change of a field takes the place of an earlier
    while len(rounds) < MOST_ROUNDS:
        longest = first.text.tokens.shape[1]
        others, left_out = alternatives(first.target, drafter, reading, longest, special_ids)
        left_out += [why for r in others if (why := first.has_room(r))]
        others = [r for r in others if not first.has_room(r)]
        comparisons, level = first.compare(reading, others)
        round_ = Round(reading.name, comparisons, left_out, level)
        if asked := round_.open:
            again = _again(second(), reading, [others[i] for i in asked])
            round_ = dataclasses.replace(round_, again=again)
        rounds.append(round_)
        if not round_.as_good:
            break
        best = min(round_.as_good, key=lambda i: _changed_since(reference, others[i]))
        changes[others[best].field] = round_.better[best]
        if others[best].num_draft_tokens:  # longer drafts would be another text
            break
        reading = others[best]
    return Found(
        in_force,
        rounds,
        first.replays[0],
        first.accepted(in_force),
        first.accepted(reading),
        list(changes.values()),
    )


def _again(page: Page | None, reading: Reading, others: Sequence[Reading]) -> list[Comparison]:
    """Compare on the second text; nothing if there is none, or if it is too short for one of these."""
    if page is None or any(page.has_room(r) for r in others):
        return []
    return page.compare(reading, others)[0]


def _changed_since(reference: Reference | None, reading: Reading) -> int:
    """Count the fields of a reading's config that differ from those of a record."""
    if reference is None:
        return 0
    then, now = reference.drafter_config, plain_config(reading.model_def.config)
    return sum(name in now and now[name] != value for name, value in then.items())
