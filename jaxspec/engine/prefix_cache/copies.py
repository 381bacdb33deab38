"""The programs that copy for stored prefixes: pages, snapshots, and both to host memory and back.

Read `DeviceCopies.keep` and `restore`. Each is one program for all lengths.

On a mesh that splits the rows of a batch, each part has pages and snapshots of its own. A program then takes numbers
for all parts, [parts, ...], where those of all but one part are past the last: these read anything, and write
nothing. Copies have an axis of parts, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import state as states
from jaxspec.cache import NO_PAGE, KVCache, Paging, caches_of, pages_for
from jaxspec.engine.slots import SlotsPart
from jaxspec.mesh import CACHE_AXES, ROWS, WHOLE, Axes, on_each_part, partition
from jaxspec.options import FieldError
from jaxspec.runtime.runtime import Runtime
from jaxspec.sampling import TokenCounts
from jaxspec.shapes import Array, Int
from jaxspec.state import DecodeSpec, DecodeState

PAGES_A_COPY = 8
"""Most pages of a row that move to host memory and back in one call. A call of each page and array took 5 ms a page
with 26B-A4B on an H100, nearly all of it the host's."""
MOST_SNAPSHOTS = 1024
"""Entries on the device at most. What they have beside pages takes some kilobytes each."""
SNAPSHOT_SHARE = 16
"""One part of so many of the memory for prefixes is for snapshots."""

_AXES = (None, "kv_heads", None, None)
_PINNED = "pinned_host"
_COPY_AXES: Any = Axes("batch", None, None, "kv_heads", None, None)
Pairs = dict[int, tuple[Int[Array, "parts N"], Int[Array, "parts N"]]]
"""Pages to copy and where they go, by the slots of a row. A page past the last goes nowhere."""


def _is_cache(x: object) -> bool:
    return isinstance(x, KVCache)


def split(state: DecodeState) -> tuple[list[Any], Callable[[list[Any]], DecodeState]]:
    """Return the arrays of a drafter's state beside its caches, and a function that puts them back."""
    leaves, tree = jax.tree.flatten(state.drafter, is_leaf=_is_cache)
    small = [x for x in leaves if not _is_cache(x)]

    def join(small: list[Any]) -> DecodeState:
        new = iter(small)
        drafter = jax.tree.unflatten(tree, [x if _is_cache(x) else next(new) for x in leaves])
        return state.replace(drafter=drafter)

    return small, join


def copy_pages(state: DecodeState, pairs: Pairs) -> DecodeState:
    """Copy pages to others, in all caches whose rows have so many slots."""

    def one(x: Any) -> Any:
        if not _is_cache(x) or x.row_slots not in pairs:
            return x
        both = CACHE_AXES, CACHE_AXES
        args = x.k, x.v, *pairs[x.row_slots]
        k, v = on_each_part(_copy_pages, args, (*both, ROWS, ROWS), both)
        return x.replace(k=k, v=v)

    caches, drafter = jax.tree.map(one, (state.caches, state.drafter), is_leaf=_is_cache)
    return state.replace(caches=caches, drafter=drafter)


def _copy_pages(k: Array, v: Array, source: Array, to: Array) -> tuple[Array, Array]:
    k, v = (x.at[to[0]].set(x.at[source[0]].get(mode="clip"), mode="drop") for x in (k, v))
    return k, v


def keep(
    snapshots: list[Array],
    state: DecodeState,
    row: Int[Array, " parts"],
    index: Int[Array, " parts"],
) -> list[Array]:
    """Copy what a row has beside pages to a snapshot."""
    return lower(snapshots, lift(split(state)[0], row), index)


def restore(
    state: DecodeState,
    snapshots: list[Array],
    row: Int[Array, " parts"],
    index: Int[Array, " parts"],
    tokens: Int[Array, "1 T"],
    length: Int[Array, " 1"],
) -> DecodeState:
    """Copy a snapshot into a row.

    Args:
      tokens: of the prefix, of which `length` are valid; penalties count them.
    """
    small, join = split(state)
    state = join(lower(small, lift(snapshots, index), row))
    if state.counts is not None:
        args, axes = (state.counts, tokens, length, row), (ROWS, WHOLE, WHOLE, ROWS)
        counts = on_each_part(TokenCounts.with_prompt, args, axes)
        state = state.replace(counts=counts)
    return state


def lift(arrays: list[Array], index: Int[Array, " parts"]) -> list[Array]:
    """Return the contents of all arrays at an index, [parts, ...]."""

    def run(arrays: list[Array], index: Array) -> list[Array]:
        return [lax.dynamic_slice_in_dim(x, index[0], 1) for x in arrays]

    return on_each_part(run, (arrays, index))


