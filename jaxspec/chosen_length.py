"""How an engine chooses its verify length: it asks a `Chooser` before each decode call, and tells it what came.

Read `ChosenLength`. `verify_length` holds the rule. Here is what it needs of an engine: which lengths may be used,
what their steps cost on this device, and how many drafts were accepted.

Costs are measured in `Engine.warm_up`, with all rows active. An engine that was not warmed up begins with all
drafts, and learns the rest while it decodes: see `verify_length.LEAST_S`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.records import FieldError, Sampling
from jaxspec.requests import Request, Seen, sampling_params
from jaxspec.runtime import Runtime
from jaxspec.sharding import fetch
from jaxspec.state import DecodeState
from jaxspec.verify_length import Choice, Chooser, ladder

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
        if choose not in ("greedy", "always", "never"):
            raise FieldError("choose_length", f'is {choose!r}; it is "greedy", "always" or "never"')
        if choose == "always" and invariant:
            raise FieldError(
                "choose_length",
                lambda say: (
                    f"{say('choose_length', choose)} lets a row depend on its neighbours, which "
                    f"{say('invariant')} rules out; leave one out"
                ),
            )
        self.runtime, self.choose = runtime, choose
        self.chooser: Chooser | None = None
        spec = runtime.spec
        fixed = choose == "never" or invariant or spec.tree is not None
        if spec.num_draft_tokens and not fixed and jax.process_count() == 1:
            lengths = ladder(spec.num_draft_tokens)
            self.chooser = Chooser(lengths, compiled=lengths[-1:])
        self._compile_s = 0.0  # of a decode program
        self._running: dict[int, Request] = {}  # by slot
        self._known_steps = np.zeros(runtime.batch_size, np.int64)
        self._call: tuple[int, bool, float, float] | None = None

    @property
    def used(self) -> dict[int, LengthUse]:
        """What became of each length; empty where none is chosen."""
        if (chooser := self.chooser) is None:
            return {}
        rows = self.runtime.batch_size
        return {v: LengthUse(chooser.steps[v], chooser.costs.of(v, rows)) for v in chooser.lengths}

    def next(self, slots: Mapping[int, Request | None], most_steps: int) -> Choice:
        """Choose for a decode call.

        Args:
          slots: the requests that have slots and are not being read; None in a slot without one.
          most_steps: of the call.
        """
        if (chooser := self.chooser) is None:
            return Choice(most_steps, self.runtime.spec.num_draft_tokens)
        running = {slot: request for slot, request in slots.items() if request is not None}
        for slot, request in running.items():
            if self._running.get(slot) is not request:
                self._known_steps[slot] = 0
        self._running = running
        choice = Choice(most_steps, chooser.full)
        asked = (request.sampling for request in running.values())
        if self.choose == "always" or all(sampling.temperature == 0 for sampling in asked):
            choice = chooser.next(len(running), most_steps, self._compile_s)
        is_new = not chooser.steps[choice.length] and not chooser.costs.is_known(choice.length)
        timings = self.runtime.timings
        self._call = choice.length, is_new, timings.decode_s, timings.compile_s
        return choice

    def learn(self, seen: Seen) -> None:
        """Take in what the host saw after a call: how long it took, and how many drafts were accepted."""
        if (chooser := self.chooser) is None:
            return
        if self._call is None:
            return
        slots = list(self._running)
        before, now = self._known_steps[slots], seen.num_steps[slots].astype(np.int64)
        self._known_steps[slots] = now
        if not (steps := int((done := now - before).max())):
            return
        (length, is_new, begin_s, compile_s), self._call = self._call, None
        rows = zip(slots, before, now, strict=True)
        new = np.concatenate([seen.acceptance_lengths[slot, a:b] for slot, a, b in rows])
        accepted, counts = np.unique(np.maximum(new, 1) - 1, return_counts=True)
        timings = self.runtime.timings
        seconds = timings.decode_s - begin_s
        if is_new:  # the first call of a program takes longer than others will
            self._compile_s, seconds = max(self._compile_s, timings.compile_s - compile_s), None
        chooser.learn(
            length,
            float(done.sum()) / steps,
            steps,
            seconds,
            dict(zip(accepted.tolist(), counts.tolist(), strict=True)),
        )

    def measure(self, state: DecodeState) -> DecodeState:
        """Compile every length and time its steps, on rows that were made up; return the state, all slots empty."""
        if (chooser := self.chooser) is None:
            return state
        runtime, before = self.runtime, self.runtime.timings.decode_s
        steps = min(STEPS, (runtime.cache_length - 2) // runtime.spec.step_tokens)
        if steps < 1:  # no row can be so short
            return state
        state = runtime.admit(state, self._made_up(state))
        for length in chooser.lengths:
            seconds = []
            for most in (1, *[steps] * CALLS):
                state = self._started(state, most)
                begin_s = runtime.timings.decode_s
                state = runtime.decode(state, most, length)
                if int(fetch(state.num_steps).max()) == most:
                    seconds.append((runtime.timings.decode_s - begin_s) / most)
            chooser.compiled.add(length)
            if len(seconds) > 1:
                chooser.costs.add(length, runtime.batch_size, statistics.median(seconds[1:]))
        runtime.timings.decode_s = before
        return runtime.clear(state, np.ones(runtime.batch_size, bool))

    def _made_up(self, state: DecodeState) -> Any:
        """Return requests for all slots, greedy, and never done."""
        runtime, (b, num_stop_ids) = self.runtime, state.stop_ids.shape
        return runtime.admission(
            range(b),
            [runtime.cache_length] * b,
            np.full((b, num_stop_ids), -1, np.int32),
            sampling_params(runtime.spec, [Sampling()] * b),
            np.zeros((b, 2), np.uint32),
        )

    def _started(self, state: DecodeState, steps: int) -> DecodeState:
        """Let all rows stand in the middle of their caches, each after another token."""
        b, length = self.runtime.batch_size, self.runtime.cache_length
        room = length - steps * self.runtime.spec.step_tokens - 1
        tokens = np.random.default_rng(0).integers(
            self.runtime.spec.target.config.vocab_size, size=b
        )
        values = dict(
            lengths=np.full(b, max(min(length // 2, room), 1), np.int32),
            anchors=tokens.astype(np.int32),
            active=np.ones(b, bool),
            num_tokens=np.ones(b, np.int32),
            num_steps=np.zeros(b, np.int32),
        )
        placed = {
            name: jax.device_put(value, getattr(state, name).sharding)
            for name, value in values.items()
        }
        return dataclasses.replace(state, **placed)
