"""The products of experts with codes for many tokens, for Hopper, by TMA and wgmma.

A block is one warpgroup. It multiplies all rows of an expert (up to 64, a tile) by two tiles of 64
outputs, of gate and of up or both of down. So a code is read and converted once. TMA loads codes
and rows into a ring in shared memory. The warpgroup takes codes into registers, converts them, and
hands them to wgmma as its left operand. While these are multiplied it converts the next. Several
blocks of a processor do so at once, and one works while another waits.

TMA reads rows that lie together. `permute.spread` has copied each token to the rows of its pairs,
and put every 16 numbers into the order in which codes come into registers: see `permute.places`.

A tile has one of a few numbers of rows, the least that its pairs fit into (`MosaicConfig.rows`).
"""

from __future__ import annotations

import dataclasses
import functools
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
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float

from pallas_kernels.common.mosaic import BY_OUTPUT, LEFT, activated, load_as, swizzled
from pallas_kernels.common.registers import words
from pallas_kernels.experts.routing import ALIGN, Placed
from pallas_kernels.experts.tile_config import MosaicConfig
from pallas_kernels.int4_matmul import dequantise_mosaic
from pallas_kernels.int4_matmul.coding import BLOCK, Codes
from pallas_kernels.int4_matmul.dequantise import SHIFT
from pallas_kernels.int8_matmul.dequantise import assembly, factor

STEP = 128  # inputs of a step
LINE = 64  # inputs of a row of 128 bytes, as wgmma reads it
TILE = 64  # outputs of a wgmma
GROUP = 32  # inputs of a scale of codes of 4 bits