def lower(arrays: list[Array], copies: list[Array], index: Int[Array, " parts"]) -> list[Array]:
    """Write into all arrays at an index."""

    def run(arrays: list[Array], copies: list[Array], index: Array) -> list[Array]:
        new = []
        for x, copy in zip(arrays, copies, strict=True):
            # A slice past the last is the last.
            old = lax.dynamic_slice_in_dim(x, index[0], 1)
            copy = jnp.where(index[0] < x.shape[0], copy, old)
            new.append(lax.dynamic_update_slice_in_dim(x, copy, index[0], 0))
        return new

    return on_each_part(run, (arrays, copies, index))


def lift_pages(state: DecodeState, pages: dict[int, Int[Array, "parts N"]]) -> list[Array]:
    """Return the contents of pages in all their caches, those of one shape as one array [parts, caches, N, ...].

    Args:
      pages: their numbers, by the slots of a row. Numbers beyond the last count as the last.
    """
    (slots, numbers), *_ = pages.items()
    arrays = _arrays(state, slots)

    def run(arrays: list[Array], numbers: Array) -> Array:
        return jnp.stack([x.at[numbers[0]].get(mode="clip") for x in arrays])[None]

    axes = CACHE_AXES, ROWS
    return [
        on_each_part(run, ([arrays[i] for i in alike], numbers), axes, _COPY_AXES)
        for alike in _alike(arrays)
    ]


def lower_pages(
    state: DecodeState, copies: list[Array], pages: dict[int, Int[Array, "parts N"]]
) -> DecodeState:
    """Write such contents into pages. No number may be there twice; those beyond the last are left out."""
    (slots, numbers), *_ = pages.items()
    arrays = _arrays(state, slots)

    def run(arrays: list[Array], copy: Array, numbers: Array) -> list[Array]:
        return [
            x.at[numbers[0]].set(part, mode="drop", unique_indices=True)
            for x, part in zip(arrays, copy[0], strict=True)
        ]

    axes = CACHE_AXES, _COPY_AXES, ROWS
    for alike, copy in zip(_alike(arrays), copies, strict=True):
        args = [arrays[i] for i in alike], copy, numbers
        for i, x in zip(alike, on_each_part(run, args, axes, CACHE_AXES), strict=True):
            arrays[i] = x
    new = iter(arrays)

    def one(x: Any) -> Any:
        if not _is_cache(x) or x.row_slots != slots:
            return x
        return x.replace(k=next(new), v=next(new))

    caches, drafter = jax.tree.map(one, (state.caches, state.drafter), is_leaf=_is_cache)
    return state.replace(caches=caches, drafter=drafter)


def _arrays(state: DecodeState, slots: int) -> list[Array]:
    """Return keys and values of all caches whose rows have so many slots."""
    caches = caches_of((state.caches, state.drafter))
    return [x for c in caches if c.row_slots == slots for x in (c.k, c.v)]


