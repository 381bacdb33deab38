"""Experts for few tokens: the kernel, interpreted, against every expert on every token."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import choose, experts, reference, router_logits
from pallas_kernels.experts.launch import Tiling
from pallas_kernels.experts.routing import Routed, num_tiles, route
from pallas_kernels.experts.triton import Block
from pallas_kernels.experts.tuning import TABLE, tiling_for
from pallas_kernels.int4_matmul.triton import TileConfig
from tests.cases import slow
from tests.pallas_kernels.inputs import Random, as_float32, compiled, difference
from tests.pallas_kernels.inputs.experts import (
    GEMMA4_26B_A4B,
    NARROW,
    ROUTINGS,
    SMALL,
    Shape,
    chosen_experts,
    inputs,
    logits_for,
)

# Blocks that cut NARROW and SMALL into several, with and without a rest.
TILINGS = {
    rows: Tiling(rows, Block(16, 32, warps=4, stages=3), Block(32, 16, warps=4, stages=3))
    for rows in (16, 32, 64)
}


@functools.partial(compiled, static_argnames=("top_k", "rows"))
def interpreted(*args: Any, top_k: int, rows: int = 16) -> jax.Array:
    kernel = dict(implementation="triton", tiling=TILINGS[rows], interpret=True)
    return experts(*args, top_k=top_k, **kernel)


plain = compiled(reference, static_argnames="top_k")


def check(shape: Shape, tokens: int, routing: str, dtype: str, rows: int) -> None:
    args = inputs(shape, tokens, jnp.dtype(dtype), routing)
    k = shape.top_k
    exact = plain(*map(as_float32, args), top_k=k)
    error = difference(interpreted(*args, top_k=k, rows=rows), exact)
    if dtype == "float32":  # what the reference sums, in another order
        assert error < 1e-5
    else:
        assert error <= 2 * difference(plain(*args, top_k=k), exact)


# By default one size for each size of tiles.
@pytest.mark.parametrize("tokens", [1, 300, *slow(3, 16, 128, 512)])
def test_the_kernel_is_the_reference(tokens: int) -> None:
    rows = tiling_for(tokens * NARROW.top_k / NARROW.experts).rows
    check(NARROW, tokens, "random", "bfloat16", rows)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [*slow("float32"), "bfloat16"])
def test_ragged_sizes_and_extreme_routing(routing: str, dtype: str) -> None:
    check(SMALL, 37, routing, dtype, 16)
    check(SMALL, 1, routing, dtype, 16)


def check_routed(logits: Any, scale: Any, top_k: int, rows: int) -> Routed:
    """Compare with `choose`: every pair is once in a tile of its expert, and no tile is needless."""
    logits, scale = np.asarray(logits), np.asarray(scale, np.float32)
    chosen, weights = jax.device_get(jax.jit(choose, static_argnums=2)(logits, scale, top_k))
    kernel = functools.partial(route, top_k=top_k, dtype=jnp.float32, rows=rows, interpret=True)
    routed = jax.device_get(jax.jit(kernel)(logits[None], scale))
    experts_ = logits.shape[1]
    assert routed.expert.size == routed.used.size == num_tiles(chosen.size, experts_, rows)
    held = np.arange(rows) < routed.used[:, None]
    pairs = routed.pair.reshape(-1, rows)[held]
    assert (np.sort(pairs) == np.arange(chosen.size)).all()
    owners = np.broadcast_to(routed.expert[:, None], held.shape)[held]
    assert (chosen.reshape(-1)[pairs] == owners).all()
    counts = np.bincount(chosen.reshape(-1), minlength=experts_)
    assert np.sum(routed.used > 0) == np.sum(-(-counts // rows))
    np.testing.assert_allclose(routed.weight, weights.reshape(-1), rtol=1e-6)
    return routed


# Both sides of the 16 tokens (or the rows of a tile) that one program routes, and of the 512 whose
# counts are read at once.
@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(1, 16), (2, 16), (40, 16), (20, 8), pytest.param(600, 64, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_tiles_hold_every_pair_once(tokens: int, rows: int, routing: str) -> None:
    logits = logits_for(GEMMA4_26B_A4B, chosen_experts(GEMMA4_26B_A4B, tokens, routing))
    check_routed(logits, np.linspace(0.5, 2, 128), 8, rows)


@pytest.mark.parametrize("tokens", [5, 20])
def test_of_equal_experts_the_first_are_chosen(tokens: int) -> None:
    """Logits are rounded to bfloat16, so that experts often are equals; and far ones all have probability 0."""
    logits = np.array(np.round(Random().normal(tokens, 24)))
    logits[1:3] = 0
    logits[2, 7] = 200
    check_routed(logits, np.ones(24), 3, 16)


@pytest.mark.parametrize("tokens", [5, 20])
def test_a_token_of_nan_has_weights_of_nan_and_rows_of_its_own(tokens: int) -> None:
    logits = np.array(Random().normal(tokens, 24))
    logits[1] = np.nan
    weights = check_routed(logits, np.ones(24), 3, 16).weight.reshape(tokens, 3)
    assert (np.isnan(weights).all(axis=1) == (np.arange(tokens) == 1)).all()


def test_tokens_do_not_see_each_other() -> None:
    """A token of NaN, whose row also fills tiles up, spoils its own result alone."""
    x, *others = inputs(SMALL, 5, jnp.dtype("float32"))
    clean = interpreted(x, *others, top_k=SMALL.top_k)
    spoilt = np.asarray(interpreted(with_nan(x, 0), *others, top_k=SMALL.top_k))
    assert np.isnan(spoilt[0]).all()
    assert (spoilt[1:] == np.asarray(clean)[1:]).all()


def with_nan(x: jax.Array, where: Any) -> np.ndarray:
    """Return a copy with NaN in some places."""
    spoilt = np.array(x)
    spoilt[where] = np.nan
    return spoilt


def test_experts_that_are_not_chosen_are_not_read() -> None:
    *router, gate_up, down = inputs(SMALL, 2, jnp.dtype("float32"))
    unused = np.setdiff1d(np.arange(SMALL.experts), chosen_experts(SMALL, 2, "random"))
    clean = interpreted(*router, gate_up, down, top_k=SMALL.top_k)
    spoilt = with_nan(gate_up, unused), with_nan(down, unused)
    assert difference(interpreted(*router, *spoilt, top_k=SMALL.top_k), clean) == 0


@pytest.mark.parametrize(
    ("tokens", "parts"), [pytest.param(2, 2, marks=pytest.mark.slow), (17, 2), (513, 1)]
)
def test_parts_of_the_routers_product_add_up(tokens: int, parts: int) -> None:
    random = Random()
    rows = random.normal(tokens, 512, dtype=jnp.bfloat16)
    weight = random.normal(512, SMALL.experts, dtype=jnp.bfloat16)
    logits = jax.jit(router_logits)(rows, weight)
    assert logits.shape == (parts, tokens, SMALL.experts)
    whole = as_float32(rows) @ as_float32(weight)
    np.testing.assert_allclose(np.sum(logits, axis=0), whole, rtol=1e-5, atol=1e-4)
    x, _, *others = inputs(SMALL, tokens, jnp.dtype("bfloat16"))
    ours, theirs = (
        as_float32(f(x, logits, *others, top_k=SMALL.top_k)) for f in (interpreted, plain)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.02)  # a few steps of bfloat16


def test_auto_is_the_reference_where_there_is_no_gpu() -> None:
    args = inputs(SMALL, 4, jnp.dtype("bfloat16"))
    assert (experts(*args, top_k=3) == reference(*args, top_k=3)).all()


def test_the_table_covers_any_number_of_tokens() -> None:
    assert [most for most, _ in TABLE] == sorted(most for most, _ in TABLE)
    assert tiling_for(0.01) == TABLE[0][1]
    assert tiling_for(1e9) == TABLE[-1][1]


@pytest.mark.parametrize("room_kib", [99, 163, 227], ids=["RTX", "A100", "Hopper"])
def test_blocks_fit_the_shared_memory_of_every_gpu(room_kib: int) -> None:
    """A step of gate and up, of 64 columns, 128 inputs and 16 rows, loads 36 KiB."""
    for tokens_an_expert, bits in itertools.product((0.1, 1, 8, 20, 50, 100), (16, 8)):
        tiling = tiling_for(tokens_an_expert, bits, room_kib << 10)
        for block, matrices in ((tiling.gate_up, 2), (tiling.down, 1)):
            if isinstance(block, Block):
                step = matrices * block.columns * bits // 8 + 2 * tiling.rows
                assert (block.stages - 1) * block.inputs * step <= room_kib << 10
                assert block.stages >= 3
    most = [tiling_for(each, 16, room_kib << 10) for each in (0.1, 1, 8, 20, 50, 100)]
    assert (most == [tiling for _, tiling in TABLE]) == (room_kib > 99)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_tables_for_codes_cut_the_experts_of_26b_evenly(bits: int) -> None:
    e, d, f = (getattr(GEMMA4_26B_A4B, name) for name in ("experts", "width", "hidden"))
    for tokens in (1, 8, 16, 32, 128, 512, 2048):
        tiling = tiling_for(tokens * GEMMA4_26B_A4B.top_k / e, bits)
        for config, outputs, contracting_axes in ((tiling.gate_up, f, d), (tiling.down, d, f)):
            if isinstance(config, TileConfig):
                assert (
                    config.dividing(outputs, contracting_axes // 64, last_may_reach_past=bits == 8)
                    == config
                )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(gate_up=jnp.zeros((4, 16, 8))), r"gate_up must be \(4, 16, 2, 8\), not"),
        (dict(x=jnp.zeros((2, 15))), r"gate_up must be \(4, 15, 2, 8\), not"),
        (dict(logits=jnp.zeros((1, 2, 3))), r"logits must be float32 \[parts, 2, 4\]"),
        (dict(logits=jnp.zeros((1, 2, 4), jnp.bfloat16)), r"they are bfloat16 \(1, 2, 4\) and"),
        (dict(top_k=5), "5 different experts a token, of 4"),
        (dict(x=jnp.zeros((2, 16), jnp.bfloat16)), "they are bfloat16, float32, float32"),
        (dict(implementation="cuda"), "pass auto, reference, triton or mosaic"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    good = dict(
        x=jnp.zeros((2, 16)),
        logits=jnp.zeros((1, 2, 4)),
        expert_scale=jnp.zeros(4),
        gate_up=jnp.zeros((4, 16, 2, 8)),
        down=jnp.zeros((4, 8, 16)),
        top_k=3,
    )
    with pytest.raises(ValueError, match=words):
        experts.__wrapped__(**{**good, **change})  # pyright: ignore[reportFunctionMemberAccess]


def test_a_choice_that_cannot_run_is_refused() -> None:
    args = inputs(SMALL, 2, jnp.dtype("float32"))
    with pytest.raises(NotImplementedError, match="bfloat16 and float16, not float32"):
        experts(*args, top_k=3, implementation="triton")
    if jax.default_backend() == "cpu":
        args = inputs(SMALL, 2, jnp.dtype("bfloat16"))
        with pytest.raises(ValueError, match="interpret mode"):
            experts(*args, top_k=3, implementation="triton")


@pytest.mark.parametrize("tokens", [5, 37])
def test_padding_chooses_no_expert(tokens: int) -> None:
    """Real tokens get the same bits as without it, whatever the padding holds, and padding gets 0."""
    x, logits, *others = inputs(SMALL, tokens, jnp.dtype("float32"))
    real = np.arange(tokens) % 3 > 0
    for run in (interpreted, plain):
        clean = np.asarray(run(x, logits, *others, top_k=SMALL.top_k))
        spoilt = with_nan(x, ~real), with_nan(logits, (0, ~real))
        found = np.asarray(run(*spoilt, *others, real, top_k=SMALL.top_k))
        assert (found[real] == clean[real]).all()
        assert (found[~real] == 0).all()


def test_experts_that_only_padding_chose_are_not_read() -> None:
    *router, gate_up, down = inputs(SMALL, 4, jnp.dtype("float32"))
    real = np.array([True, False, True, False])
    used = chosen_experts(SMALL, 4, "random")[real]
    unused = np.setdiff1d(np.arange(SMALL.experts), used)
    given = *router, with_nan(gate_up, unused), with_nan(down, unused)
    found = interpreted(*given, real, top_k=SMALL.top_k)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("routing", ["random", *slow(*(r for r in ROUTINGS if r != "random"))])
@pytest.mark.parametrize("tokens", [5, *slow(37)])
def test_devices_with_some_of_the_experts_add_up_to_all(tokens: int, routing: str) -> None:
    """All choose among all experts, those that weigh equally too, and compute what they have."""
    x, logits, scale, gate_up, down = inputs(SMALL, tokens, jnp.dtype("float32"), routing)
    logits, gate_up, down = (np.array(a) for a in (logits, gate_up, down))
    logits = logits.astype(jnp.bfloat16).astype(np.float32)
    logits[:, 0] = 1  # ties
    real = np.arange(tokens) % 3 > 0
    expected = plain(x, logits, scale, gate_up, down, real, top_k=SMALL.top_k)
    cuts = 0, SMALL.experts // 3, SMALL.experts // 2, SMALL.experts
    for run in (interpreted, plain):
        parts = [
            np.asarray(
                run(
                    *(x, logits, scale, gate_up[begin:end], down[begin:end], real, np.int32(begin)),
                    top_k=SMALL.top_k,
                )
            )
            for begin, end in itertools.pairwise(cuts)
        ]
        np.testing.assert_allclose(sum(parts), expected, atol=1e-5)
