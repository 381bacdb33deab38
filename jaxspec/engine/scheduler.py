"""What the device does next: passes over prompts, or steps of the rows that decode.

Read `Scheduler.step`. Requests that wait get rows; their prompts are read in passes that fill the device; then they
decode, and whoever is done frees a slot. `slots` says what a row got, and `engine` what a request is.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Executor

import numpy as np

from jaxspec import row_subset
from jaxspec.engine.draft_length import ChosenLength
from jaxspec.engine.prefix_cache.reading import SharedReading
from jaxspec.engine.prefix_cache.store import Store
from jaxspec.engine.request import Completion, Request, Update
from jaxspec.engine.slots import Slots
from jaxspec.runtime.prefill import PromptReader, chunk_of
from jaxspec.runtime.runtime import Runtime


class Scheduler:
    """Requests that wait or run, and the device's work for them.

    Args:
      pool: who waits for the device; None: the caller does.
      max_prefill_tokens: prompt tokens that are read before rows decode on; None for all that wait for a slot.
      prefixes: what was read before, and is copied instead; None: everything is read.

    Attributes:
      waiting: requests without a row, in their order.
    """

    def __init__(
        self,
        runtime: Runtime,
        chosen_length: ChosenLength,
        pool: Executor | None,
        *,
        num_stop_ids: int,
        max_prefill_tokens: int | None,
        prefixes: Store | None = None,
    ):
        self.runtime, self.chosen_length, self.pool = runtime, chosen_length, pool
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.slots = Slots(runtime, runtime.batch_size, num_stop_ids)
        self.ahead: Slots | None = None  # where prompts are read before they have a slot
        if runtime.read_ahead:
            self.ahead = Slots(runtime, runtime.read_ahead, num_stop_ids)
        self._reader = PromptReader(runtime.shapes)
        self._prefixes = prefixes and SharedReading(
            prefixes, self._reader, invariant=runtime.invariant
        )
        self._busy: Slots | None = None  # whose state the device has
        self._read_since = 0  # prompt tokens since rows decoded, padding included

    def step(self, most_steps: int) -> list[Update | Completion]:
        """Wait for what the device does, give it its next work, and say what came.

        Args:
          most_steps: decode steps of that work.
        """
        events = [] if self._busy is None else self._look()
        if self.ahead is not None and (
            pairs := dict(zip(self.ahead.read, self.slots.free, strict=False))
        ):
            self.slots.take(self.ahead, pairs)
        if self.ahead is None or not self.slots.read or self._is_time_to_read():
            self._admit()
        if self._is_time_to_read():
            self._read()
        elif self.slots.read:
            self._decode(most_steps)
        if self.ahead is not None and self._busy is not self.ahead:
            self._admit()  # while the device decodes
        return events

    def cancel(self, id: Hashable) -> Completion | None:
        """Free what a request has, and return what it got; None where there is no such request."""
        for place, request in enumerate(self.waiting):
            if request.id == id:
                del self.waiting[place]
                if self._prefixes is not None:
                    self._prefixes.forget(id)
                return Completion(id, finish_reason="cancelled")
        for slots in self._all:
            if (place := slots.place_of(id)) is not None:
                row = slots.rows[place]
                assert row is not None
                if slots is self._reading:
                    self._reader.forget(place)
                slots.rows[place] = None  # the device hears of it after what it does now
                return row.completion("cancelled")
        return None

    def warm_up(self, most_steps: int) -> None:
        """Compile every program, and time all verify lengths; nobody may wait or run."""
        runtime, reading, running = self.runtime, self._reading, self.slots
        of_reading, of_running = reading.ask(0), running.ask(most_steps)
        chunks = [chunk_of({}, rows, width, reading.count) for rows, width in runtime.shapes.all()]
        few = row_subset.counts(
            runtime.spec, running.count, runtime.mesh, invariant=runtime.invariant
        )
        kinds = (True, False) if runtime.spec.program_features.grammars else (False,)
        with runtime.compiling_aside():
            for guided in kinds:  # which take longest
                runtime.decoding(running.state, of_running, 1, guided=guided)
            self.chosen_length.begin_compiling(running.state, of_running, few)
            for chunk in chunks:
                runtime.feeding(reading.state, chunk, of_reading)
        reading.admit({})
        for chunk in chunks:
            reading.state, _ = runtime.feeding(reading.state, chunk, of_reading)(reading.state)
        if self._prefixes is not None:
            reading.state = self._prefixes.store.warm_up(reading.state)
        if reading is not running:
            running.state = runtime.insert(running.state, reading.state, {})
        for guided in kinds:
            call = runtime.decoding(running.state, of_running, 1, guided=guided)
            running.state, _ = call(running.state)
        for rows in few:
            nobody = row_subset.fill([], rows, running.count)
            call = runtime.decoding(running.state, of_running, 1, slots=nobody)
            running.state, _ = call(running.state)
        runtime.few = few
        running.state = self.chosen_length.measure(running.state, of_running, few)
        for slots in self._all:
            slots.state = runtime.retire(slots.state, np.ones(slots.count, bool))
            slots.state = runtime.clear(slots.state, np.zeros(slots.count, bool))

    def close(self) -> None:
        """Wait until the device is done with what it was sent."""
        if self._busy is not None:
            with contextlib.suppress(
                Exception
            ):  # whoever waited for it has heard, or does not care
                self._busy.wait()
            self._busy = None

    @property
    def _reading(self) -> Slots:
        """Where prompts are read."""
        return self.slots if self.ahead is None else self.ahead

    @property
    def _all(self) -> list[Slots]:
        return [self.slots] if self.ahead is None else [self.slots, self.ahead]

    @property
    def _worth_reading(self) -> int:
        """For how many free slots decoding stops to read prompts into them; 0 where nobody waits."""
        lengths = (len(request.prompt_ids) for request in self.waiting)
        return self.runtime.shapes.worth_reading(lengths)

    def _admit(self) -> None:
        """Give rows to requests that wait; their prompts are read next."""
        if self.ahead is None and (
            self._reader.unread or (self.slots.read and len(self.slots.free) < self._worth_reading)
        ):
            return
        free = self._reading.free
        new = dict(zip(free, self._next(len(free)), strict=False))
        if not new:
            return
        self._reading.admit(new)
        if self._prefixes is not None:
            self._prefixes.begin(self._reading, new)
        else:
            self._reader.start({place: request.prompt_ids for place, request in new.items()})

    def _next(self, count: int) -> list[Request]:
        """Take the first requests that wait, at most so many, and leave those that gain by waiting on."""
        if self._prefixes is None or not count:
            return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        ready = self._prefixes.ready(self.waiting, count)
        taken = {request.id for request in ready}
        self.waiting = deque(request for request in self.waiting if request.id not in taken)
        return ready

    def _is_time_to_read(self) -> bool:
        """Tell whether a pass over prompts comes next; rows that decode wait for it."""
        if not self._reader.unread or not self.slots.read:
            return bool(self._reader.unread)
        most, read = self.max_prefill_tokens, self._read_since
        if most is not None and read and read + self._reader.next_tokens > most:
            return False
        # Read ahead, prompts wait for a slot, and not a slot for prompts. An eighth of them is kept ready.
        return self.ahead is None or len(self.ahead.read) < max(1, self.ahead.count // 8)

    def _read(self) -> None:
        """Send a pass over prompts to the device."""
        chunk, ended = self._reader.next_chunk()
        self._read_since += chunk.tokens.size
        for place in ended:
            row = self._reading.rows[place]
            assert row is not None
            row.is_read = True
        self._busy = self._reading
        chunk = self._busy.with_masks(chunk, ended)
        ask = self._busy.ask(0)
        call = self.runtime.feeding(self._busy.state, chunk, ask)
        self._busy.start(self.pool, ask.most, call)

    def _decode(self, most_steps: int) -> None:
        """Send some steps to the device; it does fewer when rows end that others wait for."""
        active, until = len(self.slots.read), 0
        if self.ahead is not None and self.ahead.read:
            # To return takes the host some milliseconds, so that a few rows end before it is worth it.
            until = max(0, active - max(1, self.slots.count // 16))
        elif self.ahead is None and self.waiting and not self._reader.unread:
            until = max(0, active + len(self.slots.free) - self._worth_reading)
        self._read_since = 0
        self._busy = self.slots
        running = self._busy.requests
        steps, length = self.chosen_length.next(running, most_steps)
        guided = any(request.grammar is not None for request in running)
        ask = self._busy.ask(most_steps)
        some = None if guided or not self.chosen_length.has_few(length) else self._some()
        call = self.runtime.decoding(self._busy.state, ask, steps, until, length, guided, some)
        self._busy.start(self.pool, ask.most, call, length)

    def _some(self) -> np.ndarray | None:
        """Return the slots of the smallest program that computes all rows which run; None where that is for all."""
        active = self.slots.read
        rows = next((rows for rows in self.runtime.few if rows >= len(active)), None)
        return None if rows is None else row_subset.fill(active, rows, self.slots.count)

    def _look(self) -> list[Update | Completion]:
        """Wait for what the device does, and tell what came of it."""
        slots = self._busy
        assert slots is not None
        taken_s = slots.wait()  # who interrupts this may wait again, or close
        self._busy = None
        if self._read_since:
            self.runtime.timings.prefill_s += taken_s
            if self._prefixes is not None:
                self._prefixes.keep(slots)
        else:
            self.runtime.timings.decode_s += taken_s
            self.chosen_length.learn(slots.new_acceptance_lengths, taken_s)
        return slots.look()