def _alike(arrays: Sequence[Array]) -> list[list[int]]:
    """Return the indices of arrays of one shape and dtype, which move as one: each transfer costs the host time."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        groups.setdefault((x.shape, x.dtype.name), []).append(i)
    return list(groups.values())


class RowSizes:
    """The sizes of a row in pages and in a snapshot. Bytes are those of one device.

    Attributes:
      rings: the slots of a row in caches that are rings.
      slack: tokens by which a row's rings may be shortened; None: there are no rings, and no limit.
      page_bytes: of a page of all caches whose rows have so many slots.
    """

    def __init__(self, spec: DecodeSpec, cache_length: int, mesh: Mesh):
        self._mesh, self._length = mesh, cache_length
        options: dict[str, Any] = dict(cache_length=cache_length, num_stop_ids=1)
        options |= dict(cache_dtype=spec.target.cache_dtype, paging=Paging(1, cache_length))
        row = jax.eval_shape(functools.partial(states.init_state, spec, 1, **options))
        drafter = spec.drafter
        goes_back = drafter is None or drafter.bind_abstract().absorbs_again
        caches = caches_of((row.caches, row.drafter))
        rings = {c.row_slots: c.ring_slack for c in caches if c.ring_slack is not None}
        slacks = [c.ring_slack for c in caches if c.ring_slack is not None]
        self.slack = min(slacks, default=None) if goes_back else 0
        self.rings = frozenset(slots for slots in rings if slots is not None)
        self.page_bytes: dict[int, int] = {}
        for c in caches:
            assert c.row_slots is not None
            before = self.page_bytes.get(c.row_slots, 0)
            self.page_bytes[c.row_slots] = before + self._bytes([c.k, c.v]) // c.k.shape[0]
        self._small = split(row)[0]
        self.snapshot_bytes = sum(x.size * x.dtype.itemsize for x in self._small)

    @property
    def row_bytes(self) -> int:
        """Bytes of the pages of a whole row."""
        return self._pages_bytes(self._length)

    @property
    def min_bytes(self) -> int:
        """The least bytes that prefixes need: one entry of a whole row."""
        return self.row_bytes + self.snapshot_bytes

    def plan(self, nbytes: int) -> tuple[int, dict[str, int]]:
        """Return how many snapshots such memory has, and arguments of `Paging`.

        Raises:
          FieldError: it does not suffice for one whole row.
        """
        if nbytes < self.min_bytes:
            raise FieldError(
                "prefix_bytes",
                lambda format_field: (
                    f"{format_field('prefix_bytes', nbytes)} holds no prefix of a whole slot, "
                    "which takes "
                    f"{self.min_bytes:,} bytes; give as many, or 0 for no store"
                ),
            )
        snapshots = MOST_SNAPSHOTS
        if each := self.snapshot_bytes:
            fitting = min(nbytes // SNAPSHOT_SHARE, nbytes - self.row_bytes) // each
            snapshots = max(1, min(snapshots, fitting))
        left, half = nbytes - snapshots * self.snapshot_bytes, -(-self._length // 2)
        prefixes = max(1, left // self._pages_bytes(half))
        return snapshots, dict(prefixes=prefixes, prefix_tokens=half)

    def _pages_bytes(self, length: int) -> int:
        return sum(
            nbytes * pages_for(min(length, slots)) for slots, nbytes in self.page_bytes.items()
        )

    def _bytes(self, shapes: list[Any]) -> int:
        """Return the bytes of a device for caches."""
        sizes = []
        for x in shapes:
            sharding = NamedSharding(self._mesh, partition(_AXES, x.shape, self._mesh))
            sizes.append(int(np.prod(sharding.shard_shape(x.shape))) * x.dtype.itemsize)
        return sum(sizes)


class DeviceCopies(RowSizes):
    """Copies of pages and snapshots on the devices of a runtime, for rows of a part of its slots.

    Args:
      runtime: whose caches are in pages.
      num_snapshots: of each part, see `RowSizes.plan`.
    """

    def __init__(self, runtime: Runtime, num_snapshots: int):
        super().__init__(runtime.spec, runtime.cache_length, runtime.mesh)
        self.runtime, self.num_snapshots = runtime, num_snapshots
        self._snapshots: list[Array] | None = None

    @property
    def snapshots(self) -> list[Array]:
        """The snapshots, [parts * num_snapshots, ...] each, empty at first."""
        if self._snapshots is None:
            of_parts = NamedSharding(self._mesh, PartitionSpec("data"))
            count = self.runtime.shapes.parts * self.num_snapshots
            self._snapshots = [
                jnp.zeros((count, *x.shape[1:]), x.dtype, device=of_parts) for x in self._small
            ]
        return self._snapshots

    def drop(self) -> None:
        """Give back the snapshots."""
        self._snapshots = None

    def copy_pages(self, rows: SlotsPart, pairs: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Copy pages to others of the same caches."""
        if any(pairs.values()):
            inputs = self._padded(rows, pairs)
            rows.state = run_copy(
                self.runtime, copy_pages, rows.state.stop_ids.shape, rows.state, inputs
            )

    def _padded(
        self, rows: SlotsPart, pairs: Mapping[int, Sequence[tuple[int, int]]]
    ) -> dict[int, Any]:
        """Return pairs of pages as `copy_pages` takes them. A full cache has one at most, a ring its row's."""
        padded = {}
        for slots, count in self.runtime.page_counts.items():
            size = pages_for(slots) if slots in self.rings else 1
            source, to = np.zeros(size, np.int32), np.full(size, count, np.int32)
            for i, (one, other) in enumerate(pairs.get(slots, ())):
                source[i], to[i] = one, other
            nowhere = np.full(size, count, np.int32)
            padded[slots] = rows.indices(source, nowhere), rows.indices(to, nowhere)
        return padded

    def _index(self, rows: SlotsPart, snapshot: int) -> np.ndarray:
        return rows.indices(snapshot, self.num_snapshots)

    def keep(self, rows: SlotsPart, row: int, snapshot: int) -> None:
        """Copy what a row has beside pages to a snapshot."""
        if self._small:
            of_row = rows.indices(row, rows.slots.count)
            inputs = rows.state, of_row, self._index(rows, snapshot)
            shape = rows.state.stop_ids.shape
            self._snapshots = run_copy(self.runtime, keep, shape, self.snapshots, *inputs)

    def restore(self, rows: SlotsPart, row: int, snapshot: int, tokens: np.ndarray) -> None:
        """Copy a snapshot into a row that goes on behind these tokens."""
        state = rows.state
        if not self._small and state.counts is None:
            return
        padded = np.zeros((1, self.runtime.cache_length), np.int32)
        padded[0, : len(tokens)] = tokens
        of_row, index = rows.indices(row, rows.slots.count), self._index(rows, snapshot)
        inputs = of_row, index, padded, np.array([len(tokens)], np.int32)
        rows.state = run_copy(
            self.runtime, restore, state.stop_ids.shape, state, self.snapshots, *inputs
        )

    def lift(self, rows: SlotsPart, slots: int, page: int) -> list[Array]:
        """Return a copy of a page in host memory. The caller does not wait for it."""
        return pages_to_host(rows, slots, [page])

    def lower(self, rows: SlotsPart, slots: int, page: int, copy: list[Array]) -> None:
        """Put such a copy into a page."""
        pages_from_host(rows, slots, [page], copy)

    def lift_snapshot(self, rows: SlotsPart, index: int) -> list[Array]:
        """Return a copy of a snapshot in host memory. The caller does not wait for it."""
        if not self._small:
            return []
        of_index = self._index(rows, index)
        return to_host(run_copy(self.runtime, lift, (), self.snapshots, of_index, donate=False))

    def lower_snapshot(self, rows: SlotsPart, index: int, copy: list[Array]) -> None:
        """Put such a copy into a snapshot."""
        if self._small:
            inputs = self.snapshots, to_device(copy), self._index(rows, index)
            self._snapshots = run_copy(self.runtime, lower, (), *inputs)

    def warm_up(self, rows: SlotsPart, *, with_host: bool) -> None:
        """Compile all programs. Nothing may be stored, and no row may have pages."""
        first = next(iter(self.page_bytes))
        self.copy_pages(rows, {first: [(NO_PAGE, NO_PAGE)]})
        self.keep(rows, 0, 0)
        self.restore(rows, 0, 0, np.zeros(0, np.int32))
        if with_host:
            self.lower_snapshot(rows, 0, self.lift_snapshot(rows, 0))


