"""Choice of the verify length of an engine's decode calls.

Read `DraftLengthController`. It asks a `Chooser` before each call, and reports the call's result to
it. `draft_length_policy` has the rule. This module supplies its data: the lengths that may be used,
the cost of their steps on this device, and the number of accepted drafts.

`Engine.warm_up` measures costs with all rows active. An engine that was not warmed up begins with
all drafts, and measures the rest while it decodes: see `draft_length_policy.MIN_DECODE_S`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import statistics
import time
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.cache import HostTables
from jaxspec.engine.draft_length_policy import (
    MAX_CHANGE,
    Choice,
    Chooser,
    Costs,
    GateChoice,
    Prospects,
    SurvivalGate,
    ladder,
)
from jaxspec.engine.pages import spread_tables
from jaxspec.engine.request import Request
from jaxspec.options import ChooseLength, FieldError, Sampling
from jaxspec.row_subset import first
from jaxspec.runtime.runtime import Runtime, StepResult
from jaxspec.runtime.step_output import OutputRequest
from jaxspec.state import DecodeState
from jaxspec.weights.sharding import fetch

LOG = logging.getLogger("jaxspec.engine")
LOG_EVERY_S = 60.0
"""Least seconds between two lines about drafting, which may stop and start often at a near-tie."""

CALLS, STEPS = 3, 8  # of a measurement
_TOO_DEAR = 1e9
"""Cost of a width that no step is to take, beside 1."""


class LengthUse(NamedTuple):
    """Use of a verify length: its steps, and the seconds of one step; None: not timed."""

    steps: int
    step_s: float | None


class Times(NamedTuple):
    """Seconds of calls of so many steps, and of one step. There are none if rows ended before."""

    steps: int
    seconds: list[float]
    of_one_step: float

    @property
    def call_s(self) -> float:
        """Seconds of a call, beside its steps."""
        if self.steps < 2 or not self.seconds:
            return 0.0
        of_steps = min(self.seconds)
        return max((self.of_one_step * self.steps - of_steps) / (self.steps - 1), 0.0)


class _Call(NamedTuple):
    """A decode call, as it was chosen.

    Attributes:
      choice: of its steps and its verify length.
      gate: the kind of its steps.
      key: what the choice depends on, beside what was learned.
      rows: that it decodes.
      is_new: whether no step of its length was ever timed.
      compile_s: seconds of compiling before it.
    """

    choice: Choice
    gate: GateChoice
    key: tuple[int, int, bool]
    rows: int
    is_new: bool
    compile_s: float

    @property
    def is_usual(self) -> bool:
        """Return whether it tries nothing."""
        return not self.gate.is_try and self.choice.steps == self.key[1]


class DraftLengthController:
    """Chooses the verify length of an engine's decode calls.

    While the device works on a call, `prepare` learns from the one before it and chooses the next
    one. So a choice costs the device no time, and knows all calls but the newest. After a try, and
    in the first calls of a length, nothing is prepared: such a choice knows all of them.

    The length is fixed without a drafter, with a draft tree, with `invariant`, and if several
    processes have to run the same program.

    Args:
      choose: an `options.ChooseLength`.

    Raises:
      FieldError: `choose` is not one, or is "always" with `invariant`.
    """

    def __init__(self, runtime: Runtime, choose: str, *, invariant: bool):
        if choose not in typing.get_args(ChooseLength):
            words = ", ".join(f'"{known}"' for known in typing.get_args(ChooseLength))
            raise FieldError("choose_length", f"is {choose!r}; it is one of {words}")
        if choose in ("always", "survival") and invariant:
            raise FieldError(
                "choose_length",
                lambda format_field: (
                    f"{format_field('choose_length', choose)} lets a row depend on its neighbours, "
                    "which "
                    f"{format_field('invariant')} rules out; leave one out"
                ),
            )
        self.runtime, self.choose = runtime, choose
        self.chooser: Chooser | None = None
        spec = runtime.spec
        fixed = choose == "never" or invariant or spec.tree is not None
        # In other dtypes passes of other widths may part at near-ties.
        exact = spec.target.dtype == spec.target.cache_dtype.name == "float32"
        fixed |= choose == "exact" and not exact
        if spec.num_draft_tokens and not fixed and jax.process_count() == 1:
            lengths = ladder(spec.num_draft_tokens)
            self.chooser = Chooser(lengths, compiled=lengths[-1:])
        self.gate = SurvivalGate(self.chooser.credit) if self.chooser and spec.widths else None
        self._choosing = Costs()  # of steps that choose, by the width that they take
        self._compile_s = 0.0  # of a decode program
        self._call: _Call | None = None  # the newest one
        self._result: tuple[_Call, Sequence[np.ndarray], float] | None = None  # not learned yet
        self._prepared: _Call | None = None
        self._is_warm = False  # whether their program is compiled, and all lengths are timed
        self._logged, self._logged_s = True, -math.inf  # whether it drafted then

    @property
    def used(self) -> dict[int, LengthUse]:
        """Use of each length; empty if the length is fixed."""
        if (chooser := self.chooser) is None:
            return {}
        rows = self.runtime.batch_size
        return {v: LengthUse(chooser.steps[v], chooser.costs.of(v, rows)) for v in chooser.lengths}

    def next(self, running: Sequence[Request], max_steps: int) -> Choice:
        """Choose the steps and the verify length of a decode call.

        Args:
          running: the requests that it decodes.
          max_steps: of the call.
        """
        if (chooser := self.chooser) is None:
            return Choice(max_steps, self.runtime.spec.num_draft_tokens)
        if any(r.grammar is not None for r in running):
            # Its steps wait for the host too, so their times mean nothing for others.
            self._call = self._prepared = None
            return Choice(max_steps, chooser.full)
        rows, anew = len(running), self.choose in ("always", "survival")
        may_choose = anew or all(r.sampling.temperature == 0 for r in running)
        key = chooser.costs.bucket(rows), max_steps, may_choose
        call, self._prepared = self._prepared, None
        if call is None or call.key != key:
            self._learn_result()
            call = self._chosen(key, rows)
        self._call = call._replace(rows=rows)
        return call.choice

    def prepare(self) -> None:
        """Learn from the last result and choose the call after the running one, while the device works.

        Without a running call, learn alone.
        """
        if self.chooser is None:
            return
        self._learn_result()
        if (call := self._call) is not None and call.is_usual:
            self._prepared = self._chosen(call.key, call.rows)

    def _chosen(self, key: tuple[int, int, bool], rows: int) -> _Call:
        """Choose a call. `key` is as in `_Call`."""
        chooser, (_, max_steps, may_choose) = self.chooser, key
        assert chooser is not None
        choice = Choice(max_steps, chooser.full)
        if may_choose:
            choice = chooser.next(rows, max_steps, self._compile_s)
            self._log_change(chooser, rows)
        choice, gate = self._with_costs(chooser, choice, rows, max_steps)
        is_new = not chooser.steps[choice.length] and not chooser.costs.is_known(choice.length)
        return _Call(choice, gate, key, rows, is_new, self.runtime.timings.compile_s)

    def _with_costs(
        self, chooser: Chooser, choice: Choice, rows: int, max_steps: int
    ) -> tuple[Choice, GateChoice]:
        """Let the steps of a call choose, if that is quicker. Tries of other lengths stay as they are."""
        is_usual = choice == (max_steps, chooser.current, None)
        of_width = {v: self._choosing.of(v, rows) for v in self.runtime.spec.widths}
        costs = {v: cost * chooser.costs.pace for v, cost in of_width.items() if cost}
        if self.gate is None or not (self._is_warm and is_usual) or len(costs) < len(of_width):
            is_try = not is_usual
            return choice, GateChoice(False, choice.steps, is_try, choice.length)
        prospects = Prospects.of(chooser, rows, choice.length, costs)
        bucket = chooser.costs.bucket(rows)
        gate = self.gate.next(bucket, rows, choice.length, max_steps, prospects)
        if gate.chooses:
            return Choice(gate.steps, chooser.full, tuple(costs.values())), gate
        return choice._replace(steps=gate.steps), gate

    @property
    def verifies_all(self) -> bool:
        """True if calls verify all drafts, unless their steps choose otherwise."""
        return self.chooser is None or self.chooser.current == self.chooser.full

    def skip(self) -> None:
        """Learn nothing from the next call, whose time is not that of a usual one."""
        self._call = self._prepared = None

    def _log_change(self, chooser: Chooser, rows: int) -> None:
        """Log that drafting has stopped or started since the last such line."""
        drafts = chooser.current > 0
        now_s = time.monotonic()
        if drafts == self._logged or now_s - self._logged_s < LOG_EVERY_S:
            return
        self._logged, self._logged_s = drafts, now_s
        speeds = {v: chooser.speed(v, rows) for v in chooser.lengths}
        plain = speeds.pop(0)
        known = {v: speed for v, speed in speeds.items() if speed is not None}
        best = max(known, key=lambda v: known[v], default=chooser.full)
        LOG.info(
            "drafting %s: with %d row%s, %s tokens/s a row without drafts and %s with %d verified, of "
            "which %.1f are accepted; choose_length=never keeps drafting",
            "starts" if drafts else "stops",
            rows,
            "" if rows == 1 else "s",
            "unknown" if plain is None else f"{plain:.0f}",
            f"{known[best]:.0f}" if known else "unknown",
            best,
            chooser.acceptance.tokens(best) - 1,
        )

    def learn(self, acceptance_lengths: Sequence[np.ndarray], seconds: float) -> None:
        """Learn from the result of that call.

        Args:
          acceptance_lengths: tokens that each step committed, by row.
          seconds: that the call took.
        """
        call, self._call = self._call, None
        if self.chooser is None or call is None or not acceptance_lengths:
            return
        self._learn_result()
        self._result = call, acceptance_lengths, seconds
        if not call.is_usual:
            self._learn_result()

    def learn_acceptance(self, acceptance_lengths: Sequence[np.ndarray]) -> None:
        """Learn what rows accepted of all drafts, in a call whose time tells nothing. Arguments are as in `learn`."""
        steps = max(map(len, acceptance_lengths), default=0)
        if self.chooser is not None and steps:
            new = np.concatenate(acceptance_lengths)
            self.chooser.learn(self.chooser.full, len(new) / steps, steps, None, _accepted(new))

    def _learn_result(self) -> None:
        """Learn from the newest result, unless that is done."""
        if (result := self._result) is None:
            return
        (call, acceptance_lengths, seconds), self._result = result, None
        chooser, length, begun = self.chooser, call.choice.length, call.rows
        assert chooser is not None
        if not (steps := max(map(len, acceptance_lengths))):
            return
        new = np.concatenate(acceptance_lengths)
        if self.gate is not None and (call.gate.chooses or length == chooser.current):
            bucket, tokens = chooser.costs.bucket(begun), float(new.sum())
            counted_s = (chooser.costs.of(length, begun) or seconds / steps) * steps
            if call.gate.chooses:  # of its steps only the highest cost is known
                full_s = self._choosing.of(chooser.full, begun) or math.inf
                counted_s = chooser.costs.of_call(seconds, steps, call.key[1]) * steps
                counted_s = min(counted_s, MAX_CHANGE * full_s * chooser.costs.pace * steps)
            self.gate.add(call.gate, bucket, tokens, len(new), steps, counted_s, seconds)
        if call.gate.chooses:  # its verified drafts are the likelier ones
            return
        if call.is_new:  # the first call of a program takes longer than others will
            compile_s = self.runtime.timings.compile_s - call.compile_s
            self._compile_s = max(self._compile_s, compile_s)
        chooser.learn(
            length,
            len(new) / steps,
            steps,
            None if call.is_new else seconds,
            _accepted(new),
            begun if chooser.costs.small_batches else None,
        )

    def has_small_batches(self, length: int) -> bool:
        """Return whether a length has small-batch programs: no drafts and all drafts have."""
        return length in (0, self.runtime.spec.num_draft_tokens)

    def begin_compiling(
        self, state: DecodeState, output: OutputRequest, small_batches: Sequence[int]
    ) -> None:
        """Bind the programs of every length; arguments as in `measure`."""
        full = self.runtime.spec.num_draft_tokens
        for length in self.chooser.lengths if self.chooser else ():
            self.runtime.bind_decode(state, output, 1, 0, length, tables=self._dummy_tables)
        if costs := self._dummy_costs:
            for rows in (self.runtime.batch_size, *small_batches):
                self._bind(state, output, 1, self.runtime.spec.num_draft_tokens, rows, costs)
        for length in filter(
            self.has_small_batches, self.chooser.lengths if self.chooser else (full,)
        ):
            for rows in small_batches:
                slots = self.runtime.first_slots(rows)
                self.runtime.bind_decode(
                    state, output, 1, 0, length, slots=slots, tables=self._dummy_tables
                )

    def measure(
        self, state: DecodeState, output: OutputRequest, small_batches: Sequence[int]
    ) -> DecodeState:
        """Compile every length and time its steps on dummy rows; return the state with all slots empty.

        Args:
          output: of all decode calls, which is a part of their programs.
          small_batches: rows of small-batch programs.
        """
        if (chooser := self.chooser) is None:
            return state
        runtime = self.runtime
        steps = min(STEPS, (runtime.cache_length - 2) // runtime.spec.step_tokens)
        if steps < 1:  # the cache is too short for a step
            return state
        state = runtime.admit(state, self._dummy_rows(state))
        chooser.costs.small_batches = tuple(small_batches)
        timed: dict[tuple[int, int], Times] = {}
        for length in chooser.lengths:
            sizes = small_batches if self.has_small_batches(length) else ()
            for rows in (runtime.batch_size, *sizes):
                state, timed[length, rows] = self._timed(state, output, length, rows, steps)
            chooser.compiled.add(length)
        chooser.costs.call_s = statistics.median(times.call_s for times in timed.values())
        for (length, rows), times in timed.items():
            # Without a small-batch program a length takes as long for few rows as for all.
            others = () if self.has_small_batches(length) else small_batches
            for computed in (rows, *others):
                for seconds in times.seconds:
                    step_s = chooser.costs.of_call(seconds, times.steps, output.sizes.steps)
                    chooser.costs.add_dummy(length, computed, step_s)
        if self.gate:
            state = self._measure_choosing(state, output, small_batches, steps)
        self._is_warm = True
        return runtime.clear(state, np.ones(runtime.num_rows, bool), self._dummy_tables)

    def _measure_choosing(
        self,
        state: DecodeState,
        output: OutputRequest,
        small_batches: Sequence[int],
        steps: int,
    ) -> DecodeState:
        """Time steps that choose, for each width that they may take.

        They hold the choice, and their rows share a pass in another way than those of one length.
        """
        full, widths = self.runtime.spec.num_draft_tokens, self.runtime.spec.widths
        assert self.chooser is not None
        self._choosing.small_batches = tuple(small_batches)
        self._choosing.call_s = self.chooser.costs.call_s
        for rows in (self.runtime.batch_size, *small_batches):
            for width in widths:
                only = tuple(1.0 if other == width else _TOO_DEAR for other in widths)
                state, times = self._timed(state, output, full, rows, steps, only)
                for seconds in times.seconds:
                    step_s = self._choosing.of_call(seconds, times.steps, output.sizes.steps)
                    self._choosing.add_dummy(width, rows, step_s)
        return state

    def _timed(
        self,
        state: DecodeState,
        output: OutputRequest,
        length: int,
        rows: int,
        steps: int,
        costs: tuple[float, ...] | None = None,
    ) -> tuple[DecodeState, Times]:
        """Return the state, and the times of several calls.

        Args:
          costs: of each width, by which the steps choose.
        """
        taken, took_all = [], True
        for max_steps in (1, 1, *[steps] * CALLS):
            state = self._with_active(state, max_steps, rows)
            call = self._bind(state, output, max_steps, length, rows, costs)
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(call(state))
            taken.append(time.perf_counter() - begin)
            took_all &= int(fetch(state.num_steps).max()) == max_steps
        _, of_one_step, *seconds = taken  # a program's first call takes longer than others will
        return state, Times(steps, seconds if took_all else [], of_one_step)

    def _bind(
        self,
        state: DecodeState,
        output: OutputRequest,
        max_steps: int,
        length: int,
        rows: int,
        costs: tuple[float, ...] | None = None,
    ) -> Callable[[DecodeState], StepResult]:
        """Return a call on the first rows of a state."""
        runtime = self.runtime
        slots = None if rows == runtime.batch_size else runtime.first_slots(rows)
        return runtime.bind_decode(
            state,
            output,
            max_steps,
            0,
            length,
            slots=slots,
            tables=self._dummy_tables,
            costs=None if costs is None else np.asarray(costs, np.float32),
        )

    @property
    def _dummy_costs(self) -> tuple[float, ...] | None:
        """Costs of equal widths; None if steps do not choose."""
        return (1.0,) * len(self.runtime.spec.widths) if self.gate else None

    @functools.cached_property
    def _dummy_tables(self) -> HostTables | None:
        runtime = self.runtime
        if runtime.paging is None:
            return None
        return spread_tables(runtime.num_rows, runtime.page_counts)

    def _dummy_rows(self, state: DecodeState) -> Any:
        """Return greedy rows for all slots, without stop ids."""
        runtime, (b, num_stop_ids) = self.runtime, state.stop_ids.shape
        return runtime.admission(
            range(b),
            [runtime.cache_length] * b,
            np.full((b, num_stop_ids), -1, np.int32),
            [Sampling()] * b,
            np.zeros((b, 2), np.uint32),
        )

    def _with_active(self, state: DecodeState, steps: int, rows: int) -> DecodeState:
        """Put all rows in the middle of their caches, after random tokens.

        The first rows of each part are active, `rows` together.
        """
        b, length = self.runtime.num_rows, self.runtime.cache_length
        last = length - steps * self.runtime.spec.step_tokens - 1
        tokens = np.random.default_rng(0).integers(
            self.runtime.spec.target.config.vocab_size, size=b
        )
        values = dict(
            lengths=np.full(b, max(min(length // 2, last), 1), np.int32),
            anchors=tokens.astype(np.int32),
            active=np.isin(np.arange(b), first(rows, b, self.runtime.shapes.parts)),
            num_tokens=np.ones(b, np.int32),
            num_steps=np.zeros(b, np.int32),
        )
        placed = {
            name: jax.device_put(value, getattr(state, name).sharding)
            for name, value in values.items()
        }
        return dataclasses.replace(state, **placed)


def _accepted(acceptance_lengths: np.ndarray) -> dict[int, int]:
    """Return the number of rows' steps by the number of drafts that they accepted."""
    counts = np.bincount(np.maximum(acceptance_lengths, 1) - 1)
    return {n: count for n, count in enumerate(counts.tolist()) if count}
