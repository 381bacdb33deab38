"""The small parts that targets and drafters share: products, norm, rotary embedding, gated MLP.

`project` multiplies an activation by a weight, `project_gated` by gate and up, `table_logits` by a
head, and `moe.Experts` by those of experts. All take a `QuantisedArray` in place of an array. Other
products with weights are small: a router, and an assistant's centroids with the rows they choose.

The arithmetic of norm and rotary embedding is in `pallas_kernels.common.reference_ops`, and not here: the
references of the kernels need it to the last bit, and `pallas_kernels` imports nothing of ours.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.mesh import whole_rows
from jaxspec.models.xla import multiply_rows, table_left_on_cpu
from jaxspec.quantised import QuantisedArray
from jaxspec.shapes import Array, Float, Int
from jaxspec.weights.model_def import param
from pallas_kernels.common import reference_ops
from pallas_kernels.common.reference_ops import Activation, contract, gated, gelu_tanh, precision_of
from pallas_kernels.norms import RoundedNorm
from pallas_kernels.rounding import Rounded, Sums, values_of

__all__ = [
    "GatedMLP",
    "contract",
    "gelu_tanh",
    "norm_for",
    "project",
    "project_gated",
    "rms_norm",
    "rope",
    "rope_cos_sin",
    "rope_frequencies",
    "rounded_sqrt",
    "softcap",
    "sums_of",
    "table_logits",
]


def project(
    x: Float[Array, "*rows inputs"] | Rounded,
    weight: Float[Array, "*shape"] | QuantisedArray,
    *,
    inputs: int = 1,
) -> Float[Array, "*result"]:
    """Multiply rows by a weight of shape [*in, *out].

    The last `inputs` axes of x meet the first of the weight.

    The weight keeps its axes, so that one which a mesh splits stays an axis of its own, and they
    keep their order: an einsum may reorder them, and then XLA copies the transposed weight in every
    step.

    Args:
      x: rows; `Rounded` ones for a weight whose format rounds activations.
    """
    return values_of(sums_of(x, weight, inputs=inputs))


def sums_of(
    x: Float[Array, "*rows inputs"] | Rounded,
    weight: Float[Array, "*shape"] | QuantisedArray,
    *,
    inputs: int = 1,
) -> Float[Array, "*result"] | Sums:
    """Do what `project` does, but leave the multiplication with scales, if any, to the reader.

    XLA joins no factor of each row with a product of 8-bit floats. It would write the product a
    second time.
    """
    rows = x.shape[: x.ndim - inputs]
    alone = math.prod(rows) == 1 and not isinstance(x, Rounded)  # is multiplied twice, below
    if isinstance(weight, QuantisedArray) and weight.rounds_activations and not alone:
        flat = x.reshape(math.prod(rows), *x.shape[x.ndim - inputs :])
        dtype = weight.dtype if isinstance(x, Rounded) else x.dtype
        sums, of_rows, of_outputs = weight.multiply_rounded(flat, dtype)
        sums = sums.reshape(*rows, *weight.shape[inputs:])
        return Sums(sums, of_rows.reshape(rows), of_outputs)
    assert not isinstance(x, Rounded)
    meet = tuple(range(1, inputs + 1)), tuple(range(inputs))

    def product(flat: Array) -> Array:
        if isinstance(weight, QuantisedArray):
            return weight.multiply(flat, x.dtype)
        return lax.dot_general(
            flat,
            weight,
            (meet, ((), ())),
            precision=precision_of(x),
            # Summed in float32, written in the rows' dtype: XLA rounds the float32 result of a
            # cuBLAS product in a kernel of its own (31B, 256 rows on an H200: 1.3 ms a step).
            preferred_element_type=x.dtype,
        )

    out = multiply_rows(product, x.reshape(math.prod(rows), *x.shape[x.ndim - inputs :]))
    return out.reshape(*rows, *weight.shape[inputs:])


def project_gated(
    x: Float[Array, "*rows D"] | Rounded,
    weight: Float[Array, "D 2 F"] | QuantisedArray,
    activation: Activation,
) -> Float[Array, "*rows F"]:
    """Return activation(x @ gate) * (x @ up), where `weight` holds gate and up."""
    if isinstance(x, Rounded) or not isinstance(weight, QuantisedArray):
        return gated(project(x, weight), activation)
    of_codes = functools.partial(weight.multiply_gated, activation=activation, dtype=x.dtype)
    out = multiply_rows(of_codes, x.reshape(-1, x.shape[-1]))
    return out.reshape(*x.shape[:-1], -1)


def table_logits(
    x: Float[Array, "*rows D"],
    table: Float[Array, "V D"] | QuantisedArray,
    *,
    rounding: bool = False,
) -> Float[Array, "*rows V"]:
    """Multiply rows by a table that holds a row a token, in float32: the head of a model.

    Args:
      rounding: whether x may be rounded as the format of the table rounds activations. That is for
        drafts, whose logits change no result.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(table, QuantisedArray):
        # XLA reads the int8 table of 31B in 441 us for one row, and in 342 us for two (H200).
        of_codes = functools.partial(table.multiply, dtype=jnp.float32, rounding=rounding)
        out = multiply_rows(of_codes, rows)
        return out.reshape(*x.shape[:-1], table.shape[0])

    def product(x: Array, y: Array) -> Array:
        return contract("xd,yd->xy", x, y)

    out = table_left_on_cpu(product, rows, table)
    return out.reshape(*x.shape[:-1], table.shape[0])


