"""What Mosaic kernels of products with codes share. It needs a jax with their parts: import it late.

`multiply_tiles` is one kernel. Each block of threads has its shares of tiles, one after the other.
TMA loads all of them into one ring in shared memory, so that no share waits for its first step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Float

from pallas_kernels.tiles import PIECE, PROCESSORS, TILE, results_are_apart

LEFT = plgpu.Layout.WGMMA
"""How wgmma takes its left operand from registers, and how it leaves sums there."""
BY_OUTPUT = LEFT.reduce(1)
"""How numbers of outputs lie beside it."""


def load_as(ref: Any, layout: Any, *, optimized: bool = True) -> Array:
    """Load numbers from memory as a layout."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]


def words(code: str, results: int, *registers: Any) -> list[Any]:
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


def swizzled(*shape: int, dtype: DTypeLike, line: int | None = None) -> Any:
    """Return shared memory for TMA and wgmma.

    Args:
      line: numbers that are swizzled together; None for those of the last axis.
    """
    line = shape[-1] if line is None else line
    swizzle = plgpu.SwizzleTransform(line * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, line)), swizzle))


class Steps(NamedTuple):
    """How a kernel multiplies a step of inputs.

    Attributes:
      load: from a tile, a step, a place of the rings and its barrier, let TMA load what is multiplied.
      multiply: from sums and a place, hand it to wgmma, with a left operand in registers.
      finish: from sums [64 outputs, rows] and the first of these outputs, return the result.
    """

    load: Callable[[Array, Array, Array, Any], None]
    multiply: Callable[[Any, Array], None]
    finish: Callable[[Array, Array], Array] = lambda total, first: total


class _Share(NamedTuple):
    """What a block multiplies of a tile: steps of inputs, and where the sums go."""

    tile: Array
    begin: Array
    count: Array
    out: int  # which result
    split: Array
    first: Array  # of the tile's outputs in that result


