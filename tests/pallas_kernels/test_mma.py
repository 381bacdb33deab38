"""The numbers that meet in `mma.sync`: the threads of a warp, one by one, on a CPU.

The kernel itself runs on Hopper only. Here its own address arithmetic runs on integers, and a
matrix product stands in for the instruction. `test_decode.py` has the assembly that makes numbers
of codes.
"""

from __future__ import annotations

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int4_matmul import coding
from tests.pallas_kernels.layouts import owned

pytest.importorskip("jax.experimental.mosaic.gpu.utils")
mma: Any = pytest.importorskip("pallas_kernels.common.mma")
int4_mma: Any = pytest.importorskip("pallas_kernels.int4_matmul.mma")
int8_mma: Any = pytest.importorskip("pallas_kernels.int8_matmul.mma")

BF16 = np.dtype(jnp.bfloat16)
ARITHMETIC = types.SimpleNamespace(
    andi=lambda x, y: x & y,
    xori=lambda x, y: x ^ y,
    addi=lambda x, y: x + y,
    muli=lambda x, y: x * y,
    minsi=min,
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


def signed(word: np.ndarray) -> list[list[float]]:
    """Return four codes of 8 bits, in two registers."""
    numbers = word.view(np.int8).astype(np.float64)
    return [list(numbers[:2]), list(numbers[2:])]


@pytest.fixture
def on_integers(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Let these modules compute with integers. `thread` of the result is the thread that does."""
    machine = types.SimpleNamespace(thread=0)
    for module in (mma, int4_mma, int8_mma):
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
    monkeypatch.setattr(int4_mma, "dequantise_mosaic", scaled)
    monkeypatch.setattr(int4_mma, "words", lambda code, results, word, effects: [word])
    monkeypatch.setattr(int4_mma, "i32", lambda: None)
    monkeypatch.setattr(int4_mma, "at", lambda memory, offset: memory[offset : offset + 2])
    load = types.SimpleNamespace(load=lambda kind, two: float(two.view(BF16)[0]))
    monkeypatch.setattr(int4_mma, "llvm", load)
    monkeypatch.setattr(int8_mma, "words", lambda code, results, word, effects: signed(word))
    integers = types.SimpleNamespace(get_signless=lambda bits: bits)
    monkeypatch.setattr(int4_mma, "ir", types.SimpleNamespace(IntegerType=integers))
    return machine


def swizzled(x: np.ndarray) -> np.ndarray:
    """Return the bytes of rows [rows, inputs] as TMA leaves them, in tiles of 8 x 64."""
    inputs = x.shape[1]
    row, k = np.indices(x.shape)
    tile = row // 8 * (inputs // 64) + k // 64
    chunk = k % 64 // 8 ^ row % 8
    where = tile * 512 + row % 8 * 64 + chunk * 8 + k % 8
    memory = np.empty(x.size, BF16)
    memory[where.ravel()] = x.ravel()
    return memory.view(np.uint8)


def check_step(
    machine: types.SimpleNamespace, rows: int, groups: int, pieces: int, group: int, *, shared: bool
) -> None:
    """Multiply one step as all warps of a block of threads do, and compare with the product.

    Args:
      group: inputs of a scale of codes of 4 bits; 0 for codes of 8 bits.
    """
    rng, blocks, of_warp = np.random.default_rng(0), 8 if shared else 2, 2
    width = 16 * groups if shared else 64  # outputs from a piece to the next
    inputs, outputs = blocks * 64, groups * pieces * (16 if shared else 64)
    x = rng.integers(-9, 10, (rows, inputs)).astype(BF16)
    how: dict[str, Any] = dict(piece=width)
    if group:
        codes = rng.integers(0, 16, (inputs, outputs)).astype(np.uint8)
        scales = rng.integers(1, 9, (inputs // group, outputs)).astype(BF16)
        w = (codes.astype(float) - 8) * np.repeat(scales.astype(float), group, axis=0)
        memory, make = (coding.pack(codes, 0), scales), int4_mma.numbers_of
        how |= dict(group=group, outputs=outputs)
    else:
        w = rng.integers(-128, 128, (inputs, outputs)).astype(np.int8)
        memory, make = (w.T,), int8_mma.numbers_of
        how |= dict(kind=jnp.int8, inputs=inputs)
    memory = [np.ascontiguousarray(array).view(np.uint8).reshape(-1) for array in memory]
    if rows < 8:  # they lie as they are, and the last one is taken for the others
        of_rows, given, blocks_of = x.view(np.uint8).reshape(-1), rows, mma._right_of_few
        x = np.concatenate([x, np.repeat(x[-1:], 8 - rows, axis=0)])
    else:
        of_rows, given, blocks_of = swizzled(x), rows // 8, mma._right
    expected, rows = x.astype(float) @ w.astype(float), len(x)
    found = np.zeros((outputs, rows))
    for warp in range(4 * groups):
        # Blocks, pieces, products, outputs, inputs; then blocks, columns, products, inputs, rows.
        left = np.full((of_warp, pieces, 4, 16, 16), np.nan)
        right = np.full((of_warp, rows // 8, 4, 16, 8), np.nan)
        for lane in range(32):
            machine.thread = warp * 32 + lane
            where = mma._lane(None if shared else pieces, of_warp)
            at, k = lane // 4, 2 * (lane % 4)
            numbers = make(where, *memory, **how)
            for block, piece, below in np.ndindex(of_warp, pieces, 2):
                for product, pairs in enumerate(numbers(block, piece, below)):
                    for i, pair in enumerate(pairs):
                        first = k + 8 * i
                        left[block, piece, product, at + 8 * below, first : first + 2] = pair
            for block, columns in enumerate(blocks_of(where, of_rows, given, blocks, of_warp)):
                for column, registers in enumerate(columns):
                    for n, register in enumerate(registers):
                        first = k + 8 * (n % 2)
                        pair = register.view(BF16).astype(float)
                        right[block, column, n // 2, first : first + 2, at] = pair
        # [pieces, outputs, columns, rows], as an instruction multiplies them
        sums = np.einsum("bpkoi,bckir->pocr", left, right)
        for piece in range(pieces):
            first = (warp // 4 * pieces + piece) * 64 + warp % 4 * 16
            if shared:
                first = piece * width + warp // 4 * 16
            found[first : first + 16] += sums[piece].reshape(16, rows)
    np.testing.assert_array_equal(found.T, expected)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("rows", "groups", "pieces"), [(8, 2, 2), (16, 2, 1), (32, 1, 2)])
def test_every_code_meets_its_number_of_every_row(on_integers, rows, groups, pieces, group):
    check_step(on_integers, rows, groups, pieces, group, shared=False)


@pytest.mark.parametrize(("rows", "groups", "pieces"), [(8, 2, 2), (16, 1, 1), (2, 1, 1)])
def test_codes_of_8_bits_meet_their_numbers_too(on_integers, rows, groups, pieces):
    for shared in (False, True):
        check_step(on_integers, rows, groups, pieces, 0, shared=shared)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    ("rows", "groups", "pieces"), [(8, 2, 2), (16, 1, 1), (1, 1, 1), (5, 2, 1)]
)
def test_warps_that_share_inputs_have_each_of_them_once(on_integers, rows, groups, pieces, group):
    check_step(on_integers, rows, groups, pieces, group, shared=True)


@pytest.mark.parametrize(("width", "part", "outputs"), [(2816, 16, 64), (16, 8 * 16, 16)])
def test_every_sum_is_written_to_its_place(on_integers, monkeypatch, width, part, outputs):
    """Sums of 64 outputs; and four parts of 16 outputs, one behind the other."""
    monkeypatch.setattr(mma, "_registers", lambda total, column: list(range(4)))
    held = owned(mma.LEFT.to_mgpu(), (64, 8))
    rest = len(mma.LEFT.to_mgpu().registers_shape((64, 8))) - 5
    for (warp, lane), registers in held.items():
        on_integers.thread = 128 + warp * 32 + lane  # of the second warpgroup
        first = mma._first(width, part=part)
        for (row, output), i in mma._by_position(None, 0):
            # As `_registers` orders them: two rows of an output, then those of the output 8 below.
            element = registers[(0, 0, 0, 0, i // 2, *(0,) * rest)][i % 2]
            output_of, row_of = divmod(element, 8)
            expected = row_of * width + output_of % outputs
            if outputs == 16:
                expected += output_of // 16 * part
            assert first + row * width + output == expected
