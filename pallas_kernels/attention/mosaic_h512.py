"""Cached attention at head dim 512 in Pallas Mosaic, for Hopper: TMA loads, wgmma multiplies.

A block of threads attends from 64 rows (row = token * G + head, as in `triton.py`) to a share of
the keys. It has three warpgroups. One lets TMA load keys and values into a ring in shared memory,
in pieces of 64 keys and half of the columns. The other two each compute half of the columns of the
result, which is all that their registers hold. Both score every key themselves. That is half as
many products again, but neither hands anything over or waits for the other. Two tiles of rows of
one kv head form a cluster. Each block of a cluster loads half of every piece for both, so that 128
rows read keys once.

Keys and values in fp8 take another way into the ring. TMA loads their codes beside it, in pieces of
64 keys and 128 columns. The warpgroup that loads them also converts them to float16, which holds
them exactly. The other two do as ever, with queries in float16. Each block of a cluster converts
every piece itself.

A block of keys is masked only if some query does not see all of it. As in `triton.py`, shares of
the keys are averaged at the end, weighted by the softmax weights of their keys, and results do not
depend on the order of blocks.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.mosaic_launch import (
    ROWS,
    find_keys,
    free_barrier,
    launch,
    lines,
    pages_of,
)
from pallas_kernels.attention.reference import KVSegment
from pallas_kernels.attention.spans import UNSEEN, average_shares, position_range, visible_span

HEAD_DIM = 512
COLUMNS = HEAD_DIM // 2  # columns of a piece, and of the results of a warpgroup
KEYS = 64  # keys of a piece
PIECES = 4  # pieces of a block: two of keys, two of values
RING = 5  # pieces in shared memory: all that fit beside the queries
CHUNK = 128  # columns of a piece of fp8 codes
CHUNKS = HEAD_DIM // CHUNK
UPCAST = plgpu.Layout.WGMMA_UPCAST_4X  # codes of a thread: eight neighbours
NOWHERE = 1 << 30  # the position of an empty slot, which no query has reached


def _load(keys_and_values, ring, there, free, *, find, count, cluster):
    """Let TMA load keys and values into the ring."""

    def load(i, place):
        page, head, block = place
        after = find(i + 1)  # before it waits for space
        for piece in range(PIECES):
            number = PIECES * i + piece
            ring_slot = lax.rem(number, RING)

            wait = functools.partial(plgpu.barrier_wait, free.at[ring_slot])
            pl.when(number >= RING)(wait)
            columns = pl.ds(piece % 2 * COLUMNS, COLUMNS)
            plgpu.copy_gmem_to_smem(
                keys_and_values[piece // 2].at[page, head, pl.ds(block * KEYS, KEYS), columns],
                ring.at[ring_slot],
                there.at[ring_slot],
                collective_axes=("tile",) if cluster > 1 else None,
            )
        return after

    lax.fori_loop(0, count, load, find(0))

    # The other block of the cluster loads into the memory of this block and signals there. Stay
    # until it is done.
    @pl.loop(jnp.maximum(PIECES * count - RING, 0), PIECES * count)
    def _(number):
        plgpu.barrier_wait(free.at[lax.rem(number, RING)])


def _convert(
    keys_and_values, ring, there, free, codes, codes_there, codes_free, *, find, count, cluster
):
    """Let TMA load keys and values in fp8, and convert them into the ring.

    Keys have `CHUNKS` places for their codes, and values follow in the same places. Each is loaded
    as soon as the codes before it are converted.
    """

    def fetch(chunk, ref, i):
        page, head, block = find(i)
        plgpu.copy_gmem_to_smem(
            ref.at[page, head, pl.ds(block * KEYS, KEYS), pl.ds(chunk * CHUNK, CHUNK)],
            codes.at[chunk],
            codes_there.at[chunk],
            collective_axes=("tile",) if cluster > 1 else None,
        )

    @pl.when(count > 0)
    def _():
        for chunk in range(CHUNKS):
            fetch(chunk, keys_and_values[0], 0)

    # Not unrolled: ptxas would keep the addresses of every piece, and has no registers for them.
    @pl.loop(0, PIECES * count)
    def _(number):
        i, piece = lax.div(number, PIECES), lax.rem(number, PIECES)
        pl.when(i > 0)(functools.partial(plgpu.barrier_wait, free.at[piece]))
        for half in range(2):
            chunk = lax.rem(piece, 2) * 2 + half
            plgpu.barrier_wait(codes_there.at[chunk])
            part = plgpu.load(codes.at[chunk], layout=UPCAST)  # pyright: ignore[reportCallIssue]
            ring[piece, :, pl.ds(half * CHUNK, CHUNK)] = part.astype(ring.dtype)
            # Also waits for all four warps, of which one arrives at the barrier of a cluster.
            plgpu.commit_smem()
            plgpu.barrier_arrive(codes_free.at[chunk])
            # Also in the last round: the other block of the cluster signals here.
            plgpu.barrier_wait(codes_free.at[chunk])
            values_next = piece < 2
            pl.when(values_next)(functools.partial(fetch, chunk, keys_and_values[1], i))
            keys_next = (piece >= 2) & (i + 1 < count)
            pl.when(keys_next)(functools.partial(fetch, chunk, keys_and_values[0], i + 1))
        plgpu.barrier_arrive(there.at[piece])


def _attend(
    spans_ref,
    pages_ref,
    q_positions_ref,
    positions_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    log_weight_ref,
    queries,
    ring,
    log_weights,
    queries_there,
    there,
    free,
    scored,
    *narrow,
    cluster: int,
    scale: float,
    value_scale: float,
):
    """Attend from one tile of rows of one kv head to one share of its keys."""
    splits = out_ref.shape[0]
    b, head, split = (lax.axis_index(name) for name in ("sequence", "head", "split"))
    group, warpgroup = lax.axis_index("group"), lax.axis_index("warpgroup")
    rows = pl.ds((group * cluster + lax.axis_index("tile")) * ROWS, ROWS)
    begin, end, clear = (spans_ref[b, group, i] for i in range(3))
    first = lax.div(begin, KEYS)
    blocks = jnp.maximum(lax.div(end + (KEYS - 1), KEYS) - first, 0)
    share = lax.div(blocks + (splits - 1), splits)
    start = jnp.minimum(split * share, blocks)
    count = jnp.minimum(share, blocks - start)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(72 if narrow else 40, action="decrease")
        for half in range(2):
            columns = pl.ds(half * COLUMNS, COLUMNS)
            source = q_ref.at[b, head, rows, columns]
            plgpu.copy_gmem_to_smem(source, queries.at[half], queries_there)

        def find(i):
            page, block = find_keys(pages_ref, k_ref, b, first + start + i, KEYS)
            return page, head, block

        kwargs = {"find": find, "count": count, "cluster": cluster}
        (_convert if narrow else _load)((k_ref, v_ref), ring, there, free, *narrow, **kwargs)

    @pl.when(warpgroup < 2)
    def _compute():
        plgpu.set_max_registers(216 if narrow else 232, action="increase")
        layout = plgpu.Layout.WGMMA
        by_row = layout.reduce(1)
        factor = scale * math.log2(math.e)
        plgpu.barrier_wait(queries_there)

        def step(i, carry):
            total, row_max, weight = carry
            places = ring.shape[0]
            ring_slot = [lax.rem(PIECES * i + piece, places) for piece in range(PIECES)]
            values = ring.at[lax.rem(PIECES * i + 2 + warpgroup, places)]
            slot = (first + start + i) * KEYS

            def products(ref):
                for half in range(2):
                    plgpu.barrier_wait(there.at[ring_slot[half]])
                    plgpu.wgmma(ref, queries.at[half], ring.at[ring_slot[half]].transpose((1, 0)))
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(free.at[ring_slot[0]])
                return ref[...]

            score = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((ROWS, KEYS), jnp.float32))
            plgpu.barrier_arrive(free.at[ring_slot[1]])

            def masked(score):
                positions = positions_ref.at[b, pl.ds(slot, KEYS)]
                positions = plgpu.load(positions, layout=layout.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
                reached = q_positions_ref.at[b, rows]
                reached = plgpu.load(reached, layout=by_row, optimized=False)  # pyright: ignore[reportCallIssue]
                visible = lax.broadcast_in_dim(positions, score.shape, [1])
                visible = visible <= lax.broadcast_in_dim(reached, score.shape, [0])
                return jnp.where(visible, score, UNSEEN)

            partly = (slot < begin) | (slot + KEYS > clear)
            score = lax.cond(partly, masked, lambda score: score, score)
            # The GPU has powers of base 2. The scale stands beside the subtraction, so that both
            # are one instruction.
            new = jnp.maximum(row_max, jnp.max(score, axis=1) * factor)
            kept = jnp.exp2(row_max - new)
            p = jnp.exp2(score * factor - lax.broadcast_in_dim(new, score.shape, [0]))
            weight = weight * kept + jnp.sum(p, axis=1)
            total *= lax.broadcast_in_dim(kept, total.shape, [0])
            p = p.astype(ring.dtype)
            plgpu.barrier_wait(there.at[ring_slot[2]])
            plgpu.barrier_wait(there.at[ring_slot[3]])

            @pl.when(slot + KEYS > end)
            def _():
                # Slots behind the range may hold NaN, which a weight of 0 would not remove.
                for begin in range(0, COLUMNS, 64):
                    part = values.at[:, pl.ds(begin, 64)]
                    value = plgpu.load(part, layout=layout)  # pyright: ignore[reportCallIssue]
                    row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=layout)
                    part[...] = jnp.where(slot + row < end, value, jnp.zeros_like(value))
                plgpu.commit_smem()

            add = lambda ref: plgpu.wgmma(ref, p, values)  # noqa: E731
            total = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(total))
            plgpu.barrier_arrive(free.at[ring_slot[2]])
            plgpu.barrier_arrive(free.at[ring_slot[3]])
            return total, new, weight

        of_rows = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), by_row)  # noqa: E731
        total = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), layout)
        carry = total, of_rows(UNSEEN), of_rows(0.0)
        total, row_max, weight = lax.fori_loop(0, count, step, carry)
        weight = jnp.where(weight == 0, 1.0, weight)  # no keys: a result of 0
        out = total / lax.broadcast_in_dim(weight / value_scale, total.shape, [0])
        # The queries' memory is free once both have scored their last keys.
        plgpu.barrier_arrive(scored)
        plgpu.barrier_wait(scored)
        queries[warpgroup] = out.astype(queries.dtype)

        @pl.when(warpgroup == 0)
        def _():
            log_weights[...] = row_max + jnp.log(weight) * math.log2(math.e)

        plgpu.commit_smem()
        columns = pl.ds(warpgroup * COLUMNS, COLUMNS)
        plgpu.copy_smem_to_gmem(queries.at[warpgroup], out_ref.at[split, b, head, rows, columns])

        @pl.when(warpgroup == 0)
        def _():
            plgpu.copy_smem_to_gmem(log_weights, log_weight_ref.at[split, b, head, rows])

        plgpu.wait_smem_to_gmem(0)


def _launch(
    q: Float[Array, "B K R H"],
    q_positions: Int[Array, "B R"],
    spans: Int[Array, "B P _"],
    segment: KVSegment,
    *,
    splits: int,
    scale: float,
    value_scale: float,
) -> tuple[Float[Array, "X B K R H"], Float[Array, "X B K R"]]:
    b, k, rows, _ = q.shape
    groups = spans.shape[1]
    cluster = rows // ROWS // groups
    # What `_convert` writes, the other block of a cluster does not write.
    narrow = segment.k.dtype.itemsize == 1
    places = PIECES if narrow else RING
    scratch = (
        plgpu.SMEM((2, ROWS, COLUMNS), q.dtype, transforms=lines(64)),
        plgpu.SMEM((places, KEYS, COLUMNS), q.dtype, transforms=lines(64)),
        plgpu.SMEM((ROWS,), jnp.float32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=places),
        free_barrier(1 if narrow else cluster, num_arrivals=2, num_barriers=places),
        plgpu.Barrier(num_arrivals=2),
    )
    if narrow:
        scratch += (
            plgpu.SMEM((CHUNKS, KEYS, CHUNK), segment.k.dtype, transforms=lines(128)),
            plgpu.Barrier(num_barriers=CHUNKS),
            free_barrier(cluster, num_barriers=CHUNKS),
        )

    return launch(
        functools.partial(_attend, cluster=cluster, scale=scale, value_scale=value_scale),
        (spans, pages_of(segment), q_positions, segment.positions, q, segment.k, segment.v),
        q,
        grid=(groups, splits, k, b),
        cluster=cluster,
        rows=rows,
        scratch=scratch,
    )


def attention_mosaic_h512(
    q: Float[Array, "B T K G H"],
    q_positions: Int[Array, "B T"],
    segments: tuple[KVSegment, ...],
    *,
    scale: float,
    window: None,
    causal: bool,
    splits: int,
    value_scale: float = 1.0,
) -> Float[Array, "B T K G H"]:
    """Launch the kernel. Arguments as in `pallas_kernels.attention.attention`, which checks them.

    The keys of each kv head are divided among `splits` blocks or clusters.
    """
    (segment,) = segments
    b, t, k, g, _ = q.shape
    cluster = 2 if t * g > ROWS else 1
    fill = -(t * g) % (ROWS * cluster)
    rows = q.transpose(0, 2, 1, 3, 4).reshape(b, k, t * g, HEAD_DIM)
    if segment.k.dtype.itemsize == 1:
        # The GPU converts fp8 to float16 in one instruction, see `triton.py`.
        rows = rows.astype(jnp.float16)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, fill), (0, 0)))
    by_row = jnp.pad(jnp.repeat(q_positions, g, axis=1), ((0, 0), (0, fill)), mode="edge")
    positions = jnp.pad(
        segment.positions, ((0, 0), (0, -segment.positions.shape[1] % KEYS)), constant_values=-1
    )
    lowest, highest = position_range(q_positions, g, ROWS * cluster)
    spans = visible_span(lowest, highest, positions, window=window, causal=causal)
    positions = jnp.where(positions < 0, NOWHERE, positions)
    if not causal:
        lowest, by_row = (jnp.full_like(x, NOWHERE - 1) for x in (lowest, by_row))
    # The first slot of each span that some query does not see.
    slot = jnp.arange(positions.shape[1], dtype=jnp.int32)
    hidden = (positions[:, None] > lowest[:, :, None]) & (slot >= spans[:, :, :1])
    clear = jnp.min(jnp.where(hidden, slot, slot.size), axis=2, keepdims=True)
    shares, log_weights = _launch(
        rows,
        by_row,
        jnp.concatenate([spans, clear], axis=2),
        segment._replace(positions=positions),
        splits=splits,
        scale=scale,
        value_scale=value_scale,
    )
    out = shares[0] if splits == 1 else average_shares(shares, log_weights)
    out = out[:, :, : t * g].reshape(b, k, t, g, HEAD_DIM).transpose(0, 2, 1, 3, 4)
    return out.astype(q.dtype)
