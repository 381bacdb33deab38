"""Data of the prefix cache: prompts, pages, entries and counts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Passes = tuple[tuple[int, int], ...]
"""The start and the width of each pass over a prompt."""


_ID_BITS = 20


def named(ids: Sequence[int], images: Iterable[tuple[int, int, bytes]]) -> np.ndarray:
    """Return token ids, and in place of those of an image negative numbers that only this image has.

    Args:
      images: begin, end and digest of each.
    """
    names = np.asarray(ids, np.int64)
    for begin, end, digest in images:
        stream = hashlib.shake_128(digest).digest(8 * (end - begin))
        bits = np.frombuffer(stream, np.uint64) >> (_ID_BITS + 1)
        names[begin:end] = -((bits.astype(np.int64) << _ID_BITS) + names[begin:end])
    return names


def ids_of(names: np.ndarray) -> np.ndarray:
    """Return the token ids that `named` gave names."""
    return np.where(names < 0, -names % (1 << _ID_BITS), names).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Prompt:
    """The tokens of a prompt, and the keys of its prefixes.

    Attributes:
      tokens: as `named` returns them.
      keys: of the first page, of the first two, and so on; the last tokens may be in none.
      passes: over the prompt, if entries have to come from the same ones; None if from any.
    """

    tokens: np.ndarray
    keys: tuple[int, ...]
    passes: Passes | None = None

    @classmethod
    def of(cls, ids: Sequence[int] | np.ndarray, page: int, passes: Passes | None = None) -> Prompt:
        """Hash a prompt, page by page."""
        tokens = np.asarray(ids, np.int64)
        keys, key = [], 0
        for end in range(page, len(tokens) + 1, page):
            mine = [p for p in passes or () if p[0] < end and sum(p) > end - page]
            key = hash((key, tokens[end - page : end].tobytes(), *mine))
            keys.append(key)
        return cls(tokens, tuple(keys), passes)

    def __len__(self) -> int:
        return len(self.tokens)

    def common(self, other: np.ndarray) -> int:
        """Return the length of its common prefix with other tokens."""
        length = min(len(self.tokens), len(other))
        differ = np.flatnonzero(self.tokens[:length] != other[:length])
        return int(differ[0]) if differ.size else length


@dataclass(eq=False)
class Page:
    """A page of stored prefixes.

    Attributes:
      slots: of a row in the caches that it belongs to.
      key: of the tokens up to its last, if it is a full page of a cache that is no ring; else None.
      number: on the device; None if no entry there uses it.
      host: its copy in host memory, likewise.
      users, host_users: entries that use either.
    """

    slots: int
    key: int | None = None
    number: int | None = None
    host: Any = None
    users: int = 0
    host_users: int = 0


@dataclass(eq=False)
class Entry:
    """Contents of a row after some tokens.

    Attributes:
      pages: by the slots of a row, in the order of their places in a row's table.
      reach: positions that were ever written into the rings. A row that went on from a shortened
        entry still has that entry's positions there. So its own entry may be shortened by less than
        an entry of the same length that was prefilled from the start.
      is_spare: whether it is unused, and where a pass ended by chance.
      index: of its snapshot on the device; None if the entry is in host memory.
      host: the snapshot there.
    """

    tokens: np.ndarray
    keys: tuple[int, ...]
    passes: Passes | None
    pages: dict[int, list[Page]]
    reach: int
    is_spare: bool
    index: int | None = None
    host: Any = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def all_pages(self) -> list[Page]:
        """Its pages of all caches."""
        return [page for pages in self.pages.values() for page in pages]


@dataclass(frozen=True)
class Hit:
    """An entry, and the number of its tokens that a prompt has."""

    entry: Entry
    length: int


@dataclass
class PrefixStats:
    """Counts of a store since it was made, and its current contents.

    Attributes:
      queries, hits: prompts that were looked up, and those of which a prefix was there.
      query_tokens, hit_tokens: of all prompts, and those that were not prefilled.
      host_hits: hits that had to come from host memory.
      evictions: entries that had to leave the device; moves to host memory are among them.
      entries, host_entries: held now.
      used_bytes, host_bytes: of these.
      pool_bytes: of one device of each store, that are there for prefixes alone. Pages of rows serve them too.
    """

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    host_hits: int = 0
    evictions: int = 0
    offloads: int = 0
    entries: int = 0
    host_entries: int = 0
    used_bytes: int = 0
    host_bytes: int = 0
    pool_bytes: int = 0

    @classmethod
    def sum(cls, stats: Sequence[PrefixStats]) -> PrefixStats:
        """Return the sums of several stores, each on other devices."""
        return cls(**{name: sum(getattr(s, name) for s in stats) for name in vars(stats[0])})
