"""All workarounds for XLA, each with a name, its reason and its figures.

No workaround changes what is computed. All programs are compiled with `COMPILER_OPTIONS`, and the
decode loop with `LOOP_OPTIONS` or `MESH_LOOP_OPTIONS`. Models use these:

- `multiply_rows`: compute a product of one row with two rows. `target.Target` and
  `mtp.MTPDrafter.step` do the same for a whole pass over one token. References of kernels do too.
  `pallas_kernels.common.single_row` gives the reason for all of them.
- `table_left_on_cpu`: choose whether the vocabulary's table is the left or the right operand.
- `materialize`: compute a value once, where XLA would repeat it in each reader or take it apart.
- `run_if`: change large arrays in place, or not.
- `in_order`: let what reads a value wait for another value.
- `traced_once`: trace and lower layers of one shape once.
- `forgotten`: in a backward pass, compute a layer again instead of keeping its activations.

Figures are from an H200, unless another machine is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import Array, Bool, Float, Int
from pallas_kernels.common.single_row import repeat_if_single

T = TypeVar("T")
U = TypeVar("U")
CallableT = TypeVar("CallableT", bound=Callable)

COMPILER_OPTIONS = {
    # XLA joins the weights of products that share an input into one matrix. It would do so again in
    # every step. The keys and values of all layers of a DFlash drafter are such products.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # In a CUDA graph XLA runs kernels one after another, even when they are independent. Examples
    # are the experts and the dense MLP of 26B-A4B, and several norms of one residual. A plain step
    # of one row takes 3.3 ms with this option and 3.8 ms without.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    # On a CPU XLA makes matrix-vector loops for vectors of 256 bits, even when the CPU has wider
    # ones. A plain step of the bundled target takes 2.28 ms with this option and 2.59 ms without
    # (jax 0.10.2, 2 cores with AVX-512).
    "xla_cpu_prefer_vector_width": 512,
}
"""The compiler options of all programs, where they differ from XLA's defaults."""

_GRAPHS = "xla_gpu_enable_command_buffer"
LOOP_OPTIONS = COMPILER_OPTIONS | {
    # XLA makes one CUDA graph of a loop's body, and starts it from the host, which first waits for
    # the loop's condition. With WHILE the whole loop is one graph, and the host waits once. A plain
    # step of one row takes 2.30 ms instead of 2.40 (26B-A4B in int8); where tokens are drawn, 3.4
    # instead of 5.0 (E4B in int8), because a branch then needs no host either. The list replaces
    # XLA's own, so it names that too.
    _GRAPHS: "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    # By default XLA makes no graphs of fewer than five operations. A loop counts as one.
    "xla_gpu_graph_min_graph_size": 1,
}
"""The compiler options of a loop of steps that never asks the host, in place of
`COMPILER_OPTIONS`."""
if _GRAPHS in os.environ.get("XLA_FLAGS", ""):  # the user says what graphs are made of
    LOOP_OPTIONS = COMPILER_OPTIONS

MESH_LOOP_OPTIONS = COMPILER_OPTIONS | {
    # XLA joins sums over devices that are ready together, such as those of the experts and the
    # dense MLP of 26B-A4B. It leaves a joined sum to NCCL, and computes the others with a kernel of
    # its own, over the memory of all devices. A step of 8 rows on two devices takes 5.28 ms with
    # this option and 5.71 without; of 8 rows with DFlash 10.8 and 11.0.
    "xla_gpu_all_reduce_combine_threshold_bytes": 0,
}
"""The compiler options of a loop of steps on several devices, which exchange data in it."""


def multiply_rows(
    product: Callable[[Array], Array], rows: Float[Array, "R *D"]
) -> Float[Array, "R *F"]:
    """Apply a product with weights to rows. On NVIDIA GPUs a single row is computed as two rows.

    `pallas_kernels.common.single_row` gives the reason.
    """
    return repeat_if_single(
        product,
        rows,
        single=rows.shape[0] == 1,
        repeat=lambda row: (jnp.repeat(row, 2, axis=0),),
        first=lambda out: out[:1],
    )


def table_left_on_cpu(
    product: Callable[[Array, Array], Array], rows: Float[Array, "R D"], table: Float[Array, "V D"]
) -> Float[Array, "R V"]:
    """Return product(rows, table). On CPU, few rows are computed as product(table, rows) instead.

    XLA's CPU library transposes the right operand in every call, and the table is the larger
    operand. With product(table, rows) the result must be transposed. From some hundred rows on,
    that costs more. Milliseconds for a table of 3072 x 192 (jax 0.10.2, one core):

    | rows | table left | table right |
    |---|---|---|
    | 8 | 0.19 | 0.28 |
    | 64 | 1.04 | 1.14 |
    | 256 | 6.0 | 4.3 |

    Args:
      product: takes [X, D] and [Y, D], and returns [X, Y].
    """

    def left(rows: Array, table: Array) -> Array:
        # Without `materialize` XLA swaps the operands back to avoid the transpose of the result.
        return materialize(product(table, rows)).T

    if rows.shape[0] == 1 or rows.shape[0] > 64:
        return product(rows, table)
    return lax.platform_dependent(rows, table, cpu=left, default=product)


