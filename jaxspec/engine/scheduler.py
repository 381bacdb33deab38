"""The scheduler: chooses the device's next call, a prefill pass, some decode steps, or both in one pass.

Read `Scheduler.step`. Waiting requests get slots. Passes that fill the device prefill their
prompts. Then their rows decode, and each row that is done frees its slot.

On a mesh that splits the rows of a batch, a row stays in the part of its slot. Each part has pages of its own, and
decodes its share of the batch.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from concurrent.futures import Executor

import jax
import numpy as np

from jaxspec import row_subset
from jaxspec.engine.draft_length import DraftLengthController
from jaxspec.engine.placement import FreeSpace
from jaxspec.engine.preemption import RowSwap, SavedRow
from jaxspec.engine.prefix_cache.planner import PrefixPlanner
from jaxspec.engine.prefix_cache.store import Store
from jaxspec.engine.request import Completion, Request, Update, num_positions
from jaxspec.engine.slots import Progress, Slots, SlotsPart
from jaxspec.runtime.prefill import PREFILL_CHUNK, PrefillPlanner, make_chunk, on_cpu
from jaxspec.state import PrefillChunk

CALLS_AHEAD = 2
"""A row gets pages for its prompt and so many decode calls when it is admitted, and more as it needs them."""

LONGEST_PAUSE_S = 0.25
"""Seconds between two returns of a running row on a GPU. Decode calls have fewer steps where they would take longer."""
HOST_S = 0.02
"""Seconds of the host's work that such a pause may hold."""
LONG_PROMPT = 16_384
"""Tokens of a prompt before a pass over it that may be too long by its attention. An earlier one was slow by chance."""
FIRST_STEPS = 4
"""Steps of a decode call on a GPU before the time of a step is known."""


