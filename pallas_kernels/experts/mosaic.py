"""The products of experts with codes for many tokens in Pallas Mosaic, for Hopper: TMA loads, wgmma multiplies.

A block multiplies all rows of an expert (up to 64, a tile) by codes of some outputs. So a code is
read and converted once. Each warpgroup has two tiles of 64 outputs: gate and up, or two of down. TMA
loads codes and rows into a ring in shared memory. A warpgroup takes codes into registers, converts
them, and hands them to wgmma as its left operand. While these are multiplied it converts the next.

TMA reads rows that lie together. `rows.spread` has copied each token to the rows of its pairs, and put
every 16 numbers into the order in which codes come into registers: see `rows.places`.

A tile has one of a few numbers of rows, the least that its pairs fit into (`MosaicCut.rows`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.experts.cuts import MosaicCut
from pallas_kernels.experts.routing import ALIGN, Placed
from pallas_kernels.grouped.coding import BLOCK, Codes
from pallas_kernels.grouped.decode import assembly

STEP = 128  # inputs of a step
LINE = 64  # inputs of a row of 128 bytes, as wgmma reads it
TILE = 64  # outputs of a wgmma
GROUP = 32  # inputs of a scale of codes of 4 bits


_CODES, _LEFT = plgpu.Layout.WGMMA_UPCAST_2X, plgpu.Layout.WGMMA
_BY_OUTPUT = plgpu.Layout.WGMMA.reduce(1)
_TIMES = "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }"


def _load(ref: Any, layout: Any, *, optimized: bool = True) -> Array:
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def _words(code: str, results: int, *registers: Any) -> list[Any]:
    """Apply assembly to registers of 32 bits.

    It has effects for the compiler. Else this moves it behind the start of a wgmma.
    """
    word = ir.IntegerType.get_signless(32)
    given = [utils.bitcast(register, word) for register in registers]
    how: Any = code, ",".join(["=r"] * results + ["r"] * len(given))
    if results == 1:
        return [llvm.inline_asm(word, given, *how, has_side_effects=True)]
    both = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * results)})>")
    made: Any = llvm.inline_asm(both, given, *how, has_side_effects=True)
    return [llvm.extractvalue(word, made, [i]) for i in range(results)]


def _left_operand(
    codes: Any, first: int, numbers: Callable[[Any, Any], list[tuple[int, Any]]]
) -> Any:
    """Return codes in registers as wgmma's left operand [64, 64].

    Args:
      codes: a FragmentedArray.
      first: where its groups of 16 inputs begin.
      numbers: from a place and a register, of four neighbours of a group, to groups and words. Each
        group gets two words of two bfloat16.
    """
    pair, layout = ir.VectorType.get((2,), ir.BF16Type.get()), _LEFT.to_mgpu()
    made = np.empty(layout.registers_shape((TILE, LINE)), dtype=object)
    for at, register in np.ndenumerate(codes.registers[:, first : first + LINE // 16]):
        for group, words in numbers(at, register):
            for i, word in enumerate(words):
                made[(at[0], 2 * group + i, *at[2:-1])] = utils.bitcast(word, pair)
    return type(codes)(_registers=made, _layout=layout, _is_signed=None)


_LEFT_TYPE = plgpu.ShapeDtypeStruct((TILE, LINE), jnp.bfloat16, layout=_LEFT)


def _of_eight_bits(codes_ref: Any) -> Iterator[Array]:
    """Return codes [64, inputs] in shared memory as left operands [64, 64], one after another."""
    code, codes = assembly(jnp.dtype(codes_ref.dtype).name), _load(codes_ref, _CODES)
    for first in range(0, codes.shape[1] // 16, LINE // 16):

        @plgpu.inline_mgpu(arg_types=(_CODES,), return_type=_LEFT_TYPE)
        def convert(_: Any, codes: Any, first: int = first) -> Any:
            return _left_operand(codes, first, lambda at, r: [(at[1], _words(code, 2, r))])

        yield convert(codes)  # pyright: ignore[reportCallIssue]


def _of_four_bits(codes_ref: Any, scale_refs: list[Any]) -> Array:
    """Return a block of codes [64, 32] times its scales [64] as a left operand [64, 64]."""

    @plgpu.inline_mgpu(arg_types=(_CODES, _BY_OUTPUT, _BY_OUTPUT), return_type=_LEFT_TYPE)
    def convert(_: Any, codes: Any, *scales: Any) -> Any:
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        twice = [
            [vector.broadcast(pair, vector.extract(one, [], [0])) for one in scale.registers.flat]
            for scale in scales
        ]

        def numbers(at: Any, register: Any) -> list[tuple[int, Any]]:
            halves = (_words(assembly("int4", half), 2, register) for half in range(2))
            return [
                (2 * half + at[1], [_words(_TIMES, 1, w, twice[half][at[4]])[0] for w in words])
                for half, words in enumerate(halves)
            ]

        return _left_operand(codes, 0, numbers)

    scales = [_load(ref, _BY_OUTPUT, optimized=False) for ref in scale_refs]
    return convert(_load(codes_ref, _CODES), *scales)  # pyright: ignore[reportCallIssue]


def _placed(x: Array) -> Array:
    """Change the order of outputs [64, rows], as `rows.places` changes that of 16 numbers.

    Of the bits of an output, bit 3 says which of two registers, and bit 1 is bit 3 of the lane.
    """

    @plgpu.inline_mgpu(
        arg_types=(_LEFT,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_LEFT)
    )
    def swap(_: Any, x: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.andi(utils.thread_idx(), utils.c(8, i32))
        first = arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(0, i32))
        made = np.empty_like(x.registers)
        for at in np.ndindex(*x.registers.shape):
            if at[4] == 0:
                other = (*at[:4], 1, *at[5:])
                low, high = (utils.bitcast(x.registers[i], i32) for i in (at, other))
                came = utils.shfl_bfly(arith.select(first, high, low), 8)
                # A lane whose bit is 0 keeps its low one, and the others their high one.
                kept = arith.select(first, low, came), arith.select(first, came, high)
                for i, word in zip((at, other), kept, strict=True):
                    made[i] = utils.bitcast(word, x.registers[i].type)
        return type(x)(_registers=made, _layout=x.layout, _is_signed=None)

    return swap(x)  # pyright: ignore[reportCallIssue]


@dataclasses.dataclass(frozen=True)
class _Weight:
    """The codes of an expert that a block multiplies: of gate and up, or of two tiles of down.

    Attributes:
      codes, given: references: codes, and factors of outputs (8 bits) or scales (4 bits).
      ring, scale_ring: the same in shared memory: [stage, warpgroup, ...]. Codes of 8 bits have no
        scales there.
      there: barriers of the stages.
      expert, column: which expert, and which tiles of each warpgroup.
      inputs, outputs: of a matrix of an expert.
      gated: whether the two tiles of a warpgroup are of gate and up.
    """

    codes: Any
    given: Any
    ring: Any
    scale_ring: Any
    there: Any
    expert: Any
    column: Any
    inputs: int
    outputs: int
    gated: bool

    def output(self, group: Any, i: int) -> Any:
        """Return the first output of tile i of a warpgroup, within its matrix.

        The last block may have fewer tiles than warpgroups. These compute the last one twice.
        """
        each = 1 if self.gated else 2
        tiles = self.outputs // (each * TILE)
        own = jnp.minimum(self.column * self.ring.shape[1] + group, tiles - 1)
        return own * TILE if self.gated else (own * 2 + i) * TILE

    def _row(self, group: Any, i: int) -> Any:
        """Return the same within the outputs of all experts."""
        matrix = self.expert * 2 + i if self.gated else self.expert
        return matrix * self.outputs + self.output(group, i)

    def fetch(self, step: Any, group: Any, place: Any) -> None:
        """Let TMA load what a warpgroup multiplies in a step."""
        to, bar = self.ring.at[place, group], self.there.at[place]
        if self.scale_ring is None:
            width = self.ring.shape[-1]
            for i in range(2):
                for piece in range(STEP // width):
                    at = pl.ds(step * STEP + piece * width, width)
                    own = self.codes.at[pl.ds(self._row(group, i), TILE), at]
                    plgpu.copy_gmem_to_smem(own, to.at[i, piece], bar)
            return
        arrays = (self.codes, to, BLOCK), (self.given, self.scale_ring.at[place, group], GROUP)
        for ref, to, size in arrays:
            count, first = STEP // size, self.expert * (self.inputs // size) + step * (STEP // size)
            if self.gated:  # both lie together
                own = ref.at[pl.ds(2 * first, 2 * count), pl.ds(self.output(group, 0), TILE)]
                plgpu.copy_gmem_to_smem(own, to, bar)
                continue
            for i in range(2):
                own = ref.at[pl.ds(first, count), pl.ds(self.output(group, i), TILE)]
                plgpu.copy_gmem_to_smem(own, to.at[pl.ds(i * count, count)], bar)

    def numbers(self, place: Any, group: Any, i: int) -> Iterator[Array]:
        """Return the numbers of a step of tile i, 64 inputs at a time."""
        ring = self.ring.at[place, group]
        if self.scale_ring is None:
            for piece in range(STEP // self.ring.shape[-1]):
                yield from _of_eight_bits(ring.at[i, piece])
            return

        def at(which: int, size: int) -> int:
            return which * 2 + i if self.gated else i * (STEP // size) + which

        scales = self.scale_ring.at[place, group]
        for block in range(STEP // BLOCK):
            both = [scales.at[at(2 * block + half, GROUP)] for half in range(2)]
            yield _of_four_bits(ring.at[at(block, BLOCK)], both)

    def factors(self, group: Any, i: int) -> Array:
        """Return the factors of the outputs of tile i, for codes of 8 bits."""
        own = self.given.at[pl.ds(self._row(group, i), TILE)]
        return _load(own, _BY_OUTPUT, optimized=False)


def _sums(
    weight: _Weight, x_ref: Any, x_ring: Any, free: Any, start: Any, rows: int
) -> list[Array]:
    """Multiply the rows of a tile by both tiles of this warpgroup: float32 [64, rows]."""
    group, there = lax.axis_index("warpgroup"), weight.there
    stages, groups = weight.ring.shape[:2]
    steps = -(-weight.inputs // STEP)

    def fetch(step: Any) -> None:
        place = lax.rem(step, stages)
        for line in range(STEP // LINE):
            own = x_ref.at[pl.ds(start, rows), pl.ds(step * STEP + line * LINE, LINE)]
            plgpu.copy_gmem_to_smem(own, x_ring.at[place, line, pl.ds(0, rows)], there.at[place])
        for other in range(groups):
            weight.fetch(step, other, place)

    def refill(step: Any) -> None:
        """Load over what all have given back."""

        @pl.when((step >= 0) & (step + stages < steps) & (group == 0))
        def _():
            plgpu.barrier_wait(free.at[lax.rem(step, stages)])
            fetch(step + stages)

    @pl.when(group == 0)
    def _():
        pl.loop(0, min(steps, stages))(fetch)

    def run(*totals: Any) -> list[Array]:
        @pl.loop(0, steps)
        def _(step):
            place = lax.rem(step, stages)
            plgpu.barrier_wait(there.at[place])
            for i, total in enumerate(totals):
                for line, w in enumerate(weight.numbers(place, group, i)):
                    x = x_ring.at[place, line, pl.ds(0, rows)]
                    plgpu.wgmma(total, w, x.transpose((1, 0)))
                    plgpu.wgmma_wait(1)  # for the one before this

            # In the middle of a step a branch would make the compiler wait for each wgmma.
            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(step - 1, stages)])

            # One warpgroup need not wait for others. Several have a step for it.
            refill(step - 1 if groups == 1 else step - 2)

        plgpu.wgmma_wait(0)
        return [total[...] for total in totals]

    return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32)] * 2)


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
) -> None:
    """Write some outputs of the rows of a tile: gelu_tanh(gate) * up, or sums."""
    tile, column, group = (lax.axis_index(name) for name in ("tile", "column", "warpgroup"))
    used, expert = used_ref[tile], expert_ref[tile]
    start = lax.div(start_ref[tile], ALIGN) * ALIGN  # so that Mosaic sees that it is a multiple
    sizes = x_ref.shape[1], out_ref.shape[1]
    weight = _Weight(codes_ref, given_ref, ring, scale_ring, there, expert, column, *sizes, gated)
    mine = result.at[group]

    def multiply(rows: int) -> None:
        sums = _sums(weight, x_ref, x_ring, free, start, rows)
        if scale_ring is None:
            factors = [weight.factors(group, i) for i in range(2)]
            shape = TILE, rows
            sums = [
                a * lax.broadcast_in_dim(b, shape, [0]) for a, b in zip(sums, factors, strict=True)
            ]
        # As in the reference, both are rounded before the activation.
        sums = [a.astype(out_ref.dtype) for a in sums]
        if gated:
            gate, up = (a.astype(jnp.float32) for a in sums)
            inner = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * (gate * gate * gate))
            sums = [_placed((gate * up / (1 + jnp.exp(-inner))).astype(out_ref.dtype))]
        for i, total in enumerate(sums):
            total = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
            mine.at[pl.ds(0, rows)].T[...] = total
            plgpu.commit_smem()
            for first in range(0, rows, ALIGN):

                @pl.when(used > first)
                def _(first=first, i=i):
                    at = pl.ds(start + first, ALIGN), pl.ds(weight.output(group, i), TILE)
                    plgpu.copy_smem_to_gmem(mine.at[pl.ds(first, ALIGN)], out_ref.at[at])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.wait_smem_to_gmem(0)

    for less, rows in zip((0, *cut.rows), cut.rows, strict=False):
        pl.when((used > less) & (used <= rows))(functools.partial(multiply, rows))


def _memory(*shape: int, dtype: Any) -> Any:
    line = shape[-1]
    swizzle = plgpu.SwizzleTransform(line * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, line)), swizzle))


def _launch(
    placed: Placed, x: Float[Array, "padded K"], weight: Codes, cut: MosaicCut, *, gated: bool
) -> Float[Array, "padded N"]:
    """Multiply the rows of all tiles by one of both weights."""
    codes, scales, factors = weight.codes, weight.scales, weight.factors
    outputs, own = codes.shape[-2], (cut.stages, cut.warpgroups)
    if scales is not None:
        codes, given = codes.reshape(-1, outputs, BLOCK // 2), scales.reshape(-1, outputs)
        kept = _memory(*own, 2 * STEP // BLOCK, TILE, BLOCK // 2, dtype=codes.dtype)
        of_scales = plgpu.SMEM((*own, 2 * STEP // GROUP, TILE), given.dtype)
        copies = 2 if gated else 4
    else:
        assert factors is not None
        codes, given = codes.reshape(-1, codes.shape[-1]), factors.reshape(-1)
        # A whole line of memory, where it divides the inputs.
        width = STEP if codes.shape[1] % STEP == 0 else LINE
        kept = _memory(*own, 2, STEP // width, TILE, width, dtype=codes.dtype)
        of_scales, copies = None, 2 * STEP // width
    copies = copies * cut.warpgroups + STEP // LINE
    scratch = dict(
        ring=kept,
        **({} if of_scales is None else dict(scale_ring=of_scales)),
        x_ring=_memory(cut.stages, STEP // LINE, cut.rows[-1], LINE, dtype=x.dtype),
        result=_memory(cut.warpgroups, cut.rows[-1], TILE, dtype=x.dtype),
        there=plgpu.Barrier(num_arrivals=copies, num_barriers=cut.stages),
        free=plgpu.Barrier(num_arrivals=cut.warpgroups, num_barriers=cut.stages),
    )

    def body(*refs: Any) -> None:
        arrays, own = refs[: -len(scratch)], dict(zip(scratch, refs[-len(scratch) :], strict=True))
        _multiply(*arrays, **{"scale_ring": None, **own}, cut=cut, gated=gated)

    body.__name__ = "experts_gate_up" if gated else "experts_down"
    tiles = outputs // TILE if gated else outputs // (2 * TILE)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], outputs), x.dtype),
        grid=(placed.expert.size, -(-tiles // cut.warpgroups)),
        grid_names=("tile", "column"),
        num_threads=cut.warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(placed.expert, placed.used, placed.start, x, codes, given)


def multiply(
    placed: Placed,
    rows: Float[Array, "padded D"],
    gate_up: Codes,
    down: Codes,
    cuts: tuple[MosaicCut, MosaicCut],
) -> Float[Array, "padded D"]:
    """Run the experts of all tiles on rows that `rows.spread` made. Rows not in use are undefined."""
    hidden = _launch(placed, rows, gate_up, cuts[0], gated=True)
    return _launch(placed, hidden, down, cuts[1], gated=False)
