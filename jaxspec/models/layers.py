"""The small parts that targets and drafters share: matrix products, norms, rotary embedding, gated MLP."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.params import param
from jaxspec.shapes import Array, Float, Int
from jaxspec.sharding import whole
from pallas_kernels.norms import rms_norm as rms_norm


def project(
    x: Float[Array, "*rows inputs"],
    weight: Float[Array, "*shape"],
    *,
    inputs: int = 1,
) -> Float[Array, "*result"]:
    """Multiply rows by a weight of shape [*in, *out]: the trailing `inputs` axes of x meet its leading ones.

    The weight keeps its axes, so that one which a mesh splits stays an axis of its own, and they keep
    their order: an einsum may reorder them, and then XLA copies the transposed weight in every step.
    """
    rows = x.shape[: x.ndim - inputs]
    meet = tuple(range(1, inputs + 1)), tuple(range(inputs))

    def product(flat: Array) -> Array:
        return lax.dot_general(
            flat,
            weight,
            (meet, ((), ())),
            precision=precision_of(x),
            # Summed in float32, written in the rows' dtype: XLA rounds the float32 result of a cuBLAS
            # product in a kernel of its own (31B, 256 rows on an H200: 1.3 ms a step).
            preferred_element_type=x.dtype,
        )

    out = over_rows(product, x.reshape(math.prod(rows), *x.shape[x.ndim - inputs :]))
    return out.reshape(*rows, *weight.shape[inputs:])


def over_rows(
    product: Callable[[Array], Array], rows: Float[Array, "R *D"]
) -> Float[Array, "R *F"]:
    """Apply a product with weights to rows; on NVIDIA GPUs a row that is alone goes twice.

    XLA turns products of one row into elementwise ones and a sum. For weights of a few million elements
    it writes those down in float32, twice the size of the weight (E2B on an H200: 3.5 ms a plain step
    instead of 2.8), and batched ones are slower too (26B-A4B: 16.4 ms instead of 13.0).
    """
    if rows.shape[0] != 1:
        return product(rows)
    return lax.platform_dependent(
        rows, cuda=lambda r: product(jnp.repeat(r, 2, axis=0))[:1], default=product
    )


def table_logits(rows: Float[Array, "R D"], table: Float[Array, "V D"]) -> Float[Array, "R V"]:
    """Multiply rows by a table that holds a row a token, in float32.

    On CPU the table of a few rows is the left operand. The right one is transposed by XLA's library in
    every call (jax 0.10.2, a core, a table of 3072 x 192: 0.19 ms instead of 0.28 with 8 rows, 1.04 instead of
    1.14 with 64; with 256 turning the result round makes it 6.0 instead of 4.3).
    """

    def table_right(rows: Array, table: Array) -> Array:
        return contract("rd,vd->rv", rows, table)

    def table_left(rows: Array, table: Array) -> Array:
        # Without a barrier XLA turns the product round to save the transpose of the result.
        return lax.optimization_barrier(contract("vd,rd->vr", table, rows)).T

    if rows.shape[0] == 1 or rows.shape[0] > 64:
        return table_right(rows, table)
    return lax.platform_dependent(rows, table, cpu=table_left, default=table_right)


def softcap(logits: Float[Array, "... V"], cap: float | None) -> Float[Array, "... V"]:
    """Bend logits so that they stay within +-`cap`; None leaves them as they are."""
    return logits if cap is None else jnp.tanh(logits / cap) * cap


def contract(spec: str, x: Array, y: Array) -> Float[Array, "..."]:
    """Contract like `jnp.einsum`, accumulating in and returning float32."""
    precision = precision_of(x)
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)


def precision_of(x: Array) -> lax.Precision | None:
    """Return full float32 products for float32 operands.

    On Hopper JAX's default for them is TF32, whose 1e-3 errors would break the promise that speculative
    and plain decoding agree.
    """
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def rope_frequencies(
    head_dim: int, theta: float, partial_factor: float = 1.0
) -> Float[Array, " H2"]:
    """Return head_dim // 2 inverse frequencies, zero beyond `partial_factor` of them.

    With a factor below 1 this is Gemma 4's "proportional" rope: the exponent divides by the whole head
    dim, and pairs past the live ones do not turn (cos 1, sin 0).
    """
    half = head_dim // 2
    live = int(partial_factor * head_dim // 2)
    exponent = jnp.arange(half, dtype=jnp.float32) * (2.0 / head_dim)
    return jnp.where(jnp.arange(half) < live, theta**-exponent, 0.0)


def rope_turns(
    positions: Int[Array, "B T"], frequencies: Float[Array, " H2"]
) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]:
    """Return cosine and sine of position times frequency, in float32: XLA makes them once for all layers."""
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), with gate and up stored as one matrix."""

    def __init__(self, width: int, hidden: int, *, gelu: bool, dtype: jnp.dtype):
        axes = ("inputs", None, "mlp")
        self.gate_up = param(width, 2, hidden, dtype=dtype, fan_in=width, axes=axes)
        self.down = param(hidden, width, dtype=dtype, fan_in=hidden, axes=("mlp", None))
        self.gelu = gelu

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate_up = project(whole(x), self.gate_up[...])
        activation = gelu_tanh if self.gelu else jax.nn.silu
        return whole(project(activation(gate_up[:, :, 0]) * gate_up[:, :, 1], self.down[...]))
