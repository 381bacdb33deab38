"""Products of few rows on the tensor cores by `mma.sync`, in Pallas Mosaic.

wgmma with its left operand in registers takes as long for 8 rows as for 64. The time of `mma.sync`
grows with the rows. A warp multiplies 16 outputs and 16 inputs with 8 rows at once.

Four threads share the inputs of an output. Of 64 inputs thread t has the 16 from 16 * t on, in
weights and in rows alike. Any order of inputs gives the same sum, so a thread loads its inputs 16
bytes at a time and converts them without an exchange.

`multiply_tiles` of `mosaic.py` carries the sums from step to step. `int4_matmul/mma.py` and
`int8_matmul/mma.py` have the weights.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxtyping import Array

from pallas_kernels.common.mosaic import LEFT, swizzle, swizzled
from pallas_kernels.common.registers import at, four_words, word
from pallas_kernels.common.tiles import BLOCK, MMA_OUTPUTS, MMA_ROWS, TILE

_ROW = 2 * BLOCK  # bytes of a block of a row
WARPS = 4  # of a warpgroup
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)


class Lane(NamedTuple):
    """Position of a thread, as 32-bit values of MLIR.

    Attributes:
      first: of the outputs of a block of threads, the first one of its warp in the first piece.
      output: which of 8 outputs is the thread's, and which of 8 rows.
      part: which of the four that share inputs it is.
      block: of the blocks of a step, the first one of its warp.
    """

    first: Any
    output: Any
    part: Any
    block: Any


Numbers = Callable[[int, int, int], list[list[Any]]]
"""A function that returns the 16 numbers of a thread: four times 2 x 2 bfloat16 in two registers.

