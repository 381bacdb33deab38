"""How many drafts are verified changes nothing but speed: not greedy tokens, not distributions, not programs.

The rule that chooses is tried on made-up machines and texts, where the best fixed choice is known. What it does in an
engine is tried with lengths that change at every call. The distribution is in `test_distribution`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from jaxspec import decode
from jaxspec.drafters.base import Draft
from jaxspec.engine import draft_length, draft_length_policy
from jaxspec.engine.draft_length import DraftLengthController
from jaxspec.engine.draft_length_policy import (
    Acceptance,
    Choice,
    Chooser,
    Costs,
    Credit,
    GateChoice,
    Prospects,
    SurvivalGate,
    ladder,
)
from jaxspec.engine.request import Request
from jaxspec.options import FieldError, Sampling, Tree
from jaxspec.runtime.runtime import Runtime
from jaxspec.state import DecodeState
from jaxspec.weights.sharding import own_context
from tests.cases import NEW_TOKENS, case, request, run, slow

NAME = "31b"


# --- the rule ----------------------------------------------------------------------------------------


def test_ladders_are_short_and_hold_both_ends() -> None:
    assert ladder(1) == (0, 1)
    assert ladder(4) == (0, 1, 3, 4)
    assert ladder(7) == (0, 1, 3, 7)
    assert ladder(15) == (0, 1, 3, 7, 15)
    assert ladder(31) == (0, 3, 7, 15, 31)
    for drafts in range(1, 64):
        lengths = ladder(drafts)
        assert lengths[0] == 0
        assert lengths[-1] == drafts
        assert len(lengths) <= draft_length_policy.MAX_PROGRAMS
        assert sorted(set(lengths)) == list(lengths)


def test_acceptance_beyond_what_was_verified_goes_on_at_the_last_rate() -> None:
    seen = Acceptance(4)
    seen.add(2, {0: 100, 1: 200, 2: 700}, steps=50, rows=20)
    first, second, third, fourth = seen.rates()
    assert first == pytest.approx(0.9, abs=0.01)
    assert second == pytest.approx(7 / 9, abs=0.01)
    assert third == fourth == pytest.approx(second)
    assert seen.tokens(0) == 1
    assert seen.tokens(2) == pytest.approx(1 + 0.9 + 0.7, abs=0.01)
    for _ in range(1000):  # plain steps: what is known is old, but not forgotten
        seen.add(0, {0: 20}, steps=1, rows=20)
    assert seen.rates()[0] == pytest.approx(0.8, abs=0.1)
    seen.add(2, {0: 32}, steps=2, rows=16)
    assert seen.rates()[0] < 0.2  # and a little that is new counts more


def test_costs_are_compared_at_one_time_and_for_like_batches() -> None:
    costs = Costs()
    for length, seconds in ((0, 1.0), (3, 1.5), (7, 3.0)):
        costs.add_dummy(length, 32, seconds)
    for _ in range(20):  # something else runs: all lengths are slower, not this one alone
        costs.add(7, 32, 6.0, in_use=True)
    assert costs.of(0, 32) == pytest.approx(2.0)
    costs.add(7, 3, 1.5)
    assert costs.of(7, 3) == pytest.approx(1.5)
    assert costs.of(0, 3) == pytest.approx(0.5)  # few rows take a quarter, as far as known
    assert costs.of(1, 32) is None
    assert costs.between(1, 32) == pytest.approx(2.0 + 1 / 3)


def test_rows_that_one_program_computes_cost_the_same() -> None:
    """Two rows of 32 take the program for eight, not that for one. A call is filed by the rows that it began with."""
    chooser = Chooser((0, 3))
    costs = chooser.costs
    costs.small_batches = (1, 8)
    for rows, seconds in ((1, 1.0), (8, 2.0), (32, 6.0)):
        costs.add_dummy(3, rows, seconds)
    assert [costs.of(3, rows) for rows in (1, 2, 3, 8, 20, 32)] == [1.0, 2.0, 2.0, 2.0, 6.0, 6.0]
    chooser.learn(3, 5.0, 4, 24.0, {3: 20}, begun=20)  # most of its 20 rows soon ended
    assert costs.of(3, 5) == 2.0
    assert costs.of(3, 20) == 6.0


@dataclasses.dataclass
class Machine:
    """What steps cost, and how often drafts are right: in stretches of so many tokens a row."""

    drafts: int
    rows: int
    seconds: dict[int, float]
    texts: list[tuple[list[float], int]]
    warm: bool

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Machine:
        drafts, rows = int(rng.choice([1, 3, 5, 7, 15])), int(rng.choice([1, 4, 32, 128]))
        drafting, slope, curve = (
            rng.uniform(0, 0.3),
            rng.choice([0.05, 0.3, 1, 3]),
            rng.uniform(0.5, 1.5),
        )
        seconds = {
            v: 0.01 * (1 + (drafting + slope * (v / drafts) ** curve if v else 0.0))
            for v in ladder(drafts)
        }
        texts, count = [], int(rng.choice([1, 1, 2, 4]))
        for _ in range(count):
            rate = rng.uniform(*[(0, 0.2), (0.2, 0.7), (0.7, 0.98)][rng.integers(3)])
            texts.append(([rate * 0.97**i for i in range(drafts)], 6000 // count))
        return cls(drafts, rows, seconds, texts, bool(rng.random() < 0.5))

    def tokens(self, length: int, rates: Sequence[float]) -> float:
        return 1 + float(np.sum(np.cumprod(rates[:length])))

    def decode(
        self, rng: np.random.Generator, log: list[list[tuple[int, int]]] | None = None
    ) -> tuple[float, float, Chooser]:
        """Return the seconds with chosen lengths, and of the better fixed length for the same tokens.

        Args:
          log: gets a list for each text: steps and length of each call.
        """
        chooser, took, plain, full = Chooser(ladder(self.drafts)), 0.0, 0.0, 0.0
        log = [] if log is None else log
        for length in chooser.lengths if self.warm else ():
            for _ in range(3):  # as `DraftLengthController.measure` does
                seconds = self.seconds[length] * rng.lognormal(0, 0.02)
                chooser.costs.add_dummy(length, self.rows, seconds)
        for rates, tokens in self.texts:
            left = float(tokens)
            log.append([])
            while left > 0:
                steps, length, _ = chooser.next(self.rows, 16)
                log[-1].append((steps, length))
                right = rng.random((steps, self.rows, length)) < np.asarray(rates[:length])
                accepted = np.cumprod(right, axis=-1).sum(axis=-1)
                seconds = self.seconds[length] * steps
                timed = seconds * rng.lognormal(0, 0.03) * (3 if rng.random() < 0.01 else 1)
                counts = collections.Counter(accepted.flatten().tolist())
                chooser.learn(length, self.rows, steps, timed, counts)
                done = steps * self.tokens(length, rates)
                took, left = took + seconds, left - done
                plain += done * self.seconds[0]
                full += done / self.tokens(self.drafts, rates) * self.seconds[self.drafts]
        return took, min(plain, full), chooser


def test_the_choice_is_never_slower_than_the_better_fixed_one_by_more_than_3_percent() -> None:
    """Made-up machines with noisy clocks, where a program that ran beside it tripled one time of a hundred."""
    rng = np.random.default_rng(14)
    regrets = []
    for _ in range(30):
        took, best, _ = Machine.drawn(rng).decode(rng)
        regrets.append(took / best - 1)
    assert max(regrets) < 0.03
    assert np.mean(regrets) < -0.01  # lengths in between are better than both ends


H200 = {
    32: {0: 0.0163, 1: 0.0190, 3: 0.0202, 7: 0.0204, 15: 0.0253},
    1: {0: 0.0028, 1: 0.0050, 3: 0.0060, 7: 0.0075, 15: 0.0092},
}
"""Seconds of a step of 26B-A4B with DFlash, by rows and by drafts verified. Of one row only the ends were measured."""


@pytest.mark.parametrize("rows", H200)
def test_on_an_h200_no_acceptance_makes_it_slower_than_the_better_of_plain_and_all_drafts(
    rows: int,
) -> None:
    """With what first looks and later tries cost, over 2,000 tokens a row, three times."""
    for rate in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95):
        machine, regrets = Machine(15, rows, H200[rows], [([rate] * 15, 2000)], True), []
        for seed in range(3):
            took, better, _ = machine.decode(np.random.default_rng(seed))
            regrets.append(took / better - 1)
        assert np.mean(regrets) < 0.03, rate


@pytest.mark.parametrize(("rows", "most"), [(32, 250), (1, 3000)])
@pytest.mark.parametrize("rates", [(0.05, 0.9), (0.9, 0.05), (0.5, 0.95), (0.95, 0.5)])
def test_on_an_h200_it_follows_a_text_that_changes(
    rows: int, most: int, rates: tuple[float, float]
) -> None:
    """A row that was alone went on plainly for 4,000 steps when its text became easy: a look took 16 steps."""
    seconds, log = H200[rows], []
    texts = [([rate] * 15, tokens) for rate, tokens in zip(rates, (2000, 4000), strict=True)]
    machine = Machine(15, rows, seconds, texts, True)
    took, better, _ = machine.decode(np.random.default_rng(2), log)
    assert took / better < 1.03
    speeds = {v: machine.tokens(v, texts[1][0]) / seconds[v] for v in seconds}
    good = {v for v in speeds if speeds[v] > 0.95 * max(speeds.values())}
    taken, in_a_row = 0, 0
    for steps, length in log[1]:
        in_a_row = in_a_row + 1 if length in good else 0
        if in_a_row == 3:
            break
        taken += steps
    assert in_a_row == 3
    assert taken < most


def test_one_time_that_was_tripled_is_not_believed() -> None:
    """A program that ran beside the first plain steps made plain decoding look slow, for thousands of steps."""
    seconds, chooser = {0: 0.010, 3: 0.018}, Chooser((0, 3))
    chosen = []
    for _ in range(60):
        steps, length, _ = chooser.next(4, 16)
        is_first = length == 0 and 0 not in chosen
        chosen.append(length)
        chooser.learn(
            length, 4, steps, steps * seconds[length] * (3 if is_first else 1), {0: 4 * steps}
        )
    assert chosen.count(0) > 40
    assert chooser.current == 0


def test_a_text_that_becomes_easy_to_draft_is_found_again() -> None:
    seconds = {0: 0.010, 1: 0.013, 3: 0.014, 7: 0.016}
    hard, easy = [0.05] * 7, [0.9] * 7
    rng = np.random.default_rng(3)
    *_, chooser = Machine(7, 8, seconds, [(hard, 4000)], True).decode(rng)
    assert chooser.current == 0
    assert chooser.steps[0] > 0.95 * sum(chooser.steps.values())
    *_, chooser = Machine(7, 8, seconds, [(hard, 4000), (easy, 16000)], True).decode(rng)
    assert chooser.current == 7


def test_lengths_that_are_not_compiled_wait_until_they_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a table, decoding begins with all drafts. Plain decoding comes first, and others only if they promise."""
    monkeypatch.setattr(draft_length_policy, "MIN_DECODE_S", 2.0)
    chooser = Chooser(ladder(7), compiled=[7])
    seconds, chosen = {0: 0.01, 1: 0.012, 3: 0.02, 7: 0.05}, []
    for _ in range(2000):
        steps, length, _ = chooser.next(8, 16, compile_s=5.0)
        chosen.append(length)
        timed = None if chosen.count(length) == 1 else steps * seconds[length]
        chooser.learn(length, 8.0, steps, timed, {0: 8 * steps})
    assert set(chosen) == {7, 0}
    first = chosen.index(0)
    assert 10.0 < first * 16 * seconds[7] < 13.0  # after twice the compilation
    assert chosen[first + 10 :].count(0) > 0.95 * len(chosen[first + 10 :])


