"""Products of few rows: the kernels, interpreted, against XLA's product and norms."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.products import product, product_add_norm, reference
from pallas_kernels.products.cases import PRODUCTS, ROWS, SMALL, inputs
from pallas_kernels.products.triton import Tiling
from pallas_kernels.products.tuning import tiling_for

TILING = Tiling(32, 16, 1, warps=4, stages=3)
SPLIT = Tiling(32, 16, 3, warps=4, stages=3)  # three shares divide neither of SMALL's inputs


def check(ours: jax.Array, theirs: jax.Array, exact: jax.Array) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    error, same = (jnp.max(jnp.abs(a.astype(jnp.float32) - exact)) for a in (ours, theirs))
    assert error <= (1e-5 if ours.dtype == jnp.float32 else 2 * same)


@pytest.mark.parametrize("rows", ROWS)
def test_a_product_is_the_reference(rows: int) -> None:
    for (size, columns), dtype in zip(SMALL, ("bfloat16", "float32"), strict=True):
        x, w = inputs(rows, size, (columns,), jnp.dtype(dtype))
        exact = reference.product(x.astype(jnp.float32), w.astype(jnp.float32))
        for tiling in (TILING, SPLIT):
            ours = product(x, w, implementation="triton", tiling=tiling, interpret=True)
            check(ours, reference.product(x, w), exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_follows_a_product_is_the_reference(dtype: str) -> None:
    for (size, columns), factor in zip(SMALL, (None, jnp.asarray([0.75], dtype)), strict=True):
        x, w = inputs(3, size, (columns,), jnp.dtype(dtype))
        residual, scales = inputs(3, columns, (3,), jnp.dtype(dtype), seed=1)
        args = x, w, residual, scales[:, 0], factor, (scales[:, 1], scales[:, 2])
        plain = functools.partial(reference.product_add_norm, eps=1e-6)
        exact = plain(*jax.tree.map(lambda a: a.astype(jnp.float32), args))
        ours = product_add_norm(
            *args, eps=1e-6, implementation="triton", tiling=SPLIT, interpret=True
        )
        for a, b, c in zip(ours, plain(*args), exact, strict=True):
            check(a, b, c)


def test_axes_of_a_weight_may_be_several() -> None:
    x, w = inputs(2, 24, (3, 8), jnp.dtype("float32"))
    run = functools.partial(product, implementation="triton", tiling=TILING, interpret=True)
    one = x @ w.reshape(24, 24)
    assert jnp.allclose(run(x, w), one.reshape(2, 3, 8), atol=1e-5)
    two = run(x.reshape(2, 4, 6), w.reshape(4, 6, 24))
    assert jnp.allclose(two, one, atol=1e-5)


def test_rows_do_not_see_each_other() -> None:
    x, w = inputs(3, *SMALL[0][:1], (64,), jnp.dtype("float32"))
    run = functools.partial(product, implementation="triton", tiling=SPLIT, interpret=True)
    spoilt = run(x.at[2].set(jnp.nan), w)
    assert jnp.isnan(spoilt[2]).all()
    assert (spoilt[:2] == run(x, w)[:2]).all()


def test_auto_is_the_reference_where_there_is_no_gpu_and_has_its_derivative() -> None:
    x, w = inputs(2, 128, (2, 64), jnp.dtype("bfloat16"))
    assert (product(x, w) == reference.product(x, w)).all()
    ours = jax.grad(lambda w: product(x, w).sum())(w)
    theirs = jax.grad(lambda w: reference.product(x, w).sum())(w)
    assert (ours == theirs).all()


def test_tilings_divide_the_inputs_of_released_shapes() -> None:
    """A rest would have to be masked in every step."""
    for size, columns in PRODUCTS.values():
        tiling = tiling_for(size, columns)
        assert size % (tiling.inputs * tiling.splits) == 0


def unchecked(function: Any) -> Any:
    """Return a function without the checks of shapes that pytest turns on."""
    return function.__wrapped__


def test_bad_input_is_named() -> None:
    x, w = inputs(2, 16, (8,), jnp.dtype("float32"))
    with pytest.raises(
        ValueError, match=r"its first axes must be \(16,\); it is float32 \(8, 16\)"
    ):
        product(x, w.T)
    with pytest.raises(
        ValueError, match=r"residual must be float32 \(2, 8\); it is float32 \(2, 16\)"
    ):
        unchecked(product_add_norm)(x, w, x, w[0], eps=1e-6)
    with pytest.raises(ValueError, match="pass auto, reference or triton"):
        unchecked(product)(x, w, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="bfloat16 and float16 weights, not float32"):
        product(x, w, implementation="triton")
    with pytest.raises(NotImplementedError, match="16 rows at most, not 17"):
        product(jnp.zeros((17, 16)), w, implementation="triton", interpret=True)
