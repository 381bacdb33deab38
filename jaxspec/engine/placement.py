"""Choose the part of the slots for a waiting request, on a mesh that splits the rows of a batch.

A row computes with the pages of its own part alone. So requests go where most pages are free, which balances
the parts, or where a stored prefix is. Read `FreeSpace.choose`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxspec.engine.request import Request
from jaxspec.engine.slots import Slots


class FreeSpace:
    """The free space of each part, while waiting requests are placed one after the other.

    Args:
      free: slots of each part that may be given away.
    """

    def __init__(self, slots: Slots, free: Sequence[Sequence[int]]):
        self.slots = slots
        self._num_slots = [len(of_part) for of_part in free]
        # A single part is chosen anyhow.
        self._pools = slots.pages.pools if slots.pages is not None and len(free) > 1 else []
        self._pages = [pool.num_without_rows for pool in self._pools]

    def choose(self, preferred: Collection[int] = ()) -> int | None:
        """Return the part with the largest share of free pages, or with most free slots; None if no slot is free.

        Args:
          preferred: parts that are taken before others if they have a free slot.
        """
        parts = [part for part, count in enumerate(self._num_slots) if count]
        parts = [part for part in parts if part in preferred] or parts
        return parts[0] if len(parts) == 1 else max(parts, key=self._share, default=None)

    def _share(self, part: int) -> tuple[float, int]:
        share = 1.0
        if self._pools:
            counts = self._pools[part].counts
            share = min(left / counts[size] for size, left in self._pages[part].items())
        return share, self._num_slots[part]

    def take(self, request: Request, part: int) -> None:
        """Count a slot of a part, and the first pages of its request, as taken."""
        self._num_slots[part] -= 1
        if self._pools:
            positions = self.slots.first_positions(request)
            for size, count in self._pools[part].pages(positions).items():
                self._pages[part][size] -= count
