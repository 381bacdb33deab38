"""Choose the experts of each token, and sort the pairs (token, choice) by expert into tiles.

Routing is one kernel for few tokens. For more tokens it is two kernels, because all blocks of
tokens must have chosen before the first pair can be placed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.triton import load, store

# Most tokens of a program that routes. Some dozens of tokens have more programs, of fewer tokens:
# 128 on an H200 take 5.0 us, instead of 6.6. Every program reads what all counted, so that
# thousands do not.
BLOCK_TOKENS = 16
FEWER_TOKENS, MAX_TOKENS_OF_FEWER = 4, 512
# Where tiles are not filled up, the rows of an expert begin at a multiple of this.
ALIGN = 8


class Routed(NamedTuple):
    """The pairs (token * top_k + choice) in tiles by expert, and their weights."""

    expert: Int[Array, " tiles"]
    """The expert of each tile; undefined for a tile that is not used."""
    used: Int[Array, " tiles"]
    """How many rows of each tile are used: its first ones; 0 for a tile that is not used."""
    pair: Int[Array, " padded"]
    """The pair of each row of each tile; undefined for a row that is not used."""
    weight: Float[Array, " pairs"]
    """The weight of the result of each pair; 0 for an expert of another device."""


class Placed(NamedTuple):
    """The pairs in tiles whose rows lie together: those of an expert fill up `ALIGN` only."""

    expert: Int[Array, " tiles"]
    used: Int[Array, " tiles"]
    start: Int[Array, " tiles"]
    """The first row of each tile; undefined for a tile that is not used."""
    tiles: Int[Array, "1"]
    """How many tiles are used: the first ones."""
    row: Int[Array, " pairs"]
    """The row of each pair; undefined for pairs of padding, and past the last for another device's."""
    weight: Float[Array, " pairs"]


def num_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """Return the most tiles that a routing can need. Each expert in use may leave one not full."""
    in_use = min(pairs, num_experts)
    return in_use + (pairs - in_use) // rows


def _choose(
    logits_ref,
    scale_ref,
    real_ref,
    first_ref,
    weight_ref,
    *,
    block: int,
    top_k: int,
    dtype: DTypeLike,
    held: int,
) -> Array:
    """Choose experts for a block of tokens, and write their weights. Padding chooses none.

    Args:
      first_ref, held: the first expert that the device has, and their number.

    Returns:
      For each token and expert that the device has: the number of the choice that is this expert.
      For the others: -1.
    """
    parts, tokens, num_experts = logits_ref.shape
    token = pl.program_id(0) * block + lax.iota(jnp.int32, block)
    expert = lax.iota(jnp.int32, pl.next_power_of_2(num_experts))[None, :]
    real = plgpu.load(real_ref.at[token], mask=token < tokens, other=0) > 0
    inside = real[:, None] & (expert < num_experts)
    # The scale is loaded first, because it comes from memory. The logits were just written and are
    # still in L2.
    scale = load(scale_ref, expert, mask=expert < num_experts).astype(jnp.float32)
    logits = jnp.zeros(inside.shape, jnp.float32)
    for part in range(parts):
        logits += load(logits_ref, part, token[:, None], expert, mask=inside)
    logits = jnp.where(inside, logits.astype(dtype).astype(jnp.float32), -jnp.inf)
    probs = jnp.exp(logits - jnp.max(logits, axis=1)[:, None])
    probs = probs / jnp.sum(probs, axis=1)[:, None]
    # If one probability of a token is NaN, all are. Such a token gets the first experts, and NaN
    # weights.
    left = jnp.where(probs == probs, probs, jnp.inf)
    # The bits of nonnegative floats, read as integers, are in the same order as the floats. The
    # largest integer of a warp takes one instruction. An argmax takes twenty, one after another.
    left = lax.bitcast_convert_type(left, jnp.int32)
    choice = jnp.full(left.shape, -1, jnp.int32)
    for j in range(top_k):
        best = left == jnp.max(left, axis=1)[:, None]
        first = jnp.min(jnp.where(best, expert, num_experts), axis=1)
        mine = expert == first[:, None]
        choice, left = jnp.where(mine, j, choice), jnp.where(mine, -1, left)
    choice = jnp.where(inside, choice, -1)
    weights = probs / jnp.sum(jnp.where(choice >= 0, probs, 0), axis=1)[:, None] * scale
    # An index that is not stored must point outside, because the interpreter writes old values back
    # to it.
    pair = jnp.where(choice >= 0, token[:, None] * top_k + choice, weight_ref.shape[0])
    if held == num_experts:
        plgpu.store(weight_ref.at[pair], weights, mask=choice >= 0)
        return choice
    here = (expert >= first_ref[0]) & (expert < first_ref[0] + held)
    plgpu.store(weight_ref.at[pair], jnp.where(here, weights, 0), mask=choice >= 0)
    return jnp.where(here, choice, -1)