def multiply_tiles(
    name: str,
    steps_of: Callable[..., Steps],
    args: tuple[Array, ...],
    *,
    outputs: int,
    steps: int,
    cut: Any,
    dtype: DTypeLike,
    rings: tuple[Any, ...],
    loads: int,
) -> Float[Array, "R N"]:
    """Return a product of rows with all tiles of outputs.

    Args:
      name: what profiles call the kernel.
      steps_of: from references to `args` and to `rings`, return how a step is multiplied.
      args: arrays, of which the first one is the rows.
      steps: of a tile.
      cut: has `groups`, `outputs`, `splits`, `stages` and `whole`, as in `eight_bits.tuning.MosaicCut`.
      dtype: of the result. Parts are float32.
      rings: shared memory with `cut.stages` places.
      loads: of a place.

    Raises:
      ValueError: the cut puts whole tiles before splits that are too short for it.
    """
    rows, tiles = args[0].shape[0], outputs // cut.outputs
    whole = cut.whole if cut.splits > 1 else tiles
    if not results_are_apart(cut, steps):
        raise ValueError(
            f"{cut} gives a split {steps // cut.splits} of {steps} steps; where whole tiles come first, "
            "a split needs more steps than there are stages"
        )
    rest, dtype = tiles - whole, jnp.dtype(dtype)
    blocks = min(PROCESSORS, whole + rest * cut.splits)
    shapes = []
    if whole:
        shapes.append(jax.ShapeDtypeStruct((1, rows, whole * cut.outputs), dtype))
    if rest:
        parts = cut.splits, rows, rest * cut.outputs
        shapes.append(jax.ShapeDtypeStruct(parts, jnp.float32))

    def kernel(*refs: Any) -> None:
        given, refs = refs[: len(args)], refs[len(args) :]
        out_refs, refs = refs[: len(shapes)], refs[len(shapes) :]
        own, (pieces, there, free) = refs[: len(rings)], refs[len(rings) :]
        block, warpgroup = (lax.axis_index(axis) for axis in ("block", "warpgroup"))
        shares, zero = [], jnp.int32(0)
        for i in range(0, whole, blocks):
            tile = i + block
            count = jnp.where(tile < whole, steps, 0)
            shares.append(_Share(tile, zero, count, 0, zero, tile * cut.outputs))
        for i in range(0, rest * cut.splits, blocks):
            split, tile = lax.div(i + block, rest), lax.rem(i + block, rest)
            begin, end = (lax.div((split + j) * steps, cut.splits) for j in range(2))
            count = jnp.where(split < cut.splits, end - begin, 0)
            out = len(shapes) - 1
            shares.append(_Share(whole + tile, begin, count, out, split, tile * cut.outputs))

        def write(share: _Share, total: Array) -> None:
            mine, piece = warpgroup * TILE, pieces[share.out].at[warpgroup]

            @pl.when(share.count > 0)
            def _():
                sums = of_step.finish(total, share.tile * cut.outputs + mine)
                _write_sums(sums, piece, out_refs[share.out], share.split, share.first + mine)

        of_step = steps_of(*given, *own)
        _in_ring(shares, cut, rows, there, free, of_step, write)

    kernel.__name__ = name
    piece = cut.groups, min(rows, PIECE), TILE
    line = 128  # bytes that are swizzled together
    found = plgpu.kernel(
        kernel,
        out_type=tuple(shapes),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=cut.groups,
        thread_name="warpgroup",
        scratch_types=(
            *rings,
            plgpu.RefUnion(
                *(swizzled(*piece, dtype=s.dtype, line=line // s.dtype.itemsize) for s in shapes)
            ),
            plgpu.Barrier(num_arrivals=loads, num_barriers=cut.stages),
            plgpu.Barrier(num_arrivals=cut.groups, num_barriers=cut.stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(*args)
    added = [out[0] if out.shape[0] == 1 else jnp.sum(out, axis=0).astype(dtype) for out in found]
    return added[0] if len(added) == 1 else jnp.concatenate(added, axis=1)


def _in_ring(
    shares: Sequence[_Share],
    cut: Any,
    rows: int,
    there: Any,
    free: Any,
    steps: Steps,
    write: Callable[[_Share, Array], None],
) -> None:
    """Multiply shares of a block, which TMA loads into a ring several steps ahead.

    The warpgroups of a block of threads take turns with loading.

    Args:
      there, free: two barriers of each place of the ring. What was loaded is there, and all
        warpgroups have read it.
      write: the sums of a share.
    """
    warpgroup, stages = lax.axis_index("warpgroup"), cut.stages
    assert stages >= 3  # places are filled again a step after they are given back
    count = sum((share.count for share in shares), jnp.int32(0))

    def loads(place):
        """Tell whether this warpgroup loads a place of the ring. The others need not wait for it."""
        return lax.rem(place, cut.groups) == warpgroup

    def load(i, place):
        """Load a step, counted from the first one of the first share on."""
        begin = jnp.int32(0)
        tile, step = shares[0].tile, shares[0].begin + i
        for before, share in itertools.pairwise(shares):
            begin = begin + before.count
            tile = jnp.where(i >= begin, share.tile, tile)
            step = jnp.where(i >= begin, share.begin + i - begin, step)
        steps.load(tile, step, place, there.at[place])

    @pl.loop(0, jnp.minimum(count, stages))
    def _(i):
        pl.when(loads(i))(lambda: load(i, i))

    def multiply(first, last, place, total):
        def step(i, place):
            plgpu.barrier_wait(there.at[place])
            steps.multiply(total, place)
            before = jnp.where(place == 0, stages, place) - 1

            # Load over what all have given back, while this step is multiplied.
            @pl.when((i >= 1) & (i - 1 + stages < count) & loads(before))
            def _():
                plgpu.barrier_wait(free.at[before])
                load(i - 1 + stages, before)

            # The next step has the same registers for its left operand, which wgmma reads until here.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[place])
            return jnp.where(place == stages - 1, 0, place + 1)

        place = lax.fori_loop(first, last, step, place)
        return total[...], place

    first, place = jnp.int32(0), jnp.int32(0)
    for share in shares:
        last = first + share.count
        run = functools.partial(multiply, first, last, place)
        total, place = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32))
        write(share, total)
        first = last


def _write_sums(total: Array, piece_ref: Any, out_ref: Any, split: Array, first: Array) -> None:
    """Write sums [64 outputs, rows] of a warpgroup to out[split, rows, outputs], in pieces of rows.

    Args:
      piece_ref: shared memory of this warpgroup for a piece.
      first: output.
    """
    count = total.shape[1]
    for row in range(0, count, PIECE):
        size = min(PIECE, count - row)
        own = piece_ref.at[pl.ds(0, size)]
        some = total[:, row : row + size].astype(piece_ref.dtype)
        own.T[...] = plgpu.layout_cast(some, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        to = out_ref.at[split, pl.ds(row, size), pl.ds(first, TILE)]
        plgpu.copy_smem_to_gmem(own, to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.wait_smem_to_gmem(0)
