"""Which rows begin with a stored prefix, which requests wait for one, and where entries are made.

Read `SharedReading.ready`, `begin` and `keep`: before, when and after a row reads its prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from jaxspec.engine.prefix_cache.entries import Entry, Passes, Prompt
from jaxspec.engine.prefix_cache.store import Store
from jaxspec.engine.request import Request
from jaxspec.engine.slots import Row, Slots
from jaxspec.runtime.prefill import PromptReader


@dataclass(eq=False)
class Reading:
    """A prompt that is being read, or is about to be.

    Attributes:
      row: who reads it; None before it has a row.
      position: how many of its tokens are read.
      reach: positions that were ever written into the row's rings; more than `position` after a longer entry was
        copied into the row.
      stops: where a pass has to end, and an entry is made.
      version: of the store, when it began.
      made: entries that are not known to be sound yet.
    """

    prompt: Prompt
    row: Row | None = None
    position: int = 0
    reach: int = 0
    stops: set[int] = field(default_factory=set)
    version: int = 0
    made: list[Entry] = field(default_factory=list)

    @property
    def last_reach(self) -> int:
        """The reach of the row when all of its prompt is read."""
        return max(self.reach, len(self.prompt))


class SharedReading:
    """Prompts of a scheduler's requests, and what a store has of them.

    Args:
      invariant: rows go on, and entries are made, only where passes over a prompt alone end.
    """

    def __init__(self, store: Store, reader: PromptReader, *, invariant: bool):
        self.store, self.reader, self.invariant = store, reader, invariant
        self._prompts: dict[Hashable, Prompt] = {}  # of requests that wait
        self._stops: dict[Hashable, set[int]] = {}  # where passes over them are to end
        self._rows: dict[int, Reading] = {}  # prompts that are being read, by their rows

    # --- before a row is given ---------------------------------------------------------------------------

    def ready(self, waiting: Iterable[Request], count: int) -> list[Request]:
        """Return the first requests that gain nothing by waiting, at most so many.

        The others share their beginning with one that is being read, or is among these. It is cut where they part.
        """
        requests = list(waiting)
        self._prompts = {
            request.id: self._prompts.get(request.id) or self._prompt_of(request)
            for request in requests
        }
        self._stops = {name: at for name, at in self._stops.items() if name in self._prompts}
        found: list[Request] = []
        others = [
            reading
            for place, reading in self._rows.items()
            if place in self.reader.unread and reading.version == self.store.version
        ]
        for request in requests:
            if len(found) == count:
                break
            prompt = self._prompts[request.id]
            if not any(self._gains(prompt, other) for other in others):
                found.append(request)
                others.append(Reading(prompt, stops=self._planned(request)))
        return found

    def forget(self, id: Hashable) -> None:
        """Forget a request that waits no more. Its id may come again, with another prompt."""
        self._prompts.pop(id, None)
        self._stops.pop(id, None)

    def _prompt_of(self, request: Request) -> Prompt:
        ids = request.prompt_ids
        passes = self._passes(len(ids)) if self.invariant else None
        return Prompt.of(ids, self.store.pool.block, passes)

    def _passes(self, length: int) -> Passes:
        """Return the passes that read a prompt of some length."""
        passes, begin = [], 0
        while begin < length:
            passes.append((begin, self.reader.shapes.width(length - begin)))
            begin += passes[-1][1]
        return tuple(passes)

    def _planned(self, request: Request) -> set[int]:
        return self._stops.setdefault(request.id, set())

    def _gains(self, prompt: Prompt, other: Reading) -> bool:
        """Tell whether a prompt had better wait for another one, and let that one stop where they part."""
        if not prompt.keys or not other.prompt.keys or prompt.keys[0] != other.prompt.keys[0]:
            return False
        store, read = self.store, other.prompt
        shared = min(prompt.common(read.tokens), len(prompt) - 1)
        point, stop = shared, None
        if self.invariant:
            assert prompt.passes is not None
            assert read.passes is not None
            both = zip(prompt.passes, read.passes, strict=False)
            ends = [sum(one) for one, two in both if one == two and sum(one) <= shared]
            point = max(ends, default=0)
        elif other.last_reach - shared > store.slack:
            point = stop = shared // store.pool.block * store.pool.block
        hit = store.find(prompt)
        if point <= other.position or point - (hit.length if hit else 0) < store.least_tokens:
            return False
        if stop is not None:
            other.stops.add(stop)
        return True

    # --- when it is given --------------------------------------------------------------------------------

    def begin(self, slots: Slots, new: Mapping[int, Request]) -> None:
        """Copy what is stored of new rows' prompts, and let the rest be read."""
        for place, request in new.items():
            row = slots.rows[place]
            assert row is not None
            prompt = self._prompts.pop(request.id, None) or self._prompt_of(request)
            hit, shared = self.store.look_up(prompt)
            state = hit and self.store.restore(slots.state, place, hit)
            if hit and state is not None:
                slots.state, row.cached_tokens = state, hit.length
            begun = Reading(
                prompt,
                row,
                position=row.cached_tokens,
                reach=hit.entry.reach if hit and state is not None else 0,
                stops=self._stops.pop(request.id, set()),
                version=self.store.version,
            )
            if self._is_worth_a_stop(begun, shared):
                begun.stops.add(shared)
            self._rows[place] = begun
            self.reader.start({place: request.prompt_ids}, row.cached_tokens, begun.stops)

    def _is_worth_a_stop(self, begun: Reading, shared: int) -> bool:
        """Tell whether to make an entry where a prompt parts from earlier ones, before any of it is read."""
        is_far = (
            begun.last_reach - shared > self.store.slack
        )  # else the entry at its end serves, too
        new = shared - begun.position
        return not self.invariant and is_far and new >= self.store.least_tokens

    # --- when it is read ---------------------------------------------------------------------------------

    def keep(self, slots: Slots) -> None:
        """Store what rows hold after the pass that the device has just done."""
        for place, end in self.reader.taken.items():
            reading = self._rows.get(place)
            if reading is None:
                continue
            is_over = end == len(reading.prompt)
            if slots.rows[place] is not reading.row:  # it was cancelled
                is_over = True
            elif slots.is_spoilt(place):
                self.store.forget(reading.made)
            elif reading.version == self.store.version:
                self._keep(slots, place, reading, end)
            if is_over:
                del self._rows[place]

    def _keep(self, slots: Slots, place: int, reading: Reading, end: int) -> None:
        reading.position, reading.reach = end, max(reading.reach, end)
        prompt, is_end = reading.prompt, end == len(reading.prompt)
        is_spare = not is_end and end not in reading.stops
        if self.invariant:
            if is_end:
                return  # no other prompt has a pass that ends here
            assert prompt.passes is not None
            is_spare = end < sum(prompt.passes[-2])  # the last one before the end is as good as it
        elif is_spare and reading.last_reach - end <= self.store.slack:
            return  # the entry at the prompt's end serves, too
        made = self.store.keep(
            slots.state, place, prompt, end, reach=reading.reach, is_spare=is_spare
        )
        if made is not None:
            reading.made.append(made)
