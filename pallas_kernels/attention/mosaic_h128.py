"""Cached attention at head dim 128 in Pallas Mosaic, for Hopper: TMA loads, wgmma multiplies.

A block of threads attends from 64 rows (row = token * G + head, as in `triton.py`) to a share of
the keys. It has three warpgroups. One lets TMA load blocks of 128 keys and their values into a ring
in shared memory. The other two take turns: each attends to every second block and keeps its own
results. One can then multiply while the other computes powers of scores. At the end the first
averages the results of both. Two tiles of rows of one kv head form a cluster. Each block of a
cluster loads half of everything for both, so that 128 rows read keys once.

The fresh keys of a draft block, if there are any, are the first block of the first share. Queries
and results stay in the layout of the model: TMA copies the heads of each token separately. As in
`mosaic_h512.py`, a block of keys is masked only if some query does not see all of it, and shares of
the keys are averaged at the end.
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
from pallas_kernels.attention.reference import KVSegment, gathered
from pallas_kernels.attention.spans import (
    UNSEEN,
    average_shares,
    masked_span,
    position_range,
    visible_span,
)

HEAD_DIM = 128
KEYS = 128  # keys of a block, which is a piece of keys and a piece of values
# Pieces in shared memory: two for each warpgroup, so that a place always has the same user.
RING = 4
NOWHERE = 1 << 30  # a position that no key has


def _attend(
    spans_ref,
    pages_ref,
    seen_ref,
    positions_ref,
    q_ref,
    *refs,
    fresh: int,
    cluster: int,
    scale: float,
):
    """Attend from a tile of rows of one kv head to a share of its keys and to `fresh` new keys."""
    sources, refs = refs[: 4 if fresh else 2], refs[4 if fresh else 2 :]
    out_ref, log_weight_ref, queries, ring, other, stats, *barriers = refs
    queries_there, there, free, scored, merged = barriers
    splits, _, tokens, _, groups, _ = out_ref.shape
    b, head, split = (lax.axis_index(name) for name in ("sequence", "head", "split"))
    group, warpgroup = lax.axis_index("group"), lax.axis_index("warpgroup")
    tile = group * cluster + lax.axis_index("tile")
    rows = pl.ds(tile * ROWS, ROWS)
    begin, end, first_hidden, last_hidden, fresh_end = (spans_ref[b, group, i] for i in range(5))
    first = lax.div(begin, KEYS)
    blocks = jnp.maximum(lax.div(end + (KEYS - 1), KEYS) - first, 0)
    share = lax.div(blocks + (splits - 1), splits)
    start = jnp.minimum(split * share, blocks)
    extra = jnp.where(split == 0, 1, 0) if fresh else 0
    count = jnp.minimum(share, blocks - start) + extra
    first += start - extra

    @pl.when(warpgroup == 2)
    def _load():
        plgpu.set_max_registers(40, action="decrease")
        for i in range(ROWS // groups):
            token = jnp.minimum(tile * (ROWS // groups) + i, tokens - 1)
            heads = queries.at[pl.ds(i * groups, groups)]
            plgpu.copy_gmem_to_smem(q_ref.at[b, token, head], heads, queries_there)

        copies = copies_of_block(pages_ref, sources[0])
        size = KEYS // copies

        def find(i):
            pieces = [(first + i) * copies + j for j in range(copies)]
            return tuple(find_keys(pages_ref, sources[0], b, piece, size) for piece in pieces)

        def load_block(i, places):
            after = find(i + 1)  # before it waits for space
            for piece in range(2):
                number = 2 * i + piece
                ring_slot = lax.rem(number, RING)
                pl.when(number >= RING)(functools.partial(plgpu.barrier_wait, free.at[ring_slot]))

                def load(ring_slot=ring_slot, piece=piece):
                    for j, (page, block) in enumerate(places):
                        plgpu.copy_gmem_to_smem(
                            sources[piece].at[page, head, pl.ds(block * size, size)],
                            ring.at[ring_slot, pl.ds(j * size, size)],
                            there.at[ring_slot],
                            collective_axes=("tile",) if cluster > 1 else None,
                        )

                def load_fresh(ring_slot=ring_slot, piece=piece):
                    to = ring.at[ring_slot, pl.ds(0, fresh)]
                    plgpu.copy_gmem_to_smem(sources[2 + piece].at[b, head], to, there.at[ring_slot])
                    for _ in range(copies - 1):
                        plgpu.barrier_arrive(there.at[ring_slot])

                pl.when(i >= extra)(load)
                if fresh:
                    pl.when(i < extra)(load_fresh)
            return after

        lax.fori_loop(0, count, load_block, find(0))

        # The other block of the cluster loads into the memory of this block and signals there. Stay
        # until it is done.
        @pl.loop(jnp.maximum(2 * count - RING, 0), 2 * count)
        def _(number):
            plgpu.barrier_wait(free.at[lax.rem(number, RING)])

    @pl.when(warpgroup < 2)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        layout = plgpu.Layout.WGMMA
        by_row = layout.reduce(1)
        factor = scale * math.log2(math.e)
        across = functools.partial(lax.broadcast_in_dim, broadcast_dimensions=[0])
        plgpu.barrier_wait(queries_there)

        def step(turn, carry):
            total, row_max, weight = carry
            i = 2 * turn + warpgroup
            places = lax.rem(2 * i, RING), lax.rem(2 * i + 1, RING)
            slot = (first + i) * KEYS
            plgpu.barrier_wait(there.at[places[0]])

            def products(ref):
                plgpu.wgmma(ref, queries, ring.at[places[0]].transpose((1, 0)))
                return ref[...]

            score = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((ROWS, KEYS), jnp.float32))
            plgpu.barrier_arrive(free.at[places[0]])

            def masked(score):
                # Positions of cached keys follow those of the one block of fresh keys.
                at = jnp.where(i < extra, 0, slot + KEYS) if fresh else slot
                positions = positions_ref.at[b, pl.ds(at, KEYS)]
                positions = plgpu.load(positions, layout=layout.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
                positions = lax.broadcast_in_dim(positions, score.shape, [1])
                after, until = (
                    plgpu.load(seen_ref.at[j, b, rows], layout=by_row, optimized=False)  # pyright: ignore[reportCallIssue]
                    for j in range(2)
                )
                visible = positions > across(after, score.shape)
                visible &= positions <= across(until, score.shape)
                return jnp.where(visible, score, UNSEEN)

            partly = (i < extra) | (slot < begin) | (slot + KEYS > end)
            partly |= (slot + KEYS > first_hidden) & (slot < last_hidden)
            score = lax.cond(partly, masked, lambda score: score, score)
            # The GPU has powers of base 2. The scale stands beside the subtraction, so that both
            # are one instruction.
            new = jnp.maximum(row_max, jnp.max(score, axis=1) * factor)
            kept = jnp.exp2(row_max - new)
            p = jnp.exp2(score * factor - across(new, score.shape))
            weight = weight * kept + jnp.sum(p, axis=1)
            total *= across(kept, total.shape)
            p = p.astype(queries.dtype)
            plgpu.barrier_wait(there.at[places[1]])
            values = ring.at[places[1]]
            rest = jnp.where(i < extra, fresh_end, end - slot)

            @pl.when(rest < KEYS)
            def _():
                # Slots behind the range may hold NaN, which a weight of 0 would not remove.
                for half in range(2):
                    part = values.at[:, pl.ds(half * (HEAD_DIM // 2), HEAD_DIM // 2)]
                    value = plgpu.load(part, layout=layout)  # pyright: ignore[reportCallIssue]
                    row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=layout)
                    part[...] = jnp.where(row < rest, value, jnp.zeros_like(value))
                plgpu.commit_smem()

            add = lambda ref: plgpu.wgmma(ref, p, values)  # noqa: E731
            total = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(total))
            plgpu.barrier_arrive(free.at[places[1]])
            return total, new, weight

        of_rows = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), by_row)  # noqa: E731
        total = plgpu.layout_cast(jnp.zeros((ROWS, HEAD_DIM), jnp.float32), layout)
        carry = total, of_rows(UNSEEN), of_rows(0.0)
        turns = lax.div(count + 1 - warpgroup, 2)
        total, row_max, weight = lax.fori_loop(0, turns, step, carry)
        # The queries' memory is free once both have scored their last keys.
        plgpu.barrier_arrive(scored)
        plgpu.barrier_wait(scored)

        @pl.when(warpgroup == 1)
        def _():
            other[...] = total
            stats[0] = row_max
            stats[1] = weight
            plgpu.barrier_arrive(merged)

        @pl.when(warpgroup == 0)
        def _():
            plgpu.barrier_wait(merged)
            theirs = plgpu.load(other, layout=layout)  # pyright: ignore[reportCallIssue]
            their_max, their_weight = (
                plgpu.load(stats.at[j], layout=by_row, optimized=False)  # pyright: ignore[reportCallIssue]
                for j in range(2)
            )
            new = jnp.maximum(row_max, their_max)
            kept, added = jnp.exp2(row_max - new), jnp.exp2(their_max - new)
            sums = weight * kept + their_weight * added
            sums = jnp.where(sums == 0, 1.0, sums)  # no keys: a result of 0
            out = total * across(kept / sums, total.shape)
            out += theirs * across(added / sums, total.shape)
            queries[...] = out.astype(queries.dtype)
            stats[0] = new + jnp.log(sums) * math.log2(math.e)
            plgpu.commit_smem()
            for i in range(ROWS // groups):
                token = tile * (ROWS // groups) + i

                @pl.when(token < tokens)
                def _(token=token, i=i):
                    heads = queries.at[pl.ds(i * groups, groups)]
                    plgpu.copy_smem_to_gmem(heads, out_ref.at[split, b, token, head])

            plgpu.copy_smem_to_gmem(stats.at[0], log_weight_ref.at[split, b, head, rows])
            plgpu.wait_smem_to_gmem(0)


def copies_of_block(pages, cache) -> int:
    """Return by how many copies a block is loaded: one if it is in one page, else one for each half."""
    return 1 if pages.shape[1] == 1 or cache.shape[2] % KEYS == 0 else 2


def _launch(
    q: Float[Array, "B T K G H"],
    seen: Int[Array, "2 B R"],
    spans: Int[Array, "B P _"],
    pages: Int[Array, "B N"],
    positions: Int[Array, "B S"],
    sources: list[Array],
    *,
    fresh: int,
    splits: int,
    scale: float,
) -> tuple[Float[Array, "X B T K G H"], Float[Array, "X B K R"]]:
    b, _, k, _, _ = q.shape
    groups, rows = spans.shape[1], seen.shape[2]
    cluster = rows // ROWS // groups
    copies = copies_of_block(pages, sources[0])
    scratch = (
        plgpu.SMEM((ROWS, HEAD_DIM), q.dtype, transforms=lines(64)),
        plgpu.SMEM((RING, KEYS, HEAD_DIM), q.dtype, transforms=lines(64)),
        plgpu.SMEM((ROWS, HEAD_DIM), jnp.float32, transforms=lines(32)),
        plgpu.SMEM((2, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=ROWS // q.shape[3]),
        plgpu.Barrier(num_arrivals=copies, num_barriers=RING),
        free_barrier(cluster, num_barriers=RING),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(),
    )

    return launch(
        functools.partial(_attend, fresh=fresh, cluster=cluster, scale=scale),
        (spans, pages, seen, positions, q, *sources),
        q,
        grid=(groups, splits, k, b),
        cluster=cluster,
        rows=rows,
        scratch=scratch,
    )


def attention_mosaic_h128(
    q: Float[Array, "B T K G H"],
    q_positions: Int[Array, "B T"],
    segments: tuple[KVSegment, ...],
    *,
    scale: float,
    window: int | None,
    causal: bool,
    splits: int,
) -> Float[Array, "B T K G H"]:
    """Launch the kernel. Arguments as in `pallas_kernels.attention.attention`, which checks them.

    The keys of each kv head are divided among `splits` blocks or clusters. Fresh keys are the
    second segment.
    """
    cached, *own = segments
    t, g = q.shape[1], q.shape[3]
    cluster = 2 if t * g > ROWS else 1
    fill = -(t * g) % (ROWS * cluster)
    lowest, highest = position_range(q_positions, g, ROWS * cluster)
    to_blocks = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % KEYS)), constant_values=-1)  # noqa: E731
    positions = to_blocks(cached.positions)
    spans = visible_span(lowest, highest, positions, window=window, causal=causal)
    unseen = masked_span(spans, lowest, highest, positions, window=window, causal=causal)
    sources, fresh_spans = [cached.k, cached.v], jnp.zeros_like(spans)
    for s in map(gathered, own):
        fresh_spans = visible_span(lowest, highest, s.positions, window=window, causal=causal)
        positions = jnp.concatenate([to_blocks(s.positions), positions], axis=1)
        sources += [jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 8), (0, 0))) for x in (s.k, s.v)]
    # A row sees the positions p with after < p <= until.
    after = jnp.full_like(q_positions, -1)
    after = after if window is None else jnp.maximum(q_positions - window, after)
    until = q_positions if causal else jnp.full_like(q_positions, NOWHERE)
    seen = jnp.repeat(jnp.stack([after, until]), g, axis=2)
    shares, log_weights = _launch(
        q,
        jnp.pad(seen, ((0, 0), (0, 0), (0, fill)), mode="edge"),
        jnp.concatenate([spans, unseen, fresh_spans[:, :, 1:]], axis=2),
        pages_of(cached),
        positions,
        sources,
        fresh=sources[2].shape[2] if own else 0,
        splits=splits,
        scale=scale,
    )
    if splits == 1:
        return shares[0]
    by_head = log_weights[..., : t * g].reshape(*log_weights.shape[:3], t, g)
    return average_shares(shares, by_head.transpose(0, 1, 3, 2, 4)).astype(q.dtype)
