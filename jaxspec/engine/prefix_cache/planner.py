"""Use of the prefix cache by a scheduler: hits, waiting requests, and new entries.

Read `PrefixPlanner.ready`, `begin` and `keep`: before, at and after the prefill of a row's prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.configs.gemma4_vision import Gemma4VisionConfig
from jaxspec.engine.placement import FreeSpace
from jaxspec.engine.prefix_cache.entries import Entry, Passes, Prompt, named
from jaxspec.engine.prefix_cache.store import Store
from jaxspec.engine.request import Request, num_positions
from jaxspec.engine.slots import Row, Slots
from jaxspec.runtime.prefill import PrefillPlanner


@dataclass(eq=False)
class PrefillProgress:
    """Progress of a prompt that is being prefilled, or is about to be.

    Attributes:
      row: of the prompt; None before it has one.
      position: tokens of the prompt that are prefilled.
      reach: positions that were ever written into the row's rings; more than `position` after a
        longer entry was copied into the row.
      stops: positions where a pass has to end, and an entry is made.
      version: of the store at the begin.
      made: entries of the row so far. They are dropped if its numbers turn out not to be finite.
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
        """Reach of the row when its prompt is prefilled."""
        return max(self.reach, len(self.prompt))


class PrefixPlanner:
    """Prompts of a scheduler's requests, and their stored prefixes.

    Args:
      stores: of each part of the slots.
      invariant: rows go on, and entries are made, only where passes over a prompt alone end.
      vision: of the target; None: prompts have no images.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        planner: PrefillPlanner,
        *,
        invariant: bool,
        vision: Gemma4VisionConfig | None = None,
    ):
        self.stores, self.planner, self.invariant = stores, planner, invariant
        self.vision = vision
        self._prompts: dict[Hashable, Prompt] = {}  # of waiting requests
        self._stops: dict[Hashable, set[int]] = {}  # positions where passes over them have to end
        self._progress: dict[int, PrefillProgress] = {}  # by slot

    # --- before a request has a slot ---------------------------------------------------------------------

    def store_of(self, slot: int) -> Store:
        """Return the store of the part that a slot is in."""
        return self.stores[self.planner.shapes.part(slot)]

    def ready(self, waiting: Iterable[Request], space: FreeSpace) -> list[tuple[Request, int]]:
        """Return the first requests that gain nothing by waiting, as many as have room, and the part of each.

        The others share a prefix with a prompt that is being prefilled in the part that they would go to, or is
        among these. Its passes are cut where they part.
        """
        requests = list(waiting)
        self._prompts = {
            request.id: self._prompts.get(request.id) or self._prompt_of(request)
            for request in requests
        }
        self._stops = {name: at for name, at in self._stops.items() if name in self._prompts}
        ready: list[tuple[Request, int]] = []
        others: list[list[PrefillProgress]] = [[] for _ in self.stores]
        for slot, progress in self._progress.items():
            if slot in self.planner.pending and progress.version == self.store_of(slot).version:
                others[self.planner.shapes.part(slot)].append(progress)
        for request in requests:
            prompt = self._prompts[request.id]
            if (part := space.choose(self._parts_that_know(prompt))) is None:
                break
            store, of_part = self.stores[part], others[part]
            if not any(self._gains(prompt, other, store) for other in of_part):
                ready.append((request, part))
                space.take(request, part)
                of_part.append(PrefillProgress(prompt, stops=self._planned(request)))
        return ready

    def _parts_that_know(self, prompt: Prompt) -> list[int]:
        """Return the parts whose stored prefixes save a prompt most."""
        if len(self.stores) == 1:
            return []
        hits = [store.find(prompt) for store in self.stores]
        lengths = [0 if hit is None else hit.length for hit in hits]
        best = max(lengths)
        return [part for part, length in enumerate(lengths) if length == best > 0]

    def forget(self, id: Hashable) -> None:
        """Forget a cancelled request. Its id may come again, with another prompt."""
        self._prompts.pop(id, None)
        self._stops.pop(id, None)

    def _prompt_of(self, request: Request) -> Prompt:
        ids: Sequence[int] | np.ndarray = request.prompt_ids
        if request.images:
            assert self.vision is not None
            places = request.image_spans(self.vision.image_token_id)
            spans = zip(places, request.images, strict=True)
            ids = named(ids, [(*span, image.digest) for span, image in spans])
            if self.invariant:
                ids = ()  # passes over it are not those that its length gives
        passes = self._passes(len(ids)) if self.invariant else None
        return Prompt.of(ids, self.stores[0].page, passes)

    def _passes(self, length: int) -> Passes:
        """Return the passes over a prompt of some length."""
        passes, begin = [], 0
        while begin < length:
            passes.append((begin, self.planner.shapes.width(length - begin)))
            begin += passes[-1][1]
        return tuple(passes)

    def _planned(self, request: Request) -> set[int]:
        return self._stops.setdefault(request.id, set())

    def _gains(self, prompt: Prompt, other: PrefillProgress, store: Store) -> bool:
        """Return whether a prompt gains by waiting for another one, and cut that one's passes where they part."""
        if not prompt.keys or not other.prompt.keys or prompt.keys[0] != other.prompt.keys[0]:
            return False
        first = other.prompt
        shared = min(prompt.common(first.tokens), len(prompt) - 1)
        point, stop = shared, None
        if self.invariant:
            assert prompt.passes is not None
            assert first.passes is not None
            both = zip(prompt.passes, first.passes, strict=False)
            ends = [sum(one) for one, two in both if one == two and sum(one) <= shared]
            point = max(ends, default=0)
        elif other.last_reach - shared > store.slack:
            point = stop = shared // store.page * store.page
        hit = store.find(prompt)
        if point <= other.position or point - (hit.length if hit else 0) < store.min_tokens:
            return False
        if stop is not None:
            other.stops.add(stop)
        return True

    # --- when it gets one --------------------------------------------------------------------------------

    def begin(self, slots: Slots, new: Mapping[int, Request]) -> None:
        """Give new rows their pages, of stored prefixes where they can, and plan the prefill of the rest."""
        for slot, request in new.items():
            row = slots.rows[slot]
            assert row is not None
            images = slots.images_of(request)
            positions = slots.first_positions(request)
            limit = num_positions(slots.runtime.spec, request)
            store, number = self.store_of(slot), slots.part(slot).row(slot)
            if images and self.invariant:
                store.enter(number, positions, None, limit)
                self.planner.add({slot: request.prompt_ids}, images=images)
                continue
            prompt = self._prompts.pop(request.id, None) or self._prompt_of(request)
            hit, shared = store.look_up(prompt)
            row.cached_tokens = store.enter(number, positions, hit, limit)
            progress = PrefillProgress(
                prompt,
                row,
                position=row.cached_tokens,
                reach=hit.entry.reach if hit and row.cached_tokens else 0,
                stops=self._stops.pop(request.id, set()),
                version=store.version,
            )
            if self._is_worth_a_stop(progress, shared, store):
                progress.stops.add(shared)
            self._progress[slot] = progress
            self.planner.add({slot: request.prompt_ids}, row.cached_tokens, progress.stops, images)

    def _is_worth_a_stop(self, progress: PrefillProgress, shared: int, store: Store) -> bool:
        """Return whether to make an entry where a prompt parts from earlier ones."""
        is_far = progress.last_reach - shared > store.slack  # else the entry at its end serves, too
        new = shared - progress.position
        return not self.invariant and is_far and new >= store.min_tokens

    # --- after each pass ---------------------------------------------------------------------------------

    def keep(self, slots: Slots) -> None:
        """Store rows after the newest pass."""
        for slot in self.planner.last_ends:
            if (made := self._progress.get(slot)) and slots.is_non_finite(slot):
                self.store_of(slot).forget(made.made)  # before any of them moves to host memory
        for slot, end in self.planner.last_ends.items():
            progress = self._progress.get(slot)
            if progress is None:
                continue
            is_over = end == len(progress.prompt)
            if slots.rows[slot] is not progress.row:  # it was cancelled
                is_over = True
            elif not slots.is_non_finite(slot) and progress.version == self.store_of(slot).version:
                self._keep(slots.part(slot).row(slot), progress, end, self.store_of(slot))
            if is_over:
                del self._progress[slot]

    def _keep(self, row: int, progress: PrefillProgress, end: int, store: Store) -> None:
        progress.position, progress.reach = end, max(progress.reach, end)
        prompt, is_end = progress.prompt, end == len(progress.prompt)
        is_spare = not is_end and end not in progress.stops
        if self.invariant:
            if is_end:
                return  # no other prompt has a pass that ends here
            assert prompt.passes is not None
            is_spare = end < sum(prompt.passes[-2])  # the last one before the end is as good as it
        elif is_spare and progress.last_reach - end <= store.slack:
            return  # the entry at the prompt's end serves, too
        made = store.keep(row, prompt, end, reach=progress.reach, is_spare=is_spare)
        if made is not None:
            progress.made.append(made)
