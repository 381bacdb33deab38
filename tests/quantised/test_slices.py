"""Weights are quantised slice by slice, which takes little memory and changes no bit.

`eight_devices.load` does it on a mesh.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.quantised import QuantisedArray
from jaxspec.quantised.array import quantise, quantise_in_slices

# Shapes and contracting axes of all kinds of weights: experts, gate and up, an output projection, a head.
WEIGHTS = [((6, 64, 2, 10), (1,)), ((64, 2, 37), (0,)), ((2, 64, 21), (0, 1)), ((45, 128), (1,))]
FORMATS = ["int8", "fp8", "int4", "int4-g128", "int4-g16-zeros", "nvfp4", "mxfp4"]


# One program each in place of one for every operation.
quantised = jax.jit(quantise, static_argnums=(1, 2, 3))
dequantised = jax.jit(QuantisedArray.dequantise)


def normal(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(ml_dtypes.bfloat16)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for part, array in expected.items():
        assert found[part].dtype == array.dtype
        np.testing.assert_array_equal(
            np.asarray(found[part]).view(np.uint8), np.asarray(array).view(np.uint8), part
        )


@pytest.mark.parametrize("format", FORMATS)
def test_slices_have_the_bits_of_the_whole(format):
    """No slice divides these weights: the last one reaches past the end, or starts earlier."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def both(x, contracting_axes, numbers):
        sliced = quantise_in_slices(x, format, contracting_axes, numbers=numbers)
        return quantise(x, format, contracting_axes).parts, sliced

    for shape, contracting_axes in WEIGHTS:
        x = normal(shape)
        x[..., 0] = 0  # groups of zeros, too
        whole, sliced = both(x, contracting_axes, x.size // 4 + 1)
        assert_same_bits(sliced, whole)


@pytest.mark.parametrize(
    ("format", "stored"),
    [
        ("int4", "int8"),
        ("fp8", "nvfp4"),
        *(
            pytest.param(format, stored, marks=pytest.mark.slow)
            for format, stored in (
                ("fp8", "int8"),
                ("fp8", "int4-g16-zeros"),
                ("int4", "int4-g16-zeros"),
                ("int4", "nvfp4"),
            )
        ),
    ],
)
def test_what_is_quantised_is_quantised_again_slice_by_slice(format, stored):
    """From what it stands for in float32: in bfloat16 that would be rounded once more."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def both(weight, contracting_axes, numbers):
        sliced = quantise_in_slices(weight, format, contracting_axes, numbers=numbers)
        return quantise(weight, format, contracting_axes).parts, sliced

    for shape, contracting_axes in WEIGHTS:
        x = normal(shape)
        weight = quantised(x, stored, contracting_axes)
        in_float32 = dequantised(quantised(x, stored, contracting_axes, jnp.float32))
        assert (np.asarray(in_float32) != np.asarray(dequantised(weight), np.float32)).any()
        expected = quantised(in_float32, format, contracting_axes).parts
        for made in both(weight, contracting_axes, x.size // 4 + 1):
            assert_same_bits(made, expected)


def test_a_weight_is_not_copied_in_float32():
    """What XLA needs beside a weight and its codes is some slices, whatever the size of the weight."""
    x = jax.ShapeDtypeStruct((64, 256, 2, 128), jnp.bfloat16)
    run = jax.jit(lambda x: quantise_in_slices(x, "mxfp4", (1,), numbers=1 << 16))
    analysis = run.lower(x).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 2.5 * x.size, analysis  # float32: 4 bytes
