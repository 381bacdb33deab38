"""A norm, the sum with the residual and norms of that: the kernel, interpreted, against plain JAX."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norms import Branch, RoundedNorm, add_norm
from pallas_kernels.rounding import Rounded, Sums, round_rows
from tests.pallas_kernels.inputs.norms import Shape, inputs

BFLOAT16 = jnp.dtype("bfloat16")
ATTENTION = Shape(48, next_norms=2, router=True)
EXPERTS = Shape(64, parts=2, factor=True)
LAST = Shape(24, next_norms=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [ATTENTION, EXPERTS, LAST], ids=["attention", "experts", "last"])
def test_the_kernel_computes_what_the_reference_does(shape: Shape, dtype: str) -> None:
    """Bit for bit in bfloat16, but for sums of squares in another order: one rounding of a few numbers."""
    args = inputs(shape, (2, 3), jnp.dtype(dtype))._asdict()
    run = functools.partial(add_norm, **args, eps=1e-6)
    ours = jax.tree.leaves(run(implementation="triton", interpret=True))
    theirs = jax.tree.leaves(run(implementation="reference"))
    for x, y in zip(ours, theirs, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-6)
        if dtype == "bfloat16":
            assert np.mean(x != y) < 0.02


@pytest.mark.parametrize("branches", [1, 2])
def test_sums_meet_their_scales_and_norms_are_rounded(branches: int) -> None:
    """The result is that of numbers, up to the last bit of a product of scales."""
    args = inputs(dataclasses.replace(EXPERTS, parts=branches), (2, 3), BFLOAT16)
    keys = jax.random.split(jax.random.key(1), 2)
    scales = jnp.exp(jax.random.normal(keys[0], (2, 3))), jnp.exp(jax.random.normal(keys[1], (64,)))
    parts = args.h if branches > 1 else (Branch(args.h, args.scale),)
    given = tuple(Branch(Sums(part.x, *scales), part.scale) for part in parts)
    numbers = tuple(Branch(part.x.values(part.x.dtype), part.scale) for part in given)
    given, numbers = (h if branches > 1 else h[0].x for h in (given, numbers))
    run = functools.partial(add_norm, args.x, scale=args.scale, eps=1e-6)
    norms = tuple(RoundedNorm(scale) for scale in args.next_norms)
    plain, (wanted,) = run(numbers, next_norms=args.next_norms, implementation="reference")
    wanted = round_rows(wanted.reshape(6, 64)).reshape(2, 3, 64)
    for how in (dict(implementation="triton", interpret=True), dict(implementation="reference")):
        out, (found,) = run(given, next_norms=norms, **how)
        assert isinstance(found, Rounded)
        assert found.codes.dtype == jnp.float8_e4m3fn
        x, y = (np.asarray(of, np.float32) for of in (out, plain))
        np.testing.assert_allclose(x, y, rtol=2**-7)
        np.testing.assert_allclose(found.scales, wanted.scales, rtol=2**-7)
        x, y = (np.asarray(of.codes, np.float32) for of in (found, wanted))
        np.testing.assert_allclose(x, y, rtol=0.13, atol=2**-8)
        assert np.mean(x != y) < 0.05


def test_derivatives_are_those_of_the_reference() -> None:
    """Training traces what a GPU would run even on CPU, and the kernel has no derivatives."""
    args = inputs(EXPERTS, (2, 3), BFLOAT16)

    def total(x: jax.Array, implementation: Any) -> jax.Array:
        out = add_norm(**args._replace(x=x)._asdict(), eps=1e-6, implementation=implementation)
        return jnp.sum(jnp.stack([jnp.sum(y[..., :7]) for y in jax.tree.leaves(out)]))

    auto, reference = (
        jax.jit(jax.grad(total), static_argnums=1)(args.x, i) for i in ("auto", "reference")
    )
    assert jnp.any(auto != 0)
    np.testing.assert_array_equal(auto, reference)


def test_shapes_that_do_not_fit_are_named() -> None:
    args = inputs(EXPERTS, (2, 3), BFLOAT16)
    x, scale = args.x, args.scale
    run = functools.partial(add_norm, x, scale=scale, next_norms=args.next_norms, eps=1e-6)
    with pytest.raises(ValueError, match=r"added to \(2, 3, 64\) must have that shape too"):
        run((Branch(x[:, :1], scale),))
    with pytest.raises(ValueError, match=r"must be \(64,\); they are .*\(24,\)\]"):
        run((Branch(x, scale), Branch(x, scale[:24])))
    with pytest.raises(ValueError, match=r"must have that shape too, not \[\]"):
        run(())


def test_a_kernel_that_cannot_run_is_refused() -> None:
    run = functools.partial(add_norm, eps=1e-6, implementation="triton")
    args = inputs(LAST, (2, 3), jnp.float32)
    with pytest.raises(NotImplementedError, match="bfloat16 and float16, not float32"):
        run(**args._asdict())
    args = inputs(Shape(8200), (1,), BFLOAT16)
    with pytest.raises(NotImplementedError, match="rows of up to 8192 numbers, not 8200"):
        run(**args._asdict())
