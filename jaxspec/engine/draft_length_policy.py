"""How many drafts a step should verify: chosen from what steps cost and from how many drafts were accepted lately.

Read `Chooser`. Verifying v drafts costs `cost(v)` seconds a step, and commits as many tokens as the drafts before the
first wrong one, and one more. With r(d) for the share of drafts at depth d that are accepted where all before them
were, that is

    E(v) = 1 + r(1) + r(1) r(2) + ... + r(1) ... r(v)        tokens a step

The chooser takes the v of a short ladder with the most tokens a second, E(v) / cost(v). 0 is plain decoding. Each
call of the decode loop tells both numbers of its own v. What else there is to know is tried now and then, for a
few steps, at a bounded loss: a text may become easy to draft again.

Nothing here knows models or devices. `chosen_length` asks the chooser for an engine.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

MOST_PROGRAMS = 5

EXPLORE = 0.008
"""Share of the time that trying other lengths may lose."""
MARGIN = 1.01
"""Another length is taken from so many times the tokens a second on."""
BETWEEN = 1.02
"""A length between plain decoding and all drafts has to promise so many times theirs: what it promises is less sure."""
WORTH_COMPILING = 1.05
"""And it is compiled for so many."""
EVIDENCE, LATER_EVIDENCE = 16, 8
"""Drafts of one depth that say enough for a first choice, and to look again. A row that is alone gets them in as
many steps: a second look of 16 took so long to save up for that a text which became easy went unseen."""
MEMORY_STEPS, MEMORY_ROWS = 32, 256
"""Acceptance counts half after so many steps, or so many steps of all rows together, whichever is later."""
LEAST_WEIGHT = 4.0
"""However old, it counts as so many drafts: until something newer is known."""
PACE_CALLS = 9
"""Calls whose times say how fast steps are now."""
FIRST_TIMES = 2
"""Times of a length, of which the shortest counts: something else may have run beside one of them."""
TIMED_STEPS = 4
"""Most steps of a call that is made for such a time."""
TRIES, MOST_CHANGE = 5, 1.25
"""Later times that say how a length compares with the one in use; and how far one may be from what is known."""
PATIENCE_STEPS = 128
"""Steps between two tries."""

LEAST_S, TIMES_COMPILING = 2.0, 2.0
"""A length that is not compiled is tried after so many seconds of decoding, and so many times what compiling takes."""


def ladder(num_draft_tokens: int) -> tuple[int, ...]:
    """Return the verify lengths to compile, at most five, from 0 (plain decoding) to all drafts.

    Between them are lengths of 2, 4, 8, ... tokens a pass, the anchor included.
    """
    between = [2**k - 1 for k in range(1, 31) if 2**k - 1 < num_draft_tokens]
    return (0, *between[-(MOST_PROGRAMS - 2) :], num_draft_tokens)


class Acceptance:
    """The share of drafts accepted at each depth, where all before them were; old steps count less."""

    def __init__(self, depth: int):
        """Begin without any evidence."""
        self.hits = [0.0] * depth
        self.trials = [0.0] * depth

    @property
    def is_empty(self) -> bool:
        """Whether no draft was judged yet."""
        return not any(self.trials)

    def add(self, length: int, accepted: Mapping[int, int], steps: int, rows: float) -> None:
        """Count steps that verified `length` drafts.

        Args:
          accepted: how many steps of rows accepted how many drafts.
          steps: steps of the batch, which had so many active `rows`.
        """
        keep = 0.5 ** (steps / max(MEMORY_STEPS, MEMORY_ROWS / max(rows, 1.0)))
        for depth, old in enumerate(self.trials):
            kept = max(old * keep, min(old, LEAST_WEIGHT)) / old if old else 1.0
            self.trials[depth], self.hits[depth] = old * kept, self.hits[depth] * kept
        for depth in range(length):
            self.trials[depth] += sum(n for count, n in accepted.items() if count >= depth)
            self.hits[depth] += sum(n for count, n in accepted.items() if count > depth)

    def rates(self) -> list[float]:
        """Return the share at each depth. Where little is known, it is near that of the depth before."""
        rates, before = [], 0.5
        for hits, trials in zip(self.hits, self.trials, strict=True):
            before = (hits + before) / (trials + 1.0)
            rates.append(before)
        return rates

    def tokens(self, length: int) -> float:
        """Return the tokens that a step commits which verifies so many drafts."""
        return 1.0 + sum(math.prod(rates) for rates in _prefixes(self.rates()[:length]))


def _prefixes(rates: Sequence[float]) -> Iterable[Sequence[float]]:
    return (rates[: i + 1] for i in range(len(rates)))


def bucket_of(rows: float) -> int:
    """Return the bucket of a number of active rows: the power of two above."""
    return 1 << (max(math.ceil(rows), 1) - 1).bit_length()


class Costs:
    """Seconds of a step, by verify length and by bucket of active rows.

    Times that are compared should have been taken close to each other: contexts grow, and a machine may be busy
    for a while. So the table holds the proportions of lengths. How fast all of them are now, its pace, follows
    the length in use.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.few: tuple[int, ...] = ()  # rows of programs for few of the slots, fewest first
        self.table: dict[tuple[int, int], float] = {}
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._pace: deque[float] = deque([1.0], maxlen=PACE_CALLS)

    def bucket(self, rows: float) -> int:
        """Return the bucket of so many active rows: those of the program that computes them, or `bucket_of`."""
        return bucket_of(next((few for few in self.few if few >= rows), rows))

    @property
    def pace(self) -> float:
        """Seconds now for one of the table's."""
        return statistics.median(self._pace)

    def add(self, length: int, rows: float, seconds: float, *, in_use: bool = False) -> None:
        """Count the time of a step.

        Args:
          in_use: whether calls before it were of this length too. Then it says how fast all lengths are now;
            else what this one is in proportion.
        """
        key = length, self.bucket(rows)
        times = self._times.setdefault(key, deque(maxlen=TRIES))
        if in_use and len(times) >= FIRST_TIMES:
            self._pace.append(seconds / self.table[key])
            return
        now = seconds / self.pace
        if len(times) >= FIRST_TIMES:  # a much longer one is mostly another program's fault
            old = self.table[key]
            now = min(max(now, old / MOST_CHANGE), old * MOST_CHANGE)
        times.append(now)
        self.table[key] = statistics.median(times) if len(times) > FIRST_TIMES else min(times)

    def is_sure(self, length: int) -> bool:
        """Whether such a step was timed more than once, with any number of rows."""
        return (
            sum(len(times) for (known, _), times in self._times.items() if known == length)
            >= FIRST_TIMES
        )

    def is_known(self, length: int) -> bool:
        """Whether such a step was timed, with any number of rows."""
        return any(known == length for known, _ in self.table)

    def of(self, length: int, rows: float) -> float | None:
        """Return what a step takes now; None where nothing is known of this length.

        A bucket without a time takes that of the nearest one. A length that was timed in both says how much
        quicker or slower it is.
        """
        here = self.bucket(rows)
        if (length, here) in self.table:
            return self.table[length, here] * self.pace
        others = [bucket for known, bucket in self.table if known == length]
        if not others:
            return None
        near = min(others, key=lambda b: abs(b.bit_length() - here.bit_length()))
        both = [
            known for known, bucket in self.table if bucket == here and (known, near) in self.table
        ]
        scale = 1.0
        if both:
            like = min(both, key=lambda known: abs(known - length))
            scale = self.table[like, here] / self.table[like, near]
        return self.table[length, near] * scale * self.pace

    def between(self, length: int, rows: float) -> float | None:
        """Return what a step takes; for a length never timed, on the line between its neighbours."""
        known = sorted({known for known, _ in self.table})
        below = max((k for k in known if k <= length), default=None)
        above = min((k for k in known if k >= length), default=None)
        if below is None or above is None:
            return None
        low, high = self.of(below, rows), self.of(above, rows)
        assert low is not None
        assert high is not None
        if below == above:
            return low
        return low + (high - low) * (length - below) / (above - below)