Its arguments are a block of inputs, counted from the warp's first one; a piece of outputs; and 0
for the first or 1 for the second 8 outputs of a warp.
"""


Refs = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Weight(abc.ABC):
    """A weight of codes that a kernel reads. Each kind of codes has a subclass.

    Attributes:
      config: of the product: `experts.tile_config.MmaConfig`, or one with the same attributes but
        `rows`.
      gated: whether it is two matrices, gate and up, of which each is a piece of a warpgroup.
    """

    config: Any
    gated: bool

    @property
    def matrices(self) -> int:
        """Return how many matrices it has."""
        return 2 if self.gated else 1

    @property
    def width(self) -> int:
        """Return the number of outputs of a matrix that a block of threads multiplies at once."""
        return self.config.outputs * (1 if self.gated else self.config.pieces)

    @property
    def apart(self) -> int:
        """Return how many outputs lie between a piece and the next, in shared memory."""
        return self.config.outputs if self.config.shared else TILE

    def outputs(self, column: Array, warpgroup: Array, piece: int) -> Any:
        """Return which outputs of its matrix a piece of a warpgroup is."""
        own = MMA_OUTPUTS if self.config.shared else TILE
        of_group = own if self.config.shared or self.gated else own * self.config.pieces
        first = column * self.width + warpgroup * of_group
        return pl.ds(first if self.gated else first + piece * self.apart, own)

    def check(self, outputs: int) -> None:
        """Raise ValueError if the config does not fit a matrix of so many outputs."""
        if outputs % self.width or (self.config.shared and self.config.blocks % WARPS):
            raise ValueError(
                f"{self.config} does not cut {outputs} outputs evenly, or blocks among {WARPS} warps"
            )
        if self.gated and (
            self.config.pieces != 2 or not (self.config.shared or self.config.groups == 1)
        ):
            raise ValueError(
                f"gate and up are two pieces, of one warpgroup unless inputs are shared: {self.config}"
            )

    def memory(self, loaded_rows: int, rows: int) -> tuple[Any, ...]:
        """Return the shared memory of a block of threads: rings, parts of sums, and barriers.

        Args:
          loaded_rows: rows that TMA loads, as for `rows_ring`.
          rows: of sums, a multiple of 8.
        """
        config = self.config
        return (
            *self.rings,
            rows_ring(config.stages, loaded_rows, config.inputs),
            plgpu.SMEM((config.groups, config.pieces, WARPS, rows, MMA_OUTPUTS), jnp.float32),
            # A slot was loaded. All warpgroups have read it.
            plgpu.Barrier(num_arrivals=1 + self.loads, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=config.groups, num_barriers=config.stages),
        )

    @property
    @abc.abstractmethod
    def arrays(self) -> tuple[Array, ...]:
        """Return the arrays of the weight."""

    @property
    @abc.abstractmethod
    def rings(self) -> tuple[Any, ...]:
        """Return shared memory for steps of the first arrays, with `config.stages` slots each."""

    @property
    @abc.abstractmethod
    def loads(self) -> int:
        """Return the number of copies of a step."""

    @abc.abstractmethod
    def copies(
        self, refs: Refs, rings: Refs, index: Refs, column: Array, step: Array, slot: Array
    ) -> list[tuple[Any, Any]]:
        """Return the copies of a step of a column, each a source and a destination.

        Args:
          refs, rings: references to `arrays` and to `rings`.
          index: of the leading axis of arrays: the expert; or nothing.
        """

    @abc.abstractmethod
    def numbers(self, lane: Lane, *memory: Any) -> Numbers:
        """Return the conversion of codes in shared memory to numbers, for `add_products`."""

    @abc.abstractmethod
    def factors(
        self, refs: Refs, index: Refs, column: Array, warpgroup: Array, rows: int
    ) -> list[Any]:
        """Return the factors of the sums of each piece. Arguments as in `copies`."""


def rows_ring(stages: int, rows: int, inputs: int) -> Any:
    """Return shared memory for rows: fewer than 8, or a multiple of 8."""
    if rows < MMA_ROWS:
        return plgpu.SMEM((stages, rows, inputs // BLOCK, BLOCK), jnp.bfloat16)
    return swizzled(stages, rows, inputs, dtype=jnp.bfloat16, line=BLOCK)


def add_products(
    sums: tuple[Array, ...],
    x_ref: Any,
    refs: tuple[Any, ...],
    numbers: Callable[..., Numbers],
    *,
    shared: bool = False,
) -> tuple[Array, ...]:
    """Return sums with the products of a step added. TMA may write over the step then.

    Args:
      sums: [64, rows] for each piece of a warpgroup.
      x_ref: [rows, inputs] of a slot of `rows_ring`. Or [rows, blocks, 64] with fewer than 8 rows,
        of which the last one is taken for those that are missing.
      refs: weights in shared memory, as they lie.
      numbers: from a `Lane` and the memory of each reference to `Numbers`.
      shared: whether the warps of a warpgroup have the same 16 outputs of a piece, and a quarter of
        the blocks each. Then sums are four parts of [16, rows], one below the other: see
        `add_parts`.
    """
    count, inputs = x_ref.shape[0], math.prod(x_ref.shape[1:])
    columns = sums[0].shape[1] // MMA_ROWS
    of_rows = plgpu.RefType(() if count < MMA_ROWS else swizzle(BLOCK, jnp.bfloat16))

    @plgpu.inline_mgpu(
        arg_types=(of_rows, (plgpu.RefType(),) * len(refs), (LEFT,) * len(sums)),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=LEFT) for total in sums
        ),
    )
    def add(_: Any, x: Any, weights: Any, totals: Any) -> Any:
        blocks = inputs // BLOCK
        each = blocks // WARPS if shared else blocks
        lane = _lane(None if shared else len(totals), each)
        left = numbers(lane, *(utils.memref_ptr(weight) for weight in weights))
        memory = utils.memref_ptr(x)
        if count < MMA_ROWS:
            right = _right_of_few(lane, memory, count, blocks, each)
        else:
            right = _right(lane, memory, columns, blocks, each)
        carried = [[_registers(t, column) for column in range(columns)] for t in totals]
        for block, of_block in enumerate(right):
            for piece, own in enumerate(carried):
                upper, lower = (left(block, piece, below) for below in range(2))
                for k, (a, b) in enumerate(zip(upper, lower, strict=True)):
                    operand = a[0], b[0], a[1], b[1]
                    for column, x_words in enumerate(of_block):
                        both = x_words[2 * k : 2 * k + 2]
                        own[column] = _multiply(operand, both, own[column])
        # Without the fence a thread arrives at the barrier while its last loads wait in a queue,
        # and TMA may write over the memory before they read it.
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        return tuple(_array(t, own) for t, own in zip(totals, carried, strict=True))

    return add(x_ref, refs, sums)  # pyright: ignore[reportCallIssue]


def add_steps(
    weight: Weight,
    memory: Refs,
    x_of: Callable[[Array], Any],
    first: Array,
    steps: int,
    rows: int,
    warpgroup: Array,
) -> tuple[Array, ...]:
    """Return the sums of a warpgroup over all steps of a column, of each piece.

    Args:
      memory: references to `Weight.memory`.
      x_of: from a slot, return its rows.
      first: number of steps of earlier columns.
      rows: of sums.
    """
    *rings, _, parts, full, empty = memory
    config = weight.config

    def step(i: Array, totals: Any) -> Any:
        slot = lax.rem(first + i, jnp.int32(config.stages))
        plgpu.barrier_wait(full.at[slot])
        refs = tuple(ring.at[slot] for ring in rings)
        totals = add_products(totals, x_of(slot), refs, weight.numbers, shared=config.shared)
        plgpu.barrier_arrive(empty.at[slot])
        return totals

    zeros = plgpu.layout_cast(jnp.zeros((TILE, rows), jnp.float32), LEFT)
    totals = lax.fori_loop(0, steps, step, (zeros,) * config.pieces)
    return add_parts(totals, parts.at[warpgroup]) if config.shared else totals


def add_parts(sums: tuple[Array, ...], parts_ref: Any) -> tuple[Array, ...]:
    """Add up the sums that the warps of a warpgroup have of the same outputs, in their order.

    Args:
      sums: as `add_products` returns them where blocks are shared.
      parts_ref: shared memory of the warpgroup, float32 [pieces, 4, rows, 16].

    Returns:
      [rows, 16] for each piece. A thread has one number of every 8 rows.
    """
    rows = sums[0].shape[1]
    by_thread = plgpu.Layout.WG_STRIDED((rows, MMA_OUTPUTS), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), (LEFT,) * len(sums)),
        return_type=tuple(
            plgpu.ShapeDtypeStruct((rows, MMA_OUTPUTS), jnp.float32, layout=by_thread) for _ in sums
        ),
    )
    def add(_: Any, parts: Any, totals: Any) -> Any:
        memory, number = utils.memref_ptr(parts), ir.F32Type.get()
        first = _first(MMA_OUTPUTS, part=rows * MMA_OUTPUTS)

        def pointer(start: Any, beyond: int) -> Any:
            return at(memory, arith.muli(arith.addi(start, word(beyond)), word(4)))

        for piece, total in enumerate(totals):
            for column in range(rows // MMA_ROWS):
                start = (piece * WARPS * rows + column * MMA_ROWS) * MMA_OUTPUTS
                for (row, output), value in _by_position(total, column):
                    llvm.store(value, pointer(first, start + row * MMA_OUTPUTS + output))
        utils.warpgroup_barrier()

        def added(start: int) -> Any:
            values = (
                llvm.load(number, pointer(_thread(), start + warp * rows * MMA_OUTPUTS))
                for warp in range(WARPS)
            )
            one = ir.VectorType.get((1,), number)
            return vector.from_elements(one, [functools.reduce(arith.addf, values)])

        arrays, layout = [], by_thread.to_mgpu()
        for piece in range(len(totals)):
            made = np.empty(layout.registers_shape((rows, MMA_OUTPUTS)), dtype=object)
            for i in range(made.size):
                made[i] = added((piece * WARPS * rows + i * MMA_ROWS) * MMA_OUTPUTS)
            arrays.append(FragmentedArray(_registers=made, _layout=layout, _is_signed=None))
        utils.warpgroup_barrier()  # before the memory is written again
        return tuple(arrays)

    return add(parts_ref, sums)  # pyright: ignore[reportCallIssue]


def of_outputs(ref: Any, rows: int) -> Array:
    """Load a number for each of 16 outputs, as [rows, 16] that lies as `add_parts` returns sums.

    Args:
      ref: [16], float32, in the memory of the GPU.
    """
    by_thread = plgpu.Layout.WG_STRIDED((rows, MMA_OUTPUTS), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((rows, MMA_OUTPUTS), jnp.float32, layout=by_thread),
    )
    def load(_: Any, numbers: Any) -> Any:
        output = arith.andi(_thread(), word(MMA_OUTPUTS - 1))
        where = at(utils.memref_ptr(numbers), arith.muli(output, word(4)))
        one, layout = ir.VectorType.get((1,), ir.F32Type.get()), by_thread.to_mgpu()
        made = np.empty(layout.registers_shape((rows, MMA_OUTPUTS)), dtype=object)
        made[:] = [vector.from_elements(one, [llvm.load(ir.F32Type.get(), where)])] * made.size
        return FragmentedArray(_registers=made, _layout=layout, _is_signed=None)

    return load(ref)  # pyright: ignore[reportCallIssue]


def write(
    x: Array, out_ref: Any, row: int, width: int, *, shared: bool, rows: int = MMA_ROWS
) -> None:
    """Write up to 8 rows of sums to memory. Nothing waits for it.

    Args:
      x: [rows, 16] as `add_parts` returns it where blocks are shared; else [64, rows] as
        `add_products` does.
      out_ref: in the memory of the GPU, the part of an array that begins with the first sum.
      row: the first row of x.
      width: numbers of a row of that array.
      rows: how many rows are written, 8 at most.
    """
    layout = plgpu.Layout.WG_STRIDED(x.shape, vec_size=1) if shared else LEFT
    column, size = row // MMA_ROWS, x.dtype.itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def run(_: Any, out: Any, x: Any) -> None:
        if shared:
            of_thread = arith.shrui(_thread(), word(4))
            of_row = arith.muli(of_thread, word(width))
            first = arith.addi(of_row, arith.andi(_thread(), word(MMA_OUTPUTS - 1)))
            values = [((0, 0), vector.extract(x.registers[column], [], [0]))]
        else:
            of_thread = arith.muli(arith.andi(_thread(), word(3)), word(2))
            first, values = _first(width, part=MMA_OUTPUTS), _by_position(x, column)
        memory = utils.memref_ptr(out)
        for (below, output), value in values:
            beyond = arith.addi(first, word(below * width + output))
            inside = arith.cmpi(arith.CmpIPredicate.slt, of_thread, word(rows - below))
            with contextlib.nullcontext() if rows >= MMA_ROWS else utils.when(inside):
                llvm.store(value, at(memory, arith.muli(beyond, word(size))))

    run(out_ref, x)  # pyright: ignore[reportCallIssue]


def _first(width: int, *, part: int) -> Any:
    """Return the offset of the first sum of a thread in [rows, width].

    Args:
      part: from those of a warp to those of the next.
    """
    warp, lane = arith.shrui(_thread(), word(5)), arith.andi(_thread(), word(31))
    of_row = arith.muli(arith.andi(lane, word(3)), word(2 * width))
    first = arith.addi(of_row, arith.shrui(lane, word(2)))
    return arith.addi(first, arith.muli(warp, word(part)))


def _by_position(total: Any, column: int) -> list[tuple[tuple[int, int], Any]]:
    """Return the sums of a thread of 8 rows, each with its offsets in rows and outputs."""
    return [((i % 2, i // 2 * 8), value) for i, value in enumerate(_registers(total, column))]


def _thread() -> Any:
    """Return the index of a thread within its warpgroup."""
    return arith.andi(utils.thread_idx(), word(127))


def _lane(pieces: int | None, blocks: int) -> Lane:
    """Return the position of a thread.

    Args:
      pieces: of a warpgroup; None where its warps have the same outputs and share blocks.
      blocks: of a warp.
    """
    thread = utils.thread_idx()
    lane, warp = arith.andi(thread, word(31)), arith.andi(arith.shrui(thread, word(5)), word(3))
    warpgroup, block = arith.shrui(thread, word(7)), word(0)
    if pieces is None:
        first, block = arith.muli(warpgroup, word(MMA_OUTPUTS)), arith.muli(warp, word(blocks))
    else:
        first = arith.muli(warpgroup, word(TILE * pieces))
        first = arith.addi(first, arith.muli(warp, word(MMA_OUTPUTS)))
    return Lane(first, arith.shrui(lane, word(2)), arith.andi(lane, word(3)), block)


def _right_of_few(
    lane: Lane, memory: Any, count: int, blocks: int, each: int
) -> Iterator[list[list[Any]]]:
    """Yield the registers of `_right` where there are fewer than 8 rows.

    Eight threads load at once. They have two rows, so that at most two of them meet in a bank.
    """
    row = arith.minsi(lane.output, word(count - 1))
    first = arith.muli(row, word(blocks * _ROW))
    first = arith.addi(first, arith.muli(lane.block, word(_ROW)))
    first = arith.addi(first, arith.muli(lane.part, word(_ROW // 4)))
    for block in range(each):
        starts = (word(block * _ROW + i * 16) for i in range(2))
        loaded = (four_words(memory, arith.addi(first, start)) for start in starts)
        yield [[w for words in loaded for w in words]]


def _right(
    lane: Lane, memory: Any, columns: int, blocks: int, each: int
) -> Iterator[list[list[Any]]]:
    """Yield, of each block of a warp, the eight registers of a thread for every 8 rows.

    Args:
      columns: how many times 8 rows there are.
      blocks: of a step.
      each: of a warp.
    """
    # Of a row's 16-byte chunks a thread has two. They are swizzled by the row.
    of_row = arith.muli(lane.output, word(_ROW))
    of_row = arith.addi(of_row, arith.muli(lane.block, word(MMA_ROWS * _ROW)))
    chunks = [
        arith.addi(
            of_row,
            arith.muli(
                arith.xori(arith.addi(arith.muli(lane.part, word(2)), word(i)), lane.output),
                word(16),
            ),
        )
        for i in range(2)
    ]
    for block in range(each):
        made = []
        for column in range(columns):
            start = word((column * blocks + block) * MMA_ROWS * _ROW)
            loaded = (four_words(memory, arith.addi(chunk, start)) for chunk in chunks)
            made.append([w for words in loaded for w in words])
        yield made


def _multiply(left: Any, right: Any, sums: list[Any]) -> list[Any]:
    """Return sums of 16 outputs and 8 rows with the products of 16 inputs added."""
    number = ir.F32Type.get()
    struct = llvm.StructType.get_literal([number] * 4)
    types = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    made: Any = llvm.inline_asm(struct, [*left, *right, *sums], _MMA, types)
    return [llvm.extractvalue(number, made, [i]) for i in range(4)]


def _registers(total: Any, column: int) -> list[Any]:
    """Return the sums of a thread of 8 rows: of each of its 2 outputs those of 2 rows."""
    pairs = (total.registers[_index(total, column, below)] for below in range(2))
    return [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]


def _array(like: Any, columns: list[list[Any]]) -> Any:
    """Return the array whose columns have these registers. The inverse of `_registers`."""
    pair, made = ir.VectorType.get((2,), ir.F32Type.get()), np.empty_like(like.registers)
    for column, own in enumerate(columns):
        for below in range(2):
            two = own[2 * below : 2 * below + 2]
            made[_index(like, column, below)] = vector.from_elements(pair, two)
    return FragmentedArray(_registers=made, _layout=like.layout, _is_signed=None)


def _index(total: Any, column: int, below: int) -> tuple[int, ...]:
    return (0, column, 0, 0, below, *(0,) * (total.registers.ndim - 5))
