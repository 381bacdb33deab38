"""Which code meets which number of a row in `mma.sync`: the threads of a warp, one by one, on a CPU.

The kernel itself runs on Hopper only. Here its own address arithmetic runs on integers, and a matrix
product stands in for the instruction. `test_decode.py` has the assembly that makes numbers of codes.
"""

from __future__ import annotations

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped import coding

pytest.importorskip("jax.experimental.mosaic.gpu.utils")
mma: Any = pytest.importorskip("pallas_kernels.mma")
grouped: Any = pytest.importorskip("pallas_kernels.grouped.mma")

BF16 = np.dtype(jnp.bfloat16)
ARITHMETIC = types.SimpleNamespace(
    andi=lambda x, y: x & y,
    xori=lambda x, y: x ^ y,
    addi=lambda x, y: x + y,
    muli=lambda x, y: x * y,
    shrui=lambda x, y: x >> y,
    select=lambda condition, x, y: x if condition else y,
    cmpi=lambda predicate, x, y: x != y,
    extui=lambda kind, x: x,
    CmpIPredicate=types.SimpleNamespace(ne="ne"),
)


def words_at(memory: np.ndarray, offset: int) -> list[np.ndarray]:
    """Return 16 bytes as four words of four bytes."""
    assert offset % 16 == 0
    return list(memory[offset : offset + 16].reshape(4, 4))


def numbers_of(word: np.ndarray, high: bool, scale: float) -> list[list[float]]:
    """Return four codes of a word times a scale, in two registers."""
    codes = word >> 4 if high else word & 15
    numbers = (codes.astype(np.float64) - 8) * scale
    return [list(numbers[:2]), list(numbers[2:])]


@pytest.fixture
def on_integers(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Let both modules compute with integers. `thread` of the result is the thread that does."""
    machine = types.SimpleNamespace(thread=0)
    for module in (mma, grouped):
        monkeypatch.setattr(module, "arith", ARITHMETIC)
        monkeypatch.setattr(module, "word", int)
        monkeypatch.setattr(module, "four_words", words_at)
    monkeypatch.setattr(mma, "utils", types.SimpleNamespace(thread_idx=lambda: machine.thread))
    scaled = types.SimpleNamespace(
        Half=lambda mask, up: up,
        halves=lambda: ((0x0F0F0F0F, False), (0xF0F0F0F0, True)),
        factors=lambda scale, high, effects: scale,
        numbers=lambda word, high, scale, effects: numbers_of(word, high, scale),
    )
    monkeypatch.setattr(grouped, "scaled", scaled)
    monkeypatch.setattr(grouped, "words", lambda code, results, word, effects: [word])
    monkeypatch.setattr(grouped, "i32", lambda: None)
    monkeypatch.setattr(grouped, "at", lambda memory, offset: memory[offset : offset + 2])
    load = types.SimpleNamespace(load=lambda kind, two: float(two.view(BF16)[0]))
    monkeypatch.setattr(grouped, "llvm", load)
    integers = types.SimpleNamespace(get_signless=lambda bits: bits)
    monkeypatch.setattr(grouped, "ir", types.SimpleNamespace(IntegerType=integers))
    return machine


def swizzled(x: np.ndarray) -> np.ndarray:
    """Return the bytes of rows [rows, inputs] as TMA leaves them: tiles of 8 x 64, chunks of 16 bytes."""
    inputs = x.shape[1]
    row, k = np.indices(x.shape)
    tile = row // 8 * (inputs // 64) + k // 64
    chunk = k % 64 // 8 ^ row % 8
    where = tile * 512 + row % 8 * 64 + chunk * 8 + k % 8
    memory = np.empty(x.size, BF16)
    memory[where.ravel()] = x.ravel()
    return memory.view(np.uint8)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("rows", "groups", "pieces"), [(8, 2, 2), (16, 2, 1), (32, 1, 2)])
def test_every_code_meets_its_number_of_every_row(on_integers, rows, groups, pieces, group):
    """A step of 128 inputs, as all warps of a block of threads multiply it."""
    rng, inputs, outputs = np.random.default_rng(0), 128, groups * pieces * 64
    x = rng.integers(-9, 10, (rows, inputs)).astype(BF16)
    codes = rng.integers(0, 16, (inputs, outputs)).astype(np.uint8)
    scales = rng.integers(1, 9, (inputs // group, outputs)).astype(BF16)
    expected = x.astype(float) @ (
        (codes.astype(float) - 8) * np.repeat(scales.astype(float), group, axis=0)
    )
    memory = (
        np.ascontiguousarray(coding.pack(codes, 0)).reshape(-1),
        np.ascontiguousarray(scales).view(np.uint8).reshape(-1),
    )
    of_rows = swizzled(x)
    found = np.zeros((outputs, rows))
    for warp in range(4 * groups):
        left = np.full((2, pieces, 4, 16, 16), np.nan)  # blocks, pieces, products, outputs, inputs
        right = np.full((2, rows // 8, 4, 16, 8), np.nan)  # blocks, columns, products, inputs, rows
        for lane in range(32):
            on_integers.thread = warp * 32 + lane
            where = mma._lane(pieces)
            at, k = lane // 4, 2 * (lane % 4)
            numbers = grouped._numbers(where, *memory, group=group, outputs=outputs)
            for block, piece, below in np.ndindex(2, pieces, 2):
                for product, pairs in enumerate(numbers(block, piece, below)):
                    for i, pair in enumerate(pairs):
                        first = k + 8 * i
                        left[block, piece, product, at + 8 * below, first : first + 2] = pair
            for block, columns in enumerate(mma._right(where, of_rows, rows, 2)):
                for column, registers in enumerate(columns):
                    for n, register in enumerate(registers):
                        first = k + 8 * (n % 2)
                        pair = register.view(BF16).astype(float)
                        right[block, column, n // 2, first : first + 2, at] = pair
        # [pieces, outputs, columns, rows], as an instruction multiplies them
        sums = np.einsum("bpkoi,bckir->pocr", left, right)
        for piece in range(pieces):
            first = (warp // 4 * pieces + piece) * 64 + warp % 4 * 16
            found[first : first + 16] = sums[piece].reshape(16, rows)
    np.testing.assert_array_equal(found.T, expected)
