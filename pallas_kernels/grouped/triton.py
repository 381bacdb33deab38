"""A product of few rows with four-bit codes in Pallas Triton.

A program multiplies the codes of some outputs with some rows, over a share of the inputs. It reads a
block of 64 inputs of all its outputs at a time: 32 bytes each. Low and high halves of the bytes are
two products of 32 inputs. The outputs are the left operand. So up to 8 rows are the right operand of
the narrowest tensor core instruction, and the numbers go from bytes to its operand in registers.

Where `early`, codes are multiplied by their scales before the product, in bfloat16. Else the product
of each group is multiplied in float32. That rounds nothing, and costs rows / 32 instructions a code.

Where outputs are few, several programs share the inputs of a tile (`splits`). XLA adds their parts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.grouped import decode
from pallas_kernels.grouped.coding import BLOCK, HALF, Codes, Coding, scale_numbers
from pallas_kernels.triton import below, dot, load, store


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a product is cut.

    Attributes:
      rows, outputs: of a program.
      splits: programs that share the inputs of a tile.
      unroll: blocks of inputs that a step of a program reads.
      warps, stages: of a program, and steps that it loads ahead.
      early: whether scales are multiplied before the product.
    """

    rows: int
    outputs: int
    splits: int = 1
    unroll: int = 1
    warps: int = 2
    stages: int = 4
    early: bool = False


def group_scales(
    refs: tuple[Any, ...], at: Any, coding: Coding, block: Array, unroll: int
) -> list[tuple[Array, ...]]:
    """Load what belongs to the groups of some blocks: for each product, its scales (and zeros).

    Args:
      refs: of scales, and of zeros if there are any.
      at: from a group to the index of its outputs.
      block: the first of them.
    """
    size, loaded = min(coding.group, HALF), {}
    found = []
    for first in range(0, unroll * BLOCK, size):
        key = first // min(coding.group, BLOCK)
        if key not in loaded:
            group = (block * BLOCK + first) // coding.group
            loaded[key] = tuple(load(ref, *at(group)) for ref in refs)
        found.append(loaded[key])
    return found


def add_block(
    total: Array,
    x_half: Any,
    packed: Any,
    scales: list[tuple[Array, ...]],
    coding: Coding,
    dtype: Any,
    *,
    early: bool,
    interpret: bool,
) -> Array:
    """Add the product of a block of 64 inputs to sums [outputs, rows].

    Args:
      x_half: from the first input within the block and their number to x [inputs, rows].
      packed: from the first byte and their number to codes [outputs, bytes].
      scales: of each product of the block, in order of inputs.
    """
    size = min(coding.group, HALF)
    how: dict[str, Any] = dict(interpret=interpret)
    for first in range(0, HALF, size):
        codes = packed(first, size)
        for half in range(2):
            scale, *zero = scales[(half * HALF + first) // size]
            w = decode.half_numbers(codes, coding.kind, half, dtype, **how)
            if zero:
                w = decode.subtract(w, zero[0].astype(dtype)[:, None], **how)
            scale = scale_numbers(scale)[:, None]
            if early:
                w = decode.multiply(w, scale.astype(dtype), **how)
                total = total + dot(w, x_half(half * HALF + first, size))
            else:
                part = dot(w, x_half(half * HALF + first, size))
                total = decode.multiply_add(part, scale, total, **how)
    return total


def _linear(
    x_ref, codes_ref, scales_ref, *refs, coding: Coding, inputs_first: bool, cut: Cut, interpret
):
    """Write out[split, rows, outputs] of a tile. `refs` are zeros and factors, if any, and the output."""
    *given, out_ref = refs
    zeros = [ref for ref in given if len(ref.shape) == 2]
    factors = [ref for ref in given if len(ref.shape) == 1]
    share = x_ref.shape[1] // BLOCK // cut.splits
    start = pl.program_id(2) * share
    out = pl.program_id(0) * cut.outputs + lax.iota(jnp.int32, cut.outputs)
    row = pl.program_id(1) * cut.rows + lax.iota(jnp.int32, cut.rows)
    in_use = below(row, x_ref.shape[0])

    def scales(block):
        def at(group):
            group = jnp.minimum(group, scales_ref.shape[0 if inputs_first else 1] - 1)
            return (group, out) if inputs_first else (out, group)

        return group_scales((scales_ref, *zeros), at, coding, block, cut.unroll)

    def step(i, carry):
        total, now = carry
        block = start + i * cut.unroll
        # Loaded a step ahead: Triton prefetches only what is an operand of a product.
        then = scales(jnp.minimum(block + cut.unroll, start + share - cut.unroll))
        per_block = len(now) // cut.unroll
        for u in range(cut.unroll):

            def x_half(first, size, u=u):
                k = (block + u) * BLOCK + first + lax.iota(jnp.int32, size)
                mask = None if in_use is None else in_use[:, None]
                return load(x_ref, row[:, None], k[None, :], mask=mask).T

            def packed(first, size, u=u):
                byte = first + lax.iota(jnp.int32, size)[None, :]
                at = (block + u, out[:, None]) if inputs_first else (out[:, None], block + u)
                return load(codes_ref, *at, byte)

            own = now[u * per_block : (u + 1) * per_block]
            how: dict[str, Any] = dict(early=cut.early, interpret=interpret)
            total = add_block(total, x_half, packed, own, coding, x_ref.dtype, **how)
        return total, then

    total = jnp.zeros((cut.outputs, cut.rows), jnp.float32)
    total, _ = lax.fori_loop(0, share // cut.unroll, step, (total, scales(start)))
    if factors:
        total = total * load(factors[0], out)[:, None]
    store(
        out_ref,
        pl.program_id(2),
        row[:, None],
        out[None, :],
        value=total.T,
        mask=(None if in_use is None else in_use[:, None]),
    )


def linear_triton(
    x: Float[Array, "R K"],
    weight: Codes,
    *,
    coding: Coding,
    inputs_first: bool,
    dtype: DTypeLike,
    cut: Cut,
    interpret: bool = False,
) -> Float[Array, "R N"]:
    """Launch the kernel. Arguments as in `pallas_kernels.grouped.linear`, which checks them."""
    outputs = weight.codes.shape[1 if inputs_first else 0]
    given = [array for array in weight if array is not None]
    parts = pl.pallas_call(
        functools.partial(
            _linear, coding=coding, inputs_first=inputs_first, cut=cut, interpret=interpret
        ),
        out_shape=jax.ShapeDtypeStruct(
            (cut.splits, x.shape[0], outputs), dtype if cut.splits == 1 else jnp.float32
        ),
        grid=(outputs // cut.outputs, pl.cdiv(x.shape[0], cut.rows), cut.splits),
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="grouped_linear",
    )(x, *given)
    return parts[0] if cut.splits == 1 else jnp.sum(parts, axis=0).astype(dtype)