def softcap(logits: Float[Array, "... V"], cap: float | Array | None) -> Float[Array, "... V"]:
    """Bend logits so that they stay within +-`cap`; None leaves them as they are."""
    return logits if cap is None else jnp.tanh(logits / cap) * cap


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"] | None, eps: float
) -> Float[Array, "... D"]:
    """Norm the last axis by its root mean square, in float32, and round once:

        x / sqrt(mean(x²) + eps) * scale

    Args:
      scale: the weight, used as it is (no 1 + scale); None to leave it out.
    """
    return reference_ops.rms_norm(x, scale, eps)


def rope(
    x: Float[Array, "B T *heads H"], positions: Int[Array, "B T"], frequencies: Float[Array, " H2"]
) -> Float[Array, "B T *heads H"]:
    """Apply rotary embedding: turn pairs (x_j, x_{j + H/2}) by angles a = position * frequency_j:

        x_j cos a - x_{j + H/2} sin a,    x_{j + H/2} cos a + x_j sin a

    `attention.project_qkv` does the same, in one kernel with the norms of queries and keys.
    """
    return reference_ops.rotate(x, *rope_cos_sin(positions, frequencies))


def rope_frequencies(
    head_dim: int, theta: float | Array, partial_factor: float = 1.0, factor: float = 1.0
) -> Float[Array, " H2"]:
    """Return head_dim // 2 inverse frequencies, zero beyond `partial_factor` of them.

    With a `partial_factor` below 1 this is Gemma 4's "proportional" rope: the exponent divides by the whole
    head dim, and pairs past the live ones do not turn (cos 1, sin 0). `factor` stretches: positions are divided by it.
    """
    half = head_dim // 2
    live = int(partial_factor * head_dim // 2)
    exponent = jnp.arange(half, dtype=jnp.float32) * (2.0 / head_dim)
    frequencies = theta**-exponent
    if factor != 1:
        frequencies /= factor
    return jnp.where(jnp.arange(half, dtype=jnp.int32) < live, frequencies, 0.0)


def rope_cos_sin(
    positions: Int[Array, "B T"], frequencies: Float[Array, " H2"]
) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]:
    """Return cosine and sine of position * frequency, in float32.

    XLA makes them once for all layers.
    """
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), with gate and up stored as one matrix."""

    def __init__(self, width: int, hidden: int, *, activation: Activation, dtype: jnp.dtype):
        axes = ("inputs", None, "mlp")
        self.gate_up = param(
            width, 2, hidden, dtype=dtype, fan_in=width, axes=axes, contracting_axes=(0,)
        )
        self.down = param(
            hidden, width, dtype=dtype, fan_in=hidden, axes=("mlp", None), contracting_axes=(0,)
        )
        self.activation: Activation = activation

    def __call__(self, x: Float[Array, "B T D"] | Rounded) -> Float[Array, "B T D"]:
        return values_of(self.sums(x))

    def sums(self, x: Float[Array, "B T D"] | Rounded) -> Float[Array, "B T D"] | Sums:
        """Return the result of a call, before the multiplication with scales, if there are any."""
        hidden = project_gated(whole_rows(x), self.gate_up[...], self.activation)
        return whole_rows(sums_of(hidden, self.down[...]))


def norm_for(
    scale: Float[Array, " D"], weight: Float[Array, "*shape"] | QuantisedArray
) -> Float[Array, " D"] | RoundedNorm:
    """Return the norm before a product. It rounds if the weight's format rounds activations."""
    rounding = isinstance(weight, QuantisedArray) and weight.rounds_activations
    return RoundedNorm(scale) if rounding else scale


def rounded_sqrt(x: int, dtype: jnp.dtype) -> Array:
    return jnp.asarray(math.sqrt(x), dtype)
