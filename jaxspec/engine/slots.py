"""Slots: the rows of a decode state, the requests that have them, and what each request got so far.

Read `Slots.launch` and `Slots.collect`. The scheduler decides when to prefill and when to decode.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.cache import HostTables
from jaxspec.engine.length_forecast import LengthForecast
from jaxspec.engine.pages import PagePool, Pages, joined
from jaxspec.engine.request import (
    Completion,
    Reason,
    Request,
    Update,
    callback_failed,
    failed,
    grammar_failed,
    num_kept_tokens,
    num_positions,
)
from jaxspec.runtime.prefill import PromptImage
from jaxspec.runtime.runtime import NewRows, Runtime, StepResult
from jaxspec.runtime.step_output import OutputRequest, StepOutput
from jaxspec.sampling import Logprobs
from jaxspec.state import NO_GUIDE, DecodeState, PrefillChunk
from jaxspec.text.grammars.guides import Guide
from jaxspec.text.grammars.matcher import ALL

SOME_TIMES = 8
"""One of so many times of a forecast tells in most calls that no request has room."""

LaunchResult = tuple[DecodeState, StepOutput, float]
"""Result of a launched call: the next state, its output, and the seconds that the call took."""

LONGEST_START_S = 0.005
"""Seconds after which a call that still starts is one whose loop keeps its thread busy."""


@dataclasses.dataclass
class Row:
    """A request that has a slot, and what it got so far.

    Attributes:
      number: counts the requests that got a slot before this one.
      guide: follows its grammar.
      is_prefilled: whether its whole prompt is prefilled, so that its first token is there.
      cached_tokens: prompt tokens that came from the prefix cache.
      num_sent: tokens of its newest update.
    """

    request: Request
    number: int
    guide: Guide | None = None
    is_prefilled: bool = False
    cached_tokens: int = 0
    num_sent: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    verify_lengths: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)

    def update(
        self, output: StepOutput, slot: int, new: int, steps: int, verify_length: int
    ) -> None:
        """Add the output of the row's slot.

        Args:
          new: tokens.
          steps: new ones.
          verify_length: drafts that each new step verified, if steps do not choose them.
        """
        assert new <= output.tokens.shape[1]
        assert steps <= output.acceptance_lengths.shape[1]
        self.tokens += output.tokens[slot, :new].tolist()
        self.acceptance_lengths += output.acceptance_lengths[slot, :steps].tolist()
        if output.verified is None:
            self.verify_lengths += [verify_length] * steps
        else:
            self.verify_lengths += output.verified[slot, :steps].tolist()
        if output.logprobs is not None and new:
            self.logprobs.append(jax.tree.map(lambda x: x[slot, :new], output.logprobs))

    def updates(self) -> list[Update]:
        """Return its update if it has tokens that none told of, else nothing."""
        if len(self.tokens) <= self.num_sent:
            return []
        self.num_sent = len(self.tokens)
        return [self._as_update()]

    def _as_update(self) -> Update:
        """Return its tokens so far."""
        sampling = self.request.sampling
        lengths = tuple(self.acceptance_lengths), tuple(self.verify_lengths)
        logprobs = self._logprobs() if sampling.logprobs or sampling.top_logprobs else {}
        return Update(self.request.id, tuple(self.tokens), *lengths, **logprobs)

    def as_completion(self, reason: Reason, error: Exception | None = None) -> Completion:
        """Return its completion.

        Args:
          error: the exception that its `stop_at` raised.
        """
        completion = self._completion(reason, error)
        return dataclasses.replace(completion, cached_tokens=self.cached_tokens)

    def _completion(self, reason: Reason, error: Exception | None) -> Completion:
        tokens, logprobs = tuple(self.tokens), self._logprobs()
        if error is not None:
            return callback_failed(self.request, error, tokens, **logprobs)
        if reason == "error" and self.guide is not None and self.guide.error is not None:
            return grammar_failed(self.request, self.guide.error, tokens, **logprobs)
        if reason == "error":
            return failed(self.request, tokens, **logprobs)
        accepted, verified = tuple(self.acceptance_lengths), tuple(self.verify_lengths)
        return Completion(
            self.request.id, tokens, reason, accepted, verify_lengths=verified, **logprobs
        )

    def _logprobs(self) -> dict[str, Any]:
        """Return the fields of a `Completion` about log-probabilities."""
        if not self.logprobs:
            return {}
        count = len(self.tokens)
        whole = jax.tree.map(lambda *x: np.concatenate(x)[:count].tolist(), *self.logprobs)
        fields = dict(logprobs=tuple(whole.target), sampled_logprobs=tuple(whole.sampled))
        if whole.top_ids is not None:
            best = zip(whole.top_ids, whole.top_values, strict=True)
            fields["top_logprobs"] = tuple(tuple(zip(*row, strict=True)) for row in best)
        return fields


class Progress(NamedTuple):
    """Progress of a row in a call, from which its events are made.

    Attributes:
      reason: for its end; None if it goes on.
      error: the exception that its `stop_at` raised.
    """

    row: Row
    reason: Reason | None = None
    error: Exception | None = None

    def events(self) -> list[Update | Completion]:
        """Return the row's update if it has new tokens, and its completion if it has ended."""
        events: list[Update | Completion] = [*self.row.updates()]
        if self.reason is not None:
            events.append(self.row.as_completion(self.reason, self.error))
        return events


