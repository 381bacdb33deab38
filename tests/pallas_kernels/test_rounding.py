"""Rows as 8-bit floats: the kernel, interpreted, against plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rounding import LARGEST, round_rows


def rows(width: int) -> jax.Array:
    """Return rows of widely different sizes, one of zeros, one with an outlier."""
    x = jax.random.normal(jax.random.key(0), (5, width)) * jnp.array([[1], [1e-3], [0], [50], [1]])
    return x.at[4, 3].set(300).astype(jnp.bfloat16)


@pytest.mark.parametrize("width", [64, 168])
def test_the_kernel_computes_what_the_reference_does(width: int) -> None:
    codes, scales = round_rows(rows(width), implementation="triton", interpret=True)
    wanted, wanted_scales = round_rows(rows(width), implementation="reference")
    assert codes.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(codes.astype(jnp.float32), wanted.astype(jnp.float32))
    np.testing.assert_array_equal(scales, wanted_scales)


def test_a_row_is_its_codes_times_its_scale() -> None:
    """Within half a step: 1/16 of the number, or 1/1024 of a 64th of the scale's largest code."""
    x = np.asarray(rows(64), np.float32)
    codes, scales = round_rows(rows(64))
    again = np.asarray(codes, np.float32) * np.asarray(scales)[:, None]
    least = np.abs(x).max(axis=1, keepdims=True) / LARGEST * 2**-10
    assert np.all(np.abs(again - x) <= np.abs(x) / 16 + least)
    np.testing.assert_array_equal(
        np.abs(codes.astype(jnp.float32)).max(axis=1)[[0, 1, 3, 4]], LARGEST
    )
    assert not again[2].any()


def test_rows_that_are_too_long_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="rows of up to 32768 numbers, not 40000"):
        round_rows(jnp.ones((2, 40000), jnp.bfloat16), implementation="triton")
