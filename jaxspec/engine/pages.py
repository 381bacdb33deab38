"""The pages of a state's caches on the host: which are free, and who has which.

On a mesh that splits the rows of a batch, each part of the rows has a `PagePool`, and `Pages` has all of them.
Numbers of rows and pages in a pool count those of its part. Read `PagePool.take` and `release`. Caches whose rows
have the same number of slots share a table: the full layers of target and drafter, the sliding layers of one
window. A row gets the pages of its prompt and of its first steps when it is admitted, and `grow` gives it more.

Several rows and stored prefixes may have one page. A row writes to no such page, see `Sharing`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec import cache
from jaxspec.cache import NO_PAGE, HostTables, pages_for
from jaxspec.shapes import Float, Int

Numbers = dict[int, list[int]]
"""Numbers of pages, by the slots that a row has in their caches."""
RESERVE = 50
"""One page of so many is not counted on when rows are admitted beside others."""


class Pages:
    """The pages of all rows of a state.

    Args:
      rows: of the state.
      counts: as in `PagePool`.
      parts: of the rows; each has as many as the others.

    Attributes:
      pools: of each part.
    """

    def __init__(self, rows: int, counts: dict[int, int], parts: int = 1):
        self.rows_of_part = rows // parts
        self.pools = [PagePool(self.rows_of_part, counts) for _ in range(parts)]

    def of(self, row: int) -> tuple[PagePool, int]:
        """Return the pool that a row of the state has its pages from, and the row's number there."""
        part, number = divmod(row, self.rows_of_part)
        return self.pools[part], number

    @property
    def tables(self) -> HostTables:
        """Copies of the tables of all rows."""
        return joined([pool.tables for pool in self.pools])

    @property
    def usage(self) -> float:
        """The share of pages that rows have."""
        return sum(pool.usage for pool in self.pools) / len(self.pools)

    def check(self, others: Sequence[Mapping[tuple[int, int], int]] = ()) -> None:
        """Call `PagePool.check` on each pool; `others` are of each."""
        for pool, of_others in zip(self.pools, others or ({},) * len(self.pools), strict=True):
            pool.check(of_others)


def joined(tables: Sequence[HostTables]) -> HostTables:
    """Return the tables of all rows, from those of the rows of each part."""
    return {slots: np.concatenate([of[slots] for of in tables]) for slots in tables[0]}