def _place(
    choice,
    before,
    counts,
    own,
    expert_ref,
    used_ref,
    *refs,
    top_k,
    rows,
    programs,
    same_rows=False,
):
    """Write the pairs of the program's tokens into tiles, and write its share of the tiles' data.

    `refs` are the last fields of `Routed`, or of `Placed`, without the weights.

    Args:
      same_rows: whether the rows of all tiles are the tokens, `ALIGN` at most.
      choice: what `_choose` returned.
      before: for each expert, the number of pairs in earlier programs.
      counts: for each expert, the number of pairs in all programs.
      own: the first expert that this device has.
    """
    me, (block, experts) = pl.program_id(0), choice.shape
    tiles = (counts + rows - 1) // rows
    end = jnp.cumsum(tiles)
    first = end - tiles
    together = len(refs) > 1
    filled = (counts + ALIGN - 1) // ALIGN * ALIGN
    first_row = jnp.cumsum(filled) - filled if together else first * rows
    if together:
        at = me + lax.iota(jnp.int32, 1)
        plgpu.store(refs[1].at[at], jnp.broadcast_to(jnp.sum(tiles), (1,)), mask=at == 0)
    # Program `me` writes the `me`-th tile of every expert; or the next few, where a block has more
    # tokens than a tile has rows. An expert has no more tiles than all programs write.
    each = pl.cdiv(block, rows)
    for mine in (me * each + i for i in range(each)):
        owned = mine < tiles
        tile = jnp.where(owned, first + mine, expert_ref.shape[0])
        plgpu.store(expert_ref.at[tile], lax.iota(jnp.int32, experts) - own, mask=owned)
        plgpu.store(used_ref.at[tile], jnp.minimum(counts - mine * rows, rows), mask=owned)
        if together:
            plgpu.store(refs[0].at[tile], first_row + mine * rows, mask=owned)
    share = pl.next_power_of_2(pl.cdiv(expert_ref.shape[0], programs))
    tile = me * share + lax.iota(jnp.int32, share)
    unused = (tile >= jnp.sum(tiles)) & (tile < expert_ref.shape[0])
    tile = jnp.where(unused, tile, expert_ref.shape[0])
    plgpu.store(used_ref.at[tile], jnp.zeros((share,), jnp.int32), mask=unused)
    mine = (choice >= 0).astype(jnp.int32)
    token = me * block + lax.broadcasted_iota(jnp.int32, choice.shape, 0)
    if same_rows:
        row = first_row[None, :] + token
    else:
        row = (first_row + before)[None, :] + jnp.cumsum(mine, axis=0) - mine
    pair = token * top_k + choice
    at, value = (pair, row) if together else (row, pair)
    at = jnp.where(mine > 0, at, refs[-1].shape[0])
    plgpu.store(refs[-1].at[at], value, mask=mine > 0)


