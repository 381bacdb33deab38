"""The arrays of stored prefixes, and the programs that copy rows into them and back.

Read `keep` and `restore`. The number of blocks is an input of both, so that each is one program for
all lengths. The pool is donated to `keep`, and the state to `restore`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxspec import state as states
from jaxspec.cache import KVCache
from jaxspec.options import FieldError
from jaxspec.runtime.runtime import Runtime
from jaxspec.shapes import Array, Int
from jaxspec.state import DecodeSpec, DecodeState
from jaxspec.weights.sharding import partition

BLOCK = 128
"""Tokens of a block."""

_AXES = (None, "kv_heads", None, None)
_PINNED = "pinned_host"


class PoolArrays(struct.PyTreeNode):
    """Stored blocks and snapshots, along the first axis.

    Attributes:
      blocks: keys and values of each full layer, [M, K, tokens, H].
      snapshots: a row of each other array of a row's caches and drafter's state.
    """

    blocks: list[Array]
    snapshots: list[Array]


def split(state: DecodeState) -> tuple[list[Any], list[Any], Callable[..., DecodeState]]:
    """Return the arrays of blocks, the arrays of snapshots, and a function that puts both back into the state.

    Arrays may be shapes alone.
    """
    parts = (state.caches, state.drafter)
    leaves, tree = jax.tree.flatten(parts, is_leaf=lambda x: isinstance(x, KVCache))
    is_full = [
        isinstance(x, KVCache) and x.ring_slack is None for x in leaves for _ in jax.tree.leaves(x)
    ]
    arrays, inner = jax.tree.flatten(leaves)
    pairs = list(zip(arrays, is_full, strict=True))

    def join(full: list[Any], other: list[Any]) -> DecodeState:
        kinds = {True: iter(full), False: iter(other)}
        leaves = jax.tree.unflatten(inner, [next(kinds[kind]) for kind in is_full])
        caches, drafter = jax.tree.unflatten(tree, leaves)
        return state.replace(caches=caches, drafter=drafter)

    return [x for x, full in pairs if full], [x for x, full in pairs if not full], join


def slack_of(state: DecodeState) -> int | None:
    """Return the tokens by which a row's rings may be shortened; None: there are no rings, and no limit."""
    caches = jax.tree.leaves(
        (state.caches, state.drafter), is_leaf=lambda x: isinstance(x, KVCache)
    )
    slacks = [c.ring_slack for c in caches if isinstance(c, KVCache) and c.ring_slack is not None]
    return min(slacks, default=None)


def _cut(array: Array, row: Any, number: Any, tokens: int) -> Array:
    """Return a block of a row. Past the end it has the last tokens, where `restore` puts them."""
    sizes = (1, array.shape[1], tokens, array.shape[3])
    return lax.dynamic_slice(array, (row, jnp.int32(0), number * tokens, jnp.int32(0)), sizes)


def _put(array: Array, piece: Array, row: Any, number: Any) -> Array:
    at = (row, jnp.int32(0), number * piece.shape[2], jnp.int32(0))
    return lax.dynamic_update_slice(array, piece, at)


def keep(
    arrays: PoolArrays,
    state: DecodeState,
    row: Int[Array, ""],
    numbers: Int[Array, " N"],
    indices: Int[Array, " N"],
    count: Int[Array, ""],
    snapshot: Int[Array, ""],
) -> PoolArrays:
    """Copy blocks of a row, and its snapshot.

    Args:
      numbers: of blocks in the row, of which the first `count` are copied.
      indices: of them in the pool.
    """
    full, other, _ = split(state)

    def one(i: Any, blocks: list[Array]) -> list[Array]:
        pairs = zip(full, blocks, strict=True)
        cut = [_cut(x, row, numbers[i], block.shape[2]) for x, block in pairs]
        return lower(blocks, cut, indices[i])

    blocks = lax.fori_loop(0, count, one, arrays.blocks) if full else []
    return PoolArrays(blocks, lower(arrays.snapshots, lift(other, row), snapshot))