def run_copy(
    runtime: Runtime,
    function: Callable[..., Any],
    shape: tuple[Any, ...],
    *args: Any,
    donate: bool = True,
) -> Any:
    """Run a program, compiled if it is new. Its result takes the memory of its first argument.

    Args:
      shape: distinguishes it from other programs of the function.
      donate: whether the result takes the memory of the first argument.
    """
    if (key := ("copy", function.__name__, *shape)) not in runtime.used:
        begin = time.perf_counter()
        runtime.used[key] = runtime.programs.get(
            function, runtime.place(args), donate=0 if donate else None, mesh=runtime.mesh
        )
        runtime.timings.compile_s += time.perf_counter() - begin
    return runtime.used[key](*runtime.as_inputs(args))


def pages_to_host(rows: SlotsPart, slots: int, pages: Sequence[int]) -> list[Array]:
    """Return a copy of some pages in host memory. The caller does not wait for it.

    Args:
      slots: of a row in the caches that the pages belong to.
      pages: `PAGES_A_COPY` at most.
    """
    inputs = rows.state, _numbers(rows, slots, pages)
    shape = (slots, inputs[1][slots].shape[1], *rows.state.stop_ids.shape)
    return to_host(run_copy(rows.runtime, lift_pages, shape, *inputs, donate=False))


def pages_from_host(rows: SlotsPart, slots: int, pages: Sequence[int], copy: list[Array]) -> None:
    """Put such a copy into as many pages."""
    inputs = rows.state, to_device(copy), _numbers(rows, slots, pages)
    shape = (slots, inputs[2][slots].shape[1], *rows.state.stop_ids.shape)
    rows.state = run_copy(rows.runtime, lower_pages, shape, *inputs)


def _numbers(rows: SlotsPart, slots: int, pages: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the numbers of pages as programs take them: of one, or padded with numbers beyond the last."""
    size = 1 if len(pages) == 1 else PAGES_A_COPY
    past_last = rows.runtime.page_counts[slots] + np.arange(size, dtype=np.int32)
    numbers = past_last.copy()
    numbers[: len(pages)] = pages
    return {slots: rows.indices(numbers, past_last)}


def to_host(arrays: list[Array]) -> list[Array]:
    """Return copies in host memory. The caller does not wait for them."""
    return jax.device_put(arrays, [x.sharding.with_memory_kind(_PINNED) for x in arrays])


def to_device(copies: list[Array]) -> list[Array]:
    """Return such copies on the device."""
    return jax.device_put(copies, [x.sharding.with_memory_kind("device") for x in copies])
