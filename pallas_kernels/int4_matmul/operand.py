"""The weight of a Triton kernel, read in blocks of inputs: codes of 4 bits with groups, or of 8.

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

from pallas_kernels.common.triton import below, dot, load
from pallas_kernels.int4_matmul import dequantise
from pallas_kernels.int4_matmul.coding import BLOCK, HALF, Coding, scale_numbers
from pallas_kernels.int8_matmul.dequantise import factor, numbers

Scales = list[tuple[Any, ...]]  # arrays, or None


@dataclasses.dataclass(frozen=True)
class Int4Operand:
    """Codes [*before, blocks, *after, 32] and scales [*before, groups, *after]: see `coding`.

    Attributes:
      codes, scales, zeros: references; zeros may be None.
      before, after: indices of the outputs, of which one is an array [outputs].
      early: whether numbers are multiplied by their scales before the product, in bfloat16. Else
        the product of each group is multiplied in float32. That rounds nothing, and costs rows / 32
        instructions a code.
      warps: of the program.
    """

    coding: Coding
    codes: Any
    scales: Any
    zeros: Any
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    early: bool
    warps: int
    interpret: bool

    @property
    def _of_groups(self) -> tuple[Any, ...]:
        return (self.scales,) if self.zeros is None else (self.scales, self.zeros)

    def _several_steps_ahead(self, ref: Any) -> bool:
        """Tell whether Triton loads these scales several steps ahead, as it loads codes.

        It does for operands of a product, where a thread loads 4 bytes of neighbours at least.
        Scales are such operands where they are multiplied before the product.
        """
        outputs = next(i.size for i in (*self.before, *self.after) if jnp.ndim(i))
        neighbours = bool(self.after) and jnp.ndim(self.after[-1]) == 1
        return self.early and neighbours and outputs * ref.dtype.itemsize >= 4 * 32 * self.warps

    @property
    def _at_once(self) -> bool:
        """Tell whether codes become numbers times scales at once."""
        plain = self.coding.kind == "int4" and self.zeros is None
        return plain and self.early and not self.interpret

    @property
    def factor(self) -> float:
        """Factor by which sums are too small."""
        return 2.0**dequantise.SHIFT if self._at_once else 1.0

    def load_scales(self, block: Array | int, count: int, *, ahead: bool) -> Scales:
        """Load what belongs to `count` blocks: for each product, its scales, and zeros if any.

        Args:
          ahead: load the scales that Triton does not load several steps ahead; otherwise the rest.
            The others are None.
        """
        loaded, scales = {}, []
        for first in range(0, count * BLOCK, min(self.coding.group, HALF)):
            key = first // min(self.coding.group, BLOCK)
            if key not in loaded:
                group = (block * BLOCK + first) // self.coding.group
                group = jnp.minimum(group, self.scales.shape[len(self.before)] - 1)
                loaded[key] = tuple(
                    None
                    if self._several_steps_ahead(ref) == ahead
                    else load(ref, *self.before, group, *self.after)
                    for ref in self._of_groups
                )
            scales.append(loaded[key])
        return scales

    def add(self, total: Array, block: Array, preloaded: Scales, x: Any) -> Array:
        """Add the product of a block to sums [outputs, rows].

        Args:
          preloaded: what `load_scales` loaded ahead for the block.
          x: from the first input within the block, and their number, to [inputs, rows].
        """
        size, kwargs = min(self.coding.group, HALF), dict[str, Any](interpret=self.interpret)
        before, after = _columns(self.before), _columns(self.after)
        rest = self.load_scales(block, 1, ahead=False)
        scales = [
            tuple(a if b is None else b for a, b in zip(*pair, strict=True))
            for pair in zip(preloaded, rest, strict=True)
        ]
        for first in range(0, HALF, size):
            byte = first + lax.iota(jnp.int32, size)[None, :]
            codes = load(self.codes, *before, block, *after, byte)
            for half in range(2):
                start = half * HALF + first
                scale, *zero = scales[start // size]
                rows = x(start, size)
                if self._at_once:
                    scale = scale_numbers(scale).astype(rows.dtype)
                    total = total + dot(dequantise.scaled_numbers(codes, scale, half), rows)
                    continue
                scale = scale_numbers(scale)[:, None]
                w = dequantise.half_numbers(codes, self.coding.kind, half, rows.dtype, **kwargs)
                if zero:
                    w = dequantise.subtract(w, zero[0].astype(rows.dtype)[:, None], **kwargs)
                if self.early:
                    w = dequantise.multiply(w, scale.astype(rows.dtype), **kwargs)
                    total = total + dot(w, rows)
                else:
                    total = dequantise.multiply_add(dot(w, rows), scale, total, **kwargs)
        return total


@dataclasses.dataclass(frozen=True)
class Int8Operand:
    """Codes [*before, *after, inputs] of 8 bits, whose factors come after the product.

    Attributes:
      codes: a reference; as uint8, because Pallas loads no e4m3 with a mask.
      dtype: what the bytes are.
      before, after: indices of the outputs, of which one is an array [outputs].
      size: inputs of a block. A block of 128 is a whole line of memory for each output, which is
        read faster than two halves at two times. The last block may reach past the inputs.
    """

    codes: Any
    dtype: jnp.dtype
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    size: int
    interpret: bool

    @property
    def factor(self) -> float:
        """Factor by which sums are too small."""
        return factor(self.dtype, interpret=self.interpret)

    def load_scales(self, block: Array | int, count: int, *, ahead: bool) -> Scales:
        """Load nothing: a group is all inputs of an output."""
        return []

    def add(self, total: Array, block: Array, preloaded: Scales, x: Any) -> Array:
        """Add the product of a block to sums [outputs, rows]. Arguments as in `Int4Operand.add`."""
        k = (block * self.size + lax.iota(jnp.int32, self.size))[None, :]
        mask = below(k, self.codes.shape[-1])
        codes = load(self.codes, *_columns(self.before), *_columns(self.after), k, mask=mask)
        rows = x(0, self.size)
        w = numbers(codes, self.dtype, interpret=self.interpret)
        return total + dot(w.astype(rows.dtype), rows)


def multiply_blocks(
    operands: tuple[Int4Operand | Int8Operand, ...],
    shape: tuple[int, int],
    x_block: Any,
    start: Array | int,
    count: int,
    unroll: int,
) -> tuple[Array, ...]:
    """Return the sums of the products of `count` blocks from `start` on, for each operand.

    Args:
      shape: outputs and rows.
      x_block: from a block to what `Int4Operand.add` takes as x.
      unroll: blocks of a step; it divides the count.
    """

    def scales(block: Array | int) -> tuple[Scales, ...]:
        return tuple(operand.load_scales(block, unroll, ahead=True) for operand in operands)

    def step(i: Array, carry: Any) -> Any:
        totals, now = carry
        block = start + i * unroll
        # What Triton does not load ahead is loaded one step ahead. Such a step takes as long as the
        # memory takes to answer.
        then = scales(jnp.minimum(block + unroll, start + count - unroll))
        for u in range(unroll):
            x, added = x_block(block + u), []
            for operand, total, loaded in zip(operands, totals, now, strict=True):
                each = len(loaded) // unroll
                own = loaded[u * each : (u + 1) * each]
                added.append(operand.add(total, block + u, own, x))
            totals = tuple(added)
        return totals, then

    zeros = (jnp.zeros(shape, jnp.float32),) * len(operands)
    totals, _ = lax.fori_loop(0, count // unroll, step, (zeros, scales(start)))
    by = [operand.factor for operand in operands]
    return tuple(t if f == 1 else t * f for t, f in zip(totals, by, strict=True))


def _columns(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turn the index array of outputs into a column."""
    return tuple(i[:, None] if jnp.ndim(i) else i for i in index)
