"""The products of experts whose weights are codes, of 8 bits or of 4 with groups, in Pallas Triton.

They read the tiles that `routing.route` makes, as the products of that module do. The operands lie
the other way round: `pallas_kernels.int4_matmul.operand` says why.

Codes of 4 bits always go through them. `tuning.py` says for how many tokens codes of 8 bits do; the
other products of these are in `triton.py`.

Few tokens use few experts, too few for a GPU to read at full speed when a program reads all inputs
of its columns. So several programs may share the inputs of gate and up (`splits`). XLA adds their
parts and applies the activation.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.triton import load, store
from pallas_kernels.experts.routing import Routed
from pallas_kernels.int4_matmul.coding import BLOCK, Codes, Coding
from pallas_kernels.int4_matmul.operand import Int4Operand, Int8Operand, multiply_blocks
from pallas_kernels.int4_matmul.triton import TileConfig


def _parts(refs: tuple[Any, ...], weight: Codes) -> Codes:
    """Put references to the arrays of a weight into the place of these."""
    left = iter(refs)
    placed: list[Any] = [None if array is None else next(left) for array in weight]
    return Codes(*placed)


def _operand(
    w: Codes,
    coding: Coding | jnp.dtype,
    expert: Array,
    after: Any,
    config: TileConfig,
    interpret: bool,
) -> Int4Operand | Int8Operand:
    if isinstance(coding, jnp.dtype):
        return Int8Operand(
            w.codes, coding, (expert,), after, _block_size(coding, config), interpret
        )
    options = config.early, config.warps, interpret
    return Int4Operand(coding, w.codes, w.scales, w.zeros, (expert,), after, *options)


def _block_size(coding: Coding | jnp.dtype, config: TileConfig) -> int:
    """Return the inputs of a block. Codes of 8 bits have one block a step."""
    return BLOCK if isinstance(coding, Coding) else BLOCK * config.unroll


def _sums(
    operands: tuple[Any, ...],
    ref: Any,
    row: Array,
    in_use: Array,
    split: Any,
    coding: Any,
    config: TileConfig,
) -> tuple[Array, ...]:
    """Multiply the rows of an array by each operand, over a share of the inputs."""
    size, inputs = _block_size(coding, config), ref.shape[1]
    share = pl.cdiv(inputs, size) // config.splits
    unroll = config.unroll if isinstance(coding, Coding) else 1

    def block_of(block: Array) -> Any:
        def x(first: int, count: int) -> Array:
            k = block * size + first + lax.iota(jnp.int32, count)
            inside = None if inputs % size == 0 else (k < inputs)[None, :]
            mask = in_use[:, None] if inside is None else in_use[:, None] & inside
            return load(ref, row[:, None], k[None, :], mask=mask).T

        return x

    shape = config.outputs, config.rows
    return multiply_blocks(operands, shape, block_of, split * share, share, unroll)


def _gate_up(expert_ref, used_ref, pair_ref, x_ref, *refs, like, coding, top_k, config, interpret):
    """Write hidden[pairs of the tile] = gelu_tanh(x @ gate) * (x @ up) for some columns.

    Where inputs are shared, write parts [split, pairs of the tile, 2, columns] of both products.
    """
    *of_weight, out_ref = refs
    w = _parts(tuple(of_weight), like)
    tile, split = pl.program_id(1), pl.program_id(2)
    pairs, f = out_ref.shape[1 if config.splits > 1 else 0], out_ref.shape[-1]
    expert, used = expert_ref[tile], used_ref[tile]
    column = pl.program_id(0) * config.outputs + lax.iota(jnp.int32, config.outputs)
    in_use = lax.iota(jnp.int32, config.rows) < used

    @pl.when(used > 0)
    def _():
        pair = jnp.where(in_use, pair_ref[pl.ds(tile * config.rows, config.rows)], 0)
        both = tuple(_operand(w, coding, expert, (i, column), config, interpret) for i in range(2))
        sums = _sums(both, x_ref, pair // top_k, in_use, split, coding, config)
        if w.factors is not None:
            sums = tuple(
                total * load(w.factors, expert, i, column)[:, None] for i, total in enumerate(sums)
            )
        # An index that is not stored must point outside, because the interpreter writes old values
        # back to it.
        row = jnp.where(in_use, pair, pairs)[:, None]
        mask = in_use[:, None] & (column[None, :] < f)
        if config.splits > 1:
            for i, total in enumerate(sums):
                index = split, row, i, column[None, :]
                store(out_ref, *index, value=total.T, mask=mask)
        else:
            gate, up = sums
            hidden = _activated(gate, up, out_ref.dtype)
            store(out_ref, row, column[None, :], value=hidden.T, mask=mask)


def _activated(gate: Array, up: Array, dtype: DTypeLike) -> Array:
    """Return gelu_tanh(gate) * up. As in the reference, both are rounded before."""
    gate, up = (a.astype(dtype).astype(jnp.float32) for a in (gate, up))
    return jax.nn.gelu(gate, approximate=True) * up


def _down(
    expert_ref, used_ref, pair_ref, weight_ref, hidden_ref, *refs, like, coding, config, interpret
):
    """Write out[pairs of the tile] = weights * (hidden[tile] @ down) for some columns."""
    *of_weight, out_ref = refs
    w = _parts(tuple(of_weight), like)
    tile, d = pl.program_id(1), out_ref.shape[1]
    expert, used = expert_ref[tile], used_ref[tile]
    column = pl.program_id(0) * config.outputs + lax.iota(jnp.int32, config.outputs)
    in_use = lax.iota(jnp.int32, config.rows) < used

    @pl.when(used > 0)
    def _():
        pair = jnp.where(in_use, pair_ref[pl.ds(tile * config.rows, config.rows)], 0)
        weight = plgpu.load(weight_ref.at[pair], mask=in_use, other=0)
        operand = _operand(w, coding, expert, (column,), config, interpret)
        (total,) = _sums((operand,), hidden_ref, pair, in_use, 0, coding, config)
        if w.factors is not None:
            total = total * load(w.factors, expert, column)[:, None]
        mask = in_use[:, None] & (column[None, :] < d)
        pair = jnp.where(in_use, pair, out_ref.shape[0])
        store(out_ref, pair[:, None], column[None, :], value=total.T * weight[:, None], mask=mask)


def multiply_gate_up(
    routed: Routed,
    x: Float[Array, "T D"],
    gate_up: Codes,
    *,
    coding: Coding | None,
    top_k: int,
    config: TileConfig,
    interpret: bool = False,
) -> Float[Array, "pairs F"]:
    """Return the activations of each pair. They are undefined for pairs of padding."""
    f, pairs = gate_up.codes.shape[-2], routed.weight.size
    gate_up, kind = _as_bytes(gate_up, coding)
    kwargs: dict[str, Any] = dict(like=gate_up, coding=kind, config=config, interpret=interpret)
    shape, dtype = ((pairs, f), x.dtype)
    if config.splits > 1:
        shape, dtype = (config.splits, pairs, 2, f), jnp.float32
    out = pl.pallas_call(
        functools.partial(_gate_up, top_k=top_k, **kwargs),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        grid=(f // config.outputs, routed.expert.size, config.splits),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="experts_gate_up",
    )(routed.expert, routed.used, routed.pair, x, *_codes_and_scales(gate_up))
    if config.splits == 1:
        return out
    total = jnp.sum(out, axis=0)
    return _activated(total[:, 0], total[:, 1], x.dtype).astype(x.dtype)


def multiply_down(
    routed: Routed,
    hidden: Float[Array, "pairs F"],
    down: Codes,
    *,
    coding: Coding | None,
    config: TileConfig,
    interpret: bool = False,
) -> Float[Array, "pairs D"]:
    """Return the result of each pair times its weight, in the dtype of `hidden`."""
    d = down.codes.shape[-2]
    down, kind = _as_bytes(down, coding)
    kwargs: dict[str, Any] = dict(like=down, coding=kind, config=config, interpret=interpret)
    return pl.pallas_call(
        functools.partial(_down, **kwargs),
        out_shape=jax.ShapeDtypeStruct((routed.weight.size, d), hidden.dtype),
        grid=(d // config.outputs, routed.expert.size),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="experts_down",
    )(*routed, hidden, *_codes_and_scales(down))


def _as_bytes(weight: Codes, coding: Coding | None) -> tuple[Codes, Coding | jnp.dtype]:
    """Return a weight whose codes are bytes, and what these are."""
    if coding is not None:
        return weight, coding
    codes = lax.bitcast_convert_type(weight.codes, jnp.uint8)
    return weight._replace(codes=codes), weight.codes.dtype


def _codes_and_scales(weight: Codes) -> list[Array]:
    return [array for array in weight if array is not None]