class Slots:
    """A decode state, and the request of each of its rows.

    Attributes:
      count: rows of the state.
      parts: of the rows, on a mesh that splits them. Each has as many as the others.
      pages: of the rows; None where each row has one page.
      rows: by slot; None where the slot is free.
      got: tokens and steps that each row has so far, [R, 2].
      headroom: positions beyond its prompt for which a row gets pages at first.
      call_tokens: that a row can get in the next decode call.
      forecast: of the tokens that requests get.
    """

    def __init__(self, runtime: Runtime, num_stop_ids: int):
        self.runtime, self.num_stop_ids = runtime, num_stop_ids
        self.count = count = runtime.num_rows
        self.parts = runtime.shapes.parts
        self.pages = Pages(count, runtime.page_counts, self.parts) if runtime.paging else None
        self.rows: list[Row | None] = [None] * count
        self.got = np.zeros((count, 2), np.int32)
        self._max_new_tokens = np.zeros(count, int)
        self.headroom = self.call_tokens = 0
        self.forecast = LengthForecast()
        self._num_admitted = 0
        self._non_finite = np.zeros(count, bool)  # by the newest output
        self._launched: Future[LaunchResult] | None = None
        self._output: StepOutput | None = None
        self._launched_slots: list[int] = []  # prefilled ones at the launch
        self._known = np.zeros((count, 2), np.int32)  # tokens and steps of rows at the launch
        self._verify_length = 0  # of each step of the launched call
        self._state: DecodeState | None = None

    @property
    def state(self) -> DecodeState:
        """The state on the device. Every program takes the old one's memory, so set the one that it returns."""
        assert self._launched is None, "a launched call has the state"
        if self._state is None:
            self._state = self.runtime.init_state(self.num_stop_ids)
        return self._state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state

    @property
    def state_shapes(self) -> DecodeState:
        """The shapes of the state, which need not be there yet."""
        return self.runtime.state_shapes(self.num_stop_ids)

    @property
    def tables(self) -> HostTables | None:
        """The pages of all rows, as programs take them."""
        return None if self.pages is None else self.pages.tables

    def part(self, slot: int) -> SlotsPart:
        """Return the part that a slot is in."""
        return SlotsPart(self, slot // (self.count // self.parts))

    @property
    def is_taken(self) -> np.ndarray:
        """Slots that have a request, [R]."""
        return np.array([row is not None for row in self.rows])

    @property
    def free(self) -> list[int]:
        """Slots without a request."""
        return [slot for slot, row in enumerate(self.rows) if row is None]

    @property
    def prefilled(self) -> list[int]:
        """Slots whose prompts are prefilled."""
        return [slot for slot, row in enumerate(self.rows) if row is not None and row.is_prefilled]

    @property
    def new_acceptance_lengths(self) -> list[np.ndarray]:
        """Tokens that each new step committed, by row; `collect` adds them to the rows."""
        assert self._output is not None
        lengths, counts = self._output.acceptance_lengths, self._new_steps.tolist()
        slots = [slot for slot in self._launched_slots if self.rows[slot] is not None]
        return [lengths[slot, : counts[slot]] for slot in slots]

    @property
    def _new_steps(self) -> np.ndarray:
        """Steps of each row in the newest call, [R]."""
        assert self._output is not None
        return self._output.num_steps - self._known[:, 1]

    def images_of(self, request: Request) -> list[PromptImage]:
        """Return the images of a request for `PrefillPlanner.add`."""
        if not request.images:
            return []
        config = self.runtime.vision_config
        assert config is not None
        spans = request.image_spans(config.image_token_id)
        return [
            PromptImage(*span, functools.partial(self.runtime.embed, image))
            for span, image in zip(spans, request.images, strict=True)
        ]

    def admit(self, new: Mapping[int, Request]) -> None:
        """Give free slots to requests, after `release`. Their prompts are prefilled later."""
        guides: dict[int, int] = {}
        for slot, request in new.items():
            guide = None if request.grammar is None else Guide(request.grammar)
            self.put(slot, Row(request, self._num_admitted, guide))
            self._num_admitted += 1
            if guide is not None:
                guides[slot] = guide.number
        self.state = self.runtime.admit(self.state, self._new_rows(new, guides))

    def put(self, slot: int, row: Row) -> None:
        """Give a slot to a row."""
        self.rows[slot] = row
        self.got[slot] = len(row.tokens), len(row.acceptance_lengths)
        self._max_new_tokens[slot] = row.request.max_new_tokens

    def take_pages(self, slot: int, request: Request) -> None:
        """Give a row its first pages."""
        if self.pages is not None:
            end = num_positions(self.runtime.spec, request)
            pool, row = self.pages.of(slot)
            pool.take(row, self.first_positions(request), end=end)

    def first_positions(self, request: Request, new_tokens: int = 0) -> int:
        """Return the positions for which a request gets pages when it gets a slot.

        Args:
          new_tokens: that it has already.
        """
        first = len(request.prompt_ids) + new_tokens + self.headroom
        return min(num_positions(self.runtime.spec, request), first)

    def num_fitting(self, requests: Sequence[Request], new_tokens: int = 0, part: int = 0) -> int:
        """Return how many of the first requests have room until they end, by what is expected of all rows.

        Args:
          new_tokens: that the requests have already.
          part: of the slots, where they are to be.
        """
        if self.pages is None or not requests:
            return len(requests)
        pool, each, spec = self.pages.pools[part], self.count // self.parts, self.runtime.spec
        left, first = pool.num_without_rows, self.first_positions(requests[0], new_tokens)
        if any(pages > left[slots] for slots, pages in pool.pages(first).items()):
            return 0  # while memory is full, before each call
        in_part = slice(part * each, (part + 1) * each)
        rows = np.flatnonzero(self.is_taken[in_part] & (pool.positions > 0))
        got = np.append(self.got[in_part, 0][rows], [new_tokens] * len(requests))
        limits = np.append(
            self._max_new_tokens[in_part][rows], [request.max_new_tokens for request in requests]
        )
        ends = np.append(pool.ends[rows], [num_positions(spec, request) for request in requests])
        lengths = ends - spec.step_tokens - limits + got
        now = np.minimum(ends, lengths + self.headroom)  # the first positions of new rows
        now[: len(rows)] = pool.positions[rows]
        fitting = 0
        for every in (SOME_TIMES, 1):
            times, alive = self.forecast(limits, got, every)
            tokens = lengths + times[:, None] + self.call_tokens
            positions = np.maximum(now, np.minimum(tokens + spec.step_tokens, ends))
            if not (fitting := pool.num_fitting(positions, alive, rows.tolist())):
                break
        return fitting

    def positions_after(self, new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions for which each row has pages, and those that it needs for so many more tokens.

        Returns:
          Both of shape [R].
        """
        assert self.pages is not None
        has, ends = (
            np.concatenate([getattr(pool, name) for pool in self.pages.pools])
            for name in ("positions", "ends")
        )
        begin = ends - self._max_new_tokens + self.got[:, 0]
        return has, np.minimum(begin + new_tokens, ends)

    @property
    def spoiled(self) -> np.ndarray:
        """Rows without a request that hold numbers which are not finite, [R]."""
        return self._non_finite & ~self.is_taken

    def release(self) -> None:
        """Free the pages of rows without a request, after what is not finite was cleared.

        What several have was finite when it was shared, and nobody wrote to it since.
        """
        if (spoiled := self.spoiled).any():
            tables = None
            if self.pages is not None:
                of_parts = zip(self.pages.pools, spoiled.reshape(self.parts, -1), strict=True)
                tables = joined([pool.tables_of_own_pages(rows) for pool, rows in of_parts])
            self.state = self.runtime.clear(self.state, spoiled, tables)
            self._non_finite &= ~spoiled
        if self.pages is not None:
            for pool, is_taken in zip(
                self.pages.pools, self.is_taken.reshape(self.parts, -1), strict=True
            ):
                for row in np.flatnonzero((pool.positions > 0) & ~is_taken).tolist():
                    pool.release(row)

    def restart(self) -> bool:
        """Free all rows, and return whether what their caches hold is still there."""
        if self._state is None:  # never made, or lost with a call that failed
            return False
        if self._output is not None:
            self._non_finite |= np.array(self._output.non_finite)
        self.rows = [None] * self.count
        self._launched_slots = []
        self.state = self.runtime.retire(self.state, np.ones(self.count, bool))
        return True

    def _new_rows(self, new: Mapping[int, Request], guides: Mapping[int, int]) -> NewRows:
        """Return requests as the admitting program takes them.

        Args:
          new: by slot.
          guides: numbers of the guides of requests with grammars, by slot.
        """
        slots, requests = [*new], [*new.values()]
        stop_ids = np.full((len(new), self.num_stop_ids), -1, np.int32)
        for row, request in enumerate(requests):
            unique = sorted(request.all_stop_ids)
            stop_ids[row, : len(unique)] = unique
        of_new = self.runtime.admission(
            slots,
            [request.max_new_tokens for request in requests],
            stop_ids,
            [request.sampling for request in requests],
            np.array([(r.seed, r.sample or 0) for r in requests], np.uint32).reshape(-1, 2),
            [guides.get(slot, NO_GUIDE) for slot in slots] if guides else None,
        )

        def spread(values: np.ndarray) -> np.ndarray:
            of_all = np.zeros((self.count, *values.shape[1:]), values.dtype)
            of_all[slots] = values
            return of_all

        of_all = jax.tree.map(spread, of_new)
        is_new = np.isin(np.arange(self.count), slots)
        return of_all._replace(slots=np.where(is_new, of_all.slots, self.count).astype(np.int32))

    def with_masks(self, chunk: PrefillChunk, ended: Sequence[int]) -> PrefillChunk:
        """Return a pass with the masks of first tokens, if any grammar restricts one.

        Args:
          ended: slots whose prompts end in the pass.
        """
        rows = {slot: self.rows[slot] for slot in ended}
        first = {slot: row.guide.first_mask() for slot, row in rows.items() if row and row.guide}
        if not first:
            return chunk
        numbers = np.asarray(chunk.slots).reshape(self.parts, -1)
        each = self.count // self.parts
        slots = (numbers + each * np.arange(self.parts)[:, None]).ravel().tolist()
        free = np.full_like(next(iter(first.values())), ALL)
        masks = np.stack([first.get(slot, free) for slot in slots])
        return dataclasses.replace(chunk, masks=masks)

    def is_non_finite(self, slot: int) -> bool:
        """Return whether a slot holds numbers that are not finite, by the newest output."""
        assert self._output is not None
        return bool(self._output.non_finite[slot])

    def slot_of(self, id: Hashable) -> int | None:
        """Return the slot of a request."""
        return next((s for s, row in enumerate(self.rows) if row and row.request.id == id), None)

    def output_request(self, steps: int) -> OutputRequest:
        """Return the output to request from the next program on this state.

        Args:
          steps: decode steps of the program at most; 0: a prefill pass.
        """
        return self.runtime.output_request(steps, self.got * self.is_taken[:, None])

    def launch(
        self,
        executor: Executor,
        request: OutputRequest,
        call: Callable[[DecodeState], StepResult],
        verify_length: int = 0,
    ) -> None:
        """Send a call to the device. Until `wait` returns, the state belongs to the call.

        Args:
          executor: starts the call and waits for its output. Some of XLA's loops keep the thread
            busy that starts them, so only another thread leaves the caller free.
          request: for the call's output.
          verify_length: drafts that each step of the call verifies.
        """
        before, self._state = self.state, None
        started = threading.Event()

        def run() -> LaunchResult:
            begin = time.perf_counter()
            try:
                state, packed = call(before)
            finally:
                started.set()
            assert packed is not None
            return state, StepOutput.fetch(packed, request.sizes), time.perf_counter() - begin

        self._launched_slots, self._verify_length = self.prefilled, verify_length
        self._known = request.known
        self._launched = executor.submit(run)
        # Both threads need Python. The device waits for the call, and for nothing that this thread does.
        started.wait(LONGEST_START_S)

    def wait_for_device(self) -> None:
        """Wait until the launched call has ended. `wait` returns its result."""
        if self._launched is not None:
            concurrent.futures.wait([self._launched])

    def wait(self) -> float:
        """Wait for the launched call, and return the seconds that it took."""
        assert self._launched is not None
        self._state, self._output, taken_s = self._launched.result()
        self._launched = None
        return taken_s

    def collect(self, running: Collection[int]) -> list[Progress]:
        """Take over the output of the call that `wait` waited for, and free the slots of rows that are done.

        Args:
          running: slots that decode. The others keep their first tokens to themselves until they do.

        Returns:
          The rows with new tokens for their callers. Their events may be made later.
        """
        assert self._output is not None
        output, running = self._output, {*running}
        self._non_finite = np.array(output.non_finite)
        new_tokens = (output.num_tokens - self._known[:, 0]).tolist()
        new_steps, active = self._new_steps.tolist(), output.active.tolist()
        progress: list[Progress] = []
        for slot in self._launched_slots:
            new, steps, row = new_tokens[slot], new_steps[slot], self.rows[slot]
            if row is None or (active[slot] and not new and not steps):  # cancelled, or as before
                continue
            row.update(output, slot, new, steps, self._verify_length)
            self.got[slot] = len(row.tokens), len(row.acceptance_lengths)
            reason: Reason | None = None
            if not active[slot]:
                reason = "error" if output.failed[slot] else "length"
                reason = "stop" if output.stopped[slot] else reason
            error = None
            if new and row.request.stop_at is not None:
                try:  # the user's function: an exception ends this request and no other
                    keep = num_kept_tokens(row.request.stop_at(tuple(row.tokens)))
                except Exception as raised:
                    keep, reason, error = None, "error", raised
                if keep is not None:
                    reason = "stop"
                    del row.tokens[keep:]
            if reason in ("stop", "length"):
                self.forecast.learn(row.request.max_new_tokens, len(row.tokens))
            if reason is not None:
                self.rows[slot] = None
            if slot in running or reason is not None:
                progress.append(Progress(row, reason, error))
        ended = ~self.is_taken
        if (ended & output.active).any():  # still active on the device
            self.state = self.runtime.retire(self.state, ended)
        return progress


@dataclasses.dataclass
class SlotsPart:
    """The slots of one part of the batch, and programs that change rows and pages of this part alone.

    Attributes:
      number: of the part.
    """

    slots: Slots
    number: int

    @property
    def runtime(self) -> Runtime:
        """The runtime of all slots."""
        return self.slots.runtime

    @property
    def pages(self) -> PagePool | None:
        """The pages of the part."""
        return None if self.slots.pages is None else self.slots.pages.pools[self.number]

    @property
    def state(self) -> DecodeState:
        """The state of all slots."""
        return self.slots.state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self.slots.state = state

    def row(self, slot: int) -> int:
        """Return the number of a slot in the part."""
        return slot % (self.slots.count // self.slots.parts)

    def indices(self, index: int | np.ndarray, past_last: int | np.ndarray) -> np.ndarray:
        """Return an index for each part: this one in this part, one past the last in the others.

        Args:
          index: of a row, or of pages, [N].
        """
        of_all = [past_last] * self.slots.parts
        of_all[self.number] = index
        return np.array(of_all, np.int32)