def _route_few(
    logits_ref,
    scale_ref,
    real_ref,
    first_ref,
    *refs,
    block: int,
    top_k: int,
    dtype: DTypeLike,
    held: int,
    rows: int,
    same_rows: bool,
):
    """Choose experts and place the pairs, when there is only one block of tokens."""
    *refs, weight_ref = refs
    inputs = logits_ref, scale_ref, real_ref, first_ref, weight_ref
    choice = _choose(*inputs, block=block, top_k=top_k, dtype=dtype, held=held)
    counts = jnp.sum((choice >= 0).astype(jnp.int32), axis=0)
    kwargs: dict[str, Any] = dict(top_k=top_k, rows=rows, programs=1, same_rows=same_rows)
    first = _first(first_ref, held, logits_ref.shape[2])
    _place(choice, jnp.zeros_like(counts), counts, first, *refs, **kwargs)


def _first(first_ref: Any, held: int, num_experts: int) -> Any:
    return 0 if held == num_experts else first_ref[0]


def _choose_block(
    logits_ref,
    scale_ref,
    real_ref,
    first_ref,
    weight_ref,
    choice_ref,
    count_ref,
    *,
    block: int,
    top_k: int,
    dtype: DTypeLike,
    held: int,
):
    """Choose experts for the tokens of a block, and count how often each expert was chosen."""
    me, inputs = pl.program_id(0), (logits_ref, scale_ref, real_ref, first_ref, weight_ref)
    choice = _choose(*inputs, block=block, top_k=top_k, dtype=dtype, held=held)
    row = me * block + lax.iota(jnp.int32, block)[:, None]
    expert = lax.iota(jnp.int32, choice.shape[1])
    store(choice_ref, row, expert[None, :], value=choice, mask=row >= 0)
    plgpu.store(count_ref.at[me, expert], jnp.sum((choice >= 0).astype(jnp.int32), axis=0))


def _place_block(
    choice_ref, count_ref, first_ref, *refs, block: int, top_k: int, rows: int, whole: bool
):
    """Place the pairs of a block of tokens behind those of all earlier blocks."""
    me, (programs, experts) = pl.program_id(0), count_ref.shape
    expert, chunk = lax.iota(jnp.int32, experts), min(pl.next_power_of_2(programs), 32)

    def count(step, sums):
        other = step * chunk + lax.iota(jnp.int32, chunk)[:, None]
        counts = load(count_ref, other, expert[None, :], mask=other < programs)
        earlier = jnp.where(other < me, counts, 0)
        return sums[0] + jnp.sum(earlier, axis=0), sums[1] + jnp.sum(counts, axis=0)

    zeros = jnp.zeros((experts,), jnp.int32)
    before, counts = lax.fori_loop(0, pl.cdiv(programs, chunk), count, (zeros, zeros))
    row = me * block + lax.iota(jnp.int32, block)[:, None]
    choice = load(choice_ref, row, expert[None, :])
    first = 0 if whole else first_ref[0]
    _place(choice, before, counts, first, *refs, top_k=top_k, rows=rows, programs=programs)


def route(
    logits: Float[Array, "S T E"],
    expert_scale: Float[Array, " E"],
    real: Bool[Array, " T"] | None = None,
    first: Int[Array, ""] | None = None,
    *,
    held: int | None = None,
    top_k: int,
    dtype: DTypeLike,
    rows: int,
    interpret: bool = False,
) -> Routed:
    """Choose experts as `reference.choose` does, and sort the pairs by expert into tiles of rows.

    Args:
      logits: float32 logits of the router, in parts.
      expert_scale: a factor of the weight of each expert.
      real: which tokens are no padding; pairs of the others are in no tile. None: all.
      first, held: the first expert that this device has, and the number of them. Pairs of the
        others are in no tile, and have weight 0. Tiles count experts from the first one. None: all.
      top_k: number of experts of a token.
      dtype: the contracting_axes logits are rounded to this dtype.
      rows: rows of a tile.
      interpret: whether to interpret the kernels.
    """
    kwargs: dict[str, Any] = dict(top_k=top_k, dtype=dtype, rows=rows, interpret=interpret)
    kwargs |= dict(first=first, held=held)
    return Routed(*_route(logits, expert_scale, real, **kwargs, together=False))


