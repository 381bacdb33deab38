"""Products of few rows on the tensor cores by `mma.sync`, in Pallas Mosaic.

wgmma with its left operand in registers takes as long for 8 rows as for 64. `mma.sync` takes time for the
rows that there are. A warp multiplies 16 outputs and 16 inputs with 8 rows at once.

Four threads share the inputs of an output. Of 64 inputs thread t of them has the 16 from 16 * t on, in
weights and in rows alike: which inputs meet in one instruction does not matter. So it loads them 16 bytes
at a time, and they become numbers where they lie.

`multiply_tiles` of `pallas_kernels.mosaic` carries the sums from step to step. `grouped/mma.py` has weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array

from pallas_kernels.mosaic import LEFT, swizzle, swizzled
from pallas_kernels.registers import four_words, word
from pallas_kernels.tiles import TILE

BLOCK = 64  # inputs of which a thread has 16
_ROW = 2 * BLOCK  # bytes of a block of a row
_COLUMN = 8  # rows of one instruction
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)


class Lane(NamedTuple):
    """Where a thread is, as 32-bit values of MLIR.

    Attributes:
      first: of the outputs of a block of threads, the first one of its warp in the first piece.
      output: which of 8 outputs is the thread's, and which of 8 rows.
      part: which of the four that share inputs it is.
    """

    first: Any
    output: Any
    part: Any


Numbers = Callable[[int, int, int], list[list[Any]]]
"""From a block of inputs, a piece of 64 outputs, and 0 for the first or 1 for the second 8 outputs of a
warp, return the 16 numbers of a thread: four times 2 x 2 bfloat16 in two registers."""


def rows_ring(stages: int, rows: int, inputs: int) -> Any:
    """Return shared memory for rows, as `add_products` reads them."""
    return swizzled(stages, rows, inputs, dtype=jnp.bfloat16, line=BLOCK)


def add_products(
    sums: tuple[Array, ...],
    x_ref: Any,
    refs: tuple[Any, ...],
    numbers: Callable[..., Numbers],
) -> tuple[Array, ...]:
    """Return sums with the products of a step added.

    Args:
      sums: [64, rows] for each piece of a warpgroup.
      x_ref: [rows, inputs] of a place of `rows_ring`.
      refs: weights in shared memory, as they lie.
      numbers: from a `Lane` and the memory of each reference to `Numbers`.
    """
    rows, inputs = x_ref.shape
    of_rows = plgpu.RefType(swizzle(BLOCK, jnp.bfloat16))

    @plgpu.inline_mgpu(
        arg_types=(of_rows, (plgpu.RefType(),) * len(refs), (LEFT,) * len(sums)),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=LEFT) for total in sums
        ),
    )
    def add(_: Any, x: Any, weights: Any, totals: Any) -> Any:
        lane = _lane(len(totals))
        left = numbers(lane, *(utils.memref_ptr(weight) for weight in weights))
        right = _right(lane, utils.memref_ptr(x), rows, inputs // BLOCK)
        carried = [[_registers(t, column) for column in range(rows // _COLUMN)] for t in totals]
        for block, columns in enumerate(right):
            for piece, own in enumerate(carried):
                upper, lower = (left(block, piece, below) for below in range(2))
                for k, (a, b) in enumerate(zip(upper, lower, strict=True)):
                    operand = a[0], b[0], a[1], b[1]
                    for column, x_words in enumerate(columns):
                        both = x_words[2 * k : 2 * k + 2]
                        own[column] = _multiply(operand, both, own[column])
        return tuple(_array(t, own) for t, own in zip(totals, carried, strict=True))

    return add(x_ref, refs, sums)  # pyright: ignore[reportCallIssue]


def _lane(pieces: int) -> Lane:
    thread = utils.thread_idx()
    lane, warp = arith.andi(thread, word(31)), arith.andi(arith.shrui(thread, word(5)), word(3))
    warpgroup = arith.shrui(thread, word(7))
    first = arith.addi(arith.muli(warpgroup, word(TILE * pieces)), arith.muli(warp, word(16)))
    return Lane(first, arith.shrui(lane, word(2)), arith.andi(lane, word(3)))


def _right(lane: Lane, memory: Any, rows: int, blocks: int) -> Iterator[list[list[Any]]]:
    """Yield, of each block, the eight registers of a thread for every 8 rows."""
    # Of a row's 16-byte chunks a thread has two. They are swizzled by the row.
    of_row = arith.muli(lane.output, word(_ROW))
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
    for block in range(blocks):
        columns = []
        for column in range(rows // _COLUMN):
            start = word((column * blocks + block) * _COLUMN * _ROW)
            loaded = (four_words(memory, arith.addi(chunk, start)) for chunk in chunks)
            columns.append([w for words in loaded for w in words])
        yield columns


def _multiply(left: Any, right: Any, sums: list[Any]) -> list[Any]:
    """Return sums of 16 outputs and 8 rows with the products of 16 inputs added."""
    number = ir.F32Type.get()
    struct = llvm.StructType.get_literal([number] * 4)
    types = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    made: Any = llvm.inline_asm(struct, [*left, *right, *sums], _MMA, types)
    return [llvm.extractvalue(number, made, [i]) for i in range(4)]


def _registers(total: Any, column: int) -> list[Any]:
    """Return what a thread has of 8 rows: of each of its 2 outputs the sums of 2 rows."""
    pairs = (total.registers[_index(total, column, below)] for below in range(2))
    return [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]


def _array(like: Any, columns: list[list[Any]]) -> Any:
    """Return an array of what `_registers` returns of each column."""
    pair, made = ir.VectorType.get((2,), ir.F32Type.get()), np.empty_like(like.registers)
    for column, own in enumerate(columns):
        for below in range(2):
            two = own[2 * below : 2 * below + 2]
            made[_index(like, column, below)] = vector.from_elements(pair, two)
    return FragmentedArray(_registers=made, _layout=like.layout, _is_signed=None)


def _index(total: Any, column: int, below: int) -> tuple[int, ...]:
    return (0, column, 0, 0, below, *(0,) * (total.registers.ndim - 5))