class Choice(NamedTuple):
    """What the next call of the decode loop does: most steps, and how many drafts each verifies."""

    steps: int
    length: int


class Chooser:
    """Chooses the verify length of each call from the calls before.

    It looks at the past alone. So the drafts that a step verifies are fixed before any of its random numbers is
    drawn, and every row keeps the target's distribution.

    Args:
      lengths: in order; the first is 0, the last is all drafts.
      compiled: those whose programs are there. None: all.
    """

    def __init__(self, lengths: Sequence[int], compiled: Iterable[int] | None = None):
        self.lengths = tuple(lengths)
        self.compiled = set(self.lengths if compiled is None else compiled)
        self.acceptance = Acceptance(self.lengths[-1])
        self.costs = Costs()
        self.current = self.lengths[-1]
        self.steps = dict.fromkeys(self.lengths, 0)  # done so far
        self._credit_s = dict.fromkeys(self.lengths, 0.0)  # that a try may lose
        self._since_try = 0  # steps
        self._tried = dict.fromkeys(self.lengths, 0)  # total steps when it was last used
        self._since_compiling_s = 0.0
        self._last: int | None = None  # length of the last call that was timed

    @property
    def full(self) -> int:
        """All drafts."""
        return self.lengths[-1]

    def speed(self, length: int, rows: float) -> float | None:
        """Return the tokens a second and row that a length promises; None where it was never timed."""
        cost = self.costs.of(length, rows)
        return None if cost is None else self.acceptance.tokens(length) / cost

    def best(self, rows: float) -> int:
        """Return the length with the most tokens a second; the one in use, unless another is clearly better."""
        speeds = {v: self.speed(v, rows) for v in self.lengths if v in self.compiled}
        known = {v: speed for v, speed in speeds.items() if speed is not None}
        if not known or self.acceptance.is_empty:
            return self.full
        known = {v: speed if v in (0, self.full) else speed / BETWEEN for v, speed in known.items()}
        found = max(known, key=lambda v: known[v])
        own = known.get(self.current)
        return self.current if own is not None and known[found] <= MARGIN * own else found

    def next(self, rows: int, most_steps: int, compile_s: float = 0.0) -> Choice:
        """Choose for a call with so many active rows.

        Args:
          most_steps: of the call.
          compile_s: what a program takes to compile.
        """
        self.current = best = self.best(rows)
        few, fewer = (
            min(most_steps, max(2, -(-drafts // max(rows, 1))))
            for drafts in (EVIDENCE, LATER_EVIDENCE)
        )
        if self.acceptance.is_empty:
            is_choice = any(self.costs.is_known(v) for v in self.lengths if v != self.full)
            return Choice(few if is_choice else most_steps, self.full)
        if (new := self._to_compile(rows, compile_s)) is not None:
            self.compiled.add(new)
            self._since_compiling_s = 0.0
            return Choice(few, new)
        unknown = [v for v in self.compiled if not self.costs.is_sure(v)]
        if unknown:
            return Choice(min(few, TIMED_STEPS), min(unknown))
        if self._since_try >= PATIENCE_STEPS:
            other = self._to_try(best, fewer, rows)
            if other is not None:
                return Choice(self._steps_of_try(other, best, fewer, most_steps, rows), other)
        return Choice(most_steps, best)

    def learn(
        self,
        length: int,
        rows: float,
        steps: int,
        seconds: float | None,
        accepted: Mapping[int, int],
        begun: int | None = None,
    ) -> None:
        """Take in what a call of the loop did.

        Args:
          length: that it verified.
          rows: active ones, on average over its steps.
          seconds: of the call; None where they say nothing of a step.
          accepted: how many steps of rows accepted how many drafts.
          begun: rows that were active when it began, if they named its program; None: what `rows` says.
        """
        if not steps:
            return
        self.steps[length] += steps
        self._tried[length] = sum(self.steps.values())
        self.acceptance.add(length, accepted, steps, rows)
        if seconds is None:
            return
        rows = rows if begun is None else begun
        self.costs.add(length, rows, seconds / steps, in_use=self._last in (None, length))
        self._last = length
        self._since_compiling_s += seconds
        if length == self.current:
            self._since_try += steps
            for v, share in self._shares().items():
                self._credit_s[v] += share * EXPLORE * seconds
        else:
            self._since_try = 0
            self._credit_s[length] = 0.0

    def _shares(self) -> dict[int, float]:
        """Return each length's part of what tries may lose: half of it for all drafts, which say most."""
        others = [v for v in self.lengths if v not in (self.full, self.current)]
        full = {self.full: 0.5} if self.current != self.full else {}
        return full | dict.fromkeys(others, (1.0 - sum(full.values())) / max(len(others), 1))

    def _loss_s(self, other: int, best: int, rows: float) -> float:
        """Return the seconds that a step of another length loses."""
        speed, most = self.speed(other, rows), self.speed(best, rows)
        cost = self.costs.of(other, rows)
        if speed is None or most is None or cost is None:
            return 0.0
        return cost * (1.0 - speed / most)

    def _to_try(self, best: int, few: int, rows: float) -> int | None:
        """Return the length to look at again: of those whose loss is saved up for, the longest unused.

        More drafts may be better than they look: nothing is known lately of those that were not verified. And any
        length may, where one was timed wrongly.
        """
        found = [
            v
            for v in self.compiled - {best}
            if self._loss_s(v, best, rows) * few <= self._credit_s[v]
        ]
        return min(found, key=lambda v: self._tried[v], default=None)

    def _steps_of_try(self, other: int, best: int, least: int, most: int, rows: float) -> int:
        """Return the steps of a try: as many as what is saved up pays for. So near-ties are looked at closely."""
        loss_s = self._loss_s(other, best, rows)
        paid = most if loss_s <= 0 else int(min(self._credit_s[other] / loss_s, most))
        return max(least, paid)

    def _to_compile(self, rows: float, compile_s: float) -> int | None:
        """Return a length that is worth its program; None for none, or while little was decoded."""
        if self._since_compiling_s < max(LEAST_S, TIMES_COMPILING * compile_s):
            return None
        missing = [v for v in self.lengths if v not in self.compiled]
        if 0 in missing:
            return 0  # all others lie between it and all drafts
        best = self.speed(self.best(rows), rows)
        costs = {v: self.costs.between(v, rows) for v in missing}
        speeds = {v: self.acceptance.tokens(v) / cost for v, cost in costs.items() if cost}
        if best is None or not speeds:
            return None
        found = max(speeds, key=lambda v: speeds[v])
        return found if speeds[found] > WORTH_COMPILING * best else None
