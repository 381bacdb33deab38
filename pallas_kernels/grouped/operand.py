"""The weight of a Triton kernel, read in blocks of 64 inputs as codes of 4 bits with groups.

A kernel multiplies outputs x inputs (the codes) by inputs x rows. So up to 8 rows are the right
operand of the narrowest tensor core instruction, and numbers go from bytes to its left operand in
registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.grouped import decode
from pallas_kernels.grouped.coding import BLOCK, HALF, Coding, scale_numbers
from pallas_kernels.triton import dot, load

Scales = list[tuple[Array, ...]]


@dataclasses.dataclass(frozen=True)
class FourBits:
    """Codes [*before, blocks, *after, 32] and scales [*before, groups, *after]: see `coding`.

    Attributes:
      codes, scales, zeros: references; zeros may be None.
      before, after: indices of the outputs, of which one is an array [outputs].
      early: whether numbers are multiplied by their scales before the product, in bfloat16. Else
        the product of each group is multiplied in float32. That rounds nothing, and costs rows / 32
        instructions a code.
    """

    coding: Coding
    codes: Any
    scales: Any
    zeros: Any
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    early: bool
    interpret: bool

    def load_scales(self, block: Array | int, count: int) -> Scales:
        """Load what belongs to `count` blocks: for each product, its scales, and zeros if any."""
        loaded, found = {}, []
        for first in range(0, count * BLOCK, min(self.coding.group, HALF)):
            key = first // min(self.coding.group, BLOCK)
            if key not in loaded:
                group = (block * BLOCK + first) // self.coding.group
                group = jnp.minimum(group, self.scales.shape[len(self.before)] - 1)
                refs = (self.scales,) if self.zeros is None else (self.scales, self.zeros)
                loaded[key] = tuple(load(ref, *self.before, group, *self.after) for ref in refs)
            found.append(loaded[key])
        return found

    def add(self, total: Array, block: Array, scales: Scales, x: Any) -> Array:
        """Add the product of a block to sums [outputs, rows].

        Args:
          scales: of the block's products.
          x: from the first input within the block, and their number, to [inputs, rows].
        """
        size, how = min(self.coding.group, HALF), dict[str, Any](interpret=self.interpret)
        before, after = _columns(self.before), _columns(self.after)
        for first in range(0, HALF, size):
            byte = first + lax.iota(jnp.int32, size)[None, :]
            codes = load(self.codes, *before, block, *after, byte)
            for half in range(2):
                start = half * HALF + first
                scale, *zero = scales[start // size]
                scale, rows = scale_numbers(scale)[:, None], x(start, size)
                w = decode.half_numbers(codes, self.coding.kind, half, rows.dtype, **how)
                if zero:
                    w = decode.subtract(w, zero[0].astype(rows.dtype)[:, None], **how)
                if self.early:
                    w = decode.multiply(w, scale.astype(rows.dtype), **how)
                    total = total + dot(w, rows)
                else:
                    total = decode.multiply_add(dot(w, rows), scale, total, **how)
        return total


def multiply_blocks(
    operands: tuple[FourBits, ...],
    totals: tuple[Array, ...],
    x_block: Any,
    start: Array | int,
    count: int,
    unroll: int,
) -> tuple[Array, ...]:
    """Add the products of `count` blocks from `start` on to the sums of each operand.

    Args:
      x_block: from a block to what `FourBits.add` takes as x.
      unroll: blocks of a step; it divides the count.
    """

    def scales(block: Array | int) -> tuple[Scales, ...]:
        return tuple(operand.load_scales(block, unroll) for operand in operands)

    def step(i: Array, carry: Any) -> Any:
        totals, now = carry
        block = start + i * unroll
        # Loaded a step ahead: Triton prefetches only what is an operand of a product.
        then = scales(jnp.minimum(block + unroll, start + count - unroll))
        for u in range(unroll):
            x, added = x_block(block + u), []
            for operand, total, loaded in zip(operands, totals, now, strict=True):
                each = len(loaded) // unroll
                own = loaded[u * each : (u + 1) * each]
                added.append(operand.add(total, block + u, own, x))
            totals = tuple(added)
        return totals, then

    return lax.fori_loop(0, count // unroll, step, (totals, scales(start)))[0]


def _columns(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turn the index array of outputs into a column."""
    return tuple(i[:, None] if jnp.ndim(i) else i for i in index)