def gated(
    gate: SurvivalGate, speed: float, calls: int, rng: np.random.Generator, expected: float
) -> tuple[float, float, list[bool]]:
    """Decode 8 rows, each a token a second in steps that do not choose. Return seconds, tokens and what was used."""
    took, tokens, used = 0.0, 0.0, []
    for _ in range(calls):
        promise = Prospects(0.5, expected, max(expected, 9.0))
        choice = gate.next(8, 8, 3, 16, promise)
        chooses, steps, *_ = choice
        seconds = steps / (speed if chooses else 1.0)
        timed = seconds * rng.lognormal(0, 0.03) * (3 if rng.random() < 0.01 else 1)
        timed = min(timed, 1.25 * seconds) if chooses else float(steps)
        gate.add(choice, 8, 8.0 * steps, 8 * steps, steps, timed, seconds)
        if not chooses:
            gate.credit.earn(seconds)
        took, tokens = took + seconds, tokens + steps
        used.append(chooses)
    return took, tokens, used


@pytest.mark.parametrize("expected", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("speed", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("calls", [30, 1000])
def test_tries_lose_no_more_than_was_saved_up(calls: int, speed: float, expected: float) -> None:
    """Whatever was promised of steps that choose, and with a clock that is wrong now and then."""
    took, tokens, used = gated(
        SurvivalGate(Credit()), speed, calls, np.random.default_rng(1), expected
    )
    a_call = (8 + draft_length_policy.GATE_LOAN) / speed
    assert took - tokens < 1.5 * draft_length_policy.LOSS_SHARE * took + a_call
    assert sum(used) <= max(0.1 * calls, 3)


@pytest.mark.parametrize("expected", [1.0, 5.0])
@pytest.mark.parametrize("speed", [1.1, 3.0])
def test_quicker_steps_that_choose_are_used(speed: float, expected: float) -> None:
    """Here a promise matters: if it is of less, more has to be saved up for the first try."""
    gate, rng = SurvivalGate(Credit()), np.random.default_rng(1)
    gated(gate, speed, 2000, rng, expected)
    took, tokens, _ = gated(gate, speed, 1000, rng, expected)
    assert tokens / took > 0.97 * speed


def test_hopeless_steps_that_choose_are_never_tried() -> None:
    gate = SurvivalGate(Credit())
    for _ in range(200):
        choice = gate.next(8, 8, 0, 16, Prospects(1.0, 0.4, 0.9))
        assert not choice.chooses
        steps = choice.steps
        gate.add(choice, 8, 8.0 * steps, 8 * steps, steps, float(steps), float(steps))


def test_a_change_of_the_text_is_noticed() -> None:
    gate, rng = SurvivalGate(Credit()), np.random.default_rng(0)
    for speed in (1.3, 0.8, 1.3):
        *_, used = gated(gate, speed, 1200, rng, speed)
        assert np.mean(np.asarray(used[-100:]) == (speed > 1)) > 0.9


@functools.cache
def level_of(tokens: float, drafts: int) -> float:
    """Return the log-odds of a draft of middling ease, if steps of all drafts commit so many tokens."""
    own, low, high = np.random.default_rng(0), -9.0, 9.0
    noise = 1.2 * own.normal(size=(4000, 1)) + own.normal(size=(4000, drafts))
    for _ in range(30):
        level = (low + high) / 2
        chances = 1 / (1 + np.exp(-level - noise))
        few = 1 + np.cumprod(chances, axis=1).sum(axis=1).mean() < tokens
        low, high = (level, high) if few else (low, level)
    return level


class Competing:
    """Rows whose drafts compete, with true confidences. Each row stays as easy for 8 steps."""

    def __init__(self, tokens: float, drafts: int, rows: int, rng: np.random.Generator):
        self.shape, self.rng, self.step = (rows, drafts), rng, 0
        self.level = level_of(tokens, drafts)

    def verified(
        self, length: int, costs: dict[int, float] | None
    ) -> tuple[np.ndarray, float | None]:
        """Return the accepted drafts of each row, and the cost of the step that chose by these costs."""
        if self.step % 8 == 0:
            self.ease = self.rng.normal(size=(self.shape[0], 1))
        self.step += 1
        odds = self.level + 1.2 * self.ease + self.rng.normal(size=self.shape)
        chances = 1 / (1 + np.exp(-odds))
        accepted = np.cumprod(self.rng.random(self.shape) < chances, axis=1).sum(axis=1)
        if costs is None:
            return np.minimum(accepted, length), None
        survival = np.cumprod(chances, axis=1)
        pairs = [survival[:, i : i + 2].sum(axis=1) for i in range(1, self.shape[1], 2)]
        values = np.minimum.accumulate(np.stack(pairs, axis=1), axis=1)
        order = np.sort(values.ravel())[::-1]
        gained = np.concatenate([[0.0], np.cumsum(order)]) + self.shape[0] + survival[:, 0].sum()
        spare = {w: self.shape[0] * (w // 2 + w % 2 - 1) for w in costs}
        width = max(costs, key=lambda w: gained[spare[w]] / costs[w])
        least = order[spare[width] - 1] if spare[width] else np.inf
        limit = 1 + 2 * (values >= least).sum(axis=1)
        return np.minimum(accepted, limit), costs[width]


CALL_S, SWITCH_S = 1.1e-3, 1e-3  # of a call, and of one of another program than the call before
GPU_STEPS = {
    32: ({0: 2.95, 1: 4.53, 3: 4.90, 7: 5.80, 15: 7.74}, {1: 5.72, 3: 6.18, 7: 6.88, 15: 7.81}),
    8: ({0: 1.66, 1: 2.85, 3: 3.13, 7: 3.32, 15: 3.85}, {1: 3.21, 3: 3.55, 7: 3.73, 15: 4.02}),
}
"""Milliseconds of steps of one number of drafts, and of steps that choose (6 layers of 26B-A4B, H200)."""
KEEPS_UP = 0.003
"""Share of a plain step in which a drafter keeps up with the text. An engine without one is as much quicker."""
TOOK, DUMMIES_TOOK = (
    ({0: 3.03, 1: 5.1, 3: 6.0, 7: 6.95, 15: 7.1}, {1: 5.4, 3: 6.3, 7: 7.1, 15: 7.3}),
    {0: 3.33, 1: 4.83, 3: 5.62, 7: 5.86, 15: 6.74},
)
"""Milliseconds of steps of 8 rows with a text, and of dummy rows: 12 layers of 26B-A4B, H200, 28 November 2026. The
text decoded plainly with fewer experts, and verified drafts with more. Steps that choose, and those of 1 and 3, are
guessed."""


def decode_with_choice(
    rows: int,
    texts: Sequence[tuple[float, int]],
    seed: int,
    log: list[tuple[float, int, int | None]] | None = None,
    steps_ms: tuple[dict[int, float], dict[int, float]] | None = None,
    seen: dict[int, float] | None = None,
) -> list[float]:
    """Return the time against the better of plain decoding and all drafts, minus 1: of a first run, and of a second.

    Args:
      log: gets the begin, the steps and the length of each call of the first run.
      steps_ms: as `GPU_STEPS` of these rows.
      seen: seconds of steps of dummy rows, by length, if these take other times.
    """
    of_gpu = steps_ms or GPU_STEPS[rows]
    fixed, choosing = ({v: s / 1e3 for v, s in costs.items()} for costs in of_gpu)
    chooser, clock = Chooser(tuple(fixed)), np.random.default_rng(seed)
    gate, last, regrets = SurvivalGate(chooser.credit), None, []
    for length in fixed:
        for _ in range(3):
            dummy_s = (seen or fixed)[length] * clock.lognormal(0, 0.01) + CALL_S / 16
            chooser.costs.add_dummy(length, rows, dummy_s)
    chooser.costs.call_s = CALL_S
    for again in (0, 1):
        took = plain = full = 0.0
        for number, (tokens, new) in enumerate(texts):
            text, other = (
                Competing(
                    tokens, 15, rows, np.random.default_rng(1000 * again + 100 * seed + number)
                )
                for _ in "ab"
            )
            made = 0.0
            while made < new:
                choice = chooser.next(rows, 16)
                steps, length, _ = choice
                of_gate = GateChoice(False, steps, False, length)
                if choice == (16, chooser.current, None):
                    now = {w: cost * chooser.costs.pace for w, cost in choosing.items()}
                    prospects = Prospects.of(chooser, rows, length, now)
                    of_gate = gate.next(rows, rows, length, 16, prospects)
                chooses, steps = of_gate[:2]
                kind = None if chooses else length
                if log is not None and not again:
                    log.append((took, steps, kind))
                done = [text.verified(length, choosing if chooses else None) for _ in range(steps)]
                accepted = np.stack([of_rows for of_rows, _ in done])
                seconds = CALL_S + sum(fixed[length] if cost is None else cost for _, cost in done)
                seconds += SWITCH_S if kind != last else 0.0
                last = kind
                timed = seconds * clock.lognormal(0, 0.02) * (3 if clock.random() < 0.01 else 1)
                if chooses or length == chooser.current:
                    committed = float(accepted.sum() + accepted.size)
                    if chooses:
                        counted = chooser.costs.of_call(timed, steps, 16) * steps
                        counted = min(counted, 1.25 * choosing[15] * chooser.costs.pace * steps)
                    else:
                        counted = (chooser.costs.of(length, rows) or 0.0) * steps
                    gate.add(of_gate, rows, committed, accepted.size, steps, counted, timed)
                if not chooses:
                    counts = collections.Counter(accepted.ravel().tolist())
                    chooser.learn(length, rows, steps, timed, counts)
                took += seconds
                made += 1.0 * steps + accepted.sum() / rows
            plain += made * (fixed[0] + CALL_S / 16) * (1 - KEEPS_UP)
            with_all = 0.0  # the same text with all drafts
            while with_all < made:
                with_all += 1 + other.verified(15, None)[0].mean()
                full += fixed[15] + CALL_S / 16
        regrets.append(took / min(plain, full) - 1)
    return regrets


@pytest.mark.parametrize("rows", GPU_STEPS)
@pytest.mark.parametrize(
    "texts",
    [
        [(1.05, 400)],
        [(1.2, 900)],
        [(1.6, 900)],
        [(2.5, 900)],
        [(4.0, 900)],
        [(6.0, 900)],
        [(12.0, 900)],
        [(1.2, 600), (6.0, 2400)],
        [(6.0, 2400), (1.2, 600)],
    ],
)
@pytest.mark.parametrize("seeds", [4, *slow(20)])
def test_with_choice_it_is_no_slower_than_the_better_of_plain_and_all_drafts(
    seeds: int, rows: int, texts: list[tuple[float, int]], request: pytest.FixtureRequest
) -> None:
    """Short runs, of which looks and tries are a large share. A second run knows its texts.

    On the mean of runs nothing is 3 % slower, nor is a second run. In a first run 8 rows tell little: their
    mean over 2 steps is off by 30 % at 2.5 tokens.
    """
    if (seeds, rows, texts) == (20, 32, [(6.0, 900)]):
        why = "one of its twenty first runs is 3.45 % slower, and no better rule is known"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    regrets = np.array([decode_with_choice(rows, texts, seed) for seed in range(seeds)])
    if len(texts) > 1:  # it does not know that they begin anew
        regrets = regrets[:, :1]
    assert regrets.mean(axis=0).max() < 0.03
    is_short = seeds == 4
    first, *again = regrets.max(axis=0)
    most = (0.03, 0.035) if is_short else (0.031, 0.11)
    assert first < most[rows == 8]
    assert all(x < (0.027 if is_short else 0.031) for x in again)


@pytest.mark.parametrize("tokens", [1.2, 1.6, 2.5, 4.0, 6.0])
def test_times_of_dummy_rows_are_not_believed_for_long(tokens: float) -> None:
    """At 2.5 tokens 7 drafts looked quickest by dummy rows. Runs lost 9 %, since only the pace was corrected."""
    seen = {length: ms / 1e3 for length, ms in DUMMIES_TOOK.items()}
    regrets = [
        decode_with_choice(8, [(tokens, 900)], seed, steps_ms=TOOK, seen=seen) for seed in range(4)
    ]
    assert np.mean(regrets, axis=0).max() < 0.03
    assert np.max(regrets) < 0.04


@pytest.mark.parametrize("rows", GPU_STEPS)
@pytest.mark.parametrize("tokens", [1.2, 1.6])
def test_tries_cost_little_where_plain_decoding_is_best(rows: int, tokens: float) -> None:
    """Tries promised 0.8 % and took 2 to 3: of a try of two steps the call itself is a large part.

    Of the loss here 0.3 % is the drafter's, which keeps up with the text.
    """
    regrets = [decode_with_choice(rows, [(tokens, 900)], seed) for seed in range(4)]
    assert np.mean(regrets, axis=0).max() < 0.02


@pytest.mark.parametrize("rows", GPU_STEPS)
def test_with_choice_a_text_that_becomes_easy_is_found_within_seconds(rows: int) -> None:
    for seed in range(3):
        log: list[tuple[float, int, int | None]] = []
        decode_with_choice(rows, [(1.2, 1800), (6.0, 6000)], seed, log)
        made, begin, drafted = 0, math.inf, 0
        for at_s, steps, length in log:
            begin = min(begin, at_s) if made >= 1800 else math.inf
            made += steps if begin == math.inf else 0
            drafted = drafted + steps if length != 0 and begin < math.inf else 0
            if drafted >= 48:
                break
        assert drafted >= 48
        assert at_s - begin < 3


# --- an engine ---------------------------------------------------------------------------------------


def switched(monkeypatch: pytest.MonkeyPatch, seed: int, lengths: Sequence[int]) -> list[int]:
    """Let lengths and steps of every call be drawn; return a list that lengths are added to."""
    rng, used = np.random.default_rng(seed), []

    def next(self: DraftLengthController, running: Any, most_steps: int) -> Choice:
        used.append(int(rng.choice(lengths)))
        return Choice(int(rng.integers(1, most_steps + 1)), used[-1])

    monkeypatch.setattr(DraftLengthController, "next", next)
    return used


@pytest.mark.parametrize(
    ("drafter", "lengths"),
    [
        ("mixed", (0, 1, 4)),
        pytest.param("mixed", (0, 1, 2, 3, 4), marks=pytest.mark.slow),
        pytest.param("dflash", (0, 1, 4), marks=pytest.mark.slow),
        pytest.param("mtp", (0, 1, 3, 5), marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_of_plain_decoding_whatever_is_verified(
    drafter: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call has another length. Nothing is compiled twice, and no step commits more than it verified."""
    c = case(NAME)
    engine = c.engine(drafter, steps_per_return=3)
    asked = [Request(p, NEW_TOKENS) for p in c.prompts]
    known = set()
    for seed in range(3):
        used = switched(monkeypatch, seed, lengths)
        done = run(engine, asked)
        assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]
        assert set(used) == set(lengths)
        most = max(tau for d in done for tau in d.acceptance_lengths)
        assert most == max(lengths) + 1 if drafter == "mixed" else most <= max(lengths) + 1
        known.add(engine.num_compilations)
    assert len(known) == 1


@pytest.mark.parametrize("drafter", ["dflash", *slow("mtp")])
def test_a_drafter_goes_on_after_plain_steps(drafter: str) -> None:
    """Plain steps feed its state as prefill does. The first drafts do not depend on how many are verified."""
    c = case(NAME)
    prompt, steps = c.prompts[1], 6
    runtime = c.engine(drafter, batch_size=1).runtime
    spec = runtime.spec

    def drafts(prompt: tuple[int, ...], steps: int, length: int) -> list[int]:
        state = runtime.init_state(4)
        no_stop, seeds = np.full((1, 4), -1, np.int32), np.zeros((1, 2), np.uint32)
        row = runtime.admission([0], [NEW_TOKENS], no_stop, [Sampling()], seeds)
        state = runtime.admit(state, row)
        state = runtime.decode(runtime.prefill(state, {0: prompt}), steps, 0, 0)

        @jax.jit
        def propose(target_params: Any, drafter_params: Any, state: DecodeState) -> Draft:
            target, model = spec.bind(target_params, drafter_params)
            assert model is not None
            return decode.propose(target, model, spec.verifying(length), state)

        with own_context(runtime.mesh):
            draft = propose(runtime.target_params, runtime.drafter_params, state)
        return np.asarray(draft.tokens)[0].tolist()

    full = drafts(prompt, steps, spec.num_draft_tokens)
    assert len(full) == spec.num_draft_tokens
    assert drafts(prompt + c.continuation(1, steps), 0, spec.num_draft_tokens) == full
    assert drafts(prompt, steps, 2) == full[:2]
    assert drafts(prompt, 0, spec.num_draft_tokens) != full


def test_a_warm_engine_knows_all_costs_and_chooses_among_what_is_compiled() -> None:
    c = case(NAME)
    engine = c.engine("hostile")
    assert engine.draft_length.used == dict.fromkeys((0, 1, 3, 4), (0, None))
    engine.warm_up()
    known = engine.num_compilations
    assert all(use.steps == 0 and use.step_s for use in engine.draft_length.used.values())
    chooser = engine.draft_length.chooser
    assert chooser is not None
    for length, seconds in (
        (0, 1.0),
        (1, 1.5),
        (3, 2.5),
        (4, 3.0),
    ):  # as of a machine that is alone
        chooser.costs.table[length, 4] = seconds
    done = run(engine, [Request(p, NEW_TOKENS) for p in c.prompts])
    assert [d.token_ids for d in done] == [c.continuation(row) for row in range(len(done))]
    assert chooser.acceptance.rates()[0] < 0.1  # a hostile drafter is never right
    assert chooser.current == 0
    assert chooser.steps[0] > 0
    assert engine.num_compilations == known


def test_a_call_is_chosen_while_the_one_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the device does not wait for a choice. After a try it still does."""
    c = case(NAME)
    length = c.engine("mixed", choose_length="always").draft_length
    assert length.chooser is not None
    asked: list[int] = []
    choices = [Choice(16, 4), Choice(16, 4), Choice(2, 0), Choice(16, 4)]

    def choose(self: Chooser, rows: float, *_: Any) -> Choice:
        asked.append(len(asked))
        return choices[asked[-1]]

    monkeypatch.setattr(Chooser, "next", choose)
    running, of_call = [Request(p, 4) for p in c.prompts[:2]], [np.full(16, 2), np.full(16, 1)]
    used = []
    for chosen_before, chosen_meanwhile in ((1, 2), (2, 3), (3, 3), (4, 5)):
        used.append(length.next(running, 16))
        assert len(asked) == chosen_before
        if len(asked) < len(choices):
            length.prepare()
            assert len(asked) == chosen_meanwhile
        length.learn([steps[: used[-1].steps] for steps in of_call], 0.1)
    assert used == choices
    assert length.used[4].steps == 32  # the newest result waits
    length.prepare()
    assert {v: use.steps for v, use in length.used.items()} == {0: 2, 1: 0, 3: 0, 4: 48}


def test_the_log_says_when_drafting_stops_and_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server on a CPU decoded plainly for ten of twelve requests, and nothing said so."""
    c = case(NAME)
    length = c.engine("mixed").draft_length
    assert length.chooser is not None
    for verified, seconds in ((0, 0.5), (4, 2.0)):
        length.chooser.costs.add(verified, 1, seconds)
    now, greedy = [1000.0], [Request(c.prompts[0], 4)]
    monkeypatch.setattr(draft_length.time, "monotonic", lambda: now[0])

    def lines_after(current: int, seconds: float) -> list[str]:
        now[0] += seconds
        monkeypatch.setattr(length.chooser, "current", current)
        caplog.clear()
        length.next(greedy, 16)
        return caplog.messages

    monkeypatch.setattr(Chooser, "next", lambda self, *sizes: Choice(3, self.current))
    with caplog.at_level("INFO", "jaxspec.engine"):
        assert lines_after(4, 1) == []
        (stopped,) = lines_after(0, 1)
        assert stopped.startswith("drafting stops: with 1 row, 2 tokens/s a row without drafts and")
        assert "choose_length=never" in stopped
        assert lines_after(4, 1) == lines_after(0, 1) == []  # at most one a minute
        assert lines_after(0, 60) == []
        (started,) = lines_after(4, 1)
        assert started.startswith("drafting starts")


def test_where_no_length_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled rows keep their text for a seed unless "always" is asked for; `invariant` rows depend on nothing."""
    c = case(NAME)
    fixed: list[dict[str, Any]] = [
        dict(invariant=True),
        dict(choose_length="never"),
        dict(tree=Tree(2, 3), num_draft_tokens=4),
    ]
    for options in fixed:
        assert c.engine("mixed", **options).draft_length.used == {}
    assert c.engine(None).draft_length.used == {}
    halved = mock.Mock(spec=Runtime)
    halved.batch_size, halved.spec = 4, c.engine("mixed").runtime.spec.of_dtype("bfloat16")
    assert DraftLengthController(halved, "exact", invariant=False).used == {}
    assert DraftLengthController(halved, "always", invariant=False).used.keys() == {0, 1, 3, 4}
    for word, invariant, message in (
        (
            "sometimes",
            False,
            'is \'sometimes\'; it is one of "exact", "always", "survival", "never"',
        ),
        ("always", True, "lets a row depend on its neighbours, which invariant rules out"),
    ):
        with pytest.raises(FieldError, match=message) as error:
            DraftLengthController(c.engine("mixed").runtime, word, invariant=invariant)
        assert error.value.field == "choose_length"
    plainly = Choice(3, 0)
    monkeypatch.setattr(Chooser, "next", lambda self, rows, most_steps, compile_s: plainly)
    asked = request(c.prompts[0], 4, temperature=1.0)
    full = Choice(16, 4)
    for choose, sampled in (("exact", full), ("always", plainly)):
        chosen = c.engine("mixed", choose_length=choose).draft_length
        assert chosen.next([Request(c.prompts[0], 4)], 16) == plainly
        assert chosen.next([Request(c.prompts[0], 4), asked], 16) == sampled
