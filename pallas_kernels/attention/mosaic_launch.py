"""The launch and the layout of shared memory of both Mosaic kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import KVSegment

ROWS = 64  # rows of a tile, which is what one wgmma multiplies


def launch(
    body: Callable[..., None],
    inputs: tuple[Array, ...],
    q: Array,
    *,
    grid: tuple[int, int, int, int],
    cluster: int,
    rows: int,
    scratch: tuple[Any, ...],
) -> tuple[Float[Array, "X *Q"], Float[Array, "X B K R"]]:
    """Run a kernel of three warpgroups.

    Args:
      body: the kernel. It gets references to `inputs`, to both results, and to `scratch`.
      inputs: arrays in global memory.
      q: an array with the shape and dtype of the results of one share of the keys.
      grid: number of groups of tiles, shares of the keys, kv heads, sequences.
      cluster: number of blocks of a group. Each block has a tile of rows, and the blocks load keys
        for each other.
      rows: rows of each kv head, including those that fill up a tile.
      scratch: shared memory and barriers.

    Returns:
      The results of every share, and the logs (base 2) of their weights.
    """
    _, shares, kv_heads, sequences = grid

    def attention(*refs: Any) -> None:
        body(*refs)

    return plgpu.kernel(
        attention,
        out_type=(
            jax.ShapeDtypeStruct((shares, *q.shape), q.dtype),
            jax.ShapeDtypeStruct((shares, sequences, kv_heads, rows), jnp.float32),
        ),
        grid=grid,
        grid_names=("group", "split", "head", "sequence"),
        cluster=(cluster,),
        cluster_names=("tile",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch,
        # No sum crosses warps. The memory that is reserved for such sums by default does not fit.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(*inputs)


def pages_of(segment: KVSegment) -> Int[Array, "B N"]:
    """Return the pages of each row of a segment."""
    if segment.pages is None:
        return jnp.arange(segment.k.shape[0], dtype=jnp.int32)[:, None]
    return segment.pages


def find_keys(
    pages_ref: Any, cache_ref: Any, batch_row: Any, piece: Any, size: int
) -> tuple[Any, Any]:
    """Return in a kernel the page of a piece of a row's slots, and the number of the piece there.

    A page past the last one becomes the last one. It holds no key that a query sees.

    Args:
      piece: the number of the piece. It may lie behind the row's last page, because keys are looked
        up one block ahead.
      size: slots of a piece.
    """
    last, in_page = cache_ref.shape[0] - 1, cache_ref.shape[2] // size
    if pages_ref.shape[1] == 1:
        return jnp.minimum(pages_ref[batch_row, 0], last), piece
    page = jnp.minimum(lax.div(piece, in_page), pages_ref.shape[1] - 1)
    return jnp.minimum(pages_ref[batch_row, page], last), lax.rem(piece, in_page)


def lines(numbers: int) -> tuple[Any, ...]:
    """Return the layout of shared memory that wgmma needs: lines of 128 bytes.

    Args:
      numbers: how many numbers a line has.
    """
    return plgpu.TilingTransform((8, numbers)), plgpu.SwizzleTransform(128)


def free_barrier(cluster: int, *, num_barriers: int, num_arrivals: int = 1) -> Any:
    """Return barriers that tell all blocks that load into a piece of memory that it was read."""
    if cluster > 1:
        return plgpu.ClusterBarrier(
            collective_axes=("tile",), num_arrivals=num_arrivals, num_barriers=num_barriers
        )
    return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)
