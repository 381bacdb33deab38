"""The launch and the layout of shared memory of both Mosaic kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

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


def with_cache_rows(
    spans: Int[Array, "B P X"], rows: Int[Array, " B"] | None
) -> Int[Array, "B P _"]:
    """Return what a kernel knows of each group of tiles, and behind it the cache row that it reads.

    Without `rows` the result is `spans`.
    """
    if rows is None:
        return spans
    column = jnp.broadcast_to(rows[:, None, None], (*spans.shape[:2], 1))
    return jnp.concatenate([spans, column.astype(spans.dtype)], axis=2)


def cache_row_of(spans_ref: Any, at: tuple[Any, Any, int], cache_ref: Any) -> Any:
    """Return in a kernel the cache row that a batch row reads: its own, unless there is another.

    A row past the end of the cache becomes the last one. It has no sequence, and so sees no key.

    Args:
      spans_ref: the result of `with_cache_rows`.
      at: the batch row, the group of tiles, and the column of the cache row.
    """
    batch_row, _, column = at
    if spans_ref.shape[2] == column:
        return batch_row
    return jnp.minimum(spans_ref[at], cache_ref.shape[0] - 1)


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
