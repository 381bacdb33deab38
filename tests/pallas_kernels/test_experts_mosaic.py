"""Experts with codes on Hopper: what surrounds the Mosaic kernels, and in what order these read."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.quantised.array import quantise
from pallas_kernels.experts import MmaConfig, MosaicConfig, Tiling, experts, reference
from pallas_kernels.experts.permute import add_up, places, spread
from pallas_kernels.experts.routing import ALIGN, Placed, num_tiles, route_together
from pallas_kernels.experts.tuning import mosaic_tiling_for
from tests.cases import slow
from tests.pallas_kernels.inputs import compiled, gelu
from tests.pallas_kernels.inputs.experts import (
    GEMMA4_26B_A4B,
    ROUTINGS,
    SMALL,
    abstract_codes,
    abstract_inputs,
    inputs,
)
from tests.pallas_kernels.layouts import owned


def multiplied(
    rows: np.ndarray, placed: Placed, gate_up: np.ndarray, down: np.ndarray, shared: bool
) -> np.ndarray:
    """Return what the experts of all tiles make of their rows; NaN where no tile has any.

    Args:
      shared: whether all tiles have the same rows.
    """
    count = ALIGN * placed.expert.size if shared else len(rows)
    out, written = np.full((count, SMALL.width), np.nan, np.float32), set[int]()
    placed = jax.device_get(placed)
    assert int(placed.tiles[0]) == np.sum(placed.used > 0)
    for expert, used, start in zip(placed.expert, placed.used, placed.start, strict=True):
        if used:
            assert start % ALIGN == 0
            own = range(int(start), int(start) + (ALIGN if shared else int(used)))
            assert written.isdisjoint(own)
            written.update(own)
            gate, up = np.moveaxis(gate_up[expert], 1, 0)
            of = rows if shared else rows[own.start : own.stop]
            hidden = gelu(of @ gate) * (of @ up)
            out[own.start : own.stop] = hidden @ down[expert]
    return out


added_up = jax.jit(functools.partial(add_up, interpret=True))
plain = compiled(reference, static_argnames="top_k")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_up_to_8_tokens_are_the_rows_of_every_tile(routing: str) -> None:
    """Results come from where a token is in the tile of its expert."""
    tokens, k = 7, SMALL.top_k
    made = inputs(SMALL, tokens, jnp.dtype("float32"), routing)
    x, logits, scale, gate_up, down = map(np.asarray, made)
    real = np.arange(tokens) != 3
    how: Any = dict(top_k=k, dtype=x.dtype, rows=ALIGN, same_rows=True, interpret=True)
    rows = np.pad(x, ((0, ALIGN - tokens), (0, 0)))
    found = 0
    for begin, end in ((0, 5), (5, SMALL.experts)):  # on two devices
        together = jax.jit(functools.partial(route_together, **how, held=end - begin))
        placed = together(logits, scale, real, first=np.int32(begin))
        out = multiplied(rows, placed, gate_up[begin:end], down[begin:end], shared=True)
        found += np.asarray(added_up(out, placed, real.astype(np.int32)))
    expected = plain(x, logits, scale, gate_up, down, real, top_k=k)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("routing", ["random", "skewed", *slow("same", "spread")])
@pytest.mark.parametrize("begin", [None, 5])
def test_rows_of_experts_lie_together_and_come_back(
    routing: str, in_order: bool, begin: int | None
) -> None:
    """With plain products between, what spreads tokens and adds rows up gives the reference."""
    tokens, rows, k = 37, 16, SMALL.top_k
    made = inputs(SMALL, tokens, jnp.dtype("float32"), routing)
    x, logits, scale, gate_up, down = map(np.asarray, made)
    x = np.pad(x, ((0, 0), (0, -SMALL.width % 16)))
    real = np.arange(tokens) % 7 != 3
    first = None if begin is None else np.int32(begin)
    gate_up, down = (w[begin:] for w in (gate_up, down))
    how: Any = dict(top_k=k, dtype=x.dtype, rows=rows, held=len(down), interpret=True)
    together = jax.jit(functools.partial(route_together, **how))
    placed = together(logits, scale, real, first=first)
    padded, ones = ALIGN * num_tiles(tokens * k, len(down), ALIGN), real.astype(np.int32)
    put = functools.partial(spread, padded=padded, in_order=in_order, interpret=True)
    found = np.asarray(jax.jit(put)(x, placed, ones))
    if not in_order:  # changed twice is not changed
        found = found[:, np.asarray(jax.jit(places)(np.arange(x.shape[1])))]
    products = multiplied(found[:, : SMALL.width], placed, gate_up, down, shared=False)
    if begin is None:
        assert np.sum(~np.isnan(products[:, 0])) == real.sum() * k
    out = added_up(products, placed, ones)
    args = x[:, : SMALL.width], logits, scale, gate_up, down, real
    np.testing.assert_allclose(out, plain(*args, first, top_k=k), atol=1e-5)


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


@pytest.mark.parametrize("bits", [4, 8])
def test_a_draft_block_of_32_sequences_has_a_cut(bits: int) -> None:
    """Its tiles hold the mean number of tokens of an expert."""
    shape, tokens = GEMMA4_26B_A4B, 512
    tiling = mosaic_tiling_for(tokens * shape.top_k / shape.experts, bits)
    assert tiling is not None
    assert tiling.rows >= tokens * shape.top_k / shape.experts
    for config in (tiling.gate_up, tiling.down):
        assert isinstance(config, MosaicConfig)
        assert config.rows[-1] == tiling.rows
        assert list(config.rows) == sorted(config.rows)
        assert all(rows % ALIGN == 0 for rows in config.rows)
        assert config.stages >= 2


@pytest.mark.parametrize(
    ("format", "tokens", "words"),
    [
        ("int4-g64", 512, "int4 in groups of 32"),
        ("int4-g64", 8, "int4 in groups of 32"),
        ("int4", 1, "some numbers of tokens"),
        ("int8", 4096, "some numbers of tokens"),
    ],
)
def test_what_the_mosaic_kernels_cannot_take_is_said(format: str, tokens: int, words: str) -> None:
    gate_up, down, coding = abstract_codes(GEMMA4_26B_A4B, format)
    args = abstract_inputs(GEMMA4_26B_A4B, tokens)
    run = functools.partial(experts, top_k=8, coding=coding, implementation="mosaic")
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(run, *args, gate_up, down)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2")
@pytest.mark.parametrize(
    ("gate_up", "words"),
    [
        (MmaConfig((8,), groups=3), "evenly"),
        (MmaConfig((8,), blocks=2), "evenly"),
        (MmaConfig((8,), groups=1, pieces=1), "two pieces"),
        (MmaConfig((8,), groups=1, shared=False, pieces=4), "two pieces"),
    ],
)
def test_a_cut_for_few_tokens_that_does_not_fit_is_refused(gate_up: MmaConfig, words: str) -> None:
    *weights, coding = abstract_codes(GEMMA4_26B_A4B, "int4")
    args = (*abstract_inputs(GEMMA4_26B_A4B, 8), *weights)
    how: Any = dict(implementation="mosaic", tiling=Tiling(8, gate_up, MmaConfig((8,))))
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(experts, top_k=8, coding=coding, **how), *args)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "tokens"),
    [*(("int4", n) for n in (2, 8, 9, 32, 64, 128, 256)), ("int8", 8), ("int8", 16), ("fp8", 16)],
)
def test_experts_of_few_tokens_on_a_gpu(format: str, tokens: int) -> None:
    """As near to the exact result as the reference in bfloat16. Padding changes nobody's result."""
    x, logits, scale, *numbers = inputs(GEMMA4_26B_A4B, tokens, jnp.dtype("bfloat16"))
    # The kernels round logits to bfloat16, and so does the reference; but XLA leaves that out.
    logits = logits.astype(jnp.bfloat16).astype(jnp.float32)
    packed = [jax.jit(quantise, static_argnums=(1, 2))(w, format, (1,)) for w in numbers]
    weights = [w.codes_of_experts()[0] for w in packed]
    how: Any = dict(top_k=GEMMA4_26B_A4B.top_k, coding=packed[0].codes_of_experts()[1])
    run = jax.jit(functools.partial(experts, implementation="mosaic", **how))
    plain = jax.jit(functools.partial(reference, **how))
    exact = plain(x.astype(jnp.float32), logits, scale.astype(jnp.float32), *weights)
    ours, theirs = (f(x, logits, scale, *weights) for f in (run, plain))
    error, allowed = (float(jnp.linalg.norm(a.astype(jnp.float32) - exact)) for a in (ours, theirs))
    assert error <= 2 * allowed
    real = jnp.arange(tokens) != 1
    padded = run(x.at[1].set(jnp.nan), logits, scale, *weights, real)
    np.testing.assert_array_equal(padded, jnp.where(real[:, None], ours, 0))
