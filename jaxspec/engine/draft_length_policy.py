"""Rule for the number of drafts that a step verifies, from the cost of steps and recent acceptance.

Read `Chooser`. A step that verifies v drafts takes cost(v) seconds. It commits the drafts before
the first wrong one, and one more token. r(d) is the acceptance rate of drafts at depth d after
accepted ones. Then a step commits

    E(v) = 1 + r(1) + r(1) r(2) + ... + r(1) ... r(v)        tokens a step

The chooser takes the v of a short ladder with the most tokens a second, E(v) / cost(v). 0 is plain
decoding. Each call of the decode loop measures both numbers for its own v. Other lengths are tried
now and then, for a few steps: a text may become easy to draft again. What all of these tries lose is paid from
one `Credit`.

Nothing here knows models or devices. `draft_length` uses the chooser for an engine.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

MAX_PROGRAMS = 5

LOSS_SHARE = 0.006
"""Share of the time that all tries may lose together."""
LONGEST = 3.0
"""Greatest factor between the seconds of a try beside its steps, and those known. Something else made others longer."""
MARGIN = 1.01
"""Gain in tokens a second from which another length is taken."""
BETWEEN = 1.02
"""Gain of a length between plain decoding and all drafts, whose estimate is less certain."""
WORTH_COMPILING = 1.05
"""Gain from which a length is compiled."""
EVIDENCE, LATER_EVIDENCE = 16, 8
"""Drafts of one depth for a first choice, and for a later try. A single row needs as many steps. With 16 for a later
try, tries came too seldom to notice that a text had become easy."""
MEMORY_STEPS, MEMORY_ROWS = 32, 512
"""Half-life of acceptance counts: steps, or steps times rows, whichever is later."""
STEPS_OF_TEXT, ENOUGH_TEXTS, FEW_TEXTS = 8, 64.0, 16.0
"""Steps of a row that are about as easy to draft as each other; such texts for a first choice; and such texts until
which the calls of a new choice are short."""
DOUBTS = 1.5
"""Standard errors that must speak for another length in a first choice."""
MIN_WEIGHT = 4.0
"""Least weight of old acceptance counts, in drafts."""
PACE_CALLS = 9
"""Calls whose times estimate the current speed of steps."""
FIRST_TIMES = 2
"""First times of a length, of which the shortest counts: another process may have slowed one of them."""
TIMED_STEPS = 4
"""Steps of a call that takes such a time. In a call of fewer steps the call itself takes too large a share."""
TRIES, MAX_CHANGE = 5, 1.25
"""Later times that compare a length with the one in use; and the greatest factor between one and the estimate."""
SECOND_LOOK = 3.0
"""Loss of the first try that is a look, over what must be saved up for it. The first look may have been unlucky."""
LOOKS = 7
"""Looks, as `Chooser` has them, for a try of another length."""
PATIENCE_STEPS = 128
"""Steps between two tries."""

GATE_EVIDENCE, TRY_STEPS, GATE_SURE, GATE_KEPT = 64, 16, 256, 512
"""Steps of rows in a try of `SurvivalGate`, and the most steps of the batch. Calls are as short until
`GATE_SURE` steps of rows were seen. Age leaves the weight of `GATE_KEPT` steps, so that tries add up."""
GATE_DOUBT = 2.0
"""Margin that steps which choose need, beside `MARGIN`, after tries of one step of one row: two standard errors of
its tokens. With 0.6, a run out of ten took slower steps for quicker ones."""
GATE_LOAN = 2
"""Steps whose seconds may be owed."""
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
        self._tokens: list[float] = []  # of a step, by its length; empty until someone asks

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
        self._tokens = []

    def rates(self) -> list[float]:
        """Return the rate at each depth. With little evidence it is close to that of the depth before."""
        rates, before = [], 0.5
        for hits, trials in zip(self.hits, self.trials, strict=True):
            before = (hits + before) / (trials + 1.0)
            rates.append(before)
        return rates

    def tokens(self, length: int) -> float:
        """Return the expected tokens of a step that verifies `length` drafts."""
        if not self._tokens:
            survival = accumulate(self.rates(), operator.mul)
            self._tokens = [*accumulate(survival, initial=1.0)]
        return self._tokens[length]


def bucket_of(rows: float) -> int:
    """Round a number of active rows up to a power of two."""
    return 1 << (max(math.ceil(rows), 1) - 1).bit_length()


class Credit:
    """Seconds that may be lost to learn. `LOSS_SHARE` of all seconds is earned.

    A try waits until the loss that it promises is there. Its real loss is paid then, the time of the call
    itself included. So the credit may fall below 0, and the next try waits for longer. Free are the first look
    at all drafts, and a part of a second one if fewer were chosen.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.seconds = 0.0

    def earn(self, seconds: float) -> None:
        """Add the share of a call's seconds."""
        self.seconds += LOSS_SHARE * seconds

    def pay(self, seconds: float) -> None:
        """Take what was lost against the best known choice. A gain adds nothing."""
        self.seconds -= max(seconds, 0.0)


