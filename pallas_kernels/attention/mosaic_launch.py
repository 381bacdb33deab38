"""What both Mosaic kernels share: how they are launched, how shared memory is laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

ROWS = 64  # of a tile: what one wgmma multiplies


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
    """Run a kernel of three warpgroups; return every share's results and the logs of its weights.

    Args:
      body: the kernel; it gets `inputs`, both results and `scratch`.
      q: what each share's results look like.
      grid: groups of tiles, shares of the keys, kv heads, sequences.
      cluster: blocks of a group, a tile of rows each, which load keys for each other.
      rows: of each kv head, those that fill up a tile included.
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
        # No sum crosses warps; what is set aside for that by default does not fit.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(*inputs)


def lines(numbers: int) -> tuple[Any, ...]:
    """Return how wgmma wants a matrix in shared memory: lines of 128 bytes, so many numbers."""
    return plgpu.TilingTransform((8, numbers)), plgpu.SwizzleTransform(128)


def free_barrier(cluster: int, *, num_barriers: int, num_arrivals: int = 1) -> Any:
    """Return the barriers that say a piece of memory was read, by all blocks that load into it."""
    if cluster > 1:
        return plgpu.ClusterBarrier(
            collective_axes=("tile",), num_arrivals=num_arrivals, num_barriers=num_barriers
        )
    return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)