def materialize(x: T) -> T:
    """Make XLA compute a value once, here. XLA then neither repeats nor fuses the computation.

    Five values need this:

    - Gemma 4's per-layer inputs. XLA would norm them again in every layer.
    - The gated per-layer input of a Gemma 4 layer. XLA would make it part of the product that reads
      it, and would need a copy of the layer's slice of the per-layer inputs.
    - The result of `table_left_on_cpu` before its transpose. XLA would swap the operands back.
    - The logits of a level of a draft tree. XLA of jax 0.12.0.1 would join the slice of one row's
      logits with the search for the best, and then not find the slice's memory:
      "BufferAllocation::Slice not assigned". The search needs them in memory anyway.
    - The candidates of a slot that `top_k` finds. XLA would join the slices that are taken of them with
      `top_k`'s own, not see a `top_k` any more, and sort the whole vocabulary.
    """
    return lax.optimization_barrier(x)


TOP_PARTS, TOP_ROWS = 64, 16
"""Parts of a vocabulary that `top_k` searches apart, and the most rows of which it does. A GPU searches
each part with a block of its own."""


def top_k(x: Float[Array, "... V"], k: int) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Return what `lax.top_k` does, of equal values the first ones too.

    On a GPU one block of threads searches a row. For few rows of a large vocabulary that is slow. So such
    rows are cut into parts, and the best of each part compete. On an H200 (jax 0.11.2) the 16 best of
    262,144 take 0.25 ms in parts and 0.48 as a whole for 7 rows, but 1.28 and 0.54 for 56 rows.
    """

    def whole(x: Array) -> tuple[Array, Array]:
        best, ids = lax.top_k(x, k)
        return best, ids

    def by_parts(x: Array) -> tuple[Array, Array]:
        parts, index = materialize(lax.top_k(x.reshape(*x.shape[:-1], TOP_PARTS, -1), k))
        begin = jnp.arange(TOP_PARTS, dtype=jnp.int32)[:, None] * (v // TOP_PARTS)
        best, place = materialize(lax.top_k(parts.reshape(*x.shape[:-1], -1), k))
        ids = (index + begin).reshape(*x.shape[:-1], -1)
        return best, jnp.take_along_axis(ids, place, axis=-1)

    v = x.shape[-1]
    if v % TOP_PARTS or v < 1024 * TOP_PARTS or k > 16 or x.size > TOP_ROWS * v:
        return whole(x)
    return lax.platform_dependent(x, cpu=whole, default=by_parts)


def in_order(first: T, then: U) -> tuple[T, U]:
    """Return two values. XLA computes nothing that reads `then` before it has `first`.

    A chunk of a prompt attends to rings, and overwrites them after that. In long programs XLA does
    not find this order by itself. It then copies the rings: for 32 slots of E4B, 76 copies of 19
    MB.
    """
    return lax.optimization_barrier((first, then))


def run_if(condition: Bool[Array, ""], function: Callable[[T], T], values: T) -> T:
    """Return `function(values)` where the condition holds, else `values`.

    It is a loop of one turn or none. The branches of `lax.cond` do not work in place: with caches of
    31 MB, a step in one of three branches had 33 MB of copies on a CPU (jax 0.10.2), and none here.
    The loop counts its turns, so that its condition is computed. In a CUDA graph nothing waits for a
    condition that is an element of the carry as it stands.
    """

    def run(carry: tuple[Array, T]) -> tuple[Array, T]:
        return carry[0] + 1, function(carry[1])

    begin = jnp.where(condition, 0, 1).astype(jnp.int32)
    return lax.while_loop(lambda carry: carry[0] < 1, run, (begin, values))[1]


def traced_once(function: CallableT) -> CallableT:
    """Wrap a function in jit, so that calls of one shape, such as those of layers, are traced once.

    Inside a program jit does nothing else: XLA joins the calls with the code around them.
    """
    return jax.jit(function)  # type: ignore[return-value]


def forgotten(function: CallableT, remat: bool) -> CallableT:
    """Return a layer's function, of which a backward pass keeps only the inputs if `remat`.

    Each layer is wrapped by itself. XLA then computes it again when its gradient is due, and not
    all layers at once. Without a backward pass this changes nothing.
    """
    return jax.checkpoint(function) if remat else function  # type: ignore[return-value]
