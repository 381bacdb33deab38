"""Attention of few queries to long caches in Pallas Triton: a program reads its keys once.

The query heads of one kv head and the tokens are rows of one matrix (row = token * G + head). A
block of keys is read once for all rows of a tile. Each further tile belongs to another program,
which finds the keys in L2. Many tokens are cut into tiles like few, so all scores of a chunk of a
prompt are never in memory together.

The keys that some query of a tile can see are a range of slots. The range is divided evenly among
`splits` programs, whatever its length. Each program runs one softmax along its blocks. A second
kernel averages the shares, weighted by the softmax weights of their keys. There are no atomics, so
results do not depend on the order of blocks.

Where there are as many splits as blocks, each program knows its block before it knows the range. It
then loads queries, keys and values together, and waits for memory once.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import KVSegment
from pallas_kernels.attention.spans import UNSEEN, position_range, visible_span
from pallas_kernels.common.triton import below, dot, load, store

# A program that averages splits makes so many numbers, and loads so many splits at once.
COMBINED = 512
COMBINED_SPLITS = 16
# A mask also needs shared memory. 128 rows of head dim 512 leave no room for it beside 32 keys.
# Masked keys are those of a tree, and so few that smaller blocks cost nothing.
MASKED_KEYS = 16
# A program holds a table of so many pages in registers. Triton loads nothing ahead whose address it
# loads in the same turn of a loop: 8 rows of 26B-A4B with 300 keys then take 25 us for 19.
MOST_HELD = 128


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile sizes: programs, and blocks of keys.

    Attributes:
      rows: rows of a tile, a power of two and at least 16.
      keys: keys of a block, a power of two and at least 16.
      warps: warps of a program.
      stages: blocks that are loaded ahead.
      splits: programs among which the keys of a tile are divided.
      parts: programs among which the columns of the values are divided. Each part scores all keys
        itself. That is more arithmetic, but leaves room for more rows, and so for fewer reads.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int
    parts: int = 1

    def shared_bytes(self, head_dim: int, key_bytes: int, *, masked: bool = False) -> int:
        """Return how much shared memory a program takes at most, where tensor cores read registers.

        There are the queries, the weights of a block, and keys, values and positions of the blocks
        that are loaded ahead. Tensor cores of Hopper and B200 read shared memory and need more of
        it, and all tilings fit there.

        Args:
          key_bytes: of a number of a key.
          masked: whether there is a segment with a mask.
        """
        block = self.keys * (key_bytes * (head_dim + head_dim // self.parts) + 4)
        mask = self.rows * MASKED_KEYS if masked else 0
        return (self.stages - 1) * (block + mask) + 2 * self.rows * (head_dim + self.keys)


def _attend(
    spans_ref,
    q_positions_ref,
    q_ref,
    segments,
    out_ref,
    log_weight_ref=None,
    *,
    tiling: Tiling,
    scale: float,
    window: int | None,
    causal: bool,
    value_scale: float,
):
    """Attend from one tile of rows of one kv head to one share of its keys."""
    _, _, groups, tokens, width = q_ref.shape
    row_tiles = pl.cdiv(tokens * groups, tiling.rows)
    b, head = pl.program_id(2), pl.program_id(1)
    part, tile = pl.program_id(0) % tiling.parts, pl.program_id(0) // tiling.parts
    split, tile = tile // row_tiles, tile % row_tiles
    row = tile * tiling.rows + lax.iota(jnp.int32, tiling.rows)
    token, group = row // groups, row % groups
    inside = below(row, tokens * groups)
    column = lax.iota(jnp.int32, width)[None, :]
    made = part * (width // tiling.parts) + lax.iota(jnp.int32, width // tiling.parts)[None, :]

    def queries(b: Array) -> Array:
        mask = None if inside is None else inside[:, None]
        return load(q_ref, b, head, group[:, None], token[:, None], column, mask=mask)

    q = queries(b)
    q_position = load(q_positions_ref, b, token, mask=inside)

    carry = (
        jnp.zeros((tiling.rows, made.size), jnp.float32),
        jnp.full((tiling.rows,), UNSEEN, jnp.float32),
        jnp.zeros((tiling.rows,), jnp.float32),
    )
    for i, (k_ref, v_ref, positions_ref, seen_ref, pages_ref) in enumerate(segments):
        size, only_page = positions_ref.shape[1], b
        if pages_ref is not None and pages_ref.shape[1] == 1:
            only_page = _page(pages_ref, k_ref, b, 0)
        table = None
        if pages_ref is not None and 1 < pages_ref.shape[1] <= MOST_HELD:
            numbers = lax.iota(jnp.int32, pl.next_power_of_2(pages_ref.shape[1]))
            table = numbers, _page(pages_ref, k_ref, b, numbers)
        # The GPU converts fp8 to float16 in one instruction, and to bfloat16 in several. Queries
        # are normed, so they are within its range, and float16 has more bits of them and of
        # weights.
        narrow = k_ref.dtype == jnp.float8_e4m3fn and q.dtype == jnp.bfloat16
        rows = q.astype(jnp.float16) if narrow else q
        max_keys = tiling.keys if seen_ref is None else MASKED_KEYS
        keys = min(max_keys, max(16, pl.next_power_of_2(size)))
        begin, end = spans_ref[b, tile, 2 * i], spans_ref[b, tile, 2 * i + 1]
        at_once = tiling.splits > 1 and tiling.splits * keys >= size and len(segments) == 1
        if at_once:  # a loop all the same, because Triton waits for each load outside of loops
            start, stop = split, jnp.minimum(split + 1, pl.cdiv(size, keys))
        else:
            first = begin // keys
            blocks = jnp.maximum((end + keys - 1) // keys - first, 0)
            share = (blocks + tiling.splits - 1) // tiling.splits
            start = jnp.minimum(split * share, blocks) + first
            stop = jnp.minimum(split * share + share, blocks) + first

        def step(
            block,
            carry,
            table=table,
            k_ref=k_ref,
            v_ref=v_ref,
            positions_ref=positions_ref,
            seen_ref=seen_ref,
            pages_ref=pages_ref,
            only_page=only_page,
            size=size,
            keys=keys,
            end=end,
            q=rows,
            at_once=at_once,
        ):
            total, row_max, weight = carry
            if at_once:  # the block is the split; that both are in the index keeps the load in here
                q = queries(b + (block - split)).astype(q.dtype)
            slot = block * keys + lax.iota(jnp.int32, keys)
            real = slot < size if at_once else below(slot, size)
            page, in_page = only_page, slot
            if (page_size := k_ref.shape[2]) < size:
                # One page for the block if the block is in one, else one for each key.
                number = block * keys if page_size % keys == 0 else slot
                if table is not None and page_size % keys == 0:
                    page = jnp.sum(jnp.where(table[0] == number // page_size, table[1], 0))
                else:
                    page = _page(pages_ref, k_ref, b, number // page_size)
                in_page = slot % page_size
            at = (page if jnp.ndim(page) == 0 else page[:, None], head, in_page[:, None])
            k = load(k_ref, *at, column, mask=None if real is None else real[:, None])
            # Slots behind the range may hold NaN, which a weight of 0 would not remove.
            v = load(v_ref, *at, made, mask=(slot < end)[:, None])
            position = load(positions_ref, b, slot, mask=real)
            visible = ((position >= 0) & (slot < end))[None, :]
            if window is not None:
                visible &= position[None, :] > q_position[:, None] - window
            if causal:
                visible &= position[None, :] <= q_position[:, None]
            if seen_ref is not None:
                mask = None if inside is None else inside[:, None]
                mask = mask if real is None else real[None, :] & (True if mask is None else mask)
                visible &= load(seen_ref, b, token[:, None], slot[None, :], mask=mask) != 0
            # Scores are in base 2, because the GPU has powers of base 2.
            k, v = k.astype(q.dtype), v.astype(q.dtype)  # of narrow keys, in registers
            score = jnp.where(visible, dot(q, k.T) * (scale * math.log2(math.e)), UNSEEN)
            new = jnp.maximum(row_max, jnp.max(score, axis=1))
            kept, p = jnp.exp2(row_max - new), jnp.exp2(score - new[:, None])
            total = total * kept[:, None] + dot(p.astype(v.dtype), v)
            return total, new, weight * kept + jnp.sum(p, axis=1)

        carry = lax.fori_loop(start, stop, step, carry)

    total, row_max, weight = carry
    weight = jnp.where(weight == 0, 1.0, weight)  # no keys: a result of 0
    out = total / weight[:, None]
    if value_scale != 1:
        out *= value_scale
    mask = None if inside is None else inside[:, None]
    out_index = (b, token[:, None], head, group[:, None])
    store(out_ref, split, *out_index, made, value=out, mask=mask)
    if log_weight_ref is not None:
        value = row_max + jnp.log2(weight)
        once = (row < tokens * groups) & (part == 0)
        store(log_weight_ref, split, b, token, head, group, value=value, mask=once)


def _page(pages_ref, cache_ref, b, number: Array | int) -> Array:
    """Load pages of a row. One past the last becomes the last: it holds no key that a query sees."""
    number = jnp.minimum(number, pages_ref.shape[1] - 1)
    return jnp.minimum(load(pages_ref, b, number), cache_ref.shape[0] - 1)


def _combine(parts_ref, log_weights_ref, out_ref, *, rows: int):
    """Average the splits of a block of rows, weighted by the softmax weights of their keys."""
    splits, size, width = parts_ref.shape
    row, column = pl.program_id(0) * rows + lax.iota(jnp.int32, rows), lax.iota(jnp.int32, width)
    inside = below(row, size)
    inside = jnp.ones_like(row, jnp.bool_) if inside is None else inside
    chunk = min(COMBINED_SPLITS, pl.next_power_of_2(splits))

    def step(i, carry):
        total, row_max, weight = carry
        split = i * chunk + lax.iota(jnp.int32, chunk)
        mask = (split < splits)[:, None] & inside[None, :]
        part = load(
            parts_ref,
            split[:, None, None],
            row[None, :, None],
            column[None, None, :],
            mask=mask[:, :, None],
        )
        mine = load(log_weights_ref, split[:, None], row[None, :], mask=mask)
        mine = jnp.where(mask, mine, UNSEEN)
        new = jnp.maximum(row_max, jnp.max(mine, axis=0))
        kept, mine = jnp.exp2(row_max - new), jnp.where(mask, jnp.exp2(mine - new[None, :]), 0)
        total = total * kept[:, None] + jnp.sum(part.astype(jnp.float32) * mine[:, :, None], axis=0)
        return total, new, weight * kept + jnp.sum(mine, axis=0)

    carry = (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), UNSEEN, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    steps = pl.cdiv(splits, chunk)
    total, _, weight = step(0, carry) if steps == 1 else lax.fori_loop(0, steps, step, carry)
    out = total / weight[:, None]
    store(out_ref, row[:, None], column[None, :], value=out, mask=inside[:, None])


def attention_triton(
    q: Float[Array, "B T K G H"],
    q_positions: Int[Array, "B T"],
    segments: tuple[KVSegment, ...],
    *,
    scale: float,
    window: int | None,
    causal: bool,
    tiling: Tiling,
    value_scale: float = 1.0,
    interpret: bool = False,
) -> Float[Array, "B T K G H"]:
    """Launch the kernels. `pallas_kernels.attention.attention` documents and checks arguments."""
    b, t, k, g, _ = q.shape
    ends = position_range(q_positions, g, tiling.rows)
    spans = [visible_span(*ends, s.positions, window=window, causal=causal) for s in segments]
    # Triton loads no truth values.
    loaded = [
        s if s.seen_by is None else s._replace(seen_by=s.seen_by.astype(jnp.int8)) for s in segments
    ]
    splits = tiling.splits
    out_shape = [jax.ShapeDtypeStruct((splits, *q.shape), q.dtype)]
    if splits > 1:
        out_shape.append(jax.ShapeDtypeStruct((splits, b, t, k, g), jnp.float32))
    parts, *log_weights = pl.pallas_call(
        functools.partial(
            _attend,
            tiling=tiling,
            scale=scale,
            window=window,
            causal=causal,
            value_scale=value_scale,
        ),
        out_shape=out_shape,
        grid=(pl.cdiv(t * g, tiling.rows) * splits * tiling.parts, k, b),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="attention",
    )(jnp.concatenate(spans, axis=2), q_positions, q.transpose(0, 2, 3, 1, 4), loaded)
    if splits == 1:
        return parts[0]
    flat = (splits, b * t * k * g)
    rows = max(1, COMBINED // q.shape[4])
    out = pl.pallas_call(
        functools.partial(_combine, rows=rows),
        out_shape=jax.ShapeDtypeStruct((flat[1], q.shape[4]), q.dtype),
        grid=(pl.cdiv(flat[1], rows),),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="attention_combine",
    )(parts.reshape(*flat, -1), log_weights[0].reshape(flat))
    return out.reshape(q.shape)
