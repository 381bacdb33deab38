"""How an engine chooses its verify length: it asks a `Chooser` before each decode call, and tells it what came.

Read `ChosenLength`. `verify_length` holds the rule. Here is what it needs of an engine: which lengths may be used,
what their steps cost on this device, and how many drafts were accepted.

Costs are measured in `Engine.warm_up`, with all rows active. An engine that was not warmed up begins with all
drafts, and learns the rest while it decodes: see `verify_length.LEAST_S`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.engine.draft_length_policy import Choice, Chooser, ladder
from jaxspec.engine.request import Request, sampling_values
from jaxspec.options import FieldError, Sampling
from jaxspec.row_subset import fill
from jaxspec.runtime.runtime import Runtime
from jaxspec.runtime.step_output import Ask
from jaxspec.state import DecodeState
from jaxspec.weights.sharding import fetch

CALLS, STEPS = 3, 8  # of a measurement


class LengthUse(NamedTuple):
    """What became of a verify length: steps that verified so many drafts, and seconds of one; None: not timed."""

    steps: int
    step_s: float | None


class ChosenLength:
    """Chooses the verify length of an engine's decode calls.

    It does nothing without a drafter, with a draft tree, with `invariant`, and where several processes have to run
    the same program.

    Args:
      choose: a `records.ChooseLength`.

    Raises:
      FieldError: `choose` is no such word, or "always" with `invariant`.
    """

    def __init__(self, runtime: Runtime, choose: str, *, invariant: bool):
        if choose not in ("exact", "always", "never"):
            raise FieldError("choose_length", f'is {choose!r}; it is "exact", "always" or "never"')
        if choose == "always" and invariant:
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
        self._compile_s = 0.0  # of a decode program
        self._call: tuple[int, bool, float, int] | None = None

    @property
    def used(self) -> dict[int, LengthUse]:
        """What became of each length; empty where none is chosen."""
        if (chooser := self.chooser) is None:
            return {}
        rows = self.runtime.batch_size
        return {v: LengthUse(chooser.steps[v], chooser.costs.of(v, rows)) for v in chooser.lengths}

    def next(self, running: Sequence[Request], most_steps: int) -> Choice:
        """Choose for a decode call.

        Args:
          running: the requests that it decodes.
          most_steps: of the call.
        """
        if (chooser := self.chooser) is None:
            return Choice(most_steps, self.runtime.spec.num_draft_tokens)
        choice = Choice(most_steps, chooser.full)
        if any(r.grammar is not None for r in running):
            self._call = None  # its steps wait for the host too, and say nothing of others
            return choice
        if self.choose == "always" or all(r.sampling.temperature == 0 for r in running):
            choice = chooser.next(len(running), most_steps, self._compile_s)
        is_new = not chooser.steps[choice.length] and not chooser.costs.is_known(choice.length)
        self._call = choice.length, is_new, self.runtime.timings.compile_s, len(running)
        return choice

    def learn(self, acceptance_lengths: Sequence[np.ndarray], seconds: float) -> None:
        """Take in what came of that call.

        Args:
          acceptance_lengths: tokens that each step committed, a row's steps at a time.
          seconds: that it took.
        """
        if (chooser := self.chooser) is None or self._call is None or not acceptance_lengths:
            return
        (length, is_new, compile_s, begun), self._call = self._call, None
        if not (steps := max(map(len, acceptance_lengths))):
            return
        new = np.concatenate(acceptance_lengths)
        accepted, counts = np.unique(np.maximum(new, 1) - 1, return_counts=True)
        if is_new:  # the first call of a program takes longer than others will
            compile_s = self.runtime.timings.compile_s - compile_s
            self._compile_s = max(self._compile_s, compile_s)
        chooser.learn(
            length,
            len(new) / steps,
            steps,
            None if is_new else seconds,
            dict(zip(accepted.tolist(), counts.tolist(), strict=True)),
            begun if chooser.costs.few else None,
        )

    def has_few(self, length: int) -> bool:
        """Tell whether few rows have a program of their own for a length: for no drafts, and for all of them."""
        return length in (0, self.runtime.spec.num_draft_tokens)

    def begin_compiling(self, state: DecodeState, ask: Ask, few: Sequence[int]) -> None:
        """Ask for the programs of every length; arguments as in `measure`."""
        full = self.runtime.spec.num_draft_tokens
        for length in self.chooser.lengths if self.chooser else ():
            self.runtime.decoding(state, ask, 1, 0, length)
        for length in filter(self.has_few, self.chooser.lengths if self.chooser else (full,)):
            for rows in few:
                slots = fill([], rows, self.runtime.batch_size)
                self.runtime.decoding(state, ask, 1, 0, length, slots=slots)

    def measure(self, state: DecodeState, ask: Ask, few: Sequence[int]) -> DecodeState:
        """Compile every length and time its steps, on rows that were made up; return the state, all slots empty.

        Args:
          ask: what is asked of all decode calls, which is a part of their programs.
          few: rows of programs for few of the slots.
        """
        if (chooser := self.chooser) is None:
            return state
        runtime = self.runtime
        steps = min(STEPS, (runtime.cache_length - 2) // runtime.spec.step_tokens)
        if steps < 1:  # no row can be so short
            return state
        state = runtime.admit(state, self._made_up(state))
        chooser.costs.few = tuple(few)
        for length in chooser.lengths:
            for rows in (runtime.batch_size, *(few if self.has_few(length) else ())):
                state, seconds = self._timed(state, ask, length, rows, steps)
                # A length without a program for few rows takes for them what it takes for all.
                others = () if self.has_few(length) else few
                # The first call of a program takes longer than others will.
                for step_s in seconds[1:]:
                    for computed in (rows, *others):
                        chooser.costs.add(length, computed, step_s)
            chooser.compiled.add(length)
        return runtime.clear(state, np.ones(runtime.batch_size, bool))

    def _timed(
        self, state: DecodeState, ask: Ask, length: int, rows: int, steps: int
    ) -> tuple[DecodeState, list[float]]:
        """Return the state, and the seconds of a step in each of some calls with so many active rows."""
        runtime, seconds = self.runtime, []
        slots = None if rows == runtime.batch_size else fill(range(rows), rows, runtime.batch_size)
        for most in (1, *[steps] * CALLS):
            state = self._started(state, most, rows)
            call = runtime.decoding(state, ask, most, 0, length, slots=slots)
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(call(state))
            taken_s = time.perf_counter() - begin
            if int(fetch(state.num_steps).max()) == most:
                seconds.append(taken_s / most)
        return state, seconds

    def _made_up(self, state: DecodeState) -> Any:
        """Return requests for all slots, greedy, and never done."""
        runtime, (b, num_stop_ids) = self.runtime, state.stop_ids.shape
        return runtime.admission(
            range(b),
            [runtime.cache_length] * b,
            np.full((b, num_stop_ids), -1, np.int32),
            sampling_values(runtime.spec, [Sampling()] * b),
            np.zeros((b, 2), np.uint32),
        )

    def _started(self, state: DecodeState, steps: int, rows: int) -> DecodeState:
        """Let all rows stand in the middle of their caches, each after another token; the first ones are active."""
        b, length = self.runtime.batch_size, self.runtime.cache_length
        room = length - steps * self.runtime.spec.step_tokens - 1
        tokens = np.random.default_rng(0).integers(
            self.runtime.spec.target.config.vocab_size, size=b
        )
        values = dict(
            lengths=np.full(b, max(min(length // 2, room), 1), np.int32),
            anchors=tokens.astype(np.int32),
            active=np.arange(b) < rows,
            num_tokens=np.ones(b, np.int32),
            num_steps=np.zeros(b, np.int32),
        )
        placed = {
            name: jax.device_put(value, getattr(state, name).sharding)
            for name, value in values.items()
        }
        return dataclasses.replace(state, **placed)
