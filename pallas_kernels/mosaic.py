"""What Mosaic kernels of products with codes share. It needs a jax with their parts: import it late."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.tiles import TILE, pieces


def swizzled(*shape: int, dtype: DTypeLike, line: int | None = None) -> Any:
    """Return shared memory for TMA and wgmma.

    Args:
      line: numbers that are swizzled together; None for those of the last axis.
    """
    line = shape[-1] if line is None else line
    swizzle = plgpu.SwizzleTransform(line * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, line)), swizzle))


def in_ring(
    count: Array,
    cut: Any,
    there: Any,
    free: Any,
    load: Callable[[Array, Array], None],
    multiply: Callable[[Array], None],
) -> None:
    """Multiply `count` steps of inputs, which TMA loads into a ring several steps ahead.

    The warpgroups of a block of threads take turns with loading.

    Args:
      cut: has `groups` and `stages`, of which there are 3 at least.
      there, free: barriers of each place of the ring, see `_launch`.
      load: from a step and its place, let TMA load what is multiplied.
      multiply: from a place, hand it to wgmma, with a left operand in registers.
    """
    warpgroup, stages = lax.axis_index("warpgroup"), cut.stages
    assert stages >= 3  # places are filled again a step after they are given back

    def loads(place):
        """Tell whether this warpgroup loads a place of the ring. The others need not wait for it."""
        return lax.rem(place, cut.groups) == warpgroup

    @pl.loop(0, jnp.minimum(count, stages))
    def _(i):
        pl.when(loads(i))(lambda: load(i, i))

    def step(i, place):
        plgpu.barrier_wait(there.at[place])
        multiply(place)
        last = jnp.where(place == 0, stages, place) - 1

        # Load over what all have given back, while this step is multiplied.
        @pl.when((i >= 1) & (i - 1 + stages < count) & loads(last))
        def _():
            plgpu.barrier_wait(free.at[last])
            load(i - 1 + stages, last)

        # The next step has the same registers for its left operand, which wgmma reads until here.
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(free.at[place])
        return jnp.where(place == stages - 1, 0, place + 1)

    lax.fori_loop(jnp.int32(0), count, step, jnp.int32(0))


def write_sums(total: Array, piece_ref: Any, out_ref: Any, split: Array, first: Array) -> None:
    """Write sums [64 outputs, rows] of a warpgroup to out[split, rows, outputs], in pieces of rows.

    Args:
      piece_ref: shared memory of this warpgroup for a piece.
      first: output.
    """
    size = piece_ref.shape[0]
    for row in range(0, total.shape[1], size):
        some = total[:, row : row + size].astype(piece_ref.dtype)
        piece_ref.T[...] = plgpu.layout_cast(some, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        to = out_ref.at[split, pl.ds(row, size), pl.ds(first, TILE)]
        plgpu.copy_smem_to_gmem(piece_ref, to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.wait_smem_to_gmem(0)


def multiply_tiles(
    name: str,
    body: Callable[..., None],
    args: tuple[Array, ...],
    *,
    outputs: int,
    cut: Any,
    dtype: DTypeLike,
    rings: tuple[Any, ...],
    loads: int,
) -> Float[Array, "R N"]:
    """Return a product of all tiles of outputs: the first `cut.whole` ones, then those that are split.

    Args:
      name: what profiles call the kernel.
      body: the kernel, as in `_launch`. It also gets `first_tile` of those in its output, and `splits`.
      args: arrays, of which the first one is the rows.
      cut: has `groups`, `outputs`, `splits`, `stages` and `whole`.
      rings, loads: as in `_launch`.
    """
    tiles, found = outputs // cut.outputs, []
    for first, last, splits in ((0, cut.whole, 1), (cut.whole, tiles, cut.splits)):
        if first < last:
            own = functools.partial(body, first_tile=first, splits=splits)
            out = _launch(name, own, args, cut, last - first, splits, dtype, rings, loads)
            found.append(out[0] if splits == 1 else jnp.sum(out, axis=0).astype(dtype))
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)


def _launch(
    name: str,
    body: Callable[..., None],
    args: tuple[Array, ...],
    cut: Any,
    tiles: int,
    splits: int,
    dtype: DTypeLike,
    rings: tuple[Any, ...],
    loads: int,
) -> Float[Array, "X R M"]:
    """Run a kernel with a block for each tile and split, and a ring in shared memory.

    Args:
      body: the kernel. It gets references to `args`, to out[splits, rows, outputs], to `rings`, to
        shared memory for a piece of each warpgroup's result, and two barriers for each place of the
        rings: what was loaded is there, and all warpgroups have read it.
      dtype: of the result. Parts are float32.
      rings: shared memory with `cut.stages` places.
      loads: of a place.
    """

    def named(*refs: Any) -> None:
        body(*refs)

    named.__name__ = name
    rows, groups, stages = args[0].shape[0], cut.groups, cut.stages
    part = jnp.dtype(dtype if splits == 1 else jnp.float32)
    piece = groups, rows // pieces(rows), TILE
    return plgpu.kernel(
        named,
        out_type=jax.ShapeDtypeStruct((splits, rows, tiles * groups * TILE), part),
        grid=(splits, tiles),
        grid_names=("split", "tile"),
        num_threads=groups,
        thread_name="warpgroup",
        scratch_types=(
            *rings,
            swizzled(*piece, dtype=part, line=128 // part.itemsize),
            plgpu.Barrier(num_arrivals=loads, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(*args)
