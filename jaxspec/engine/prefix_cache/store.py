"""The store of prefixes: lookup, storage and eviction.

This module knows no arrays. `copies.Copies` copies what has to be copied. Read `Store.find`,
`Store.enter` and `Store.keep`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxspec import cache
from jaxspec.engine.pages import (
    Numbers,
    PagePool,
    sharing_of_entering,
    sharing_of_keeping,
)
from jaxspec.engine.prefix_cache.entries import Entry, Hit, Page, PrefixStats, Prompt, ids_of

MIN_TOKENS = 256
"""Fewer tokens are not worth an entry: a GPU prefills them in the time of reading its weights once."""
MAX_SEEN = 1 << 16
"""Remembered pages of prompts, to find where two prompts part. They take 100 bytes each."""


@runtime_checkable
class PagedRows(Protocol):
    """The part of `slots.SlotsPart` that a store needs. `Copies` take all of it."""

    @property
    def pages(self) -> PagePool | None: ...


@runtime_checkable
class Copies(Protocol):
    """The part of `copies.DeviceCopies` that a store needs. Bytes are those of one device."""

    rings: frozenset[int]
    num_snapshots: int
    page_bytes: dict[int, int]
    snapshot_bytes: int
    slack: int | None

    def copy_pages(self, rows: Any, pairs: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Copy pages to others of the same caches."""
        ...

    def keep(self, rows: Any, row: int, snapshot: int) -> None:
        """Copy what a row has beside pages to a snapshot."""
        ...

    def restore(self, rows: Any, row: int, snapshot: int, tokens: np.ndarray) -> None:
        """Copy a snapshot into a row that goes on behind these tokens."""
        ...

    def lift(self, rows: Any, slots: int, page: int) -> Any:
        """Return a copy of a page in host memory."""
        ...

    def lower(self, rows: Any, slots: int, page: int, copy: Any) -> None:
        """Put such a copy into a page."""
        ...

    def lift_snapshot(self, rows: Any, index: int) -> Any:
        """Return a copy of a snapshot in host memory."""
        ...

    def lower_snapshot(self, rows: Any, index: int, copy: Any) -> None:
        """Put such a copy into a snapshot."""
        ...

    def warm_up(self, rows: Any, *, with_host: bool) -> None:
        """Compile all programs."""
        ...

    def drop(self) -> None:
        """Give back all arrays."""
        ...


