"""The products of experts with codes for few tokens in Pallas Mosaic, for Hopper: TMA loads, mma.sync multiplies.

A block of threads multiplies tile after tile, each by some outputs of its expert. One of its warpgroups lets
TMA load codes, scales and rows into a ring in shared memory, several steps ahead, those of the next tile
too. So a block waits for its first step only. The others multiply: `pallas_kernels/mma.py` says how. Where
the warps of a warpgroup share inputs, they add up what each has in shared memory. No part of a sum is
written to the memory of the GPU.

Up to 8 tokens are the rows of every tile, whether an expert was chosen for them or not: `mma.sync` takes
8 rows at once. Nothing is copied then. More tokens lie in the order of their experts: see `rows.spread`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import processors
from pallas_kernels.eight_bits import mma as eight_bits
from pallas_kernels.eight_bits.decode import factor
from pallas_kernels.experts.cuts import MmaCut
from pallas_kernels.experts.mosaic import activated
from pallas_kernels.experts.routing import ALIGN, Placed
from pallas_kernels.grouped.coding import BLOCK, HALF, Codes
from pallas_kernels.grouped.decode import SHIFT
from pallas_kernels.grouped.mma import numbers_of
from pallas_kernels.mma import (
    WARPS,
    Numbers,
    add_parts,
    add_products,
    of_outputs,
    rows_ring,
    write,
)
from pallas_kernels.mosaic import BY_OUTPUT, LEFT, load_as
from pallas_kernels.tiles import MMA_OUTPUTS, TILE

GROUP = 32  # inputs of a scale
LINE = 128  # bytes that TMA loads side by side


@dataclasses.dataclass(frozen=True)
class _Weight:
    """The codes of all experts, of gate and up or of down.

    Attributes:
      codes, given: references: codes, and scales of groups (4 bits) or factors of outputs (8 bits).
      rings: the same in shared memory, [stage, ...]. There are no factors.
      cut: of the product.
      gated: whether it is gate and up.
    """

    codes: Any
    given: Any
    rings: Sequence[Any]
    cut: MmaCut
    gated: bool

    @property
    def four_bits(self) -> bool:
        """Tell whether scales belong to groups of inputs."""
        return len(self.rings) > 1

    @property
    def apart(self) -> int:
        """Return how many outputs lie between a piece and the next."""
        return self.cut.outputs if self.cut.shared else TILE

    def outputs(self, column: Array, warpgroup: Array, piece: int) -> Any:
        """Return which outputs of its matrix a piece of a warpgroup is, in a column of a block."""
        width = MMA_OUTPUTS if self.cut.shared else TILE
        pieces = 1 if self.gated else self.cut.pieces
        of_group = width if self.cut.shared else width * pieces
        first = column * self.cut.outputs * pieces + warpgroup * of_group
        return pl.ds(first if self.gated else first + piece * self.apart, width)

    def copies(self, expert: Array, column: Array, step: Array, place: Array) -> list[Any]:
        """Return what TMA loads of a step: from where, and where to."""
        if self.four_bits:
            found = []
            for ref, ring in zip((self.codes, self.given), self.rings, strict=True):
                _, count, width = ring.shape[:3]
                some = pl.ds(step * count, count), pl.ds(column * width, width)
                found.append((ref.at[expert, *some], ring.at[place]))
            return found
        (ring,) = self.rings
        matrices = 2 if self.gated else 1
        width, inputs = ring.shape[1] // matrices, ring.shape[2]
        some = pl.ds(column * width, width), pl.ds(step * inputs, inputs)
        return [
            (
                self.codes.at[expert, i, *some] if self.gated else self.codes.at[expert, *some],
                ring.at[place, pl.ds(i * width, width)],
            )
            for i in range(matrices)
        ]

    def numbers(self, *args: Any) -> Numbers:
        """Return what makes numbers of codes in shared memory. Arguments as `add_products` gives them."""
        if self.four_bits:
            outputs = self.cut.outputs * self.cut.pieces
            return numbers_of(*args, group=GROUP, outputs=outputs, piece=self.apart)
        how: Any = dict(kind=self.codes.dtype, inputs=self.cut.inputs, piece=self.apart)
        return eight_bits.numbers_of(*args, **how)

    def factors(self, expert: Array, column: Array, warpgroup: Array, rows: int) -> list[Any]:
        """Return what the sums of each piece are multiplied with."""
        if self.four_bits:
            return [2.0**SHIFT] * self.cut.pieces
        found = []
        for piece in range(self.cut.pieces):
            matrix = (expert, piece) if self.gated else (expert,)
            own = self.given.at[*matrix, self.outputs(column, warpgroup, piece)]
            if self.cut.shared:
                own = of_outputs(own, rows)
            else:
                own = load_as(own, BY_OUTPUT, optimized=False)
                own = lax.broadcast_in_dim(own, (TILE, rows), [0])
            found.append(own * factor(self.codes.dtype))
        return found


def _multiply(
    expert_ref,
    used_ref,
    tiles_ref,
    start_ref,
    x_ref,
    codes_ref,
    given_ref,
    out_ref,
    *memory,
    cut: MmaCut,
    blocks: int,
    gated: bool,
    same_rows: bool,
) -> None:
    """Write all outputs of the rows of all tiles: gelu_tanh(gate) * up, or sums."""
    *rings, x_ring, parts, there, free = memory
    block, warpgroup = (lax.axis_index(axis) for axis in ("block", "warpgroup"))
    outputs, stages = out_ref.shape[1], jnp.int32(cut.stages)
    weight = _Weight(codes_ref, given_ref, rings, cut, gated)
    columns = jnp.int32(outputs // (cut.outputs if gated else cut.outputs * cut.pieces))
    inputs = cut.inputs
    steps = -(-x_ref.shape[1] // inputs)
    # Blocks at work at the same time have neighbouring outputs, most of them of one expert.
    own = lax.div(tiles_ref[0] * columns - block + blocks - 1, jnp.int32(blocks))

    def place_of(i: Array) -> tuple[Array, Array]:
        """Return the tile, and which of its outputs, that the i-th of this block is."""
        at = block + i * blocks
        return lax.div(at, columns), lax.rem(at, columns)

    def by_rows(used: Array, do: Any) -> None:
        """Do something with as many rows as a tile needs."""
        for less, rows in zip((0, *cut.rows), cut.rows, strict=False):
            pl.when((used > less) & (used <= rows))(functools.partial(do, rows))

    def aligned(start: Array) -> Array:
        return lax.div(start, jnp.int32(ALIGN)) * ALIGN  # so that Mosaic sees that it is a multiple

    def load_all() -> None:
        def about(i: Array) -> tuple[Array, ...]:
            tile, _ = place_of(jnp.minimum(i, own - 1))
            return expert_ref[tile], used_ref[tile], start_ref[tile]

        def load(i: Array, now: tuple[Array, ...]) -> tuple[Array, ...]:
            # Memory takes long to answer, so the next tile is asked for while this one is loaded.
            then, (expert, used, start), (_, column) = about(i + 1), now, place_of(i)
            row = 0 if same_rows else aligned(start)

            def load_steps(rows: int) -> None:
                @pl.loop(0, steps)
                def _(step):
                    done = i * steps + step
                    place = lax.rem(done, stages)
                    pl.when(done >= stages)(lambda: plgpu.barrier_wait(free.at[place]))
                    x = x_ref.at[pl.ds(row, rows), pl.ds(step * inputs, inputs)]
                    of_x = x, x_ring.at[place, pl.ds(0, rows)]
                    for of, to in (of_x, *weight.copies(expert, column, step, place)):
                        plgpu.copy_gmem_to_smem(of, to, there.at[place])

            by_rows(used, load_steps)
            return then

        @pl.when(own > 0)
        def _():
            lax.fori_loop(0, own, load, about(jnp.int32(0)))

    def multiply_all() -> None:
        @pl.loop(0, own)
        def _(i):
            tile, column = place_of(i)
            used, start = used_ref[tile], start_ref[tile]

            def multiply(rows: int) -> None:
                factors = weight.factors(expert_ref[tile], column, warpgroup, rows)

                def step(j: Array, totals: Any) -> Any:
                    place = lax.rem(i * steps + j, stages)
                    plgpu.barrier_wait(there.at[place])
                    refs = tuple(ring.at[place] for ring in rings)
                    x = x_ring.at[place, pl.ds(0, rows)]
                    totals = add_products(totals, x, refs, weight.numbers, shared=cut.shared)
                    plgpu.barrier_arrive(free.at[place])
                    return totals

                zeros = plgpu.layout_cast(jnp.zeros((TILE, rows), jnp.float32), LEFT)
                totals = lax.fori_loop(0, steps, step, (zeros,) * cut.pieces)
                if cut.shared:
                    totals = add_parts(totals, parts.at[warpgroup])
                # As in the reference, gate and up are rounded before the activation.
                both = zip(totals, factors, strict=True)
                totals = [(total * by).astype(out_ref.dtype) for total, by in both]
                results = [activated(*totals)] if gated else totals
                for piece, result in enumerate(results):
                    mine = weight.outputs(column, warpgroup, piece)
                    for row in range(0, rows, ALIGN):

                        @pl.when(used > row)
                        def _(row=row, result=result, mine=mine):
                            to = out_ref.at[pl.ds(aligned(start) + row, ALIGN), mine]
                            write(result, to, row, outputs, shared=cut.shared)

            by_rows(used, multiply)

    pl.when(warpgroup == cut.groups)(load_all)
    pl.when(warpgroup < cut.groups)(multiply_all)


def _launch(
    placed: Placed,
    x: Float[Array, "R K"],
    weight: Codes,
    cut: MmaCut,
    *,
    gated: bool,
    same_rows: bool,
) -> Float[Array, "P N"]:
    """Multiply the rows of all tiles by one of both weights.

    Raises:
      ValueError: the cut does not fit.
    """
    codes, rows = weight.codes, cut.rows[-1]
    experts = codes.shape[0]
    outputs = codes.shape[-2]  # of a matrix
    # Gate and up lie side by side: in each block of inputs (4 bits), or one behind the other.
    matrices, width = (2, cut.outputs) if gated else (1, cut.outputs * cut.pieces)
    if outputs % width or (cut.shared and cut.blocks % WARPS):
        raise ValueError(
            f"{cut} does not cut {outputs} outputs evenly, or blocks among {WARPS} warps"
        )
    if gated and (cut.pieces != 2 or not (cut.shared or cut.groups == 1)):
        raise ValueError(
            f"gate and up are two pieces, of one warpgroup unless inputs are shared: {cut}"
        )
    if (given := weight.scales) is not None:
        codes = codes.reshape(experts, -1, outputs * HALF // LINE, LINE)
        given = given.reshape(experts, -1, outputs)
        count, copies = matrices * cut.blocks, 2
        rings = (
            plgpu.SMEM((cut.stages, count, width * HALF // LINE, LINE), codes.dtype),
            plgpu.SMEM((cut.stages, count * BLOCK // GROUP, width), given.dtype),
        )
    else:
        given, copies = weight.factors, matrices
        rings = (plgpu.SMEM((cut.stages, matrices * width, cut.inputs), codes.dtype),)
    memory = (
        *rings,
        rows_ring(cut.stages, rows, cut.inputs),
        plgpu.SMEM((cut.groups, cut.pieces, WARPS, rows, MMA_OUTPUTS), jnp.float32),
        plgpu.Barrier(num_arrivals=1 + copies, num_barriers=cut.stages),
        plgpu.Barrier(num_arrivals=cut.groups, num_barriers=cut.stages),
    )
    blocks = processors() * cut.per_processor

    def body(*refs: Any) -> None:
        _multiply(*refs, cut=cut, blocks=blocks, gated=gated, same_rows=same_rows)

    body.__name__ = "experts_gate_up" if gated else "experts_down"
    all_rows = ALIGN * placed.expert.size if same_rows else x.shape[0]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((all_rows, outputs), x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=cut.groups + 1,
        thread_name="warpgroup",
        scratch_types=memory,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
    )(
        placed.expert,
        placed.used,
        placed.tiles,
        placed.start,
        x,
        codes,
        given,
    )


def multiply(
    placed: Placed,
    rows: Float[Array, "R D"],
    gate_up: Codes,
    down: Codes,
    cuts: tuple[MmaCut, MmaCut],
    *,
    same_rows: bool,
) -> Float[Array, "P D"]:
    """Run the experts of all tiles on their rows. Rows not in use are undefined.

    Args:
      same_rows: whether all tiles have the same rows: tokens, of which there are `ALIGN` at most. In the
        result tile i has those from `ALIGN` * i on.
    """
    hidden = _launch(placed, rows, gate_up, cuts[0], gated=True, same_rows=same_rows)
    return _launch(placed, hidden, down, cuts[1], gated=False, same_rows=False)