def restore(
    state: DecodeState,
    arrays: PoolArrays,
    row: Int[Array, ""],
    indices: Int[Array, " N"],
    count: Int[Array, ""],
    snapshot: Int[Array, ""],
    tokens: Int[Array, " T"],
    length: Int[Array, ""],
) -> DecodeState:
    """Copy the first blocks of a prefix and its snapshot into a row.

    Args:
      tokens: of the prefix, of which `length` are valid; penalties count them.
    """
    full, other, join = split(state)

    def one(i: Any, full: list[Array]) -> list[Array]:
        pairs = zip(full, lift(arrays.blocks, indices[i]), strict=True)
        return [_put(x, block, row, i) for x, block in pairs]

    if full:
        full = lax.fori_loop(0, count, one, full)
    state = join(full, lower(other, lift(arrays.snapshots, snapshot), row))
    if state.counts is not None:
        counts = state.counts.with_prompt(tokens[None], length[None], row[None])
        state = state.replace(counts=counts)
    return state


def lift(arrays: list[Array], index: Int[Array, ""]) -> list[Array]:
    """Return the contents of all arrays at an index."""
    return [lax.dynamic_slice_in_dim(x, index, 1) for x in arrays]


def lower(arrays: list[Array], copies: list[Array], index: Int[Array, ""]) -> list[Array]:
    """Write into all arrays at an index."""
    return [
        lax.dynamic_update_slice_in_dim(x, copy, index, 0)
        for x, copy in zip(arrays, copies, strict=True)
    ]


@runtime_checkable
class Sizes(Protocol):
    """The part of a runtime that says how large a row is."""

    @property
    def spec(self) -> DecodeSpec: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def cache_length(self) -> int: ...


