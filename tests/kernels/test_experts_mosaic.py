"""Experts with codes for many tokens: what surrounds the Mosaic kernels, and in what order these read."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import MosaicCut, experts, reference
from pallas_kernels.experts.cases import GEMMA4_26B_A4B, ROUTINGS, SMALL, abstract_codes, inputs
from pallas_kernels.experts.routing import ALIGN, num_tiles, route_together
from pallas_kernels.experts.rows import add_up, places, spread
from pallas_kernels.experts.tuning import mosaic_tiling_for


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_of_experts_lie_together_and_come_back(routing: str) -> None:
    """With plain products between, what spreads tokens and adds rows up gives the reference."""
    tokens, rows, k = 37, 16, SMALL.top_k
    x, logits, scale, gate_up, down = inputs(SMALL, tokens, jnp.dtype("float32"), routing)
    x = jnp.pad(x, ((0, 0), (0, -SMALL.width % 16)))
    real = np.arange(tokens) % 7 != 3
    placed = route_together(
        logits, scale, jnp.asarray(real), top_k=k, dtype=x.dtype, rows=rows, interpret=True
    )
    padded = ALIGN * num_tiles(tokens * k, SMALL.experts, ALIGN)
    ones = jnp.asarray(real, jnp.int32)
    found = np.asarray(spread(x, placed, ones, padded, interpret=True))
    found = found[:, np.asarray(places(jnp.arange(x.shape[1])))]  # changed twice is not changed
    multiplied, written = np.full((padded, SMALL.width), np.nan, np.float32), set[int]()
    for expert, used, start in zip(placed.expert, placed.used, placed.start, strict=True):
        if used:
            assert start % ALIGN == 0
            own = range(int(start), int(start + used))
            assert written.isdisjoint(own)
            written.update(own)
            gate, up = np.moveaxis(np.asarray(gate_up[expert]), 1, 0)
            of = found[own.start : own.stop, : SMALL.width]
            hidden = jax.nn.gelu(of @ gate, approximate=True) * (of @ up)
            multiplied[own.start : own.stop] = hidden @ np.asarray(down[expert])
    assert len(written) == real.sum() * k
    out = add_up(jnp.asarray(multiplied), placed, ones, interpret=True)
    args = x[:, : SMALL.width], logits, scale, gate_up, down, jnp.asarray(real)
    np.testing.assert_allclose(out, reference(*args, top_k=k), atol=1e-5)


def test_rows_have_the_order_in_which_codes_come_into_registers() -> None:
    """A thread loads four neighbouring codes. wgmma takes what it hands over for other inputs."""
    layouts: Any = pytest.importorskip("jax.experimental.mosaic.gpu.fragmented_array")
    if not hasattr(layouts, "WGMMA_LAYOUT_UPCAST_2X"):
        pytest.skip("this jax has no such layout")
    shape, order = (64, 64), np.asarray(places(jnp.arange(64)))
    loaded, handed = (
        owned(layout, shape) for layout in (layouts.WGMMA_LAYOUT_UPCAST_2X, layouts.WGMMA_LAYOUT)
    )
    for thread, registers in loaded.items():
        for at, codes in registers.items():
            for i in range(2):
                takes = handed[thread][(at[0], 2 * at[1] + i, *at[2:-1])]
                for code, place in zip(codes[2 * i : 2 * i + 2], takes, strict=True):
                    assert place // 64 == code // 64
                    assert order[place % 64] == code % 64


def owned(layout: Any, shape: tuple[int, int]) -> dict[Any, dict[Any, list[int]]]:
    """Return for each thread (warp, lane) which elements of an array its registers hold."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, kept = x.ndim - len(tile), x.shape[: x.ndim - len(tile)]
        sizes = [n for size, t in zip(x.shape[lead:], tile, strict=True) for n in (size // t, t)]
        x = x.reshape(*kept, *sizes)
        x = x.transpose(*range(lead), *range(lead, x.ndim, 2), *range(lead + 1, x.ndim, 2))
    warps, lanes, vector = layout.warp_dims, layout.lane_dims, layout.vector_dim
    found: dict[Any, dict[Any, list[int]]] = {}
    for at in np.ndindex(*x.shape):
        warp, lane = (
            int(np.ravel_multi_index([at[d] for d in dims], [x.shape[d] for d in dims]))
            for dims in (warps, lanes)
        )
        shared = {x.ndim + d for d in (*warps, *lanes, vector)}
        register = tuple(0 if d in shared else i for d, i in enumerate(at))
        found.setdefault((warp, lane), {}).setdefault(register, []).append(int(x[at]))
    return found


@pytest.mark.parametrize("bits", [4, 8])
def test_a_draft_block_of_32_sequences_has_a_cut(bits: int) -> None:
    """Its tiles hold the mean number of tokens of an expert."""
    shape, tokens = GEMMA4_26B_A4B, 512
    tiling = mosaic_tiling_for(tokens * shape.top_k / shape.experts, bits)
    assert tiling is not None
    assert tiling.rows >= tokens * shape.top_k / shape.experts
    for cut in (tiling.gate_up, tiling.down):
        assert isinstance(cut, MosaicCut)
        assert cut.rows[-1] == tiling.rows
        assert list(cut.rows) == sorted(cut.rows)
        assert all(rows % ALIGN == 0 for rows in cut.rows)
        assert cut.stages >= 2


@pytest.mark.parametrize(
    ("format", "tokens", "words"),
    [
        ("int4-g64", 512, "int4 in groups of 32"),
        ("int4", 2, "some numbers of tokens"),
        ("int8", 4096, "some numbers of tokens"),
    ],
)
def test_what_the_mosaic_kernels_cannot_take_is_said(format: str, tokens: int, words: str) -> None:
    shape, of = GEMMA4_26B_A4B, jax.ShapeDtypeStruct
    gate_up, down, coding = abstract_codes(shape, format)
    args = (
        of((tokens, shape.width), jnp.bfloat16),
        of((1, tokens, shape.experts), jnp.float32),
        of((shape.experts,), jnp.bfloat16),
    )
    run = functools.partial(experts, top_k=8, coding=coding, implementation="mosaic")
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(run, *args, gate_up, down)
