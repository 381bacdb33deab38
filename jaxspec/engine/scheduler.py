"""The scheduler: chooses the device's next call, a prefill pass or some decode steps.

Read `Scheduler.step`. Waiting requests get slots. Passes that fill the device prefill their
prompts. Then their rows decode, and each row that is done frees its slot.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Executor

import numpy as np

from jaxspec import row_subset
from jaxspec.engine.draft_length import DraftLengthController
from jaxspec.engine.prefix_cache.planner import PrefixPlanner
from jaxspec.engine.prefix_cache.store import Store
from jaxspec.engine.request import Completion, Request, Update
from jaxspec.engine.slots import Slots
from jaxspec.runtime.prefill import PrefillPlanner, make_chunk
from jaxspec.runtime.runtime import Runtime


class Scheduler:
    """Requests that wait or run, and the device's calls for them.

    Args:
      executor: waits for the device; None: the caller does.
      max_prefill_tokens: prompt tokens that are prefilled before rows decode on. None: those of all
        prompts that have slots.
      prefixes: stored prefixes, which are copied instead of prefilled. None: no prefix cache.

    Attributes:
      waiting: requests without a slot, in their order.
      slots: the decode batch.
      ahead_slots: rows in which prompts are prefilled before they have a slot; None: slots prefill
        their own.
    """

    def __init__(
        self,
        runtime: Runtime,
        draft_length: DraftLengthController,
        executor: Executor | None,
        *,
        num_stop_ids: int,
        max_prefill_tokens: int | None,
        prefixes: Store | None = None,
    ):
        self.runtime, self.draft_length, self.executor = runtime, draft_length, executor
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.slots = Slots(runtime, runtime.batch_size, num_stop_ids)
        self.ahead_slots: Slots | None = None
        if runtime.read_ahead:
            self.ahead_slots = Slots(runtime, runtime.read_ahead, num_stop_ids)
        self._planner = PrefillPlanner(runtime.shapes)
        self._prefixes = prefixes and PrefixPlanner(
            prefixes, self._planner, invariant=runtime.invariant
        )
        self._busy: Slots | None = None  # with a launched call
        self._prefill_tokens = 0  # since rows decoded, padding included

    def step(self, max_steps: int) -> list[Update | Completion]:
        """Wait for the running call, launch the next one, and return the events of the first.

        Args:
          max_steps: decode steps of the next call at most.
        """
        events = [] if self._busy is None else self._collect()
        ahead = self.ahead_slots
        if ahead is not None and (
            targets := dict(zip(ahead.prefilled, self.slots.free, strict=False))
        ):
            self.slots.move_from(ahead, targets)
        if ahead is None or not self.slots.prefilled or self._should_prefill():
            self._admit()
        if self._should_prefill():
            self._prefill()
        elif self.slots.prefilled:
            self._decode(max_steps)
        if ahead is not None and self._busy is not ahead:
            self._admit()  # while the device decodes
        return events

    def cancel(self, id: Hashable) -> Completion | None:
        """Free the slot of a request, and return its completion; None if there is no such request."""
        for index, request in enumerate(self.waiting):
            if request.id == id:
                del self.waiting[index]
                if self._prefixes is not None:
                    self._prefixes.forget(id)
                return Completion(id, finish_reason="cancelled")
        for slots in self._all_slots:
            if (slot := slots.slot_of(id)) is not None:
                row = slots.rows[slot]
                assert row is not None
                if slots is self._prefill_slots:
                    self._planner.remove(slot)
                slots.rows[slot] = None  # `Slots.collect` retires the row on the device
                return row.as_completion("cancelled")
        return None

    def warm_up(self, max_steps: int) -> None:
        """Compile every program, and time all verify lengths. No request may wait or run."""
        runtime, prefilling, decoding = self.runtime, self._prefill_slots, self.slots
        of_prefill = prefilling.output_request(0)
        of_decode = decoding.output_request(max_steps)
        chunks = [
            make_chunk({}, rows, width, prefilling.count) for rows, width in runtime.shapes.all()
        ]
        small_batches = row_subset.counts(
            runtime.spec, decoding.count, runtime.mesh, invariant=runtime.invariant
        )
        kinds = (True, False) if runtime.spec.program_features.grammars else (False,)
        with runtime.compiling_in_background():
            for guided in kinds:  # first, since they compile longest
                runtime.bind_decode(decoding.state, of_decode, 1, guided=guided)
            self.draft_length.begin_compiling(decoding.state, of_decode, small_batches)
            for chunk in chunks:
                runtime.bind_prefill(prefilling.state, chunk, of_prefill)
        prefilling.admit({})
        for chunk in chunks:
            call = runtime.bind_prefill(prefilling.state, chunk, of_prefill)
            prefilling.state, _ = call(prefilling.state)
        if self._prefixes is not None:
            prefilling.state = self._prefixes.store.warm_up(prefilling.state)
        if prefilling is not decoding:
            decoding.state = runtime.insert(decoding.state, prefilling.state, {})
        for guided in kinds:
            call = runtime.bind_decode(decoding.state, of_decode, 1, guided=guided)
            decoding.state, _ = call(decoding.state)
        for rows in small_batches:
            no_slots = row_subset.fill([], rows, decoding.count)
            call = runtime.bind_decode(decoding.state, of_decode, 1, slots=no_slots)
            decoding.state, _ = call(decoding.state)
        runtime.small_batches = small_batches
        decoding.state = self.draft_length.measure(decoding.state, of_decode, small_batches)
        for slots in self._all_slots:
            slots.state = runtime.retire(slots.state, np.ones(slots.count, bool))
            slots.state = runtime.clear(slots.state, np.zeros(slots.count, bool))

    def close(self) -> None:
        """Wait until the device is done with its last call."""
        if self._busy is not None:
            with contextlib.suppress(Exception):  # `step` raised it already, or nobody needs it
                self._busy.wait()
            self._busy = None

    @property
    def _prefill_slots(self) -> Slots:
        """The slots in which prompts are prefilled."""
        return self.slots if self.ahead_slots is None else self.ahead_slots

    @property
    def _all_slots(self) -> list[Slots]:
        return [self.slots] if self.ahead_slots is None else [self.slots, self.ahead_slots]

    @property
    def _min_free_slots(self) -> int:
        """Number of free slots at which decoding stops for a prefill; 0 if no request waits."""
        lengths = (len(request.prompt_ids) for request in self.waiting)
        return self.runtime.shapes.min_free_slots(lengths)

    def _admit(self) -> None:
        """Give slots to waiting requests, and plan the prefill of their prompts."""
        if self.ahead_slots is None and (
            self._planner.pending
            or (self.slots.prefilled and len(self.slots.free) < self._min_free_slots)
        ):
            return
        free = self._prefill_slots.free
        new = dict(zip(free, self._take_waiting(len(free)), strict=False))
        if not new:
            return
        self._prefill_slots.admit(new)
        if self._prefixes is not None:
            self._prefixes.begin(self._prefill_slots, new)
        else:
            self._planner.add({slot: request.prompt_ids for slot, request in new.items()})

    def _take_waiting(self, count: int) -> list[Request]:
        """Take the first waiting requests, `count` at most, but leave those that gain by waiting on."""
        if self._prefixes is None or not count:
            return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        ready = self._prefixes.ready(self.waiting, count)
        taken = {request.id for request in ready}
        self.waiting = deque(request for request in self.waiting if request.id not in taken)
        return ready

    def _should_prefill(self) -> bool:
        """Return whether the next call is a prefill pass. Rows that decode wait for it."""
        if not self._planner.pending or not self.slots.prefilled:
            return bool(self._planner.pending)
        limit, done = self.max_prefill_tokens, self._prefill_tokens
        if limit is not None and done and done + self._planner.next_tokens > limit:
            return False
        # Prompts that are prefilled ahead wait for slots. An eighth of the rows ahead is kept ready.
        ahead = self.ahead_slots
        return ahead is None or len(ahead.prefilled) < max(1, ahead.count // 8)

    def _prefill(self) -> None:
        """Launch a prefill pass."""
        chunk, ended = self._planner.next_chunk()
        self._prefill_tokens += chunk.tokens.size
        slots = self._busy = self._prefill_slots
        for slot in ended:
            row = slots.rows[slot]
            assert row is not None
            row.is_prefilled = True
        chunk = slots.with_masks(chunk, ended)
        request = slots.output_request(0)
        call = self.runtime.bind_prefill(slots.state, chunk, request)
        slots.launch(self.executor, request.sizes, call)

    def _decode(self, max_steps: int) -> None:
        """Launch some decode steps. They end early when rows end whose slots are needed."""
        active, until_active = len(self.slots.prefilled), 0
        if self.ahead_slots is not None and self.ahead_slots.prefilled:
            # A return to the host takes some milliseconds, so a few rows have to end before it pays.
            until_active = max(0, active - max(1, self.slots.count // 16))
        elif self.ahead_slots is None and self.waiting and not self._planner.pending:
            until_active = max(0, active + len(self.slots.free) - self._min_free_slots)
        self._prefill_tokens = 0
        slots = self._busy = self.slots
        running = slots.prefilled_requests
        steps, length = self.draft_length.next(running, max_steps)
        guided = any(request.grammar is not None for request in running)
        request = slots.output_request(max_steps)
        subset = None
        if not guided and self.draft_length.has_small_batches(length):
            subset = self._row_subset()
        call = self.runtime.bind_decode(
            slots.state, request, steps, until_active, length, guided, subset
        )
        slots.launch(self.executor, request.sizes, call, length)

    def _row_subset(self) -> np.ndarray | None:
        """Return the slots of the smallest program that computes all running rows; None: that of all slots."""
        active = self.slots.prefilled
        rows = next((rows for rows in self.runtime.small_batches if rows >= len(active)), None)
        return None if rows is None else row_subset.fill(active, rows, self.slots.count)

    def _collect(self) -> list[Update | Completion]:
        """Wait for the running call, and return its events."""
        slots = self._busy
        assert slots is not None
        taken_s = slots.wait()  # after an interrupt, `step` or `close` waits again
        self._busy = None
        if self._prefill_tokens:
            self.runtime.timings.prefill_s += taken_s
            if self._prefixes is not None:
                self._prefixes.keep(slots)
        else:
            self.runtime.timings.decode_s += taken_s
            self.draft_length.learn(slots.new_acceptance_lengths, taken_s)
        return slots.collect()
