"""Experts for few tokens in Pallas Triton: a grouped product that reads each expert in use once.

Three kernels and a sum. `_route` sorts the (token, choice) pairs by expert into tiles of rows that share
one, `_gate_up` multiplies each tile by its expert's gate and up matrices and applies the activation,
`_down` multiplies by its down matrix and writes each row to its pair's place; the weighted sum over a
token's pairs is left to XLA. Tiles beyond the last one in use end at once, so experts that no token
chose are never read. Tiles are the fastest axis of both grids: those of one expert run side by side, and
the second finds the weights in L2. No atomics: results do not depend on the order in which blocks run.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

# The expert of each tile, and the pair of each of their rows; both -1 where there is none.
Routed: TypeAlias = tuple[Int[Array, " tiles"], Int[Array, " padded"]]


@dataclasses.dataclass(frozen=True)
class Block:
    """How a matrix product is cut: columns of a block, inputs of a step, warps, steps loaded ahead."""

    columns: int
    inputs: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Rows of a tile (a power of two, at least 16), and the blocks of both products."""

    rows: int
    gate_up: Block
    down: Block


def num_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """Return the most tiles that any routing can need: each expert in use may leave one not full."""
    in_use = min(pairs, num_experts)
    return in_use + (pairs - in_use) // rows


def _route(chosen_ref, expert_ref, pair_ref, *, pairs: int, rows: int, num_experts: int):
    """Write the tiles of one expert: its number to `expert_ref`, their rows' pairs to `pair_ref`.

    Rows that are padding get -1. The program of the last expert marks the tiles that are left with -1.
    """
    me, experts = pl.program_id(0), lax.iota(jnp.int32, _power(num_experts))

    def some_pairs(step, size):
        pair = step * size + lax.iota(jnp.int32, size)
        return pair, plgpu.load(chosen_ref.at[pair], mask=pair < pairs, other=-1)

    few = min(_power(pairs), 32)  # times experts, all in registers

    def count(step, counts):
        _, chosen = some_pairs(step, few)
        return counts + jnp.sum((chosen[:, None] == experts[None, :]).astype(jnp.int32), axis=0)

    counts = jnp.zeros(experts.shape, jnp.int32)
    counts = lax.fori_loop(0, pl.cdiv(pairs, few), count, counts)
    tiles = (counts + rows - 1) // rows
    first = jnp.sum(jnp.where(experts < me, tiles, 0))
    end = first + jnp.sum(jnp.where(experts == me, tiles, 0))
    many = min(_power(pairs), 1024)

    def place(step, row):
        pair, chosen = some_pairs(step, many)
        mine = (chosen == me).astype(jnp.int32)
        # An index that is not stored points outside: the interpreter writes old values back.
        rows_of_pairs = jnp.where(mine > 0, row + jnp.cumsum(mine) - 1, pair_ref.shape[0])
        plgpu.store(pair_ref.at[rows_of_pairs], pair, mask=mine > 0)
        return row + jnp.sum(mine)

    @pl.when(first < end)
    def _():
        row = lax.fori_loop(0, pl.cdiv(pairs, many), place, first * rows)
        row = row + lax.iota(jnp.int32, rows)
        plgpu.store(pair_ref.at[row], jnp.full((rows,), -1, jnp.int32), mask=row < end * rows)

    tile = lax.iota(jnp.int32, _power(expert_ref.shape[0]))
    owned = (tile >= first) & (tile < end)
    unused = (tile >= end) & (tile < expert_ref.shape[0]) & (me == num_experts - 1)
    index = jnp.where(owned | unused, tile, expert_ref.shape[0])
    plgpu.store(expert_ref.at[index], jnp.where(owned, me, -1), mask=owned | unused)


def _gate_up(
    expert_ref, pair_ref, x_ref, w_ref, hidden_ref, *, top_k: int, rows: int, block: Block
):
    """hidden[tile] = gelu_tanh(x[tokens of the tile] @ gate) * (x[...] @ up), for a block of columns."""
    tile, expert = pl.program_id(0), expert_ref[pl.program_id(0)]
    d, f = x_ref.shape[1], w_ref.shape[3]
    column = pl.program_id(1) * block.columns + lax.iota(jnp.int32, block.columns)

    @pl.when(expert >= 0)
    def _():
        row = tile * rows + lax.iota(jnp.int32, rows)
        # Padding computes token 0 once more, and nobody reads it.
        token = jnp.maximum(pair_ref[pl.ds(tile * rows, rows)], 0) // top_k

        def step(i, sums):
            k = i * block.inputs + lax.iota(jnp.int32, block.inputs)
            x = _load(x_ref, token[:, None], k[None, :], inside=_inside(k[None, :], d))
            inside = _both(_inside(k[:, None], d), _inside(column[None, :], f))
            gate = _load(w_ref, expert, k[:, None], 0, column[None, :], inside=inside)
            up = _load(w_ref, expert, k[:, None], 1, column[None, :], inside=inside)
            return sums[0] + _dot(x, gate), sums[1] + _dot(x, up)

        zeros = jnp.zeros((rows, block.columns), jnp.float32)
        gate, up = lax.fori_loop(0, pl.cdiv(d, block.inputs), step, (zeros, zeros))
        # As in the reference, both are rounded before the activation.
        gate, up = (a.astype(hidden_ref.dtype).astype(jnp.float32) for a in (gate, up))
        hidden = jax.nn.gelu(gate, approximate=True) * up
        _store(hidden_ref, row[:, None], column[None, :], hidden, mask=column[None, :] < f)