def route_together(
    logits: Float[Array, "S T E"],
    expert_scale: Float[Array, " E"],
    real: Bool[Array, " T"] | None = None,
    first: Int[Array, ""] | None = None,
    *,
    held: int | None = None,
    top_k: int,
    dtype: DTypeLike,
    rows: int,
    same_rows: bool = False,
    interpret: bool = False,
) -> Placed:
    """Route tokens to tiles whose rows lie together.

    Args:
      same_rows: whether the rows of every tile are all tokens, of which there are `ALIGN` at most.
      others: as in `route`.
    """
    kwargs: dict[str, Any] = dict(top_k=top_k, dtype=dtype, rows=rows, interpret=interpret)
    kwargs |= dict(first=first, held=held, same_rows=same_rows)
    placed = Placed(*_route(logits, expert_scale, real, **kwargs, together=True))
    if first is None:
        return placed
    past = jnp.iinfo(jnp.int32).max  # no row was written
    return placed._replace(row=jnp.where(placed.weight != 0, placed.row, past))


def _route(
    logits: Array,
    expert_scale: Array,
    real: Array | None,
    *,
    first: Array | None,
    held: int | None,
    top_k: int,
    dtype: DTypeLike,
    rows: int,
    together: bool,
    same_rows: bool = False,
    interpret: bool,
) -> tuple[Array, ...]:
    _, tokens, num_experts = logits.shape
    real = jnp.ones(tokens, jnp.int32) if real is None else real.astype(jnp.int32)
    at = jnp.zeros(1, jnp.int32) if first is None else first.astype(jnp.int32).reshape(1)
    held = num_experts if first is None or held is None else held
    pairs = tokens * top_k
    tiles = num_tiles(pairs, held, rows)
    fewer = BLOCK_TOKENS < tokens <= MAX_TOKENS_OF_FEWER
    block = FEWER_TOKENS if fewer else min(pl.next_power_of_2(tokens), BLOCK_TOKENS)
    programs = pl.cdiv(tokens, block)
    of = jax.ShapeDtypeStruct
    weight = of((pairs,), jnp.float32)
    of_tiles = (
        of((tiles,), jnp.int32),
        of((tiles,), jnp.int32),
        *([of((n,), jnp.int32) for n in (tiles, 1)] if together else []),
        of((pairs if together else tiles * rows,), jnp.int32),
    )
    call = functools.partial(
        pl.pallas_call,
        grid=(programs,),
        # One warp per token, for up to 8 tokens. 8 tokens on an H200 take 3.1 us, instead of 3.6 us
        # with half as many warps. More than 8 warps take longer to synchronize.
        compiler_params=plgpu.CompilerParams(num_warps=min(block, 8), num_stages=1),
        interpret=interpret,
    )
    if programs == 1:
        kwargs: dict[str, Any] = dict(top_k=top_k, dtype=dtype, held=held, rows=rows)
        kernel = functools.partial(_route_few, block=block, same_rows=same_rows, **kwargs)
        few_rows = call(kernel, out_shape=(*of_tiles, weight), name="experts_route")
        return tuple(few_rows(logits, expert_scale, real, at))
    padded = pl.next_power_of_2(num_experts)
    weight, choice, count = call(
        functools.partial(_choose_block, block=block, top_k=top_k, dtype=dtype, held=held),
        out_shape=(
            weight,
            of((programs * block, padded), jnp.int32),
            of((programs, padded), jnp.int32),
        ),
        name="experts_choose",
    )(logits, expert_scale, real, at)
    sizes: dict[str, Any] = dict(block=block, top_k=top_k, rows=rows, whole=held == num_experts)
    kernel = functools.partial(_place_block, **sizes)
    placed = call(kernel, out_shape=of_tiles, name="experts_place")(choice, count, at)
    return *placed, weight
