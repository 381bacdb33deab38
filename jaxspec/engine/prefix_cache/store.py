"""The store of prefixes: lookup, storage and eviction.

This module knows no arrays. A `pool.Pool` copies them. Read `Store.find`, then `Store.keep`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxspec.engine.prefix_cache.entries import Block, Entry, Hit, PrefixStats, Prompt, ids_of

MIN_TOKENS = 256
"""Fewer tokens are not worth a copy: a GPU prefills them in the time of reading its weights once."""
MAX_SEEN = 1 << 16
"""Remembered blocks of prompts, to find where two prompts part. They take 100 bytes each."""


@runtime_checkable
class Copies(Protocol):
    """The part of a `pool.Pool` that a store needs. Bytes are those of one device."""

    block: int
    num_blocks: int
    num_snapshots: int
    block_bytes: int
    snapshot_bytes: int
    slack: int | None

    def keep(self, state: Any, row: int, blocks: Sequence[tuple[int, int]], snapshot: int) -> None:
        """Copy numbered blocks of a row to their indices, and its snapshot."""
        ...

    def restore(
        self,
        state: Any,
        row: int,
        indices: Sequence[int],
        snapshot: int,
        tokens: np.ndarray,
    ) -> Any:
        """Copy the first blocks of an entry and its snapshot into a row."""
        ...

    def lift(self, kind: str, index: int) -> Any:
        """Return a copy of a block or a snapshot in host memory."""
        ...

    def lower(self, kind: str, index: int, copy: Any) -> None:
        """Put such a copy into the pool."""
        ...

    def warm_up(self, state: Any, *, with_host: bool) -> Any:
        """Compile all programs."""
        ...

    def drop(self) -> None:
        """Give back all arrays."""
        ...


@dataclass
class Store:
    """The stored prefixes of one engine.

    Args:
      host_bytes: of host memory for entries that leave the device; 0 for none.
      min_tokens: least length of a stored entry.

    Attributes:
      version: another number after each `clear`.
    """

    pool: Copies
    host_bytes: int = 0
    min_tokens: int = field(default_factory=lambda: MIN_TOKENS)
    version: int = 0
    counts: PrefixStats = field(default_factory=PrefixStats)

    def __post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._device: OrderedDict[Entry, None] = OrderedDict()  # least recently used first
        self._host: OrderedDict[Entry, None] = OrderedDict()
        self._blocks: dict[int, Block] = {}
        self._at: dict[int, dict[Entry, None]] = {}  # entries for prompts with that key
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._free_blocks = list(range(self.pool.num_blocks))[::-1]
        self._free_snapshots = list(range(self.pool.num_snapshots))[::-1]
        self._host_used = 0

    @property
    def slack(self) -> float:
        """Positions below an entry's reach at which a row may go on."""
        return math.inf if self.pool.slack is None else self.pool.slack

    @property
    def stats(self) -> PrefixStats:
        """Its counts and contents."""
        pool, now = self.pool, PrefixStats(**vars(self.counts))
        blocks = pool.num_blocks - len(self._free_blocks)
        snapshots = pool.num_snapshots - len(self._free_snapshots)
        now.entries, now.host_entries = len(self._device), len(self._host)
        now.used_bytes = blocks * pool.block_bytes + snapshots * pool.snapshot_bytes
        now.host_bytes = self._host_used
        now.pool_bytes = (
            pool.num_blocks * pool.block_bytes + pool.num_snapshots * pool.snapshot_bytes
        )
        return now

    def clear(self, *, drop_arrays: bool = False) -> None:
        """Forget all entries.

        Args:
          drop_arrays: whether to free their memory too; it is allocated again when it is needed.
        """
        self.version += 1
        self._forget()
        if drop_arrays:
            self.pool.drop()

    def warm_up(self, state: Any) -> Any:
        """Compile all programs, and forget all entries."""
        self.clear()
        return self.pool.warm_up(state, with_host=self.host_bytes > 0)

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
          The entry for it, and the number of its tokens, in whole blocks, that an earlier prompt
          had too.
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
        return hit, min(shared, (len(prompt) - 1) // self.pool.block) * self.pool.block

    def restore(self, state: Any, row: int, hit: Hit) -> Any:
        """Copy an entry into a row; return None if the device has no space for it."""
        entry = hit.entry
        entry.is_spare = False
        if entry.index is None:
            if not self._bring_back(entry):
                return None
            self.counts.host_hits += 1
        self._device.move_to_end(entry)
        self.counts.hits += 1
        self.counts.hit_tokens += hit.length
        count = -(-hit.length // self.pool.block)
        indices = [_index_of(block) for block in entry.blocks[:count]]
        assert entry.index is not None
        return self.pool.restore(
            state, row, indices, entry.index, ids_of(entry.tokens[: hit.length])
        )

    # --- storing -----------------------------------------------------------------------------------------

    def keep(
        self,
        state: Any,
        row: int,
        prompt: Prompt,
        length: int,
        *,
        reach: int | None = None,
        is_spare: bool,
    ) -> Entry | None:
        """Store a row after the first tokens of its prompt, unless it is stored or there is no space.

        Args:
          reach: positions that were ever written into the row's rings. None: as many as `length`.
          is_spare: whether a pass ended there by chance. Such an entry evicts only its like.
        """
        if length < max(self.min_tokens, self.pool.block):
            return None
        reach = length if reach is None else reach
        assert reach >= length
        passes = prompt.passes
        if passes is not None:
            passes = tuple(p for p in passes if sum(p) <= length)
        keys = prompt.keys[: length // self.pool.block]
        for entry in self._at.get(keys[-1], ()):
            known = len(entry) == length and entry.passes == passes
            if known and prompt.common(entry.tokens) == length:
                if reach < entry.reach:  # this one serves more prompts
                    self.forget([entry])
                    break
                entry.is_spare &= is_spare
                (self._host if entry.index is None else self._device).move_to_end(entry)
                return entry
        partial = [None] if length % self.pool.block else []
        blocks = [
            (self._blocks.get(key) if key is not None else None) or Block(key)
            for key in (*keys, *partial)
        ]
        entry = Entry(prompt.tokens[:length].copy(), keys, passes, blocks, reach, is_spare)
        if (new := self._allocate(entry)) is None:
            return None
        assert entry.index is not None
        self.pool.keep(state, row, [(n, _index_of(blocks[n])) for n in new], entry.index)
        for level in self._levels(entry):
            self._at.setdefault(keys[level - 1], {})[entry] = None
        return entry

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drop entries, such as those of a row whose numbers are not finite."""
        for entry in entries:
            if entry in self._device:
                self._leave_device(entry)
                self._drop(entry)
            elif entry in self._host:
                self._leave_host(entry)
                self._drop(entry)

    def _levels(self, entry: Entry) -> Iterator[int]:
        """Yield the numbers of blocks after which a prompt may part from an entry and still use it."""
        least = max(0, entry.reach - self.slack)
        yield from range(max(1, int(least) // self.pool.block), len(entry.keys) + 1)

    def _allocate(self, entry: Entry) -> list[int] | None:
        """Allocate an entry in the pool, evicting others; return which of its blocks are new there."""
        for block in entry.blocks:
            block.users += 1  # so that none of them is evicted
        new = [n for n, block in enumerate(entry.blocks) if block.index is None]
        while len(self._free_blocks) < len(new) or not self._free_snapshots:
            victims = (e for e in self._device if e.is_spare)
            if (victim := next(victims, None)) is None and not entry.is_spare:
                victim = next(iter(self._device), None)
            if victim is None:
                self._release(entry.blocks)
                return None
            self._evict(victim)
        for n in new:
            entry.blocks[n].index = self._free_blocks.pop()
        entry.index = self._free_snapshots.pop()
        self._device[entry] = None
        self._blocks |= {block.key: block for block in entry.blocks if block.key is not None}
        return new

    # --- leaving -----------------------------------------------------------------------------------------

    def _evict(self, entry: Entry) -> None:
        """Take an entry off the device, into host memory if it is worth that and there is space."""
        self.counts.evictions += 1
        is_moved = not entry.is_spare and self._move_to_host(entry)
        self._leave_device(entry)
        if not is_moved:
            self._drop(entry)

    def _move_to_host(self, entry: Entry) -> bool:
        pool, new = self.pool, [b for b in entry.blocks if b.host is None]
        if pool.snapshot_bytes + pool.block_bytes * len(entry.blocks) > self.host_bytes:
            return False
        for block in entry.blocks:
            block.host_users += 1  # so that none of them leaves
        needed = pool.snapshot_bytes + pool.block_bytes * len(new)
        while self._host_used + needed > self.host_bytes:
            oldest = next(iter(self._host))
            self._leave_host(oldest)
            self._drop(oldest)
        for block in new:
            block.host = pool.lift("block", _index_of(block))
        assert entry.index is not None
        entry.host = pool.lift("snapshot", entry.index)
        self._host_used += needed
        self._host[entry] = None
        self.counts.offloads += 1
        return True

    def _bring_back(self, entry: Entry) -> bool:
        """Move an entry from host memory to the device."""
        blocks, snapshot = [block.host for block in entry.blocks], entry.host
        self._leave_host(entry)  # to free space there for evicted entries
        if (new := self._allocate(entry)) is None:
            self._drop(entry)
            return False
        for n in new:
            self.pool.lower("block", _index_of(entry.blocks[n]), blocks[n])
        assert entry.index is not None
        self.pool.lower("snapshot", entry.index, snapshot)
        return True

    def _leave_device(self, entry: Entry) -> None:
        assert entry.index is not None
        del self._device[entry]
        self._free_snapshots.append(entry.index)
        entry.index = None
        self._release(entry.blocks)

    def _leave_host(self, entry: Entry) -> None:
        del self._host[entry]
        entry.host = None
        self._host_used -= self.pool.snapshot_bytes
        for block in entry.blocks:
            block.host_users -= 1
            if not block.host_users:
                block.host = None
                self._host_used -= self.pool.block_bytes
                self._forget_block(block)

    def _release(self, blocks: Sequence[Block]) -> None:
        """Count one user less of each block, and free those without users."""
        for block in blocks:
            block.users -= 1
            if not block.users and block.index is not None:
                self._free_blocks.append(block.index)
                block.index = None
            self._forget_block(block)

    def _forget_block(self, block: Block) -> None:
        if not block.users and not block.host_users and block.key is not None:
            self._blocks.pop(block.key, None)

    def _drop(self, entry: Entry) -> None:
        """Remove an entry from lookup."""
        for level in self._levels(entry):
            key = entry.keys[level - 1]
            self._at[key].pop(entry, None)
            if not self._at[key]:
                del self._at[key]


def _index_of(block: Block) -> int:
    assert block.index is not None
    return block.index
