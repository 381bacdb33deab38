"""Every workaround for the compiler, each behind one name, with its reason and its figures.

None of them changes what is computed. Programs are compiled with `COMPILER_OPTIONS`. In the models:

- `multiply_rows`: a product of one row goes by way of two. A whole pass over one token does the
  same (`target.Target`, `mtp.MTPDrafter.step`) and so do references of kernels:
  `pallas_kernels.lone_row` has the story for all of them.
- `table_left_on_cpu`: which operand of a product the vocabulary's table is.
- `materialize`: a value that XLA would make anew in each reader, or take apart.
- `traced_once`: layers of one shape are traced and lowered once.

Figures are from an H200, unless another machine is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import Array, Float
from pallas_kernels.lone_row import twice_if_alone

T = TypeVar("T")
CallableT = TypeVar("CallableT", bound=Callable)

COMPILER_OPTIONS = {
    # XLA joins the weights of products that share an input into one matrix, and does so again in
    # every step: a DFlash drafter's keys and values of all layers.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # In a CUDA graph XLA puts one kernel after the other, also where neither needs the other:
    # 26B-A4B's experts and its dense MLP, several norms of one residual. A plain step of one row
    # takes 3.3 ms with this option, and 3.8 ms without.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    # On a CPU XLA makes matrix-vector loops for vectors of 256 bits, also where there are wider
    # ones. A plain step of the bundled target takes 2.28 ms with this option and 2.59 ms without
    # (jax 0.10.2, 2 cores with AVX-512).
    "xla_cpu_prefer_vector_width": 512,
}
"""What all programs are compiled with, instead of XLA's defaults."""


def multiply_rows(
    product: Callable[[Array], Array], rows: Float[Array, "R *D"]
) -> Float[Array, "R *F"]:
    """Apply a product with weights to rows; on NVIDIA GPUs a row that is alone goes twice.

    Why: `pallas_kernels.lone_row`.
    """
    return twice_if_alone(
        product,
        rows,
        alone=rows.shape[0] == 1,
        repeat=lambda row: (jnp.repeat(row, 2, axis=0),),
        first=lambda out: out[:1],
    )


def table_left_on_cpu(
    product: Callable[[Array, Array], Array], rows: Float[Array, "R D"], table: Float[Array, "V D"]
) -> Float[Array, "R V"]:
    """Return product(rows, table); on CPU, for a few rows, by way of product(table, rows).

    The right operand is transposed by XLA's CPU library in every call, and the table is the larger
    one. From some hundred rows on it costs more to turn the result round. Milliseconds for a table
    of 3072 x 192 (jax 0.10.2, one core):

    | rows | table left | table right |
    |---|---|---|
    | 8 | 0.19 | 0.28 |
    | 64 | 1.04 | 1.14 |
    | 256 | 6.0 | 4.3 |

    Args:
      product: [X, D] and [Y, D] to [X, Y].
    """

    def left(rows: Array, table: Array) -> Array:
        # Otherwise XLA turns the product round to save the transpose of the result.
        return materialize(product(table, rows)).T

    if rows.shape[0] == 1 or rows.shape[0] > 64:
        return product(rows, table)
    return lax.platform_dependent(rows, table, cpu=left, default=product)


def materialize(x: T) -> T:
    """Have XLA make a value here: neither anew in each reader nor joined with what reads it.

    Three values need it: Gemma 4's per-layer inputs, which XLA would norm anew in every layer; what
    a layer multiplies its own of them with, of which it would need a copy beside; and the
    transposed result of `table_left_on_cpu`.
    """
    return lax.optimization_barrier(x)


def traced_once(function: CallableT) -> CallableT:
    """Compile a function through jit, so that calls of one shape, as of layers, are traced once.

    Inside of a program that is all jit does: XLA joins the calls with what is around them.
    """
    return jax.jit(function)  # type: ignore[return-value]