class Look:
    """First steps of a choice."""

    def __init__(self) -> None:
        """Begin without any."""
        self.texts = 0.0  # steps of one row that follow each other are of like texts
        self._steps = self._tokens = self._squares = 0.0

    def add(self, accepted: Mapping[int, int], steps: int, rows: float) -> None:
        """Count steps of the batch; arguments as of `Acceptance.add`."""
        self.texts += rows * max(1.0, steps / STEPS_OF_TEXT)
        self._steps += sum(accepted.values())
        self._tokens += sum((1 + n) * of for n, of in accepted.items())
        self._squares += sum((1 + n) ** 2 * of for n, of in accepted.items())

    @property
    def doubt(self) -> float:
        """Standard error of the mean of tokens, as a share of it; 0 when enough was seen."""
        if not self._steps or self.texts >= ENOUGH_TEXTS:
            return 0.0
        mean = self._tokens / self._steps
        variance = max(self._squares / self._steps - mean**2, 0.0)
        return math.sqrt(variance / self.texts) / mean


class Costs:
    """Seconds of a step, by verify length and by bucket of active rows.

    Only times that were taken close to each other are comparable: contexts grow, and a machine may
    be busy for a while. So the table holds the proportions of lengths. The pace scales all of them
    to the current speed of the length in use.

    The first times are of dummy rows. Real rows may need more experts in one length and fewer in
    another, so the first real time of a length takes their place.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.small_batches: tuple[int, ...] = ()  # rows of small-batch programs, ascending
        self.table: dict[tuple[int, int], float] = {}
        self.call_s = 0.0  # of a call, beside its steps
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._dummies: dict[tuple[int, int], list[float]] = {}
        self._first: int | None = None  # length of the first real step
        self._paces: deque[float] = deque([1.0], maxlen=PACE_CALLS)
        self.pace = 1.0  # current seconds for one second of the table

    def bucket(self, rows: float) -> int:
        """Return the bucket of active rows: the rows of their small-batch program, or `bucket_of`."""
        return bucket_of(next((size for size in self.small_batches if size >= rows), rows))

    def of_call(self, seconds: float, steps: int, usual_steps: int) -> float:
        """Return the seconds of a step of a call, as if it had as many steps as calls usually have."""
        of_steps_s = max(seconds - self.call_s, 0.5 * seconds)
        return of_steps_s / steps + (seconds - of_steps_s) / max(usual_steps, steps)

    def add_dummy(self, length: int, rows: float, seconds: float) -> None:
        """Count the time of a step of dummy rows, before there are real ones."""
        times = self._dummies.setdefault((length, self.bucket(rows)), [])
        times.append(seconds)
        self.table[length, self.bucket(rows)] = min(times)

    def add(self, length: int, rows: float, seconds: float, *, in_use: bool = False) -> None:
        """Count the time of a step.

        Args:
          in_use: whether the calls before it were of this length too. Then the time updates the
            pace, else the proportion of this length.
        """
        key = length, self.bucket(rows)
        times = self._times.setdefault(key, deque(maxlen=TRIES))
        self._first = length if self._first is None else self._first
        # Of the first length all that is known is the pace; others are compared with it.
        is_first = key in self._dummies and length == self._first
        if in_use and (is_first or len(times) >= FIRST_TIMES):
            self._paces.append(seconds / self.table[key])
            self.pace = statistics.median(self._paces)
            return
        now = seconds / self.pace
        if key in self._dummies or len(times) >= FIRST_TIMES:
            # Another process causes most of the much longer ones.
            old = self.table[key]
            now = min(max(now, old / MAX_CHANGE), old * MAX_CHANGE)
        times.append(now)
        self.table[key] = statistics.median(times) if len(times) > FIRST_TIMES else min(times)

    def is_sure(self, length: int) -> bool:
        """Return whether such a step was timed more than once, with any number of rows."""
        times = (*self._times.items(), *self._dummies.items())
        return sum(len(of) for (known, _), of in times if known == length) >= FIRST_TIMES

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
        self.look = Look()  # at the length in use
        self._is_first = True  # whether no other length was in use before
        self._is_doubtful = False  # whether another length looks better, but not surely
        self.costs = Costs()
        self.current = self.lengths[-1]
        self.steps = dict.fromkeys(self.lengths, 0)  # so far
        self.credit = Credit()
        self._since_try = 0  # steps
        self._looks = 0  # since another length was tried
        self._was_second_look = False
        self._calls_s: deque[float] = deque(maxlen=PACE_CALLS)  # of tries, but for their steps
        self._max_steps = 0  # of the last call
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
        own, self._is_doubtful = known.get(self.current), False
        if own is None:
            return fastest
        if known[fastest] <= MARGIN * own:
            return self.current
        if self._is_first:  # what was left may look bad for long
            own *= 1.0 + DOUBTS * self.look.doubt
            self._is_doubtful = known[fastest] <= MARGIN * own
        return self.current if self._is_doubtful else fastest

    def next(self, rows: int, max_steps: int, compile_s: float = 0.0) -> Choice:
        """Choose for a call with `rows` active rows.

        Args:
          max_steps: of the call.
          compile_s: seconds that a program takes to compile.
        """
        best, self._max_steps = self._chosen(rows), max_steps
        first, later = (
            min(max_steps, max(least, -(-drafts // max(rows, 1))))
            for drafts, least in ((EVIDENCE, 2), (LATER_EVIDENCE, 1))
        )
        short = min(max_steps, TIMED_STEPS)
        if self.acceptance.is_empty:
            is_choice = any(self.costs.is_known(v) for v in self.lengths if v != self.full)
            is_timed = all(self.costs.is_sure(v) for v in self.lengths)
            steps = min(first, -(-EVIDENCE // max(math.ceil(rows), 1))) if is_timed else first
            return Choice(steps if is_choice else max_steps, self.full)
        if (new := self._to_compile(rows, compile_s)) is not None:
            self.compiled.add(new)
            self._since_compiling_s = 0.0
            return Choice(first, new)
        unknown = [v for v in self.compiled if not self.costs.is_sure(v)]
        if unknown:
            return Choice(short, min(unknown))
        if self._is_doubtful or (best and not self._is_first and self.look.texts < FEW_TEXTS):
            return Choice(short, best)
        if self._since_try >= PATIENCE_STEPS and (other := self._to_try(best)) is not None:
            # Drafts that were not verified are worth a look. Of others only the time is to be learned.
            is_look = other in self._worth_a_look(best)
            least = later if is_look else short
            loss_s, call_s = self._loss_s(other, best, rows), self._call_s(best, rows)
            # A call costs something anyhow. So it has as many steps as lose as much again.
            steps = int(min(max_steps, max(least, call_s / loss_s if loss_s > 0 else max_steps)))
            owed_s = loss_s * steps + call_s
            if is_look and not self._was_second_look:
                owed_s /= SECOND_LOOK
            if owed_s <= self.credit.seconds:
                return Choice(steps, other)
        return Choice(max_steps, best)

    def _chosen(self, rows: float) -> int:
        """Set the length in use to the best one, and return it."""
        if (best := self.best(rows)) != self.current:
            self.current, self.look, self._is_first = best, Look(), False
        return best

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
        if length == self.current:
            self.look.add(accepted, steps, rows)
        if seconds is None:
            return
        rows = rows if begun is None else begun
        is_timed = steps >= min(TIMED_STEPS, self._max_steps)
        if is_timed or not self.costs.is_sure(length):
            step_s = self.costs.of_call(seconds, steps, self._max_steps)
            self.costs.add(length, rows, step_s, in_use=self._last in (None, length))
        self._last = length
        self._since_compiling_s += seconds
        self.credit.earn(seconds)
        if length == self.current:
            self._since_try += steps
            return
        self._since_try = 0
        is_look = length in self._worth_a_look(self.current)
        self._looks = self._looks + 1 if is_look else 0
        if (cost := self.costs.of(length, rows)) is not None:
            call_s = max(seconds - cost * steps, 0.0)
            counted_s = min(call_s, LONGEST * self._call_s(self.current, rows))
            self._calls_s.append(call_s)
            self.credit.pay(self._loss_s(length, self.current, rows) * steps + counted_s)
            if is_look and not self._was_second_look:
                self._was_second_look, self.credit.seconds = True, max(self.credit.seconds, 0.0)

    def _loss_s(self, other: int, best: int, rows: float) -> float:
        """Return the seconds that a step of another length loses."""
        speed, best_speed = self.speed(other, rows), self.speed(best, rows)
        cost = self.costs.of(other, rows)
        if speed is None or best_speed is None or cost is None:
            return 0.0
        return cost * (1.0 - speed / best_speed)

    def _call_s(self, best: int, rows: float) -> float:
        """Return the seconds that a try takes beside its steps; before the first one, those of a step in use."""
        if self._calls_s:
            return min(self._calls_s)
        return self.costs.of(best, rows) or 0.0

    def _worth_a_look(self, best: int) -> tuple[int, ...]:
        """Return the lengths that may be better than they look, since nothing recent is known of their drafts.

        They are all drafts, and beside plain decoding also the middle of the ladder, before them. A few drafts
        vary less than all, so they tell sooner whether drafting pays.
        """
        return (self.lengths[len(self.lengths) // 2], self.full) if best == 0 else (self.full,)

    def _to_try(self, best: int) -> int | None:
        """Return the length of the next try; None for none.

        Most tries are looks. Any other length may be better too, if it was timed wrongly.
        """
        others = self.compiled - {best}
        looks = [v for v in self._worth_a_look(best) if v in others]
        if looks and (self._looks < LOOKS or others == {*looks}):
            return looks[self._looks % len(looks)]
        return min(others - {self.full}, key=lambda v: self._tried[v], default=None)

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


class Prospects(NamedTuple):
    """Tokens a second of a row, as far as they are known before a call.

    Attributes:
      plain: without drafts, which no text changes.
      expected: of steps that choose, if their confidences tell nothing.
      highest: of steps that choose, if their confidences tell everything. They then commit what all
        drafts would, by passes that hold as many tokens. 0 if calls of one length are as quick.
    """

    plain: float
    expected: float
    highest: float

    @classmethod
    def of(
        cls, chooser: Chooser, rows: float, length: int, costs: Mapping[int, float]
    ) -> Prospects:
        """Return those of a call.

        Args:
          length: of the other kind of calls.
          costs: seconds of a step that chooses, by the width that it takes.
        """
        tokens = {width: chooser.acceptance.tokens(width) for width in costs}
        committed = {width: min(tokens[max(costs)], 1.0 + width) for width in costs}
        highest = max(committed[width] / cost for width, cost in costs.items())
        if highest <= (chooser.speed(length, rows) or 0.0):
            highest = 0.0
        expected = max(tokens[width] / cost for width, cost in costs.items())
        return cls(chooser.speed(0, rows) or 0.0, expected, highest)


class _Calls:
    """Recent calls of a kind. Older ones count less."""

    def __init__(self) -> None:
        self.tokens, self.row_seconds, self.row_steps = 0.0, 0.0, 0.0
        self.seconds, self.steps, self._at = 0.0, 0.0, 0

    @property
    def speed(self) -> float:
        """Tokens a second of a row."""
        return self.tokens / self.row_seconds

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    def add(self, tokens: float, row_steps: float, steps: int, seconds: float, now: int) -> None:
        rows = row_steps / steps
        half_life = max(MEMORY_STEPS, MEMORY_ROWS / rows)
        keep = 0.5 ** ((now - self._at) / half_life)
        keep = max(keep, min(1.0, GATE_KEPT / self.row_steps)) if self.row_steps else 0.0
        self._at = now
        self.tokens = self.tokens * keep + tokens
        self.row_seconds = self.row_seconds * keep + seconds * rows
        self.row_steps = self.row_steps * keep + row_steps
        self.seconds, self.steps = self.seconds * keep + seconds, self.steps * keep + steps


class GateChoice(NamedTuple):
    """Kind of the next call, and its steps.

    Attributes:
      chooses: whether its steps choose what they verify.
      is_try: whether it is one.
      length: of the calls of one length.
      plain: tokens a second of a row without drafts; 0 if calls of one length are compared by what they took.
    """

    chooses: bool
    steps: int
    is_try: bool
    length: int
    plain: float = 0.0


class SurvivalGate:
    """Chooses between calls whose steps choose what they verify, and calls of one length.

    It compares their measured tokens a second, for each bucket of active rows, and takes the quicker
    kind. A try of the other kind is paid from the credit. So is what steps that choose lose while they are
    believed to be the quicker kind, but for what they gained shortly before: the seconds of one try at most.
    They end where more than `GATE_LOAN` of them are owed.

    Args:
      credit: for what is lost to learn. Calls of one length earn it elsewhere.
    """

    def __init__(self, credit: Credit):
        self.credit = credit
        self._seen: dict[tuple[int | None, int], _Calls] = {}  # None: steps choose
        self._best: dict[int, bool] = {}
        self._gained_s = 0.0  # by steps that choose
        self._steps = 0
        self._tried = -PATIENCE_STEPS

    def next(
        self,
        bucket: int,
        rows: float,
        length: int,
        steps: int,
        prospects: Prospects,
    ) -> GateChoice:
        """Return the kind of the next call, and how many steps it has.

        Args:
          rows: active ones.
          length: of the other kind of calls.
          steps: of the call, if it is no try.
          prospects: without drafts the other kind of calls is as quick, once `Chooser` knows the text.
        """
        chooses, steps, is_try = self._next(bucket, rows, length, steps, prospects)
        if is_try:
            self._tried = self._steps
        return GateChoice(chooses, steps, is_try, length, prospects.plain)

    def _next(
        self, bucket: int, rows: float, length: int, steps: int, prospects: Prospects
    ) -> tuple[bool, int, bool]:
        """Return whether the next call's steps choose, how many they are, and whether it is a try."""
        plain, expected, highest = prospects
        own, fixed = (self._seen.get((kind, bucket)) for kind in (None, length))
        short = self._steps_of_try(rows, steps)
        if fixed is None:
            return False, short if self._best.get(bucket) else steps, False
        other = max(fixed.speed, plain)
        is_due = self._steps - self._tried >= PATIENCE_STEPS
        if own is not None and self._is_best(bucket, own, other):
            loss_s = short * fixed.step_s * (1.0 - fixed.speed / own.speed)
            if is_due and loss_s <= self.credit.seconds:
                return False, short, True
            is_new = own.row_steps < GATE_SURE
            is_paid = self._gained_s > 0 or self.credit.seconds > -GATE_LOAN * own.step_s
            return is_paid, short if is_new else steps, False
        if highest <= other or not is_due:
            return False, steps, False
        if own is None:
            loss_s = short * (1.0 / expected - 1.0 / other)  # a token of each row
        else:
            loss_s = short * own.step_s * (1.0 - max(own.speed, expected) / other)
        if max(loss_s, 0.0) <= self.credit.seconds:
            return True, short, True
        return False, steps, False

    def _is_best(self, bucket: int, own: _Calls, other: float) -> bool:
        """Return whether steps that choose are the quicker kind. What is in use stays at a near-tie."""
        margin = 1.0 if self._best.get(bucket) else MARGIN + GATE_DOUBT * own.row_steps**-0.5
        self._best[bucket] = own.speed > margin * other
        return self._best[bucket]

    @staticmethod
    def _steps_of_try(rows: float, steps: int) -> int:
        return min(steps, max(TRY_STEPS // 2, math.ceil(GATE_EVIDENCE / max(rows, 1.0))))

    def add(
        self,
        choice: GateChoice,
        bucket: int,
        tokens: float,
        row_steps: float,
        steps: int,
        seconds: float,
        taken_s: float,
    ) -> None:
        """Count a call.

        Args:
          choice: of its kind, by `next`.
          tokens: of all rows.
          row_steps: steps of all rows.
          steps: of the batch.
          seconds: by which kinds are compared. Of calls of one length they are those of its steps by their
            known cost, since short calls take longer a step.
          taken_s: that the call took.
        """
        own, others = (None, choice.length) if choice.chooses else (choice.length, None)
        calls = self._seen.setdefault((own, bucket), _Calls())
        self._steps += steps
        rows = row_steps / steps
        if (other := self._seen.get((others, bucket))) is not None:
            if choice.chooses:
                self._gained_s += tokens / (rows * max(other.speed, choice.plain)) - seconds
                self.credit.earn(seconds)
            elif choice.is_try:
                self.credit.pay(taken_s - tokens / (rows * other.speed))
        calls.add(tokens, row_steps, steps, seconds, self._steps)
        self.credit.pay(-self._gained_s)
        a_try_s = self._steps_of_try(rows, TRY_STEPS) * calls.step_s
        self._gained_s = min(max(self._gained_s, 0.0), a_try_s)
