"""Rows that give up their pages, and go on later where they were.

Read `RowSwap.save` and `load`. A row's pages go to host memory, and its small arrays stay on the
device. They come back as they were, so the row's tokens are those of a row that was never away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxspec.cache import NO_PAGE
from jaxspec.engine.prefix_cache.copies import (
    PAGES_A_COPY,
    lift,
    lower,
    pages_from_host,
    pages_to_host,
    run_copy,
    split,
)
from jaxspec.engine.slots import Row, Slots, SlotsPart
from jaxspec.runtime.runtime import Runtime
from jaxspec.shapes import Array, Int
from jaxspec.state import DecodeState


@dataclass(frozen=True)
class SavedRow:
    """A row without a slot.

    Attributes:
      row: the request, and what it got so far.
      part: of the slots, where it was and will be.
      num_pages: of the row, by its slots.
      pages: copies in host memory, of `PAGES_A_COPY` pages each, by the slots of a row and in the
        order of its table.
      small: all else of the row. None: its prompt was not prefilled to the end, and is again.
    """

    row: Row
    part: int
    num_pages: dict[int, int]
    pages: dict[int, list[list[Array]]]
    small: list[Array] | None


def lift_row(state: DecodeState, row: Int[Array, " parts"]) -> list[Array]:
    """Return what a row has beside its caches; see `copies.lift`."""
    return lift([*jax.tree.leaves(state.small), *split(state)[0]], row)


def lower_row(state: DecodeState, copies: list[Array], row: Int[Array, " parts"]) -> DecodeState:
    """Give a row what `lift_row` returned of another."""
    leaves, tree = jax.tree.flatten(state.small)
    of_drafter, join = split(state)
    new = lower([*leaves, *of_drafter], copies, row)
    state = join(new[len(leaves) :])
    return state.with_small(jax.tree.unflatten(tree, new[: len(leaves)]))


class RowSwap:
    """Moves rows off the device and back. No call may be running."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime

    def save(self, slots: Slots, slot: int) -> SavedRow:
        """Take a row off the device. Its slot is free then, and its pages are as far as nobody else has them."""
        row, part = slots.rows[slot], slots.part(slot)
        assert row is not None
        assert part.pages is not None
        of_row = part.pages.of_row(part.row(slot))
        pages: dict[int, list[list[Array]]] = {}
        small = None
        if row.is_prefilled:
            for size, numbers in of_row.items():
                pages[size] = [pages_to_host(part, size, batch) for batch in _batched(numbers)]
            small = self._run(lift_row, slots, _of_row(part, slot), donate=False)
        is_away = np.arange(slots.count) == slot
        slots.state = self.runtime.retire(slots.state, is_away)
        slots.rows[slot] = None
        part.pages.release(part.row(slot))
        counts = {size: len(numbers) for size, numbers in of_row.items()}
        return SavedRow(row, part.number, counts, pages, small)

    def load(self, slots: Slots, slot: int, saved: SavedRow) -> None:
        """Put a row back into a slot of its part that has pages for it."""
        part = slots.part(slot)
        assert part.pages is not None
        assert saved.small is not None
        for size, numbers in part.pages.of_row(part.row(slot)).items():
            batches = _batched(numbers[: saved.num_pages[size]])
            for batch, copy in zip(batches, saved.pages[size], strict=True):
                pages_from_host(part, size, batch, copy)
        row = _of_row(part, slot)
        slots.state = self._run(lower_row, slots, saved.small, row, donate=True)
        slots.put(slot, saved.row)

    def warm_up(self, slots: Slots) -> None:
        """Compile all programs. All rows must be free."""
        part = slots.part(0)
        assert part.pages is not None
        for size in part.pages.counts:
            for batch in ([NO_PAGE], [NO_PAGE, NO_PAGE + 1]):
                pages_from_host(part, size, batch, pages_to_host(part, size, batch))
        row = _of_row(part, 0)
        small = self._run(lift_row, slots, row, donate=False)
        slots.state = self._run(lower_row, slots, small, row, donate=True)

    def _run(self, function: Callable[..., Any], slots: Slots, *args: Any, donate: bool) -> Any:
        shape = slots.state.stop_ids.shape
        return run_copy(self.runtime, function, shape, slots.state, *args, donate=donate)


def _of_row(part: SlotsPart, slot: int) -> np.ndarray:
    """Return the row of a slot as programs take it."""
    return part.indices(part.row(slot), part.slots.count)


def _batched(pages: Sequence[int]) -> list[Sequence[int]]:
    """Return the numbers of pages, `PAGES_A_COPY` at a time."""
    return [pages[at : at + PAGES_A_COPY] for at in range(0, len(pages), PAGES_A_COPY)]
