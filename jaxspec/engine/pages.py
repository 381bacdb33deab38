"""The pages of a state's caches on the host: which are free, and which row has which.

Read `PagePool.take` and `release`. Caches whose rows have the same number of slots share a table:
the full layers of target and drafter, the sliding layers of one window. A row gets all pages that
it can need when it is admitted, so that it never waits for one while it decodes.
"""

from __future__ import annotations

import numpy as np

from jaxspec.cache import NO_PAGE, HostTables, pages_for


class PagePool:
    """Pages of all rows.

    Args:
      rows: of the state.
      counts: pages of caches, `NO_PAGE` included, by the slots of a row.

    Attributes:
      tables: the pages of each row, by the slots of a row.
    """

    def __init__(self, rows: int, counts: dict[int, int]):
        self.counts = counts
        self.tables: HostTables = {
            slots: np.full((rows, pages_for(slots)), NO_PAGE, np.int32) for slots in counts
        }
        # The last one is taken first.
        self._free = {
            slots: [page for page in range(count)[::-1] if page != NO_PAGE]
            for slots, count in counts.items()
        }

    @property
    def num_free(self) -> dict[int, int]:
        """Free pages, by the slots of a row."""
        return {slots: len(free) for slots, free in self._free.items()}

    @property
    def usage(self) -> float:
        """The share of pages that rows have, of the caches that have the smallest part free."""
        return max(1 - len(free) / (self.counts[slots] - 1) for slots, free in self._free.items())

    def pages(self, positions: int) -> dict[int, int]:
        """Return the pages of a row of so many positions, by the slots of a row."""
        return {slots: pages_for(min(positions, slots)) for slots in self.counts}

    def num_fitting(self, rows: list[int]) -> int:
        """Return how many of the first rows can have pages at the same time.

        Args:
          rows: the positions of each.
        """
        left = self.num_free
        for count, positions in enumerate(rows):
            for slots, pages in self.pages(positions).items():
                left[slots] -= pages
            if min(left.values(), default=0) < 0:
                return count
        return len(rows)

    def take(self, row: int, positions: int) -> None:
        """Give a row without pages those of so many positions. `num_fitting` says whether it can."""
        for slots, count in self.pages(positions).items():
            free, table = self._free[slots], self.tables[slots]
            assert (table[row] == NO_PAGE).all(), "the row has pages"
            assert len(free) >= count, "there are too few free pages"
            table[row, :count] = [free.pop() for _ in range(count)]

    def release(self, row: int) -> None:
        """Free the pages of a row, if it has any."""
        for slots, table in self.tables.items():
            pages = table[row]
            self._free[slots] += pages[pages != NO_PAGE].tolist()
            table[row] = NO_PAGE

    def check(self) -> None:
        """Raise an error if a page is lost, or belongs to two rows."""
        for slots, count in self.counts.items():
            used = self.tables[slots][self.tables[slots] != NO_PAGE].tolist()
            pages = sorted(used + self._free[slots])
            assert pages == [page for page in range(count) if page != NO_PAGE], slots


def spread_tables(rows: int, counts: dict[int, int]) -> HostTables:
    """Return tables in which every row has all its pages, which rows may share.

    They are for timing steps whose results nobody reads.

    Args:
      rows, counts: as in `PagePool`.
    """
    tables: HostTables = {}
    for slots, count in counts.items():
        numbers = np.arange(rows * pages_for(slots), dtype=np.int32).reshape(rows, -1)
        tables[slots] = NO_PAGE + 1 + numbers % (count - 1)
    return tables