class Scheduler:
    """Requests that wait or run, and the device's calls for them.

    Args:
      slots: all free.
      executor: of one thread, which waits for the device.
      max_prefill_tokens: prompt tokens that are prefilled before rows decode on. None: as many as
        they may wait for, where calls are timed; else those of all prompts that have slots.
      prefixes: stored prefixes of each part of the slots, which rows share. (): no prefix cache.

    Attributes:
      waiting: requests without a slot, in their order.
      slots: the rows of the state. Those beyond the batch size let prompts be prefilled ahead.
      running: the slots that decode, as many as the batch size at most.
      preempted: rows that gave up their pages, the oldest first. They return before others get slots.
    """

    def __init__(
        self,
        slots: Slots,
        draft_length: DraftLengthController,
        executor: Executor,
        *,
        max_prefill_tokens: int | None,
        prefixes: Sequence[Store] = (),
    ):
        self.runtime = runtime = slots.runtime
        self.slots, self.draft_length, self.executor = slots, draft_length, executor
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[int] = []
        self.preempted: list[SavedRow] = []
        self._swap = RowSwap(runtime)
        vision = runtime.vision_config
        two_way = vision is not None and vision.two_way
        self._planner = PrefillPlanner(runtime.shapes, two_way=two_way)
        self._prefixes: PrefixPlanner | None = None
        if prefixes:
            for number, store in enumerate(prefixes):
                store.attach(SlotsPart(slots, number))
            self._prefixes = PrefixPlanner(
                prefixes, self._planner, invariant=runtime.invariant, vision=vision
            )
        self._release()
        self._is_busy = False  # with a launched call
        self._prefill_tokens = 0  # since rows decoded, padding included
        self._deferred_steps = 0  # for which the next pass has waited
        # Several devices, or several processes, need their programs in one order, the caller's too.
        self._keeps_order = runtime.mesh.size > 1
        # Processes would measure other times, and have to run the same calls.
        self._is_timed = not on_cpu(runtime.mesh) and jax.process_count() == 1
        if max_prefill_tokens is None and not on_cpu(runtime.mesh) and not self._is_timed:
            self.max_prefill_tokens = runtime.shapes.full_tokens
        self._step_s = self._pass_s = 0.0  # of the newest decode call and pass; 0: unknown
        self._pass_width = 0  # of the newest pass; its most tokens of a prompt, if these are more
        self._narrow_from = math.inf  # as in `PrefillPlanner`
        self._events: list[Update | Completion] = []  # that no step has returned yet
        self._is_mixed = False  # the launched call
        self._paused_s = 0.0  # of passes since rows decoded

    def step(self, max_steps: int) -> list[Update | Completion]:
        """Wait for the running call, launch the next one, and return the events of the first.

        Args:
          max_steps: decode steps of the next call at most.
        """
        progress = self._collect() if self._is_busy else []
        spec = self.runtime.spec
        self.slots.call_tokens = self._within_pause(max_steps) * (spec.depth + 1)
        self.slots.headroom = CALLS_AHEAD * self.slots.call_tokens + spec.step_tokens
        self._release()
        self._return_preempted()
        progress += self._start_rows()
        self._planner.narrow_from = self._narrow_from if self.running else math.inf
        self._admit()
        if self._should_prefill(max_steps):
            if self._should_mix():
                self._mix(max_steps)
            else:
                self._prefill()
        elif self.running:
            self._decode(max_steps)
        self.draft_length.prepare()
        # The device works by now.
        self._events += [event for of_row in progress for event in of_row.events()]
        if self._keeps_order:
            self.slots.wait_for_device()
        events, self._events = self._events, []
        return events

    def cancel(self, id: Hashable) -> Completion | None:
        """Free the slot of a request, and return its completion; None if there is no such request."""
        for index, request in enumerate(self.waiting):
            if request.id == id:
                del self.waiting[index]
                if self._prefixes is not None:
                    self._prefixes.forget(id)
                return Completion(id, finish_reason="cancelled")
        for saved in self.preempted:
            if saved.row.request.id == id:
                self.preempted.remove(saved)
                return saved.row.as_completion("cancelled")
        if (slot := self.slots.slot_of(id)) is None:
            return None
        row = self.slots.rows[slot]
        assert row is not None
        self._planner.remove(slot)
        self.slots.rows[slot] = None  # `Slots.collect` retires the row on the device
        return row.as_completion("cancelled")

    def warm_up(self, max_steps: int, prompt_lengths: Collection[int] | None = None) -> None:
        """Compile every program, and time all verify lengths. No request may wait or run.

        `Engine.warm_up` says what `prompt_lengths` are.

        The state is made last: while XLA compiles for a GPU, it times products on copies of their operands.
        """
        runtime, slots = self.runtime, self.slots
        tables = slots.tables
        of_prefill, of_decode = slots.output_request(0), slots.output_request(max_steps)
        # Behind a stored prefix a prompt may have any length.
        if prompt_lengths is None or self._prefixes is not None:
            passes = runtime.shapes.all(runtime.cache_length)
        else:
            passes = runtime.shapes.of_prompts(prompt_lengths)
        chunks = [make_chunk({}, rows, width, slots.count) for rows, width in passes]
        mixed = [
            make_chunk({}, *shape, slots.count)
            for shape in (runtime.shapes.mixed_passes if runtime.can_mix else ())
        ]
        decoding = runtime.first_slots(runtime.batch_size)
        if runtime.vision_params is not None:
            chunks += runtime.warm_up_vision(chunks, slots.count)
        small_batches = row_subset.counts(
            runtime.spec, runtime.batch_size, runtime.mesh, invariant=runtime.invariant
        )
        kinds = (True, False) if runtime.spec.program_features.grammars else (False,)
        with runtime.compiling_in_background():
            state = slots.state_shapes
            for guided in kinds:  # first, since they compile longest
                runtime.bind_decode(state, of_decode, 1, guided=guided, tables=tables)
            self.draft_length.begin_compiling(state, of_decode, small_batches)
            for chunk in mixed:
                runtime.bind_mixed(state, of_decode, chunk, decoding, tables)
            for chunk in chunks:
                runtime.bind_prefill(state, chunk, of_prefill, tables)
        runtime.wait_for_programs()
        slots.admit({})
        if self._prefixes is not None:
            for store in self._prefixes.stores:  # passes write to pages
                store.clear()
            self._prefixes.stores[0].warm_up()
        if slots.pages is not None:
            self._swap.warm_up(slots)
        every = np.ones(slots.count, bool)
        slots.state = runtime.retire(slots.state, every)
        slots.state = runtime.clear(slots.state, ~every, tables)
        subsets = [runtime.first_slots(rows) for rows in small_batches]
        decode = functools.partial(runtime.bind_decode, slots.state, of_decode, 1, tables=tables)
        calls = [
            *(runtime.bind_prefill(slots.state, chunk, of_prefill, tables) for chunk in chunks),
            *(
                runtime.bind_mixed(slots.state, of_decode, chunk, decoding, tables)
                for chunk in mixed
            ),
            *(decode(guided=guided) for guided in kinds),
            *(decode(slots=subset) for subset in subsets),
        ]
        # XLA makes the CUDA graph of a program when it runs again, and drops all graphs when it loads a program.
        for _ in range(1 if on_cpu(runtime.mesh) else 2):
            for call in calls:
                slots.state, _ = call(slots.state)
        runtime.small_batches = small_batches
        slots.state = self.draft_length.measure(slots.state, of_decode, small_batches)
        slots.state = runtime.retire(slots.state, every)

    def close(self) -> None:
        """Wait until the device is done with its last call."""
        if self._is_busy:
            with contextlib.suppress(Exception):  # `step` raised it already, or nobody needs it
                self.slots.wait()
            self._is_busy = False

    @property
    def _ready(self) -> list[int]:
        """Slots whose prompts are prefilled and that do not decode yet, in the order of admission."""
        running = {*self.running}
        ready = (slot for slot in self.slots.prefilled if slot not in running)
        return sorted(ready, key=self._number_of)

    def _start_rows(self) -> list[Progress]:
        """Let rows decode whose prompts are prefilled, in place of those that have ended.

        Returns:
          These rows. Their first tokens, sent when they were prefilled, would be followed by a pause.
        """
        prefilled = {*self.slots.prefilled}
        self.running = [slot for slot in self.running if slot in prefilled]
        shapes, started = self.runtime.shapes, []
        left = [self.runtime.batch_size // shapes.parts - n for n in self._num_running]
        for slot in self._ready:
            if left[part := shapes.part(slot)]:
                left[part] -= 1
                started.append(slot)
        self.running += started
        return [Progress(row) for slot in started if (row := self.slots.rows[slot]) is not None]

    @property
    def _num_running(self) -> list[int]:
        """Number of running rows in each part."""
        return [len(slots) for slots in self.runtime.shapes.by_part(self.running)]

    @property
    def _min_free_slots(self) -> int:
        """Number of free slots at which decoding stops for a prefill; 0 if no request waits."""
        lengths = (len(request.prompt_ids) for request in self.waiting)
        return self.runtime.shapes.min_free_slots(lengths)

    def _admit(self) -> None:
        """Give slots to waiting requests, and plan the prefill of their prompts.

        A part gets none while rows wait that gave up their pages there.
        """
        free, waits = self.slots.free, {saved.part for saved in self.preempted}
        if not self.runtime.read_ahead and (
            self._planner.pending or (self.running and len(free) < self._min_free_slots)
        ):
            return
        parts = self.runtime.shapes.by_part(free)
        new = self._place([[] if part in waits else of for part, of in enumerate(parts)])
        if new:
            self._start(new)

    def _start(self, new: dict[int, Request]) -> None:
        """Give free slots to requests, by slot."""
        self.slots.admit(new)
        if self._prefixes is not None:
            self._prefixes.begin(self.slots, new)
        else:
            for slot, request in new.items():
                self.slots.take_pages(slot, request)
                images = self.slots.images_of(request)
                self._planner.add({slot: request.prompt_ids}, images=images)

    def _release(self) -> None:
        """Free the pages of rows without a request, and forget prefixes that are not finite."""
        slots = self.slots
        if self._prefixes is not None and (spoiled := slots.spoiled).any():
            assert slots.pages is not None
            for slot in np.flatnonzero(spoiled).tolist():
                pool, row = slots.pages.of(slot)
                self._prefixes.store_of(slot).forget_pages(pool.of_row(row))
        slots.release()

    def _return_preempted(self) -> None:
        """Give slots and pages to rows that gave up theirs, in the order of their first admission in each part."""
        slots, full = self.slots, set[int]()
        for saved in list(self.preempted):
            request, part = saved.row.request, saved.part
            if part in full:
                continue
            free = self.runtime.shapes.by_part(slots.free)[part]
            if not free or not slots.num_fitting([request], len(saved.row.tokens), part):
                full.add(part)
                continue
            slot = free[0]
            self.preempted = [other for other in self.preempted if other is not saved]
            if saved.small is None:
                self._start({slot: request})
                continue
            assert slots.pages is not None
            pool, row = slots.pages.of(slot)
            positions = slots.first_positions(request, len(saved.row.tokens))
            self._make_room(slot, pool.pages(positions))
            end = num_positions(self.runtime.spec, request)
            pool.take(row, positions, end=end)
            self._swap.load(slots, slot, saved)

    def _make_room(self, slot: int, needed: dict[int, int]) -> bool:
        """Evict stored prefixes until so many pages are free in the part of a slot; return whether they are.

        Args:
          needed: by the slots of a row.
        """
        assert self.slots.pages is not None
        if self._prefixes is not None:
            return self._prefixes.store_of(slot).make_room(needed)
        pool, _ = self.slots.pages.of(slot)
        return all(free >= needed[slots] for slots, free in pool.num_free.items())

    def _grow_rows(self, max_steps: int) -> None:
        """Give running rows pages for some steps. Where too few are left, the youngest rows give up theirs.

        The oldest row of a part is never preempted, and alone it has space. So all rows end.
        """
        slots, pages, spec = self.slots, self.slots.pages, self.runtime.spec
        if pages is None:
            return
        has, needed = (x.tolist() for x in slots.positions_after(max_steps * (spec.depth + 1)))
        growing = [slot for slot in self.running if needed[slot] > has[slot]]
        for slot in sorted(growing, key=self._number_of):
            if (row := slots.rows[slot]) is None:  # it was preempted for an older one
                continue
            (pool, number), positions = pages.of(slot), needed[slot]
            while slots.rows[slot] is row and not self._make_room(
                slot, pool.missing(number, positions)
            ):
                taken = (other for other, row in enumerate(slots.rows) if row is not None)
                of_part = self.runtime.shapes.by_part(taken)[slots.part(slot).number]
                self._preempt(max(of_part, key=self._number_of))
            if slots.rows[slot] is row:
                pool.grow(number, positions)
        self.running = [slot for slot in self.running if slots.rows[slot] is not None]

    def _number_of(self, slot: int) -> int:
        row = self.slots.rows[slot]
        assert row is not None
        return row.number

    def _preempt(self, slot: int) -> None:
        """Take a row off the device, until there are pages for it."""
        self._planner.remove(slot)
        self.preempted.append(self._swap.save(self.slots, slot))
        self.preempted.sort(key=lambda saved: saved.row.number)
        self.runtime.timings.preemptions += 1

    def _place(self, free: list[list[int]]) -> dict[int, Request]:
        """Take the first waiting requests, and return them by slot, but leave those that gain by waiting on.

        The others go in their order: none overtakes one that waits for pages.

        Args:
          free: slots of each part.
        """
        new: dict[int, Request] = {}
        while not new and any(free) and self.waiting:
            placed = self._parts_of_waiting(FreeSpace(self.slots, free))
            if not placed:
                break
            left = []
            for part in range(len(free)):
                of_part = [request for request, at in placed if at == part]
                left.append(self.slots.num_fitting(of_part, part=part))
            _, full = placed[0]
            for request, part in placed:
                if not left[part]:
                    break
                left[part] -= 1
                new[free[part].pop(0)] = request
            if not new:  # the first one may still have room in another part
                free[full] = []
        if ids := {request.id for request in new.values()}:
            self.waiting = deque(request for request in self.waiting if request.id not in ids)
        return new

    def _parts_of_waiting(self, space: FreeSpace) -> list[tuple[Request, int]]:
        """Return the first waiting requests that have slots, each with the part that it would go to."""
        if self._prefixes is not None:
            return self._prefixes.ready(self.waiting, space)
        placed: list[tuple[Request, int]] = []
        for request in self.waiting:
            if (part := space.choose()) is None:
                break
            space.take(request, part)
            placed.append((request, part))
        return placed

    def _should_prefill(self, max_steps: int) -> bool:
        """Return whether the next call is a prefill pass. Rows that decode wait for it."""
        if not self._planner.pending or not self.running:
            return bool(self._planner.pending)
        if self._is_past_limit() or self._should_defer(max_steps):
            return False
        return self._lacks_rows

    @property
    def _lacks_rows(self) -> bool:
        """True if too few rows are ready to start, and prompts are pending.

        Rows that are prefilled ahead wait for others to end. An eighth of the rows ahead is kept ready.
        """
        ahead, shapes = self.runtime.read_ahead, self.runtime.shapes
        if not ahead:
            return bool(self._planner.pending)
        enough = max(1, ahead // shapes.parts // 8)
        of_parts = zip(
            shapes.by_part(self._ready), shapes.by_part(self._planner.pending), strict=True
        )
        return any(pending and len(ready) < enough for ready, pending in of_parts)

    def _is_past_limit(self) -> bool:
        """Return whether rows decode on before the next pass, though prompts are pending."""
        done, limit = self._prefill_tokens, self.max_prefill_tokens
        if not done:
            return False
        if limit is not None:
            return done + self._planner.next_tokens > limit
        # The next step may take longer than the last one, since more rows are in it.
        waits_s = self._paused_s + self._pass_s + 2 * self._step_s
        return self._is_timed and (not self._step_s or waits_s > LONGEST_PAUSE_S - HOST_S)

    def _should_defer(self, max_steps: int) -> bool:
        """Return whether a pass that is not full waits for requests that wait, for so many decode steps at most.

        A pass takes about as long for few prompts as for all that fill it. Without rows that are
        read ahead, `min_free_slots` has waited for enough prompts already.
        """
        if not self.runtime.read_ahead or not self.waiting or self._deferred_steps >= max_steps:
            return False
        return self._planner.num_left < self.runtime.shapes.full_tokens

    def _should_mix(self) -> bool:
        """Return whether running rows decode in the next pass over prompts."""
        if not (self.runtime.can_mix and self.running):
            return False
        return not self._is_guided and self.draft_length.verifies_all and self._planner.can_mix

    @property
    def _is_guided(self) -> bool:
        """True if a running row has a grammar."""
        rows = (self.slots.rows[slot] for slot in self.running)
        return any(row is not None and row.request.grammar is not None for row in rows)

    def _mix(self, max_steps: int) -> None:
        """Launch one decode step in whose pass prompts are read."""
        self._grow_rows(1)
        if not self._planner.can_mix:  # the rows of its prompts gave up their pages
            self._decode(max_steps)
            return
        runtime, slots = self.runtime, self.slots
        chunk = self._next_chunk(mixed=True)
        self._prefill_tokens, self._is_mixed = 0, True
        request = slots.output_request(max_steps)
        decoding = row_subset.fill(
            self.running, runtime.batch_size, slots.count, waiting=self._ready
        )
        call = runtime.bind_mixed(slots.state, request, chunk, decoding, slots.tables)
        slots.launch(self.executor, request, call, runtime.spec.num_draft_tokens)

    def _next_chunk(self, *, mixed: bool = False) -> PrefillChunk:
        """Return the chunk of the next pass, whose prompts are prefilled from its launch on."""
        self._deferred_steps = 0
        chunk, ended = self._planner.next_chunk(mixed=mixed)
        self._is_busy = True
        for slot in ended:
            row = self.slots.rows[slot]
            assert row is not None
            row.is_prefilled = True
        return self.slots.with_masks(chunk, ended)

    def _prefill(self) -> None:
        """Launch a prefill pass."""
        begins = {slot: begin for slot, (_, begin) in self._planner.pending.items()}
        chunk = self._next_chunk()
        self._prefill_tokens += chunk.tokens.size
        taken = [end - begins[slot] for slot, end in self._planner.last_ends.items()]
        self._pass_width = max(chunk.tokens.shape[1], *taken)
        slots = self.slots
        request = slots.output_request(0)
        call = self.runtime.bind_prefill(slots.state, chunk, request, slots.tables)
        slots.launch(self.executor, request, call)

    def _decode(self, max_steps: int) -> None:
        """Launch some decode steps. They end early when rows end whose slots are needed."""
        most_steps, max_steps = max_steps, self._within_pause(max_steps)
        self._grow_rows(max_steps)
        runtime, slots, active, until_active = self.runtime, self.slots, len(self.running), 0
        waits_for_pages = bool(slots.pages and self.waiting and slots.free)
        if self._ready or waits_for_pages:
            # A return to the host takes some milliseconds, so a few rows have to end before it pays.
            until_active = max(0, active - max(1, runtime.batch_size // 16))
        elif not runtime.read_ahead and self.waiting and not self._planner.pending:
            until_active = max(0, active + len(slots.free) - self._min_free_slots)
        is_between_passes = self._lacks_rows and self._is_past_limit()
        if self._planner.pending and not is_between_passes and self._should_defer(most_steps):
            self._deferred_steps += max_steps
        self._prefill_tokens, self._is_busy = 0, True
        requests = [row.request for slot in self.running if (row := slots.rows[slot])]
        steps, length, costs = self.draft_length.next(requests, max_steps)
        if is_between_passes:
            steps = 1
            self.draft_length.skip()
        guided = self._is_guided
        small_batches = not guided and self.draft_length.has_small_batches(length)
        request = slots.output_request(most_steps)
        subset = self._row_subset(small_batches=small_batches)
        call = runtime.bind_decode(
            slots.state,
            request,
            steps,
            until_active,
            length,
            guided,
            subset,
            slots.tables,
            None if costs is None else np.asarray(costs, np.float32),
        )
        slots.launch(self.executor, request, call, length)

    def _learn_width(self, taken_s: float) -> None:
        """Let passes be narrow from where the newest one began, if running rows waited too long for it."""
        begin = max(self._planner.last_ends.values(), default=0) - self._pass_width
        is_long = taken_s > LONGEST_PAUSE_S - HOST_S - self._step_s
        if self._is_timed and is_long and begin >= LONG_PROMPT and self._pass_width > PREFILL_CHUNK:
            self._narrow_from = min(self._narrow_from, begin)

    def _within_pause(self, max_steps: int) -> int:
        """Return the steps of a decode call that running rows may wait for, with a pass before it."""
        if not self._is_timed:
            return max_steps
        if not self._step_s:
            return min(max_steps, FIRST_STEPS)
        waits = self.waiting or self._planner.pending
        passes_s = max(self._paused_s, self._pass_s if waits else 0.0)
        left_s = LONGEST_PAUSE_S - HOST_S - passes_s
        return min(max_steps, max(1, math.floor(left_s / self._step_s)))

    def _row_subset(self, *, small_batches: bool) -> np.ndarray | None:
        """Return the slots of the smallest program that computes all running rows; None: all slots."""
        runtime = self.runtime
        sizes = runtime.small_batches if small_batches else ()
        parts = runtime.shapes.parts
        needed = parts * max(self._num_running)
        rows = next((n for n in sizes if n >= needed), runtime.batch_size)
        if rows == self.slots.count:
            return None
        return row_subset.fill(self.running, rows, self.slots.count, parts, self._ready)

    def _collect(self) -> list[Progress]:
        """Wait for the running call, and return the rows that it brought on."""
        slots = self.slots
        taken_s = slots.wait()  # after an interrupt, `step` or `close` waits again
        self._is_busy = False
        if self._prefixes is not None and (self._prefill_tokens or self._is_mixed):
            self._prefixes.keep(slots)
        if self._prefill_tokens:
            self.runtime.timings.prefill_s += taken_s
            self._paused_s += taken_s
            # The next pass may be as full as the last ones were.
            self._pass_s = max(taken_s, self._pass_s / 2)
            self._learn_width(taken_s)
        else:
            self.runtime.timings.decode_s += taken_s
            self._paused_s = 0.0
            lengths = slots.new_acceptance_lengths
            if self._is_mixed:  # its time is not that of a step
                self.draft_length.learn_acceptance(lengths)
            else:
                if steps := max(map(len, lengths), default=0):
                    self._step_s = taken_s / steps
                self.draft_length.learn(lengths, taken_s)
        self._is_mixed = False
        return slots.collect(self.running)
