"""Rule for the number of drafts that a step verifies, from the cost of steps and recent acceptance.

Read `Chooser`. A step that verifies v drafts takes cost(v) seconds. It commits the drafts before
the first wrong one, and one more token. r(d) is the acceptance rate of drafts at depth d after
accepted ones. Then a step commits

    E(v) = 1 + r(1) + r(1) r(2) + ... + r(1) ... r(v)        tokens a step

The chooser takes the v of a short ladder with the most tokens a second, E(v) / cost(v). 0 is plain
decoding. Each call of the decode loop measures both numbers for its own v. Other lengths are tried
now and then, for a few steps, at a bounded loss: a text may become easy to draft again.

Nothing here knows models or devices. `draft_length` uses the chooser for an engine.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

MAX_PROGRAMS = 5

EXPLORE = 0.008
"""Share of the time that tries of other lengths may lose."""
MARGIN = 1.01
"""Gain in tokens a second from which another length is taken."""
BETWEEN = 1.02
"""Gain of a length between plain decoding and all drafts, whose estimate is less certain."""
WORTH_COMPILING = 1.05
"""Gain from which a length is compiled."""
EVIDENCE, LATER_EVIDENCE = 16, 8
"""Drafts of one depth for a first choice, and for a later try. A single row needs as many steps. With 16 for a later
try, tries came too seldom to notice that a text had become easy."""
MEMORY_STEPS, MEMORY_ROWS = 32, 256
"""Half-life of acceptance counts: steps, or steps times rows, whichever is later."""
MIN_WEIGHT = 4.0
"""Least weight of old acceptance counts, in drafts."""
PACE_CALLS = 9
"""Calls whose times estimate the current speed of steps."""
FIRST_TIMES = 2
"""First times of a length, of which the shortest counts: another process may have slowed one of them."""
TIMED_STEPS = 4
"""Most steps of a call that takes such a time."""
TRIES, MAX_CHANGE = 5, 1.25
"""Later times that compare a length with the one in use; and the greatest factor between one and the estimate."""
PATIENCE_STEPS = 128
"""Steps between two tries."""

GATE_STEPS = 256
"""Steps between two tries of `SurvivalGate`. A try has `TIMED_STEPS`, so one that takes twice as long a
token loses 1.6 %."""

MIN_DECODE_S, TIMES_COMPILING = 2.0, 2.0
"""Seconds of decoding, and multiples of the compile time, before a length is compiled."""


def ladder(num_draft_tokens: int) -> tuple[int, ...]:
    """Return the verify lengths to compile, at most five, from 0 (plain decoding) to all drafts.

    Between them are lengths of 2, 4, 8, ... tokens a pass, the anchor included.
    """
    between = [2**k - 1 for k in range(1, 31) if 2**k - 1 < num_draft_tokens]
    return (0, *between[-(MAX_PROGRAMS - 2) :], num_draft_tokens)


class Acceptance:
    """Acceptance rates of drafts at each depth, after accepted ones. Old steps count less."""

    def __init__(self, depth: int):
        """Begin without any evidence."""
        self.hits = [0.0] * depth
        self.trials = [0.0] * depth

    @property
    def is_empty(self) -> bool:
        """Return whether no draft was verified yet."""
        return not any(self.trials)

    def add(self, length: int, accepted: Mapping[int, int], steps: int, rows: float) -> None:
        """Count steps that verified `length` drafts.

        Args:
          accepted: number of rows' steps by the number of drafts that they accepted.
          steps: steps of the batch.
          rows: active rows of the batch.
        """
        keep = 0.5 ** (steps / max(MEMORY_STEPS, MEMORY_ROWS / max(rows, 1.0)))
        for depth, old in enumerate(self.trials):
            kept = max(old * keep, min(old, MIN_WEIGHT)) / old if old else 1.0
            self.trials[depth], self.hits[depth] = old * kept, self.hits[depth] * kept
        for depth in range(length):
            self.trials[depth] += sum(n for count, n in accepted.items() if count >= depth)
            self.hits[depth] += sum(n for count, n in accepted.items() if count > depth)

    def rates(self) -> list[float]:
        """Return the rate at each depth. With little evidence it is close to that of the depth before."""
        rates, before = [], 0.5
        for hits, trials in zip(self.hits, self.trials, strict=True):
            before = (hits + before) / (trials + 1.0)
            rates.append(before)
        return rates

    def tokens(self, length: int) -> float:
        """Return the expected tokens of a step that verifies `length` drafts."""
        return 1.0 + sum(math.prod(rates) for rates in _prefixes(self.rates()[:length]))


def _prefixes(rates: Sequence[float]) -> Iterable[Sequence[float]]:
    return (rates[: i + 1] for i in range(len(rates)))


def bucket_of(rows: float) -> int:
    """Round a number of active rows up to a power of two."""
    return 1 << (max(math.ceil(rows), 1) - 1).bit_length()


class Costs:
    """Seconds of a step, by verify length and by bucket of active rows.

    Only times that were taken close to each other are comparable: contexts grow, and a machine may
    be busy for a while. So the table holds the proportions of lengths. The pace scales all of them
    to the current speed of the length in use.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.small_batches: tuple[int, ...] = ()  # rows of small-batch programs, ascending
        self.table: dict[tuple[int, int], float] = {}
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._pace: deque[float] = deque([1.0], maxlen=PACE_CALLS)

    def bucket(self, rows: float) -> int:
        """Return the bucket of active rows: the rows of their small-batch program, or `bucket_of`."""
        return bucket_of(next((size for size in self.small_batches if size >= rows), rows))

    @property
    def pace(self) -> float:
        """Current seconds for one second of the table."""
        return statistics.median(self._pace)

    def add(self, length: int, rows: float, seconds: float, *, in_use: bool = False) -> None:
        """Count the time of a step.

        Args:
          in_use: whether the calls before it were of this length too. Then the time updates the
            pace, else the proportion of this length.
        """
        key = length, self.bucket(rows)
        times = self._times.setdefault(key, deque(maxlen=TRIES))
        if in_use and len(times) >= FIRST_TIMES:
            self._pace.append(seconds / self.table[key])
            return
        now = seconds / self.pace
        if len(times) >= FIRST_TIMES:  # another process causes most of the much longer ones
            old = self.table[key]
            now = min(max(now, old / MAX_CHANGE), old * MAX_CHANGE)
        times.append(now)
        self.table[key] = statistics.median(times) if len(times) > FIRST_TIMES else min(times)

    def is_sure(self, length: int) -> bool:
        """Return whether such a step was timed more than once, with any number of rows."""
        return (
            sum(len(times) for (known, _), times in self._times.items() if known == length)
            >= FIRST_TIMES
        )

    def is_known(self, length: int) -> bool:
        """Return whether such a step was timed, with any number of rows."""
        return any(known == length for known, _ in self.table)

    def of(self, length: int, rows: float) -> float | None:
        """Return the current seconds of a step; None if this length was never timed.

        A bucket without a time takes that of the nearest one, scaled by a length that was timed in
        both.
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
        """Return the seconds of a step, interpolated between the neighbours of a length that was never timed."""
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
    """Most steps of the next decode call, and the drafts that each of them verifies.

    Attributes:
      costs: seconds of a step of each width, if each step chooses among them.
    """

    steps: int
    length: int
    costs: tuple[float, ...] | None = None


class Chooser:
    """Chooses the verify length of each call from the calls before.

    It uses the past alone. So the number of drafts is fixed before any random number of a step is
    drawn, and every row keeps the target's distribution.

    Args:
      lengths: in order; the first is 0, the last is all drafts.
      compiled: those that have programs. None: all.
    """

    def __init__(self, lengths: Sequence[int], compiled: Iterable[int] | None = None):
        self.lengths = tuple(lengths)
        self.compiled = set(self.lengths if compiled is None else compiled)
        self.acceptance = Acceptance(self.lengths[-1])
        self.costs = Costs()
        self.current = self.lengths[-1]
        self.steps = dict.fromkeys(self.lengths, 0)  # so far
        self._credit_s = dict.fromkeys(self.lengths, 0.0)  # seconds that a try may lose
        self._since_try = 0  # steps
        self._tried = dict.fromkeys(self.lengths, 0)  # total steps when it was last used
        self._since_compiling_s = 0.0
        self._last: int | None = None  # length of the last call that was timed

    @property
    def full(self) -> int:
        """All drafts."""
        return self.lengths[-1]

    def speed(self, length: int, rows: float) -> float | None:
        """Return the expected tokens a second of a row; None if the length was never timed."""
        cost = self.costs.of(length, rows)
        return None if cost is None else self.acceptance.tokens(length) / cost

    def best(self, rows: float) -> int:
        """Return the length with the most tokens a second, or the one in use unless another is clearly better."""
        speeds = {v: self.speed(v, rows) for v in self.lengths if v in self.compiled}
        known = {v: speed for v, speed in speeds.items() if speed is not None}
        if not known or self.acceptance.is_empty:
            return self.full
        known = {v: speed if v in (0, self.full) else speed / BETWEEN for v, speed in known.items()}
        fastest = max(known, key=lambda v: known[v])
        own = known.get(self.current)
        return self.current if own is not None and known[fastest] <= MARGIN * own else fastest

    def next(self, rows: int, max_steps: int, compile_s: float = 0.0) -> Choice:
        """Choose for a call with `rows` active rows.

        Args:
          max_steps: of the call.
          compile_s: seconds that a program takes to compile.
        """
        self.current = best = self.best(rows)
        first, later = (
            min(max_steps, max(2, -(-drafts // max(rows, 1))))
            for drafts in (EVIDENCE, LATER_EVIDENCE)
        )
        if self.acceptance.is_empty:
            is_choice = any(self.costs.is_known(v) for v in self.lengths if v != self.full)
            return Choice(first if is_choice else max_steps, self.full)
        if (new := self._to_compile(rows, compile_s)) is not None:
            self.compiled.add(new)
            self._since_compiling_s = 0.0
            return Choice(first, new)
        unknown = [v for v in self.compiled if not self.costs.is_sure(v)]
        if unknown:
            return Choice(min(first, TIMED_STEPS), min(unknown))
        if self._since_try >= PATIENCE_STEPS:
            other = self._to_try(best, later, rows)
            if other is not None:
                return Choice(self._steps_of_try(other, best, later, max_steps, rows), other)
        return Choice(max_steps, best)

    def learn(
        self,
        length: int,
        rows: float,
        steps: int,
        seconds: float | None,
        accepted: Mapping[int, int],
        begun: int | None = None,
    ) -> None:
        """Learn from a decode call.

        Args:
          length: its verify length.
          rows: active rows, on average over its steps.
          seconds: of the call; None if they do not measure its steps.
          accepted: number of rows' steps by the number of drafts that they accepted.
          begun: active rows at the begin, if they chose a small-batch program; None: `rows`.
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
        """Return each length's share of the loss by tries. All drafts get half: they are the best evidence."""
        others = [v for v in self.lengths if v not in (self.full, self.current)]
        full = {self.full: 0.5} if self.current != self.full else {}
        return full | dict.fromkeys(others, (1.0 - sum(full.values())) / max(len(others), 1))

    def _loss_s(self, other: int, best: int, rows: float) -> float:
        """Return the seconds that a step of another length loses."""
        speed, best_speed = self.speed(other, rows), self.speed(best, rows)
        cost = self.costs.of(other, rows)
        if speed is None or best_speed is None or cost is None:
            return 0.0
        return cost * (1.0 - speed / best_speed)

    def _to_try(self, best: int, steps: int, rows: float) -> int | None:
        """Return the longest unused length whose loss in a try is saved up; None for none.

        More drafts may be better than they look: nothing recent is known of drafts that were not
        verified. Any length may be, if it was timed wrongly.
        """
        affordable = [
            v
            for v in self.compiled - {best}
            if self._loss_s(v, best, rows) * steps <= self._credit_s[v]
        ]
        return min(affordable, key=lambda v: self._tried[v], default=None)

    def _steps_of_try(
        self, other: int, best: int, min_steps: int, max_steps: int, rows: float
    ) -> int:
        """Return the steps of a try, as many as the saved seconds pay for. Near-ties get the most."""
        loss_s = self._loss_s(other, best, rows)
        paid = max_steps if loss_s <= 0 else int(min(self._credit_s[other] / loss_s, max_steps))
        return max(min_steps, paid)

    def _to_compile(self, rows: float, compile_s: float) -> int | None:
        """Return a length that is worth a program; None for none, or while little was decoded."""
        if self._since_compiling_s < max(MIN_DECODE_S, TIMES_COMPILING * compile_s):
            return None
        missing = [v for v in self.lengths if v not in self.compiled]
        if 0 in missing:
            return 0  # all others lie between it and all drafts
        best = self.speed(self.best(rows), rows)
        costs = {v: self.costs.between(v, rows) for v in missing}
        speeds = {v: self.acceptance.tokens(v) / cost for v, cost in costs.items() if cost}
        if best is None or not speeds:
            return None
        fastest = max(speeds, key=lambda v: speeds[v])
        return fastest if speeds[fastest] > WORTH_COMPILING * best else None


class SurvivalGate:
    """Chooses between calls whose steps choose what they verify, and calls of one length.

    It compares their measured tokens a second, for each bucket of active rows. The slower kind is
    tried now and then, for a few steps.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._speeds: dict[tuple[bool, int], deque[float]] = {}
        self._calls: dict[tuple[bool, int], int] = {}
        self._since: dict[int, int] = {}

    def next(self, bucket: int, steps: int) -> tuple[bool, bool]:
        """Return whether steps of the next call choose, and whether that is a try of the slower kind.

        Args:
          steps: of the call, if it is no try.
        """
        own, fixed = (self._speeds.get((kind, bucket)) for kind in (True, False))
        if own is None or fixed is None:
            return own is None, own is None
        best = statistics.median(own) > statistics.median(fixed)
        self._since[bucket] = self._since.get(bucket, 0) + steps
        if self._since[bucket] <= GATE_STEPS:
            return best, False
        self._since[bucket] = 0
        return not best, True

    def add(self, chooses: bool, bucket: int, speed: float) -> None:
        """Count the speed of a call. The first one of a kind takes longer than others."""
        key = chooses, bucket
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] > 1:
            self._speeds.setdefault(key, deque(maxlen=PACE_CALLS)).append(speed)