_CODES = plgpu.Layout.WGMMA_UPCAST_2X


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
    pair, layout = ir.VectorType.get((2,), ir.BF16Type.get()), LEFT.to_mgpu()
    made = np.empty(layout.registers_shape((TILE, LINE)), dtype=object)
    for at, register in np.ndenumerate(codes.registers[:, first : first + LINE // 16]):
        for group, both in numbers(at, register):
            for i, word in enumerate(both):
                made[(at[0], 2 * group + i, *at[2:-1])] = utils.bitcast(word, pair)
    return type(codes)(_registers=made, _layout=layout, _is_signed=None)


_LEFT_TYPE = plgpu.ShapeDtypeStruct((TILE, LINE), jnp.bfloat16, layout=LEFT)


def _of_eight_bits(codes_ref: Any) -> Iterator[Array]:
    """Return codes [64, inputs] in shared memory as left operands [64, 64], one after another."""
    code, codes = assembly(codes_ref.dtype), load_as(codes_ref, _CODES)
    for first in range(0, codes.shape[1] // 16, LINE // 16):

        @plgpu.inline_mgpu(arg_types=(_CODES,), return_type=_LEFT_TYPE)
        def convert(_: Any, codes: Any, first: int = first) -> Any:
            return _left_operand(codes, first, lambda at, r: [(at[1], words(code, 2, r))])

        yield convert(codes)  # pyright: ignore[reportCallIssue]


def _of_four_bits(codes_ref: Any, scale_refs: list[Any]) -> Array:
    """Return a block of codes [64, 32] times its scales [64] as a left operand [64, 64]."""

    @plgpu.inline_mgpu(arg_types=(_CODES, BY_OUTPUT, BY_OUTPUT), return_type=_LEFT_TYPE)
    def convert(_: Any, codes: Any, *scales: Any) -> Any:
        halves = dequantise_mosaic.halves()
        factors = [
            dequantise_mosaic.of_outputs(s, half) for s, half in zip(scales, halves, strict=True)
        ]

        def numbers(at: Any, register: Any) -> list[tuple[int, Any]]:
            return [
                (
                    2 * i + at[1],
                    dequantise_mosaic.numbers(register, half, factors[i][at[4]], effects=True),
                )
                for i, half in enumerate(halves)
            ]

        return _left_operand(codes, 0, numbers)

    scales = [load_as(ref, BY_OUTPUT, optimized=False) for ref in scale_refs]
    return convert(load_as(codes_ref, _CODES), *scales)  # pyright: ignore[reportCallIssue]


def _placed(x: Array) -> Array:
    """Change the order of outputs [64, rows], as `permute.places` changes that of 16 numbers.

    Of the bits of an output, bit 3 says which of two registers, and bit 1 is bit 3 of the lane.
    """

    @plgpu.inline_mgpu(
        arg_types=(LEFT,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LEFT)
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
    """The codes of an expert, of which a block multiplies two tiles of 64 outputs at a time.

    They are of gate and up (a column of the hidden numbers), or neighbours of down.

    Attributes:
      codes, scales: references: codes, and factors of outputs (8 bits) or scales (4 bits).
      ring, scale_ring: the same in shared memory: [stage, ...]. Codes of 8 bits have no scales
        there.
      full: barriers of the stages.
      expert: which expert.
      inputs, outputs: of a matrix of an expert.
      gated: whether the two tiles are of gate and up.
    """

    codes: Any
    scales: Any
    ring: Any
    scale_ring: Any
    full: Any
    expert: Any
    inputs: int
    outputs: int
    gated: bool

    @property
    def columns(self) -> int:
        """Number of pairs of tiles."""
        return self.outputs // (TILE if self.gated else 2 * TILE)

    def output(self, column: Any, i: int) -> Any:
        """Return the first output of a tile, within its matrix."""
        return column * TILE if self.gated else (column * 2 + i) * TILE

    def _row(self, column: Any, i: int) -> Any:
        """Return the same within the outputs of all experts."""
        matrix = self.expert * 2 + i if self.gated else self.expert
        return matrix * self.outputs + self.output(column, i)

    def fetch(self, column: Any, step: Any, slot: Any) -> None:
        """Let TMA load what a step multiplies."""
        to, bar = self.ring.at[slot], self.full.at[slot]
        if self.scale_ring is None:
            width = self.ring.shape[-1]
            for i in range(2):
                for piece in range(STEP // width):
                    at = pl.ds(step * STEP + piece * width, width)
                    own = self.codes.at[pl.ds(self._row(column, i), TILE), at]
                    plgpu.copy_gmem_to_smem(own, to.at[i, piece], bar)
            return
        arrays = (self.codes, to, BLOCK), (self.scales, self.scale_ring.at[slot], GROUP)
        for ref, to, size in arrays:
            count, first = STEP // size, self.expert * (self.inputs // size) + step * (STEP // size)
            if self.gated:  # both lie together
                own = ref.at[pl.ds(2 * first, 2 * count), pl.ds(self.output(column, 0), TILE)]
                plgpu.copy_gmem_to_smem(own, to, bar)
                continue
            for i in range(2):
                own = ref.at[pl.ds(first, count), pl.ds(self.output(column, i), TILE)]
                plgpu.copy_gmem_to_smem(own, to.at[pl.ds(i * count, count)], bar)

    def numbers(self, slot: Any, i: int) -> Iterator[Array]:
        """Return the numbers of a step of a tile, 64 inputs at a time."""
        ring = self.ring.at[slot]
        if self.scale_ring is None:
            for piece in range(STEP // self.ring.shape[-1]):
                yield from _of_eight_bits(ring.at[i, piece])
            return

        def at(which: int, size: int) -> int:
            return which * 2 + i if self.gated else i * (STEP // size) + which

        scales = self.scale_ring.at[slot]
        for block in range(STEP // BLOCK):
            both = [scales.at[at(2 * block + half, GROUP)] for half in range(2)]
            yield _of_four_bits(ring.at[at(block, BLOCK)], both)

    def finished(self, column: Any, i: int, total: Array, dtype: Any) -> Array:
        """Multiply sums [64, rows] of a tile by what comes after them, and round them."""
        if self.scale_ring is None:
            own = self.scales.at[pl.ds(self._row(column, i), TILE)]
            factors = load_as(own, BY_OUTPUT, optimized=False) * factor(self.codes.dtype)
            total = total * lax.broadcast_in_dim(factors, total.shape, [0])
        else:
            total = total * 2.0**SHIFT
        return total.astype(dtype)


def _multiply(
    expert_ref,
    used_ref,
    start_ref,
    x_ref,
    codes_ref,
    scales_ref,
    out_ref,
    ring,
    scale_ring,
    x_ring,
    result,
    full,
    empty,
    *,
    config: MosaicConfig,
    gated: bool,
) -> None:
    """Write some outputs of the rows of a tile: gelu_tanh(gate) * up, or sums."""
    tile, share = lax.axis_index("tile"), lax.axis_index("share")
    used = used_ref[tile]
    start = lax.div(start_ref[tile], ALIGN) * ALIGN  # so that Mosaic sees that it is a multiple
    sizes, dtype = (x_ref.shape[1], out_ref.shape[1]), out_ref.dtype
    weight = _Weight(codes_ref, scales_ref, ring, scale_ring, full, expert_ref[tile], *sizes, gated)
    columns, steps = weight.columns, -(-sizes[0] // STEP)
    first = share * config.columns
    count = (
        jnp.minimum(config.columns, columns - first) if columns % config.columns else config.columns
    )

    def multiply(rows: int) -> None:
        def fetch(step: Any) -> None:
            slot, own = lax.rem(step, config.stages), lax.rem(step, steps)
            for line in range(STEP // LINE):
                of = x_ref.at[pl.ds(start, rows), pl.ds(own * STEP + line * LINE, LINE)]
                to = x_ring.at[slot, line, pl.ds(0, rows)]
                plgpu.copy_gmem_to_smem(of, to, full.at[slot])
            weight.fetch(first + lax.div(step, steps), own, slot)

        def refill(step: Any) -> None:
            """Load over what a step has read."""

            @pl.when((step >= 0) & (step + config.stages < count * steps))
            def _():
                slot = lax.rem(step, config.stages)
                plgpu.barrier_arrive(empty.at[slot])
                plgpu.barrier_wait(empty.at[slot])  # for all warps
                fetch(step + config.stages)

        def sums(column: Any, *totals: Any) -> list[Array]:
            @pl.loop(0, steps)
            def _(step):
                step = column * steps + step
                slot = lax.rem(step, config.stages)
                plgpu.barrier_wait(full.at[slot])
                for i, total in enumerate(totals):
                    for line, w in enumerate(weight.numbers(slot, i)):
                        x = x_ring.at[slot, line, pl.ds(0, rows)]
                        plgpu.wgmma(total, w, x.transpose((1, 0)))
                        plgpu.wgmma_wait(1)  # for the one before this
                # In the middle of a step a branch would make the compiler wait for each wgmma.
                refill(step - 1)

            plgpu.wgmma_wait(0)
            return [total[...] for total in totals]

        pl.loop(0, jnp.minimum(count * steps, config.stages))(fetch)
        total = plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32)

        @pl.loop(0, count)
        def _(column):
            both = pl.run_scoped(functools.partial(sums, column), total, total)
            # As in the reference, both are rounded before the activation.
            both = [weight.finished(first + column, i, a, dtype) for i, a in enumerate(both)]
            for i, a in enumerate([_placed(activated(both, "gelu_tanh"))] if gated else both):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                result.at[pl.ds(0, rows)].T[...] = plgpu.layout_cast(
                    a, plgpu.Layout.WGMMA_TRANSPOSED
                )
                plgpu.commit_smem()
                for row in range(0, rows, ALIGN):

                    @pl.when(used > row)
                    def _(row=row, i=i):
                        output = pl.ds(weight.output(first + column, i), TILE)
                        to = out_ref.at[pl.ds(start + row, ALIGN), output]
                        plgpu.copy_smem_to_gmem(result.at[pl.ds(row, ALIGN)], to)

        plgpu.wait_smem_to_gmem(0)

    for less, rows in zip((0, *config.rows), config.rows, strict=False):
        pl.when((used > less) & (used <= rows))(functools.partial(multiply, rows))


def _launch(
    placed: Placed, x: Float[Array, "padded K"], weight: Codes, config: MosaicConfig, *, gated: bool
) -> Float[Array, "padded N"]:
    """Multiply the rows of all tiles by one of both weights."""
    codes, scales, factors = weight.codes, weight.scales, weight.factors
    outputs, stages = codes.shape[-2], config.stages
    if scales is not None:
        codes, scales = codes.reshape(-1, outputs, BLOCK // 2), scales.reshape(-1, outputs)
        kept = swizzled(stages, 2 * STEP // BLOCK, TILE, BLOCK // 2, dtype=codes.dtype)
        of_scales = plgpu.SMEM((stages, 2 * STEP // GROUP, TILE), scales.dtype)
        copies = 2 if gated else 4
    else:
        assert factors is not None
        codes, scales = codes.reshape(-1, codes.shape[-1]), factors.reshape(-1)
        # A whole line of memory, where it divides the inputs.
        width = STEP if codes.shape[1] % STEP == 0 else LINE
        kept = swizzled(stages, 2, STEP // width, TILE, width, dtype=codes.dtype)
        of_scales, copies = None, 2 * STEP // width
    rows, lines = config.rows[-1], STEP // LINE
    scratch = dict(
        ring=kept,
        **({} if of_scales is None else dict(scale_ring=of_scales)),
        x_ring=swizzled(stages, lines, rows, LINE, dtype=x.dtype),
        result=swizzled(rows, TILE, dtype=x.dtype),
        full=plgpu.Barrier(num_arrivals=copies + lines, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    )

    def body(*refs: Any) -> None:
        arrays, own = refs[: -len(scratch)], dict(zip(scratch, refs[-len(scratch) :], strict=True))
        _multiply(*arrays, **{"scale_ring": None, **own}, config=config, gated=gated)

    body.__name__ = "experts_gate_up" if gated else "experts_down"
    columns = outputs // (TILE if gated else 2 * TILE)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], outputs), x.dtype),
        grid=(placed.expert.size, -(-columns // config.columns)),
        grid_names=("tile", "share"),
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(placed.expert, placed.used, placed.start, x, codes, scales)


def multiply(
    placed: Placed,
    rows: Float[Array, "padded D"],
    gate_up: Codes,
    down: Codes,
    configs: tuple[MosaicConfig, MosaicConfig],
) -> Float[Array, "padded D"]:
    """Run the experts of all tiles on rows of `permute.spread`. Rows not in use are undefined."""
    hidden = _launch(placed, rows, gate_up, configs[0], gated=True)
    return _launch(placed, hidden, down, configs[1], gated=False)
