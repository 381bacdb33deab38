"""Eight bits a number and a float32 scale per output channel: `int8`, `fp8` (e4m3), `fp8-dynamic`.

The scale is the largest magnitude of a channel over the largest code, so no code is ever clipped:

    int8    code = round(w / scale),    scale = max |w| / 127     steps of equal size
    fp8     code = e4m3(w / scale),     scale = max |w| / 448     four significant bits

A product reads the codes, converts them to the dtype of the rows, which is exact, and multiplies the
float32 sums by the scales. `pallas_kernels.int8_matmul` has kernels. Where none is used, XLA makes the
conversion part of the product that reads the codes. So nothing is written out in 16 bits
(`tests/runtime/test_compiled_for_gpu.py`).

Codes are stored with the contracting axes last, [*out, *in], as Hugging Face stores matrices. A GPU then
finds neighbouring codes of one sum side by side. XLA's product of 2 rows with codes of 5376 x 43008
takes 73 us on an H200 (int8, jax 0.11.2), 108 us with codes in the order of the weight, and 131 us
with bfloat16 weights.

The formulas are those of compressed-tensors' `channel` strategy and of vLLM's `fp8_per_channel`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.quantised.format import Format, QuantisedWeight, Shape, register
from jaxspec.shapes import Array, Float, Int
from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.int4_matmul import Codes
from pallas_kernels.int8_matmul import gated, linear, rounded_sums
from pallas_kernels.rounding import Rounded, Sums


class PerChannel(Format):
    """A code for each number, and a scale for each place of the axes that are not contracted."""

    def __init__(self, name: str, title: str, codes: Any, largest: float, least_capability: float):
        """Make a format whose codes go from -`largest` to `largest`."""
        self.name, self.title, self.least_capability = name, title, least_capability
        self.codes_dtype, self.largest = jnp.dtype(codes), largest

    def parts(
        self, shape: Shape, contracting_axes: tuple[int, ...]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        dtypes = {"codes": self.codes_dtype, "scales": jnp.dtype(jnp.float32)}
        return {
            part: jax.ShapeDtypeStruct(
                tuple(shape[i] for i in self.axes(part, len(shape), contracting_axes)), dtype
            )
            for part, dtype in dtypes.items()
        }

    def axes(self, part: str, ndim: int, contracting_axes: tuple[int, ...]) -> tuple[int, ...]:
        kept = tuple(i for i in range(ndim) if i not in contracting_axes)
        return (*kept, *contracting_axes) if part == "codes" else kept

    def quantise(
        self, x: Float[Array, "..."], contracting_axes: tuple[int, ...]
    ) -> dict[str, Array]:
        magnitudes = jnp.max(jnp.abs(x), axis=contracting_axes, keepdims=True).astype(jnp.float32)
        scales = magnitudes / np.float32(self.largest)
        # A channel of zeros has codes of zero, whatever it is divided by.
        codes = x.astype(jnp.float32) / jnp.where(scales > 0, scales, 1)
        if jnp.issubdtype(self.codes_dtype, jnp.integer):
            codes = jnp.round(codes)
        # The quotient may exceed the largest code by a rounding error, which e4m3 makes NaN.
        codes = jnp.clip(codes, -self.largest, self.largest).astype(self.codes_dtype)
        codes = codes.transpose(self.axes("codes", x.ndim, contracting_axes))
        return {"codes": codes, "scales": jnp.squeeze(scales, contracting_axes)}

    def dequantise(self, weight: QuantisedWeight) -> Float[Array, "..."]:
        scales = jnp.expand_dims(weight.scales, weight.contracting_axes)
        order = self.axes("codes", weight.ndim, weight.contracting_axes)
        codes = weight.codes.transpose([order.index(i) for i in range(weight.ndim)])
        return (codes.astype(jnp.float32) * scales).astype(weight.dtype)

    def multiply(
        self, rows: Float[Array, "R *in"], weight: QuantisedWeight, dtype: Any
    ) -> Float[Array, "R *out"]:
        return linear(rows, weight.codes, weight.scales, dtype=dtype)

    def multiply_gated(
        self,
        rows: Float[Array, "R D"],
        weight: QuantisedWeight,
        activation: Activation,
        dtype: Any,
    ) -> Float[Array, "R F"]:
        return gated(rows, weight.codes, weight.scales, activation=activation, dtype=dtype)

    def rows(self, weight: QuantisedWeight, ids: Int[Array, "*ids"]) -> Float[Array, "*ids D"]:
        assert 0 not in weight.contracting_axes
        scales = weight.scales[ids]
        scales = scales.reshape(*scales.shape, *[1] * len(weight.contracting_axes))
        return (weight.codes[ids].astype(jnp.float32) * scales).astype(weight.dtype)

    def codes_of_experts(self, weight: QuantisedWeight) -> tuple[Codes, None]:
        return Codes(weight.codes, factors=weight.scales), None


class Dynamic(PerChannel):
    """fp8 weights, of which linears multiply activations that are rounded to e4m3 as well.

    Each row of activations has a scale of its own: its largest magnitude over 448. The product of
    8-bit floats takes half the time of one of 16 bits where arithmetic binds, which is from some
    hundred rows on. With fewer rows it gains nothing. Experts and heads round weights only.
    """

    rounds_activations = True

    def multiply_rounded(self, rows: Rounded, weight: QuantisedWeight, dtype: Any) -> Sums:
        # XLA joins no factor of each row with a product, so the product writes its sums. Those of 512
        # rows with the gate and up of 31B are 88 MB in float32, beside 231 MB of weights. The MLP takes
        # 316 us with sums in bfloat16, and 322 or 356 in float32 (H200, jax 0.11.2; two programs).
        sums = rounded_sums(rows.codes, weight.codes, dtype=dtype)
        return Sums(sums, rows.scales, weight.scales)


INT8 = register(PerChannel("int8", "8-bit integers, a scale per channel", jnp.int8, 127.0, 8.0))

# Below 8.9 the GPU cannot convert e4m3. XLA then writes the weight out in 16 bits in every step.
FP8 = register(
    PerChannel("fp8", "8-bit floats (e4m3), a scale per channel", jnp.float8_e4m3fn, 448.0, 8.9)
)

FP8_DYNAMIC = register(
    Dynamic(
        "fp8-dynamic",
        "fp8 weights, and activations rounded to e4m3 with a scale per token",
        jnp.float8_e4m3fn,
        448.0,
        8.9,
    )
)
