"""Gates that are rounded: the kernel, interpreted, against plain JAX."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.elementary import gelu_tanh
from pallas_kernels.gated import gated
from pallas_kernels.gated.triton import pieces
from pallas_kernels.rounding import Rounded, Sums, round_rows


def sums(*rows: int, width: int) -> Sums:
    """Return sums of a product, of which one row is of zeros."""
    keys = jax.random.split(jax.random.key(width), 3)
    numbers = 100 * jax.random.normal(keys[0], (*rows, 2, width))
    numbers = numbers.at[(0,) * len(rows)].set(0)
    scales = jax.random.uniform(keys[1], rows) / 100
    return Sums(numbers.astype(jnp.bfloat16), scales, 1 + jax.random.uniform(keys[2], (2, width)))


def numbers(rounded: Rounded) -> np.ndarray:
    return np.asarray(rounded.codes, np.float32) * np.asarray(rounded.scales)[..., None]


@pytest.mark.parametrize("activation", [gelu_tanh, jax.nn.silu])
@pytest.mark.parametrize("width", [64, 256, 1300])  # one piece, that is not full or is; three
def test_the_kernel_computes_what_the_reference_does(
    activation: Callable[[jax.Array], jax.Array], width: int
) -> None:
    given = sums(2, 3, width=width)
    how = dict(rounding=True)
    found = gated(given, activation, **how, implementation="triton", interpret=True)
    wanted = gated(given, activation, **how, implementation="reference")
    assert isinstance(found, Rounded)
    assert isinstance(wanted, Rounded)
    assert found.codes.dtype == jnp.float8_e4m3fn
    assert found.shape == (2, 3, width)
    assert not numbers(found)[0, 0].any()
    # The reference rounds gates, activations and products. A code may be one step off, 1/8 at most.
    np.testing.assert_allclose(found.scales, wanted.scales, rtol=2e-2)
    np.testing.assert_allclose(numbers(found), numbers(wanted), rtol=0.15, atol=2e-2)
    exact = given.values(jnp.float32)
    hidden = np.asarray(activation(exact[..., 0, :]) * exact[..., 1, :])
    step = np.abs(hidden) / 16 + np.asarray(found.scales)[..., None] * 2**-10
    assert np.all(np.abs(numbers(found) - hidden) <= step + 2**-8 * np.abs(hidden))


@pytest.mark.parametrize("width", [1, 255, 256, 300, 2112, 15360, 21504])
def test_pieces_cover_a_row_once(width: int) -> None:
    found = pieces(width)
    assert [begin for begin, _ in found] == [
        sum(n for _, n in found[:i]) for i in range(len(found))
    ]
    assert all(size & (size - 1) == 0 for _, size in found)
    assert sum(size for _, size in found[:-1]) < width <= sum(size for _, size in found)
    assert found[-1][0] + found[-1][1] < width + 256


def test_without_rounding_gates_are_numbers() -> None:
    given = sums(4, width=64)
    found = gated(given, gelu_tanh)
    values = given.values(jnp.bfloat16)
    np.testing.assert_array_equal(found, gelu_tanh(values[:, 0]) * values[:, 1])
    rounded = gated(values, gelu_tanh, rounding=True)
    assert isinstance(found, jax.Array)
    for ours, theirs in zip(rounded, round_rows(found), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_the_kernel_cannot_take_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="for sums, and rounds"):
        gated(sums(1, width=64), gelu_tanh, implementation="triton")
    with pytest.raises(NotImplementedError, match="rows of up to 32768 numbers, not 33000"):
        gated(sums(1, width=33000), gelu_tanh, rounding=True, implementation="triton")
