"""Products of few rows with large matrices in Pallas Triton: reading the matrix is all that takes time.

A program has a block of columns and, where those are too few to fill the GPU, a share of the inputs: then
what reads the result adds the shares up, always in the same order. Where that is a norm and a sum with
the residual, they are one kernel, with the norms that follow.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

ROWS = 16  # the fewest that tensor cores take; those that are not there repeat the last one


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut: columns of a block, inputs of a step, shares of the inputs, warps, steps loaded ahead."""

    columns: int
    inputs: int
    splits: int
    warps: int
    stages: int


def _product(x_ref, w_ref, out_ref, *, tiling: Tiling):
    """out[split] = x @ w over the split's inputs, for a block of columns."""
    (rows, inputs), columns, split = x_ref.shape, w_ref.shape[1], pl.program_id(1)
    steps = pl.cdiv(inputs, tiling.inputs * tiling.splits)
    row = lax.iota(jnp.int32, ROWS)
    column = pl.program_id(0) * tiling.columns + lax.iota(jnp.int32, tiling.columns)
    inside = None if columns % tiling.columns == 0 else (column < columns)[None, :]

    def step(i, total):
        k = (split * steps + i) * tiling.inputs + lax.iota(jnp.int32, tiling.inputs)
        of_x, of_w = None, inside
        if inputs % (tiling.inputs * tiling.splits):
            real = k < inputs
            of_x = real[None, :]
            of_w = real[:, None] if inside is None else real[:, None] & inside
        x = _load(x_ref, jnp.minimum(row, rows - 1)[:, None], k[None, :], inside=of_x)
        return total + _dot(x, _load(w_ref, k[:, None], column[None, :], inside=of_w))

    total = jnp.zeros((ROWS, tiling.columns), jnp.float32)
    total = lax.fori_loop(0, steps, step, total)
    row, column = (jnp.broadcast_to(i, total.shape) for i in (row[:, None], column[None, :]))
    there = (row < rows) & (column < columns)
    plgpu.store(out_ref.at[split, row, column], total.astype(out_ref.dtype), mask=there)


def _add_norm(
    parts_ref, residual_ref, scale_ref, factor_ref, then_refs, x_ref, normed_refs, *, eps: float
):
    """For one row, x = (residual + norm(sum of the parts)) * factor, and x normed with other weights."""
    row, size = pl.program_id(0), x_ref.shape[1]
    column = lax.iota(jnp.int32, pl.next_power_of_2(size))

    def load(ref, *index):
        return _load(ref, *index, column, inside=column < size).astype(jnp.float32)

    def rounded(x):  # where the reference rounds
        return x.astype(x_ref.dtype).astype(jnp.float32)

    def norm(x, scale_ref):
        return rounded(x * lax.rsqrt(jnp.sum(x * x, axis=0) / size + eps) * load(scale_ref))

    total = load(parts_ref, 0, row)
    for split in range(1, parts_ref.shape[0]):
        total += load(parts_ref, split, row)
    x = rounded(load(residual_ref, row) + norm(rounded(total), scale_ref))
    if factor_ref is not None:
        x = rounded(x * factor_ref[0].astype(jnp.float32))
    for ref, value in zip(
        (x_ref, *normed_refs), (x, *(norm(x, r) for r in then_refs)), strict=True
    ):
        plgpu.store(ref.at[row, column], value.astype(ref.dtype), mask=column < size)


def _load(ref, *index, inside: Array | None) -> Array:
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    at = ref.at[tuple(jnp.broadcast_to(i, shape) if jnp.ndim(i) else i for i in index)]
    if inside is None:
        return plgpu.load(at)
    return plgpu.load(at, mask=jnp.broadcast_to(inside, shape), other=0)


def _dot(x: Array, y: Array) -> Array:
    # On Hopper the default for float32 would be TF32.
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=exact, preferred_element_type=jnp.float32)


def _parts(
    x: Float[Array, "R D"], w: Float[Array, "D N"], *, tiling: Tiling, interpret: bool
) -> Float[Array, "S R N"]:
    rows, columns, splits = x.shape[0], w.shape[1], tiling.splits
    return pl.pallas_call(
        functools.partial(_product, tiling=tiling),
        out_shape=jax.ShapeDtypeStruct(
            (splits, rows, columns), x.dtype if splits == 1 else jnp.float32
        ),
        grid=(pl.cdiv(columns, tiling.columns), splits),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="product",
    )(x, w)


def product_triton(
    x: Float[Array, "R D"], w: Float[Array, "D N"], *, tiling: Tiling, interpret: bool = False
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.products.product`, which checks them."""
    parts = _parts(x, w, tiling=tiling, interpret=interpret)
    # One by one: XLA adds them in the kernel that reads the sum, where it would reduce them in one of its own.
    return functools.reduce(jnp.add, (parts[i] for i in range(tiling.splits))).astype(x.dtype)


def product_add_norm_triton(
    x: Float[Array, "R D"],
    w: Float[Array, "D N"],
    residual: Float[Array, "R N"],
    scale: Float[Array, " N"],
    factor: Float[Array, " 1"] | None,
    then: tuple[Float[Array, " N"], ...],
    *,
    eps: float,
    tiling: Tiling,
    interpret: bool = False,
) -> tuple[Float[Array, "R N"], ...]:
    """Launch the kernels. Arguments as in `pallas_kernels.products.product_add_norm`, which checks them."""
    parts = _parts(x, w, tiling=tiling, interpret=interpret)
    like = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    x, normed = pl.pallas_call(
        functools.partial(_add_norm, eps=eps),
        out_shape=(like, (like,) * len(then)),
        grid=(residual.shape[0],),
        # Measured on an H200, 2 rows of 1536 and 8 parts: 2.0 us with 16 warps, 2.8 with 8; 2816: 3.4 and 2.9.
        compiler_params=plgpu.CompilerParams(
            num_warps=16 if residual.shape[1] <= 2048 else 8, num_stages=1
        ),
        interpret=interpret,
        name="add_norm",
    )(parts, residual, scale, factor, then)
    return (x, *normed)