class PagePool:
    """Pages of the rows of a part, and of what else holds pages.

    Args:
      rows: of the part.
      counts: pages of caches, `NO_PAGE` included, by the slots of a row.

    Attributes:
      tables: the pages of each row, by the slots of a row.
      positions: for which each row has pages.
      ends: positions that each row may need in the end.
    """

    def __init__(self, rows: int, counts: dict[int, int]):
        self.counts = counts
        self.tables: HostTables = {
            slots: np.full((rows, pages_for(slots)), NO_PAGE, np.int32) for slots in counts
        }
        self.positions, self.ends = np.zeros(rows, int), np.zeros(rows, int)
        self._holders = {slots: np.zeros(count, np.int32) for slots, count in counts.items()}
        self._of_rows = {slots: np.zeros(count, np.int32) for slots, count in counts.items()}
        # The last one is taken first.
        self._free = {
            slots: [page for page in range(count)[::-1] if page != NO_PAGE]
            for slots, count in counts.items()
        }

    @property
    def num_free(self) -> dict[int, int]:
        """Pages that nobody has, by the slots of a row."""
        return {slots: len(free) for slots, free in self._free.items()}

    @property
    def num_without_rows(self) -> dict[int, int]:
        """Pages that no row has: they are free, or would be if stored prefixes left."""
        return {
            slots: self.counts[slots] - 1 - int((rows > 0).sum())
            for slots, rows in self._of_rows.items()
        }

    @property
    def usage(self) -> float:
        """The share of pages that rows have, of the caches that have the smallest part without."""
        left = self.num_without_rows
        return max(1 - left[slots] / (count - 1) for slots, count in self.counts.items())

    def pages(self, positions: int) -> dict[int, int]:
        """Return the pages of a row of so many positions, by the slots of a row."""
        return {slots: pages_for(min(positions, slots)) for slots in self.counts}

    def num_fitting(
        self,
        positions: Int[np.ndarray, "T R"],
        alive: Float[np.ndarray, "T R"] | None = None,
        running: Sequence[int] = (),
    ) -> int:
        """Return how many of the first new rows are expected to have pages until they end, if they share none.

        A few pages are left for rows that grow faster than others, or end later than expected.

        Args:
          positions: that each row needs at some times, if it is still there. Rows that have pages
            come first.
          alive: the chance that it is. None: all are.
          running: numbers of the rows that have pages.
        """
        old, num_new = len(running), positions.shape[1] - len(running)
        left, rows = self.num_without_rows, np.array(running, int)
        chance = np.ones(positions.shape) if alive is None else alive
        fits = np.ones(num_new, bool)
        for slots, table in self.tables.items():
            pages = -(-np.minimum(positions, slots) // cache.PAGE)
            has = -(-np.minimum(self.positions[rows], slots) // cache.PAGE)
            # Pages that other rows have too stay when the row ends.
            shared = (self._of_rows[slots] > 1)[table[rows]].sum(1)
            own = has - shared
            pages[:, :old] -= shared
            needed = chance * pages
            total = needed[:, :old].sum(1, keepdims=True) + needed[:, old:].cumsum(1) - own.sum()
            reserve = (self.counts[slots] - 1) // RESERVE if old else 0
            fits &= total.max(0) <= left[slots] - reserve + 1e-6
        return num_new if fits.all() else int(fits.argmin())

    def take(
        self,
        row: int,
        positions: int,
        shared: Mapping[int, Mapping[int, int]] | None = None,
        *,
        end: int | None = None,
    ) -> None:
        """Give a row without pages those of so many positions. As many as are not shared must be free.

        Args:
          shared: pages that others have, by the slots of a row and by their places in its table.
          end: positions that it may need in the end; None: no more.
        """
        assert not self.positions[row], "the row has pages"
        self.positions[row], self.ends[row] = positions, positions if end is None else end
        for slots, count in self.pages(positions).items():
            of_others = (shared or {}).get(slots, {})
            for place in range(count):
                page = of_others[place] if place in of_others else self._free[slots].pop()
                self._put(slots, row, place, page)

    def missing(self, row: int, positions: int) -> dict[int, int]:
        """Return how many pages more a row needs for so many positions, by the slots of a row."""
        has = self.pages(int(self.positions[row]))
        return {slots: max(0, n - has[slots]) for slots, n in self.pages(positions).items()}

    def grow(self, row: int, positions: int) -> None:
        """Give a row the pages that it misses for so many positions. As many must be free."""
        has = self.pages(int(self.positions[row]))
        for slots, count in self.missing(row, positions).items():
            for place in range(has[slots], has[slots] + count):
                self._put(slots, row, place, self._free[slots].pop())
        self.positions[row] = max(self.positions[row], pages_for(positions) * cache.PAGE)

    def _put(self, slots: int, row: int, place: int, page: int) -> None:
        """Give a row a page."""
        self.tables[slots][row, place] = page
        self._of_rows[slots][page] += 1
        self.hold(slots, page)

    def release(self, row: int) -> None:
        """Take the pages of a row from it, if it has any."""
        if not self.positions[row]:
            return
        self.positions[row] = 0
        for slots, table in self.tables.items():
            for page in table[row][table[row] != NO_PAGE].tolist():
                self._of_rows[slots][page] -= 1
                self.drop(slots, page)
            table[row] = NO_PAGE

    def allocate(self, slots: int) -> int:
        """Return a free page, held once."""
        page = self._free[slots].pop()
        self.hold(slots, page)
        return page

    def hold(self, slots: int, page: int) -> None:
        """Count one holder more of a page."""
        self._holders[slots][page] += 1

    def drop(self, slots: int, page: int) -> None:
        """Count one holder less of a page. It is free without any."""
        self._holders[slots][page] -= 1
        if not self._holders[slots][page]:
            self._free[slots].append(page)

    def has_rows(self, slots: int, page: int) -> bool:
        """Return whether a row has a page."""
        return bool(self._of_rows[slots][page])

    def of_row(self, row: int) -> Numbers:
        """Return the pages of a row in the order of their places."""
        return {slots: t[row][t[row] != NO_PAGE].tolist() for slots, t in self.tables.items()}

    def tables_of_own_pages(self, rows: np.ndarray) -> HostTables:
        """Return the tables with the pages alone that one of these rows has and nobody else.

        Args:
          rows: [R], which of all rows.
        """
        tables = {slots: table.copy() for slots, table in self.tables.items()}
        for slots, table in tables.items():
            table[~rows] = NO_PAGE
            table[self._holders[slots][table] > 1] = NO_PAGE
        return tables

    def check(self, others: Mapping[tuple[int, int], int] | None = None) -> None:
        """Raise an error if a page is lost, or its holders are not those that are counted.

        Args:
          others: how many hold each page beside the rows, by the slots of a row and its number.
        """
        for slots, count in self.counts.items():
            used = np.bincount(self.tables[slots].ravel(), minlength=count)
            used[NO_PAGE] = 0
            assert (used == self._of_rows[slots]).all(), slots
            for (of, page), number in (others or {}).items():
                if of == slots:
                    used[page] += number
            assert (used == self._holders[slots]).all(), slots
            free = [page for page in range(count) if page != NO_PAGE and not used[page]]
            assert sorted(self._free[slots]) == free, slots


@dataclass
class Sharing:
    """Places in a row's table whose pages a row shares with a stored prefix, or copies.

    Attributes:
      shared: places of pages to which the row writes nothing.
      copied: places of pages to which it writes, and whose older keys are needed.
    """

    shared: dict[int, list[int]] = field(default_factory=dict)
    copied: dict[int, list[int]] = field(default_factory=dict)

    def divide(self, slots: int, needed: Iterable[int], written: Container[int]) -> None:
        """Share the places that are needed and not written, and copy those that are written."""
        self.shared[slots], self.copied[slots] = [], []
        for place in needed:
            (self.copied if place in written else self.shared)[slots].append(place)


def places_written(slots: int, begin: int, end: int) -> set[int]:
    """Return the places of the pages to which a row writes positions begin .. end - 1.

    Args:
      slots: of the row. Position p is in slot p modulo this.
    """
    page = cache.PAGE
    if end <= begin:
        return set()
    if end - begin >= slots:
        return set(range(pages_for(slots)))
    positions = [*range(begin, end, page), end - 1]
    return {position % slots // page for position in positions}


def sharing_of_entering(num_pages: Mapping[int, int], begin: int, end: int) -> Sharing:
    """Return what a row shares that goes on behind the first tokens of a stored prefix.

    Args:
      num_pages: of the prefix, by the slots of a row.
      begin: tokens of the prefix that the row has too.
      end: positions that the row can have.
    """
    sharing = Sharing()
    for slots, count in num_pages.items():
        needed = range(min(count, pages_for(min(begin, slots))))
        sharing.divide(slots, needed, places_written(slots, begin, end))
    return sharing


def sharing_of_keeping(num_pages: Mapping[int, int], length: int, end: int) -> Sharing:
    """Return what a stored prefix shares with the row that it is made from.

    The row goes on to write. The prefix needs a copy of the pages whose keys it overwrites.

    Args:
      num_pages: of the row, by the slots of a row.
      length: tokens of the prefix.
      end: positions that the row can have.
    """
    sharing = Sharing()
    for slots, count in num_pages.items():
        needed = range(min(count, pages_for(min(length, slots))))
        sharing.divide(slots, needed, places_written(slots, max(length, slots), end))
    return sharing


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
