"""What a store of prefixes is made of: prompts, blocks and entries, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Passes = tuple[tuple[int, int], ...]
"""The start and the width of each pass over a prompt."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """The tokens of a prompt, and what their beginnings are found by.

    Attributes:
      keys: of the first block, of the first two, and so on; the last tokens may be in none.
      passes: that read it, where entries have to come of the same ones; None where they may come of any.
    """

    tokens: np.ndarray
    keys: tuple[int, ...]
    passes: Passes | None = None

    @classmethod
    def of(cls, ids: Sequence[int], block: int, passes: Passes | None = None) -> Prompt:
        """Hash a prompt, block by block."""
        tokens = np.asarray(ids, np.int32)
        keys, key = [], 0
        for end in range(block, len(tokens) + 1, block):
            mine = [p for p in passes or () if p[0] < end and sum(p) > end - block]
            key = hash((key, tokens[end - block : end].tobytes(), *mine))
            keys.append(key)
        return cls(tokens, tuple(keys), passes)

    def __len__(self) -> int:
        return len(self.tokens)

    def common(self, other: np.ndarray) -> int:
        """Return how many tokens it has in common with others, from the first one on."""
        most = min(len(self.tokens), len(other))
        differ = np.flatnonzero(self.tokens[:most] != other[:most])
        return int(differ[0]) if differ.size else most


@dataclass(eq=False)
class Block:
    """The K/V of some tokens in all full layers.

    Attributes:
      key: of the tokens up to its last; None where it is not full, so that one entry alone has it.
      place: in the pool; None where no entry there uses it.
      host: its copy in host memory, likewise.
      users, host_users: entries that use either.
    """

    key: int | None
    place: int | None = None
    host: Any = None
    users: int = 0
    host_users: int = 0


@dataclass(eq=False)
class Entry:
    """What a row holds after some tokens.

    Attributes:
      reach: positions that were ever written into the snapshot's rings. A row that was restored from a longer entry
        still has that entry's positions there, so its own entry may be shortened by less than one of the same
        length that was read from the start.
      is_spare: nobody used it yet, and it is where a pass ended by chance.
      place: of its snapshot in the pool; None where the entry is in host memory.
      host: the snapshot there.
    """

    tokens: np.ndarray
    keys: tuple[int, ...]
    passes: Passes | None
    blocks: list[Block]
    reach: int
    is_spare: bool
    place: int | None = None
    host: Any = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Hit:
    """An entry, and how many of its tokens a prompt has."""

    entry: Entry
    length: int


@dataclass
class PrefixStats:
    """What a store did since it was made, and what it holds now.

    Attributes:
      queries, hits: prompts that were looked up, and those of which a beginning was there.
      query_tokens, hit_tokens: of all prompts, and those that were not read again.
      host_hits: hits that had to come from host memory.
      evictions: entries that had to leave the device; moves to host memory are among them.
      entries, host_entries: held now.
      used_bytes, host_bytes: of these.
      pool_bytes: allocated on each device, once used.
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