@dataclass
class Store:
    """The stored prefixes of one engine, or of one part of its slots on a mesh that splits them.

    Args:
      host_bytes: of host memory for entries that leave the device; 0 for none.
      min_tokens: least length of a stored entry.
      pool_bytes: of each device, that are there for prefixes alone.

    Attributes:
      page: tokens of a page.
      version: another number after each `clear`.
    """

    copies: Copies
    host_bytes: int = 0
    min_tokens: int = field(default_factory=lambda: MIN_TOKENS)
    pool_bytes: int = 0
    version: int = 0
    counts: PrefixStats = field(default_factory=PrefixStats)

    def __post_init__(self) -> None:
        self.page = cache.PAGE
        self._rows: PagedRows | None = None
        self._forget()

    def _forget(self) -> None:
        self._device: OrderedDict[Entry, None] = OrderedDict()  # least recently used first
        self._host: OrderedDict[Entry, None] = OrderedDict()
        self._on_device: dict[tuple[int, int], Page] = {}  # by the slots of a row and their numbers
        self._by_key: dict[tuple[int, int], Page] = {}  # by the slots of a row
        self._at: dict[int, dict[Entry, None]] = {}  # entries for prompts with that key
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._free_snapshots = list(range(self.copies.num_snapshots))[::-1]
        self._host_used = 0

    @property
    def slack(self) -> float:
        """Positions below an entry's reach at which a row may go on."""
        return math.inf if self.copies.slack is None else self.copies.slack

    @property
    def stats(self) -> PrefixStats:
        """Its counts and contents."""
        now = PrefixStats(**vars(self.counts))
        now.entries, now.host_entries = len(self._device), len(self._host)
        now.used_bytes = len(self._device) * self.copies.snapshot_bytes + self._bytes_of(
            self._on_device.values()
        )
        now.host_bytes, now.pool_bytes = self._host_used, self.pool_bytes
        return now

    @property
    def rows(self) -> PagedRows:
        """The rows whose pages it shares."""
        assert self._rows is not None, "no rows were attached"
        return self._rows

    @property
    def pages(self) -> PagePool:
        """The pages of the rows."""
        assert self.rows.pages is not None
        return self.rows.pages

    @property
    def holders(self) -> dict[tuple[int, int], int]:
        """Counts of the pages that it holds, as `PagePool.check` takes them."""
        return dict.fromkeys(self._on_device, 1)

    def attach(self, rows: PagedRows) -> None:
        """Share the pages of these rows, and forget all entries in those of others."""
        if rows != self._rows:
            self.version += 1
            self._forget()
            self._rows = rows

    def clear(self, *, drop_arrays: bool = False) -> None:
        """Forget all entries.

        Args:
          drop_arrays: whether the snapshots may be lost.
        """
        self.version += 1
        for slots, number in self._on_device:
            self.pages.drop(slots, number)
        self._forget()
        if drop_arrays:
            self.copies.drop()

    def warm_up(self) -> None:
        """Compile all programs. There must be no entries: pages are written to."""
        assert not self._on_device
        self.copies.warm_up(self.rows, with_host=self.host_bytes > 0)

    # --- looking up --------------------------------------------------------------------------------------

    def find(self, prompt: Prompt) -> Hit | None:
        """Return the entry that saves a prompt most. At least its last token is left to prefill."""
        for key in reversed(prompt.keys):
            hits = [Hit(entry, self._usable(entry, prompt)) for entry in self._at.get(key, ())]
            if (best := max(hits, key=lambda hit: hit.length, default=None)) and best.length:
                return best
        return None

    def _usable(self, entry: Entry, prompt: Prompt) -> int:
        """Return the tokens of a prompt that an entry saves, or 0."""
        length = min(prompt.common(entry.tokens), len(prompt) - 1)
        if entry.reach - length > self.slack:
            return 0
        if entry.passes is not None:
            of_prompt = (prompt.passes or ())[: len(entry.passes)]
            return length if entry.passes == of_prompt and length == len(entry) else 0
        return length

    def look_up(self, prompt: Prompt) -> tuple[Hit | None, int]:
        """Count a prompt that is about to be prefilled, and remember it.

        Returns:
          The entry for it, and the number of its tokens, in whole pages, that an earlier prompt had
          too.
        """
        shared = 0
        for shared, key in enumerate((*prompt.keys, None)):  # noqa: B007
            if key not in self._seen:
                break
        for key in prompt.keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        hit = self.find(prompt)
        self.counts.queries += 1
        self.counts.query_tokens += len(prompt)
        return hit, min(shared, (len(prompt) - 1) // self.page) * self.page

    def enter(self, row: int, positions: int, hit: Hit | None, end: int | None = None) -> int:
        """Give a row its pages, and return how many tokens of its prompt they hold.

        The row shares the pages of an entry to which it writes nothing, and gets a copy of others.
        `PagePool.num_fitting` has said that it can have as many.

        Args:
          positions: for which the row needs pages.
          hit: the entry for it; None if there is none.
          end: positions that it may need in the end; None: no more.
        """
        if hit is not None and self._enter(row, positions, hit, positions if end is None else end):
            self.counts.hits += 1
            self.counts.hit_tokens += hit.length
            return hit.length
        has_room = self.make_room(self.pages.pages(positions))
        assert has_room, "a row was admitted that has no room"
        self.pages.take(row, positions, end=end)
        return 0

    def _enter(self, row: int, positions: int, hit: Hit, end: int) -> bool:
        """Give a row its pages, those of an entry among them; return whether there is room for that."""
        entry, pages = hit.entry, self.pages
        entry.is_spare = False
        if entry.index is None:
            if not self._bring_back(entry):
                return False
            self.counts.host_hits += 1
        self._device.move_to_end(entry)
        counts = {slots: len(of) for slots, of in entry.pages.items()}
        sharing = sharing_of_entering(counts, hit.length, end)
        needed = {
            slots: count - len(sharing.shared[slots])
            for slots, count in pages.pages(positions).items()
        }
        if not self.make_room(needed, keep=entry):
            return False
        numbers = {slots: [_number_of(page) for page in of] for slots, of in entry.pages.items()}
        shared = {
            slots: {place: numbers[slots][place] for place in places}
            for slots, places in sharing.shared.items()
        }
        pages.take(row, positions, shared, end=end)
        own = pages.of_row(row)
        pairs = {
            slots: [(numbers[slots][place], own[slots][place]) for place in places]
            for slots, places in sharing.copied.items()
        }
        self.copies.copy_pages(self.rows, pairs)
        assert entry.index is not None
        tokens = ids_of(entry.tokens[: hit.length])
        self.copies.restore(self.rows, row, entry.index, tokens)
        return True

    # --- storing -----------------------------------------------------------------------------------------

    def keep(
        self,
        row: int,
        prompt: Prompt,
        length: int,
        *,
        reach: int | None = None,
        is_spare: bool,
    ) -> Entry | None:
        """Store a row after the first tokens of its prompt, unless it is stored or there is no room.

        Args:
          reach: positions that were ever written into the row's rings. None: as many as `length`.
          is_spare: whether a pass ended there by chance. Such an entry evicts only its like.
        """
        if length < max(self.min_tokens, self.page):
            return None
        reach = length if reach is None else reach
        assert reach >= length
        passes = prompt.passes
        if passes is not None:
            passes = tuple(p for p in passes if sum(p) <= length)
        keys = prompt.keys[: length // self.page]
        for entry in self._at.get(keys[-1], ()):
            known = len(entry) == length and entry.passes == passes
            if known and prompt.common(entry.tokens) == length:
                if reach < entry.reach:  # this one serves more prompts
                    self.forget([entry])
                    break
                entry.is_spare &= is_spare
                (self._host if entry.index is None else self._device).move_to_end(entry)
                return entry
        pages, copied = self._pages_of_row(row, keys, length)
        entry = Entry(prompt.tokens[:length].copy(), keys, passes, pages, reach, is_spare)
        if not self._allocate(entry):
            return None
        assert entry.index is not None
        pairs = {
            slots: [(number, _number_of(page)) for number, page in of]
            for slots, of in copied.items()
        }
        self.copies.copy_pages(self.rows, pairs)
        self.copies.keep(self.rows, row, entry.index)
        for level in self._levels(entry):
            self._at.setdefault(keys[level - 1], {})[entry] = None
        return entry

    def _pages_of_row(
        self, row: int, keys: Sequence[int], length: int
    ) -> tuple[dict[int, list[Page]], dict[int, list[tuple[int, Page]]]]:
        """Return the pages of an entry of a row, and those that are copies, with the numbers of the row's.

        A page that another entry has for the same tokens is taken instead of the row's own.
        """
        rings, own = self.copies.rings, self.pages.of_row(row)
        counts = {slots: len(numbers) for slots, numbers in own.items()}
        sharing = sharing_of_keeping(counts, length, int(self.pages.ends[row]))
        pages: dict[int, list[Page]] = {}
        copied: dict[int, list[tuple[int, Page]]] = {}
        for slots, numbers in own.items():
            copied[slots] = [(numbers[place], Page(slots)) for place in sharing.copied[slots]]
            by_place = dict(zip(sharing.copied[slots], copied[slots], strict=True))
            of_keys = () if slots in rings else keys
            pages[slots] = []
            for place in range(len(sharing.shared[slots]) + len(copied[slots])):
                if place in by_place:
                    pages[slots].append(by_place[place][1])
                    continue
                key, number = of_keys[place] if place < len(of_keys) else None, numbers[place]
                pages[slots].append(self._page_of(slots, number, key))
        return pages, copied

    def _page_of(self, slots: int, number: int, key: int | None) -> Page:
        """Return the page of a row, or another one on the device that has the same tokens."""
        known = None if key is None else self._by_key.get((slots, key))
        if known is not None and known.number is not None:
            return known
        page = self._on_device.get((slots, number)) or known or Page(slots, key)
        page.number = number
        return page

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drop entries, such as those of a row whose numbers are not finite."""
        for entry in entries:
            if entry in self._device:
                self._leave_device(entry)
                self._drop(entry)
            elif entry in self._host:
                self._leave_host(entry)
                self._drop(entry)

    def forget_pages(self, numbers: Numbers) -> None:
        """Drop all entries on the device that have one of these pages."""
        spoiled = {
            self._on_device.get((slots, number)) for slots, of in numbers.items() for number in of
        }
        self.forget([e for e in self._device if any(page in spoiled for page in e.all_pages)])

    def _levels(self, entry: Entry) -> Iterator[int]:
        """Yield the numbers of pages after which a prompt may part from an entry and still use it."""
        least = max(0, entry.reach - self.slack)
        yield from range(max(1, int(least) // self.page), len(entry.keys) + 1)

    def _allocate(self, entry: Entry) -> bool:
        """Give an entry its pages and a snapshot, evicting others; return whether there is room."""
        needed = dict.fromkeys(entry.pages, 0)
        for page in entry.all_pages:
            self._use(page)  # so that none of them is evicted
            needed[page.slots] += page.number is None
        if not self.make_room(needed, snapshots=1, spare_alone=entry.is_spare):
            self._release(entry.all_pages)
            return False
        for page in entry.all_pages:
            if page.number is None:
                page.number = self.pages.allocate(page.slots)
                self._on_device[page.slots, page.number] = page
        entry.index = self._free_snapshots.pop()
        self._device[entry] = None
        return True

    def make_room(
        self,
        needed: Mapping[int, int],
        *,
        snapshots: int = 0,
        keep: Entry | None = None,
        spare_alone: bool = False,
    ) -> bool:
        """Evict entries until so many pages are free, by the slots of a row; return whether they are.

        Args:
          snapshots: that have to be free too.
          keep: an entry that stays.
          spare_alone: whether only spare entries are evicted.
        """
        pages = self.pages
        left = pages.num_without_rows
        for page in [] if keep is None else keep.all_pages:
            left[page.slots] -= not pages.has_rows(page.slots, _number_of(page))
        if any(left[slots] < count for slots, count in needed.items()):
            return False
        while len(self._free_snapshots) < snapshots or any(
            free < needed.get(slots, 0) for slots, free in pages.num_free.items()
        ):
            others = [entry for entry in self._device if entry is not keep]
            victim = next((entry for entry in others if entry.is_spare), None)
            if victim is None and not spare_alone:
                victim = next(iter(others), None)
            if victim is None:
                return False
            self._evict(victim)
        return True

    # --- leaving -----------------------------------------------------------------------------------------

    def _evict(self, entry: Entry) -> None:
        """Take an entry off the device, into host memory if it is worth that and there is space."""
        self.counts.evictions += 1
        is_moved = not entry.is_spare and self._move_to_host(entry)
        self._leave_device(entry)
        if not is_moved:
            self._drop(entry)

    def _bytes_of(self, pages: Iterable[Page]) -> int:
        return sum(self.copies.page_bytes[page.slots] for page in pages)

    def _move_to_host(self, entry: Entry) -> bool:
        copies, new = self.copies, [page for page in entry.all_pages if page.host is None]
        if copies.snapshot_bytes + self._bytes_of(entry.all_pages) > self.host_bytes:
            return False
        for page in entry.all_pages:
            page.host_users += 1  # so that none of them leaves
        needed = copies.snapshot_bytes + self._bytes_of(new)
        while self._host_used + needed > self.host_bytes:
            oldest = next(iter(self._host))
            self._leave_host(oldest)
            self._drop(oldest)
        for page in new:
            page.host = copies.lift(self.rows, page.slots, _number_of(page))
        assert entry.index is not None
        entry.host = copies.lift_snapshot(self.rows, entry.index)
        self._host_used += needed
        self._host[entry] = None
        self.counts.offloads += 1
        return True

    def _bring_back(self, entry: Entry) -> bool:
        """Move an entry from host memory to the device."""
        copies = {page: page.host for page in entry.all_pages if page.number is None}
        snapshot = entry.host
        self._leave_host(entry)  # to free space there for evicted entries
        if not self._allocate(entry):
            self._drop(entry)
            return False
        for page, copy in copies.items():
            self.copies.lower(self.rows, page.slots, _number_of(page), copy)
        assert entry.index is not None
        self.copies.lower_snapshot(self.rows, entry.index, snapshot)
        return True

    def _leave_device(self, entry: Entry) -> None:
        assert entry.index is not None
        del self._device[entry]
        self._free_snapshots.append(entry.index)
        entry.index = None
        self._release(entry.all_pages)

    def _leave_host(self, entry: Entry) -> None:
        del self._host[entry]
        entry.host = None
        self._host_used -= self.copies.snapshot_bytes
        for page in entry.all_pages:
            page.host_users -= 1
            if not page.host_users:
                page.host = None
                self._host_used -= self.copies.page_bytes[page.slots]
                self._forget_page(page)

    def _use(self, page: Page) -> None:
        """Count one user more of a page."""
        page.users += 1
        if page.key is not None:
            self._by_key[page.slots, page.key] = page
        if page.number is not None and (at := (page.slots, page.number)) not in self._on_device:
            self._on_device[at] = page
            self.pages.hold(*at)

    def _release(self, pages: Iterable[Page]) -> None:
        """Count one user less of each page, and give back those without users."""
        for page in pages:
            page.users -= 1
            if not page.users and page.number is not None:
                del self._on_device[page.slots, page.number]
                self.pages.drop(page.slots, page.number)
                page.number = None
            self._forget_page(page)

    def _forget_page(self, page: Page) -> None:
        if page.key is None or page.users or page.host_users:
            return
        if self._by_key.get(at := (page.slots, page.key)) is page:
            del self._by_key[at]

    def _drop(self, entry: Entry) -> None:
        """Remove an entry from lookup."""
        for level in self._levels(entry):
            key = entry.keys[level - 1]
            self._at[key].pop(entry, None)
            if not self._at[key]:
                del self._at[key]


def _number_of(page: Page) -> int:
    assert page.number is not None
    return page.number
