"""The products of experts with codes for many tokens in Pallas Mosaic, for Hopper: TMA loads, wgmma multiplies.

A block multiplies all rows of an expert (up to 64, a tile) by codes of some outputs. So a code is
read and converted once. Each warpgroup has two tiles of 64 outputs: gate and up, or two of down. TMA
loads codes and rows into a ring in shared memory. A warpgroup takes codes into registers, converts
them, and hands them to wgmma as its left operand. While these are multiplied it converts the next.

TMA reads rows that lie together. So `_spread` copies each token to the rows of its pairs. It changes
the order of every 16 numbers to the order in which codes come into registers: see `_places`.

A tile has one of a few numbers of rows, the least that its pairs fit into (`MosaicCut.rows`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Int

from pallas_kernels.experts.cuts import MosaicCut
from pallas_kernels.experts.routing import ALIGN, Placed
from pallas_kernels.grouped.coding import BLOCK, Codes
from pallas_kernels.grouped.decode import assembly
from pallas_kernels.triton import load, store

STEP = 128  # inputs of a step
LINE = 64  # inputs of a row of 128 bytes, as wgmma reads it
TILE = 64  # outputs of a wgmma
GROUP = 32  # inputs of a scale of codes of 4 bits


def _words(code: str, results: int, *registers: ir.Value) -> list[ir.Value]:
    """Apply assembly to registers of 32 bits."""
    word = ir.IntegerType.get_signless(32)
    given = [utils.bitcast(register, word) for register in registers]
    how = ",".join(["=r"] * results + ["r"] * len(given))
    if results == 1:
        return [llvm.inline_asm(word, given, code, how, has_side_effects=True)]
    both = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * results)})>")
    made = llvm.inline_asm(both, given, code, how, has_side_effects=True)
    return [llvm.extractvalue(word, made, [i]) for i in range(results)]


def _put(registers: np.ndarray, at: tuple[int, ...], group: int, words: list[ir.Value]) -> None:
    """Put four numbers of 16 neighbours into the registers of wgmma's left operand.

    Args:
      at: where they come from, an index of `WGMMA_UPCAST_2X`.
      group: which 16 neighbours.
    """
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    for i, word in enumerate(words):
        registers[(at[0], 2 * group + i, *at[2:-1])] = utils.bitcast(word, pair)


_CODES, _LEFT = plgpu.Layout.WGMMA_UPCAST_2X, plgpu.Layout.WGMMA
_BY_OUTPUT = plgpu.Layout.WGMMA.reduce(1)


_LEFT_TYPE = plgpu.ShapeDtypeStruct((TILE, LINE), jnp.bfloat16, layout=_LEFT)


def _of_eight_bits(codes_ref: Any) -> Iterator[Array]:
    """Return codes [64, inputs] in shared memory as left operands [64, 64], one after another."""
    kind, codes = jnp.dtype(codes_ref.dtype).name, plgpu.load(codes_ref, layout=_CODES)
    for line in range(codes_ref.shape[1] // LINE):

        @plgpu.inline_mgpu(arg_types=(_CODES,), return_type=_LEFT_TYPE)
        def convert(_, codes, line=line):
            made = np.empty(_LEFT.to_mgpu().registers_shape((TILE, LINE)), dtype=object)
            groups = LINE // 16
            own = codes.registers[:, line * groups : (line + 1) * groups]
            for at, register in np.ndenumerate(own):
                _put(made, at, at[1], _words(assembly(kind), 2, register))
            return type(codes)(_registers=made, _layout=_LEFT.to_mgpu(), _is_signed=None)

        numbers: Any = convert
        yield numbers(codes)


def _of_four_bits(codes_ref: Any, scale_refs: list[Any]) -> Array:
    """Return a block of codes [64, 32] times its scales [64] as a left operand [64, 64]."""

    @plgpu.inline_mgpu(arg_types=(_CODES, _BY_OUTPUT, _BY_OUTPUT), return_type=_LEFT_TYPE)
    def convert(_, codes, *scales):
        word = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        made = np.empty(_LEFT.to_mgpu().registers_shape((TILE, LINE)), dtype=object)
        twice: dict[Any, Any] = {}
        for half, scale in enumerate(scales):
            for i, one in enumerate(scale.registers.flat):
                one = vector.extract(one, [], [0])
                twice[half, i] = utils.bitcast(vector.broadcast(pair, one), word)
        zero = "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }"
        for at, register in np.ndenumerate(codes.registers):
            for half in range(2):
                words = _words(assembly("int4", half), 2, register)
                words = [_words(zero, 1, w, twice[half, at[4]])[0] for w in words]
                _put(made, at, half * 2 + at[1], words)
        return type(codes)(_registers=made, _layout=_LEFT.to_mgpu(), _is_signed=None)

    scales = [plgpu.load(ref, layout=_BY_OUTPUT, optimized=False) for ref in scale_refs]
    convert: Any = convert
    return convert(plgpu.load(codes_ref, layout=_CODES), *scales)


def _placed(x: Array) -> Array:
    """Change the order of outputs [64, rows], as `_places` changes that of 16 numbers.

    Of the bits of an output, bit 3 says which of two registers, and bit 1 is bit 3 of the lane.
    """

    @plgpu.inline_mgpu(
        arg_types=(_LEFT,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_LEFT)
    )
    def swap(_, x):
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.andi(utils.thread_idx(), utils.c(8, i32))
        first = arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(0, i32))
        made = np.empty_like(x.registers)
        for at, low in np.ndenumerate(x.registers):
            if at[4]:
                continue
            other = (*at[:4], 1, *at[5:])
            high = x.registers[other]
            low_word, high_word = utils.bitcast(low, i32), utils.bitcast(high, i32)
            came = utils.shfl_bfly(arith.select(first, high_word, low_word), 8)
            # A lane whose bit is 0 keeps its low one, and the others their high one.
            made[at] = utils.bitcast(arith.select(first, low_word, came), low.type)
            made[other] = utils.bitcast(arith.select(first, came, high_word), low.type)
        return type(x)(_registers=made, _layout=x.layout, _is_signed=None)

    swap: Any = swap
    return swap(x)


def _multiply(
    expert_ref,
    used_ref,
    start_ref,
    x_ref,
    codes_ref,
    given_ref,
    out_ref,
    ring,
    scale_ring,
    x_ring,
    result,
    there,
    free,
    *,
    cut: MosaicCut,
    gated: bool,
    outputs: int,
) -> None:
    """Write some outputs of the rows of a tile.

    Args:
      given_ref: factors of outputs, for codes of 8 bits; or scales.
      gated: whether the tiles of a warpgroup are gate and up. `out` is then what follows from both.
      outputs: of a matrix of an expert.
    """
    block, column, warpgroup = (lax.axis_index(name) for name in ("tile", "column", "warpgroup"))
    four, groups = scale_ring is not None, cut.warpgroups
    inputs, width = x_ref.shape[1], ring.shape[-1]
    blocks, steps = inputs // BLOCK, -(-inputs // STEP)
    used = used_ref[block]
    expert = expert_ref[block]
    start = lax.div(start_ref[block], ALIGN) * ALIGN  # so that Mosaic sees it is a multiple
    tiles = outputs // TILE if gated else outputs // (2 * TILE)

    def own(
        group,
    ):  # the last block may have fewer tiles than warpgroups; they do the last one twice
        return jnp.minimum(column * groups + group, tiles - 1)

    def output(group, i):
        """Return the first output of tile i of a warpgroup, within its matrix."""
        return own(group) * TILE if gated else (own(group) * 2 + i) * TILE

    def fetch_codes(step, group, place):
        to, bar = ring.at[place, group], there.at[place]
        if not four:
            for i in range(2):
                first = expert * outputs + output(group, i)
                if gated:
                    first = (expert * 2 + i) * outputs + output(group, i)
                for piece in range(STEP // width):
                    at = pl.ds(first, TILE), pl.ds(step * STEP + piece * width, width)
                    plgpu.copy_gmem_to_smem(codes_ref.at[at], to.at[i, piece], bar)
            return
        size, many = STEP // BLOCK, STEP // GROUP
        scales = scale_ring.at[place, group]
        if gated:
            at = pl.ds(output(group, 0), TILE)
            first = (expert * blocks + step * size) * 2
            plgpu.copy_gmem_to_smem(codes_ref.at[pl.ds(first, 2 * size), at], to, bar)
            first = (expert * (inputs // GROUP) + step * many) * 2
            plgpu.copy_gmem_to_smem(given_ref.at[pl.ds(first, 2 * many), at], scales, bar)
            return
        for i in range(2):
            at = pl.ds(output(group, i), TILE)
            first = pl.ds(expert * blocks + step * size, size)
            plgpu.copy_gmem_to_smem(codes_ref.at[first, at], to.at[pl.ds(i * size, size)], bar)
            first = pl.ds(expert * (inputs // GROUP) + step * many, many)
            plgpu.copy_gmem_to_smem(given_ref.at[first, at], scales.at[pl.ds(i * many, many)], bar)

    def numbers(place, i) -> Iterator[Array]:
        """Return the numbers of a step of tile i, 64 inputs at a time."""
        own_ring = ring.at[place, warpgroup]
        if not four:
            for piece in range(STEP // width):
                yield from _of_eight_bits(own_ring.at[i, piece])
            return

        def at(which, count):  # in the order of both copies
            return which * 2 + i if gated else i * count + which

        scales = scale_ring.at[place, warpgroup]
        for b in range(STEP // BLOCK):
            both = [scales.at[at(2 * b + half, STEP // GROUP)] for half in range(2)]
            yield _of_four_bits(own_ring.at[at(b, STEP // BLOCK)], both)

    def multiply(rows: int) -> None:
        def fetch(step):
            place = lax.rem(step, cut.stages)
            for line in range(STEP // LINE):
                at = pl.ds(start, rows), pl.ds(step * STEP + line * LINE, LINE)
                to = x_ring.at[place, line, pl.ds(0, rows)]
                plgpu.copy_gmem_to_smem(x_ref.at[at], to, there.at[place])
            for group in range(groups):
                fetch_codes(step, group, place)

        def refill(step):
            """Load over what all have given back."""

            @pl.when((step >= 0) & (step + cut.stages < steps) & (warpgroup == 0))
            def _():
                plgpu.barrier_wait(free.at[lax.rem(step, cut.stages)])
                fetch(step + cut.stages)

        @pl.when(warpgroup == 0)
        def _():
            pl.loop(0, min(steps, cut.stages))(fetch)

        def run(*totals):
            @pl.loop(0, steps)
            def _(step):
                place = lax.rem(step, cut.stages)
                plgpu.barrier_wait(there.at[place])
                for i, total in enumerate(totals):
                    for line, w in enumerate(numbers(place, i)):
                        x = x_ring.at[place, line, pl.ds(0, rows)]
                        plgpu.wgmma(total, w, x.transpose((1, 0)))
                        plgpu.wgmma_wait(1)  # for the one before this

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_arrive(free.at[lax.rem(step - 1, cut.stages)])

                # One warpgroup need not wait for others. Several have a step for it.
                refill(step - 1 if groups == 1 else step - 2)

            plgpu.wgmma_wait(0)
            return [total[...] for total in totals]

        sums = pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32)] * 2)
        if not four:
            for i in range(2):
                first = expert * outputs + output(warpgroup, i)
                if gated:
                    first = (expert * 2 + i) * outputs + output(warpgroup, i)
                of_tile = given_ref.at[pl.ds(first, TILE)]
                factors = plgpu.load(of_tile, layout=_BY_OUTPUT, optimized=False)
                sums[i] = sums[i] * lax.broadcast_in_dim(factors, (TILE, rows), [0])
        sums = [a.astype(out_ref.dtype) for a in sums]
        if gated:
            gate, up = (a.astype(jnp.float32) for a in sums)
            inner = 1.5957691216 * (gate + 0.044715 * (gate * gate * gate))
            sums = [_placed((gate * up / (1 + jnp.exp(-inner))).astype(out_ref.dtype))]
        mine = result.at[warpgroup]
        for i, total in enumerate(sums):
            some = mine.at[pl.ds(0, rows)]
            some.T[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            for first in range(0, rows, ALIGN):

                @pl.when(used > first)
                def _(first=first, i=i):
                    at = pl.ds(start + first, ALIGN), pl.ds(output(warpgroup, i), TILE)
                    plgpu.copy_smem_to_gmem(mine.at[pl.ds(first, ALIGN)], out_ref.at[at])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.wait_smem_to_gmem(0)

    for less, rows in zip((0, *cut.rows), cut.rows, strict=False):
        pl.when((used > less) & (used <= rows))(functools.partial(multiply, rows))


def _launch(
    placed: Placed, x: Float[Array, "padded K"], weight: Codes, cut: MosaicCut, *, gated: bool
) -> Float[Array, "padded N"]:
    """Multiply the rows of all tiles by one of both weights."""
    codes, padded, rows = weight.codes, x.shape[0], cut.rows[-1]
    four = weight.scales is not None
    outputs = codes.shape[-2]
    pieces = 2 * STEP // BLOCK
    if four:
        codes = codes.reshape(-1, outputs, BLOCK // 2)
        given = weight.scales.reshape(-1, outputs)
        kept = (cut.stages, cut.warpgroups, pieces, TILE, BLOCK // 2)
        copies = 2 if gated else 4
    else:
        codes, given = codes.reshape(-1, codes.shape[-1]), weight.factors.reshape(-1)
        # A whole line of memory, where it divides the inputs.
        width = STEP if codes.shape[1] % STEP == 0 else LINE
        kept = (cut.stages, cut.warpgroups, 2, STEP // width, TILE, width)
        copies = 2 * STEP // width
    tiles = outputs // TILE if gated else outputs // (2 * TILE)

    def memory(*shape: int, dtype: Any, swizzled: bool = True) -> Any:
        line, size = shape[-1], jnp.dtype(dtype).itemsize
        swizzle = plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(line * size)
        return plgpu.SMEM(shape, dtype, transforms=swizzle if swizzled else ())

    scales = (cut.stages, cut.warpgroups, 2 * STEP // GROUP, TILE)
    scratch = [
        memory(*kept, dtype=codes.dtype),
        *([memory(*scales, dtype=given.dtype, swizzled=False)] if four else []),
        memory(cut.stages, STEP // LINE, rows, LINE, dtype=x.dtype),
        memory(cut.warpgroups, rows, TILE, dtype=x.dtype),
        plgpu.Barrier(num_arrivals=copies * cut.warpgroups + STEP // LINE, num_barriers=cut.stages),
        plgpu.Barrier(num_arrivals=cut.warpgroups, num_barriers=cut.stages),
    ]

    def body(*refs: Any) -> None:
        refs = refs if four else (*refs[:8], None, *refs[8:])
        _multiply(*refs, cut=cut, gated=gated, outputs=outputs)

    body.__name__ = "experts_gate_up" if gated else "experts_down"
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((padded, outputs), x.dtype),
        grid=(placed.expert.size, -(-tiles // cut.warpgroups)),
        grid_names=("tile", "column"),
        num_threads=cut.warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(placed.expert, placed.used, placed.start, x, codes, given)


def _places(k: Array) -> Array:
    """Return which number of an array is the k-th of what the kernels read.

    A thread gets codes of four neighbours of 16. It hands the first two to wgmma for the first 8
    inputs, and the others for the last 8. So of the bits of a place the fourth and the second change.
    """
    return (k & ~10) | (k & 8) >> 2 | (k & 2) << 2


def _spread(row_ref, real_ref, x_ref, out_ref, *, top_k: int, block: int) -> None:
    """Write a token to the rows of its pairs."""
    token = pl.program_id(0)
    k = pl.program_id(1) * block + lax.iota(jnp.int32, block)
    inside = k < x_ref.shape[1]

    @pl.when(real_ref[token] > 0)
    def _():
        x = load(x_ref, token, _places(k), mask=inside)
        for i in range(top_k):
            store(out_ref, row_ref[token * top_k + i], k, value=x, mask=inside)


def _add_up(row_ref, real_ref, weight_ref, x_ref, out_ref, *, top_k: int, block: int) -> None:
    """Write the weighted sum of the rows of the pairs of a token; 0 for padding."""
    token = pl.program_id(0)
    k = pl.program_id(1) * block + lax.iota(jnp.int32, block)
    inside = (k < x_ref.shape[1]) & (real_ref[token] > 0)
    total = jnp.zeros((block,), jnp.float32)
    for i in range(top_k):
        pair = token * top_k + i
        row = jnp.where(real_ref[token] > 0, row_ref[pair], 0)
        weight = jnp.where(real_ref[token] > 0, weight_ref[pair], 0)
        total += weight * load(x_ref, row, k, mask=inside).astype(jnp.float32)
    store(out_ref, token, k, value=total, mask=k < x_ref.shape[1])


def multiply(
    x: Float[Array, "T D"],
    placed: Placed,
    real: Int[Array, " T"],
    gate_up: Codes,
    down: Codes,
    *,
    padded: int,
    top_k: int,
    cuts: tuple[MosaicCut, MosaicCut],
) -> Float[Array, "T D"]:
    """Run the experts of all tokens, and return the weighted sums.

    Args:
      real: 1 for a token that is no padding, else 0.
      padded: rows that the pairs of all experts need at most.
    """
    (tokens, width), block = x.shape, 1024
    call = functools.partial(
        pl.pallas_call,
        grid=(tokens, pl.cdiv(width, block)),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
    )
    how = dict(top_k=top_k, block=block)
    rows = call(
        functools.partial(_spread, **how),
        out_shape=jax.ShapeDtypeStruct((padded, width), x.dtype),
        name="experts_spread",
    )(placed.row, real, x)
    hidden = _launch(placed, rows, gate_up, cuts[0], gated=True)
    out = _launch(placed, hidden, down, cuts[1], gated=False)
    return call(
        functools.partial(_add_up, **how),
        out_shape=jax.ShapeDtypeStruct((tokens, width), x.dtype),
        name="experts_add_up",
    )(placed.row, real, placed.weight, out)
