"""Norms, rotations and writes of queries, keys and values: the kernel, interpreted, against plain JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.qkv import Destination, qkv
from pallas_kernels.rounding import Sums
from tests.pallas_kernels.inputs.qkv import Shape, destination, inputs

BFLOAT16 = jnp.dtype("bfloat16")
PLAIN = Shape(2, 2, 32)
SAME = Shape(1, 8, 64, extra=1)
QUERIES = Shape(2, 3, 16, extra=0)
CONTEXT = Shape(2, 0, 32, norm_values=False)


def check(
    shape: Shape,
    batch: int,
    tokens: int,
    into: Destination | None,
    dtype: Any = BFLOAT16,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> None:
    """Compare bit for bit, but for sums of squares in another order: one rounding of a few numbers."""
    projected, *others = inputs(shape, batch, tokens, dtype)
    run = functools.partial(
        qkv,
        projected if scales is None else Sums(projected, *scales),
        *others,
        into,
        groups=shape.groups,
        eps=1e-6,
        norm_values=shape.norm_values,
    )
    ours = run(implementation="triton", interpret=True)
    theirs = jax.jit(functools.partial(run, implementation="reference"))()
    for x, y in zip(ours, theirs, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            np.testing.assert_allclose(x, y, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-6)
            if dtype == BFLOAT16:
                assert np.mean(x != y) < 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_pass_is_written_to_rings(dtype: str) -> None:
    """Some tokens come round to the ring's beginning, some do not count, one row writes nothing."""
    kind = jnp.dtype(dtype)
    into = destination(PLAIN, [0, 9, 22, 5], [5, 5, 3, 0], 5, 12, kind)
    check(PLAIN, 4, 5, into, kind)


@pytest.mark.parametrize("shape", [SAME, CONTEXT], ids=["values are keys", "context"])
@pytest.mark.parametrize("pages", [[[4], [1]], [[4, 0, 7, 2], [1, 3, 6, 5]]], ids=["one", "four"])
def test_a_pass_is_written_to_pages(shape: Shape, pages: list[list[int]]) -> None:
    """The tokens of the first row are in two pages, and those of the second row come round."""
    into = destination(shape, [3, 14], [3, 3], 3, 16, BFLOAT16, pages=pages, num_pages=8)
    check(shape, 2, 3, into)


@pytest.mark.parametrize("shape", [PLAIN, SAME, QUERIES], ids=["plain", "same", "queries"])
def test_a_pass_without_caches(shape: Shape) -> None:
    check(shape, 2, 3, None)


@pytest.mark.parametrize("shape", [PLAIN, SAME, QUERIES], ids=["plain", "same", "queries"])
def test_sums_meet_their_scales(shape: Shape) -> None:
    keys = jax.random.split(jax.random.key(2), 2)
    outputs = (shape.kv_heads, shape.groups + shape.extra, shape.head_dim)
    of_rows = jnp.exp(jax.random.normal(keys[0], (2, 3)))
    of_outputs = jnp.exp(jax.random.normal(keys[1], outputs))
    into = destination(shape, [3, 7], [3, 1], 3, 16, BFLOAT16) if shape.extra else None
    for caches in (None, into):
        check(shape, 2, 3, caches, scales=(of_rows, of_outputs))
    given = inputs(shape, 2, 3, BFLOAT16)
    how = dict(groups=shape.groups, eps=1e-6, norm_values=False)
    exact = given[0].astype(jnp.float32)
    numbers = (exact * (of_rows[..., None, None, None] * of_outputs)).astype(BFLOAT16)
    found = qkv(Sums(given[0], of_rows, of_outputs), *given[1:], **how)
    for x, y in zip(found, qkv(numbers, *given[1:], **how), strict=True):
        if x is not None and y is not None:
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            np.testing.assert_allclose(x, y, rtol=2**-6, atol=1e-6)