class RowParts:
    """A row's shapes as blocks and a snapshot.

    Raises:
      FieldError: rows are split over devices.
    """

    def __init__(self, sizes: Sizes):
        if sizes.mesh.shape["data"] > 1:
            raise FieldError(
                "prefix_bytes", "needs a mesh whose data axis has one device; leave it out"
            )
        spec, self._mesh = sizes.spec, sizes.mesh
        self.block = min(BLOCK, sizes.cache_length)
        self.max_blocks = -(-sizes.cache_length // self.block)
        dtype = spec.target.cache_dtype
        options = dict(cache_length=sizes.cache_length, num_stop_ids=1, cache_dtype=dtype)
        row = jax.eval_shape(functools.partial(states.init_state, spec, 1, **options))
        drafter = spec.drafter
        goes_back = drafter is None or drafter.bind_abstract().absorbs_again
        self.slack = slack_of(row) if goes_back else 0
        full, self._other, _ = split(row)
        self._full = [
            jax.ShapeDtypeStruct((1, x.shape[1], self.block, x.shape[3]), x.dtype) for x in full
        ]
        self.block_bytes = self._bytes(self._full)
        self.snapshot_bytes = self._bytes(self._other)

    @property
    def min_bytes(self) -> int:
        """Bytes of the smallest pool, for one slot."""
        return self.max_blocks * self.block_bytes + self.snapshot_bytes

    def _bytes(self, shapes: list[Any]) -> int:
        sizes = [(x, _sharding(x, self._mesh).shard_shape(x.shape)) for x in shapes]
        return sum(int(np.prod(shape)) * x.dtype.itemsize for x, shape in sizes)


def min_bytes(sizes: Sizes) -> int:
    """Return the bytes of a runtime's smallest pool, for one slot."""
    return RowParts(sizes).min_bytes


class Pool(RowParts):
    """Memory for blocks and snapshots on the devices of a runtime, allocated when it is first used.

    Args:
      nbytes: of all of it, on each device.

    Raises:
      FieldError: the bytes do not suffice for one slot, or rows are split over devices.
    """

    def __init__(self, runtime: Runtime, nbytes: int):
        super().__init__(runtime)
        self.runtime = runtime
        self.num_blocks, self.num_snapshots = self._sizes(nbytes)
        self._arrays: PoolArrays | None = None

    def _sizes(self, nbytes: int) -> tuple[int, int]:
        """Split bytes into blocks and snapshots: for each snapshot half a slot of blocks, and one slot at least."""
        if nbytes < self.min_bytes:
            raise FieldError(
                "prefix_bytes",
                lambda format_field: (
                    f"{format_field('prefix_bytes', nbytes)} holds no prefix of a whole slot, "
                    "which takes "
                    f"{self.min_bytes:,} bytes; give as many, or 0 for no store"
                ),
            )
        if not self.snapshot_bytes:
            return (count := nbytes // self.block_bytes), count
        of_blocks = self.block_bytes * self.max_blocks
        snapshots = int(nbytes // (self.snapshot_bytes + of_blocks / 2))
        snapshots = max(1, min(snapshots, (nbytes - of_blocks) // self.snapshot_bytes))
        if not self.block_bytes:
            return self.max_blocks * snapshots, snapshots
        return (nbytes - snapshots * self.snapshot_bytes) // self.block_bytes, snapshots

    @property
    def arrays(self) -> PoolArrays:
        """The arrays, empty at first."""
        if self._arrays is None:
            self._arrays = self._empty()
        return self._arrays

    def _empty(self) -> PoolArrays:
        def zeros(count: int, shapes: list[Any]) -> list[Array]:
            return [jnp.zeros((count, *x.shape[1:]), x.dtype) for x in shapes]

        def make() -> PoolArrays:
            return PoolArrays(
                zeros(self.num_blocks, self._full), zeros(self.num_snapshots, self._other)
            )

        shardings = jax.tree.map(lambda x: _sharding(x, self._mesh), jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings)()

    def drop(self) -> None:
        """Give back all arrays."""
        self._arrays = None

    def keep(
        self, state: DecodeState, row: int, blocks: Sequence[tuple[int, int]], snapshot: int
    ) -> None:
        """Copy numbered blocks of a row to their indices, and its snapshot."""
        numbers = self._padded([number for number, _ in blocks])
        indices = self._padded([index for _, index in blocks])
        inputs = (np.int32(row), numbers, indices, np.int32(len(blocks)), np.int32(snapshot))
        self._arrays = self._run(keep, state.stop_ids.shape, self.arrays, state, *inputs)

    def restore(
        self,
        state: DecodeState,
        row: int,
        indices: Sequence[int],
        snapshot: int,
        tokens: np.ndarray,
    ) -> DecodeState:
        """Copy the first blocks of an entry and its snapshot into a row."""
        padded = np.zeros(self.runtime.cache_length, np.int32)
        padded[: len(tokens)] = tokens
        inputs = (np.int32(row), self._padded(indices), np.int32(len(indices)), np.int32(snapshot))
        inputs = (*inputs, padded, np.int32(len(tokens)))
        return self._run(restore, state.stop_ids.shape, state, self.arrays, *inputs)

    def lift(self, kind: str, index: int) -> list[Array]:
        """Return a copy of a block or a snapshot in host memory; the caller does not wait for it."""
        arrays = getattr(self.arrays, f"{kind}s")
        copies = self._run(lift, (kind,), arrays, np.int32(index), donate=False)
        host = [x.sharding.with_memory_kind(_PINNED) for x in copies]
        return jax.device_put(copies, host)

    def lower(self, kind: str, index: int, copy: list[Array]) -> None:
        """Put such a copy into the pool."""
        arrays = getattr(self.arrays, f"{kind}s")
        copies = jax.device_put(copy, [x.sharding for x in arrays])
        arrays = self._run(lower, (kind,), arrays, copies, np.int32(index))
        self._arrays = self.arrays.replace(**{f"{kind}s": arrays})

    def warm_up(self, state: DecodeState, *, with_host: bool) -> DecodeState:
        """Compile all programs; the pool may hold no entry."""
        self.keep(state, 0, [], 0)
        state = self.restore(state, 0, [], 0, np.zeros(0, np.int32))
        if with_host:
            for kind in ("block", "snapshot"):
                self.lower(kind, 0, self.lift(kind, 0))
        return state

    def _padded(self, values: Sequence[int]) -> np.ndarray:
        padded = np.zeros(self.max_blocks, np.int32)
        padded[: len(values)] = values
        return padded

    def _run(
        self, function: Callable[..., Any], shape: tuple[Any, ...], *args: Any, donate: bool = True
    ) -> Any:
        """Run a program, compiled if it is new. Its result takes the memory of its first argument.

        Args:
          shape: distinguishes it from other programs of the function.
          donate: whether the result takes the memory of the first argument.
        """
        runtime = self.runtime
        if (key := ("prefix", function.__name__, *shape)) not in runtime.used:
            begin = time.perf_counter()
            runtime.used[key] = runtime.programs.get(
                function, runtime.place(args), donate=0 if donate else None, mesh=runtime.mesh
            )
            runtime.timings.compile_s += time.perf_counter() - begin
        return runtime.used[key](*runtime.as_inputs(args))


def _sharding(array: Any, mesh: Mesh) -> NamedSharding:
    axes = _AXES if len(array.shape) == 4 else ()
    return NamedSharding(mesh, partition(axes, array.shape, mesh))