def _down(expert_ref, pair_ref, hidden_ref, w_ref, out_ref, *, rows: int, block: Block):
    """out[pairs of the tile] = hidden[tile] @ down, for a block of columns."""
    tile, expert = pl.program_id(0), expert_ref[pl.program_id(0)]
    f, d = w_ref.shape[1:]
    column = pl.program_id(1) * block.columns + lax.iota(jnp.int32, block.columns)

    @pl.when(expert >= 0)
    def _():
        row = tile * rows + lax.iota(jnp.int32, rows)
        pair = pair_ref[pl.ds(tile * rows, rows)]

        def step(i, total):
            k = i * block.inputs + lax.iota(jnp.int32, block.inputs)
            hidden = _load(hidden_ref, row[:, None], k[None, :], inside=_inside(k[None, :], f))
            inside = _both(_inside(k[:, None], f), _inside(column[None, :], d))
            w = _load(w_ref, expert, k[:, None], column[None, :], inside=inside)
            return total + _dot(hidden, w)

        total = jnp.zeros((rows, block.columns), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(f, block.inputs), step, total)
        mask = (pair[:, None] >= 0) & (column[None, :] < d)
        where = jnp.where(pair >= 0, pair, out_ref.shape[0])  # as in `_route`
        _store(out_ref, where[:, None], column[None, :], total, mask=mask)


def _inside(index: Array, size: int) -> Array | None:
    """Return a mask of the indices below size, or None where the axis is cut evenly."""
    return None if size % index.size == 0 else index < size


def _both(a: Array | None, b: Array | None) -> Array | None:
    return a if b is None else b if a is None else a & b


def _load(ref, *index, inside: Array | None) -> Array:
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    at = ref.at[tuple(jnp.broadcast_to(i, shape) if jnp.ndim(i) else i for i in index)]
    if inside is None:
        return plgpu.load(at)
    return plgpu.load(at, mask=jnp.broadcast_to(inside, shape), other=0)


def _store(ref, row: Array, column: Array, value: Array, *, mask: Array) -> None:
    at = ref.at[jnp.broadcast_to(row, value.shape), jnp.broadcast_to(column, value.shape)]
    plgpu.store(at, value.astype(ref.dtype), mask=jnp.broadcast_to(mask, value.shape))


def _dot(x: Array, y: Array) -> Array:
    # On Hopper the default for float32 would be TF32.
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=exact, preferred_element_type=jnp.float32)


def _power(size: int) -> int:
    return pl.next_power_of_2(size)


def route(
    chosen: Int[Array, "T topk"], num_experts: int, rows: int, *, interpret: bool = False
) -> Routed:
    """Sort pairs by expert into tiles of `rows` rows.

    Returns:
        The expert of each tile, and the pair (token * top_k + choice) of each of their rows; -1 for tiles
        that are not used and rows that are padding. Rows of tiles that are not used are undefined.
    """
    pairs = chosen.size
    tiles = num_tiles(pairs, num_experts, rows)
    if chosen.shape[0] == 1:  # a tile each: the experts of one token differ
        row = jnp.arange(pairs * rows, dtype=jnp.int32)
        return chosen[0].astype(jnp.int32), jnp.where(row % rows == 0, row // rows, -1)
    return pl.pallas_call(
        functools.partial(_route, pairs=pairs, rows=rows, num_experts=num_experts),
        out_shape=(
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            jax.ShapeDtypeStruct((tiles * rows,), jnp.int32),
        ),
        grid=(num_experts,),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="experts_route",
    )(chosen.reshape(pairs).astype(jnp.int32))


def multiply_gate_up(
    routed: Routed,
    x: Float[Array, "T D"],
    gate_up: Float[Array, "E D 2 F"],
    *,
    top_k: int,
    rows: int,
    block: Block,
    interpret: bool = False,
) -> Float[Array, "padded F"]:
    """Return the activations of each row of each tile."""
    f = gate_up.shape[3]
    return pl.pallas_call(
        functools.partial(_gate_up, top_k=top_k, rows=rows, block=block),
        out_shape=jax.ShapeDtypeStruct((routed[1].size, f), x.dtype),
        grid=(routed[0].size, pl.cdiv(f, block.columns)),
        compiler_params=plgpu.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=interpret,
        name="experts_gate_up",
    )(*routed, x, gate_up)


def multiply_down(
    routed: Routed,
    hidden: Float[Array, "padded F"],
    down: Float[Array, "E F D"],
    *,
    pairs: int,
    rows: int,
    block: Block,
    interpret: bool = False,
) -> Float[Array, "pairs D"]:
    """Return each pair's result, in float32, since XLA adds them up."""
    d = down.shape[2]
    return pl.pallas_call(
        functools.partial(_down, rows=rows, block=block),
        out_shape=jax.ShapeDtypeStruct((pairs, d), jnp.float32),
        grid=(routed[0].size, pl.cdiv(d, block.columns)),
        compiler_params=plgpu.CompilerParams(num_warps=block.warps, num_stages=block.stages),
        interpret=interpret,
        name="experts_down",
    )(*routed, hidden, down)


def experts_triton(
    x: Float[Array, "T D"],
    chosen: Int[Array, "T topk"],
    weights: Float[Array, "T topk"],
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
    *,
    tiling: Tiling,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Launch the kernels. Arguments as in `pallas_kernels.experts.experts`, which checks them."""
    (tokens, top_k), rows = chosen.shape, tiling.rows
    routed = route(chosen, gate_up.shape[0], rows, interpret=interpret)
    hidden = multiply_gate_up(
        routed, x, gate_up, top_k=top_k, rows=rows, block=tiling.gate_up, interpret=interpret
    )
    out = multiply_down(
        routed, hidden, down, pairs=chosen.size, rows=rows, block=tiling.down, interpret=interpret
    )
    weighted = out.reshape(tokens, top_k, -1) * weights.astype(jnp.float32)[:, :, None]
    return jnp.sum(weighted, axis=1).astype(x.dtype)