def test_derivatives_are_those_of_the_reference() -> None:
    """Training traces what a GPU would run even on CPU, and the kernel has no derivatives."""
    projected, q_scale, k_scale, cos, sin = inputs(PLAIN, 1, 2, BFLOAT16)
    weight = jnp.arange(PLAIN.head_dim, dtype=BFLOAT16)

    def total(projected: jax.Array, implementation: Any) -> jax.Array:
        how = {"groups": 2, "eps": 1e-6, "implementation": implementation}
        out = qkv(projected, q_scale, k_scale, cos, sin, **how)
        return jnp.sum(jnp.stack([jnp.sum(x * weight) for x in jax.tree.leaves(out)]))

    auto, reference = (
        jax.jit(jax.grad(total), static_argnums=1)(projected, i) for i in ("auto", "reference")
    )
    assert jnp.any(auto != 0)
    np.testing.assert_array_equal(auto, reference)


def test_shapes_that_do_not_fit_are_named() -> None:
    projected, q_scale, k_scale, cos, sin = inputs(PLAIN, 2, 3, BFLOAT16)
    run = functools.partial(qkv, eps=1e-6)
    with pytest.raises(ValueError, match="q_scale is for queries and k_scale for keys"):
        run(projected, None, k_scale, cos, sin, groups=2)
    with pytest.raises(ValueError, match="a key and a value at most, not 3 rows"):
        run(projected, q_scale, k_scale, cos, sin, groups=1)
    with pytest.raises(ValueError, match=r"cos and sin must be \(2, 3, 16\)"):
        run(projected, q_scale, k_scale, cos[:, :, :8], sin[:, :, :8], groups=2)
    into = destination(PLAIN, [0], [3], 3, 12, BFLOAT16)
    with pytest.raises(ValueError, match=r"index and pages must be \(2, 3\)"):
        run(projected, q_scale, k_scale, cos, sin, into, groups=2)


def test_a_kernel_that_cannot_run_is_refused() -> None:
    args, how = inputs(PLAIN, 1, 2, jnp.float32), {"groups": 2, "eps": 1e-6}
    with pytest.raises(NotImplementedError, match="bfloat16 and float16, not float32"):
        qkv(*args, **how, implementation="triton")


@pytest.mark.parametrize("shape", [PLAIN, SAME], ids=["values", "values are keys"])
def test_keys_and_values_are_stored_in_fp8(shape: Shape) -> None:
    """Written to caches or not, they are rounded alike; those that no fp8 number reaches are clipped."""
    args = list(inputs(shape, 2, 3, BFLOAT16))
    args[2] = jnp.asarray(args[2], jnp.float32) * 300  # the norm of keys, divided by a scale
    how: dict[str, Any] = dict(groups=shape.groups, eps=1e-6, value_factor=16.0)
    how |= dict(kv_dtype=jnp.float8_e4m3fn)
    caches = destination(shape, [0, 4], [3, 3], 3, 8, BFLOAT16)
    narrow = (x.astype(jnp.float8_e4m3fn) for x in (caches.k, caches.v))
    caches = caches._replace(**dict(zip("kv", narrow, strict=True)))
    wide = qkv(*args, groups=shape.groups, eps=1e-6)
    assert wide.k is not None
    assert wide.v is not None
    for run in (dict(implementation="triton", interpret=True), dict(implementation="reference")):
        alone, written = qkv(*args, None, **how, **run), qkv(*args, caches, **how, **run)
        assert alone.k is not None
        assert alone.v is not None
        for x, exact in ((alone.k, wide.k), (alone.v, wide.v * 16)):
            assert x.dtype == jnp.float8_e4m3fn
            exact = np.clip(np.asarray(exact, np.float32), -448, 448)
            np.testing.assert_allclose(np.asarray(x, np.float32), exact, rtol=1 / 15, atol=2**-9)
        assert float(jnp.max(jnp.abs(alone.k.astype(jnp.float32)))) == 448
        for row, start in enumerate((0, 4)):
            for new, cache in ((alone.k, written.k), (alone.v, written.v)):
                assert cache is not None
                assert (cache[row, :, start : start + 3] == new[row]).all()


def test_keys_cannot_go_to_caches_of_another_dtype() -> None:
    into = destination(PLAIN, [0], [3], 3, 8, BFLOAT16)
    with pytest.raises(ValueError, match="cannot go to caches of bfloat16"):
        qkv(*inputs(PLAIN, 1, 3, BFLOAT16), into, groups=2, eps=1e-6, kv_dtype=jnp.float8_e4m3fn)
