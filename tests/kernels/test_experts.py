"""Experts for few tokens: the kernel, interpreted, against every expert on every token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import experts, reference
from pallas_kernels.experts.cases import (
    GEMMA4_26B_A4B,
    NARROW,
    ROUTINGS,
    SMALL,
    TOKENS,
    Shape,
    chosen_experts,
    inputs,
)
from pallas_kernels.experts.triton import Block, Tiling, num_tiles, route
from pallas_kernels.experts.tuning import TABLE, tiling_for

# Blocks that cut NARROW and SMALL into several, with and without a rest.
TILINGS = {
    rows: Tiling(rows, Block(16, 32, warps=4, stages=3), Block(32, 16, warps=4, stages=3))
    for rows in (16, 32, 64)
}


def interpreted(*args: Any, rows: int = 16) -> jax.Array:
    return experts(*args, implementation="triton", tiling=TILINGS[rows], interpret=True)


def check(shape: Shape, tokens: int, routing: str, dtype: str, rows: int) -> None:
    args = inputs(shape, tokens, jnp.dtype(dtype), routing)
    float32 = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in args]
    exact = reference(*float32)
    ours, theirs = (
        f.astype(jnp.float32) for f in (interpreted(*args, rows=rows), reference(*args))
    )
    error = float(jnp.max(jnp.abs(ours - exact)))
    if dtype == "float32":  # what the reference sums, in another order
        assert error < 1e-5
    else:
        assert error <= 2 * float(jnp.max(jnp.abs(theirs - exact)))


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_kernel_is_the_reference(tokens: int) -> None:
    rows = tiling_for(tokens * NARROW.top_k / NARROW.experts).rows
    check(NARROW, tokens, "random", "bfloat16", rows)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_sizes_and_extreme_routing(routing: str, dtype: str) -> None:
    check(SMALL, 37, routing, dtype, 16)
    check(SMALL, 1, routing, dtype, 16)


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        (1, 16),
        (40, 16),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, 16), (300, 32), (512, 64)]),
    ],
)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_tiles_hold_every_pair_once(tokens: int, rows: int, routing: str) -> None:
    chosen = chosen_experts(GEMMA4_26B_A4B, tokens, routing)
    tile_experts, pairs = map(np.asarray, route(jnp.asarray(chosen), 128, rows, interpret=True))
    assert tile_experts.size == num_tiles(chosen.size, 128, rows)
    pairs = pairs.reshape(-1, rows)[tile_experts >= 0]
    tile_experts = tile_experts[tile_experts >= 0]
    # Experts nobody chose have no tile, the others no more than they need.
    names, counts = np.unique(chosen, return_counts=True)
    assert (np.unique(tile_experts) == names).all()
    if tokens > 1:
        assert tile_experts.size == np.sum(-(-counts // rows))
    held = pairs >= 0
    assert (np.sort(pairs[held]) == np.arange(chosen.size)).all()
    owners = np.broadcast_to(tile_experts[:, None], pairs.shape)
    assert (chosen.reshape(-1)[pairs[held]] == owners[held]).all()


def test_tokens_do_not_see_each_other() -> None:
    """A token of NaN, whose row also fills tiles up, spoils its own result alone."""
    x, chosen, weights, gate_up, down = inputs(SMALL, 5, jnp.dtype("float32"))
    clean = interpreted(x, chosen, weights, gate_up, down)
    spoilt = interpreted(x.at[0].set(jnp.nan), chosen, weights, gate_up, down)
    assert jnp.isnan(spoilt[0]).all()
    assert (spoilt[1:] == clean[1:]).all()


def test_experts_that_are_not_chosen_are_not_read() -> None:
    x, chosen, weights, gate_up, down = inputs(SMALL, 2, jnp.dtype("float32"))
    unused = np.setdiff1d(np.arange(SMALL.experts), np.asarray(chosen))
    clean = interpreted(x, chosen, weights, gate_up, down)
    gate_up, down = gate_up.at[unused].set(jnp.nan), down.at[unused].set(jnp.nan)
    assert (interpreted(x, chosen, weights, gate_up, down) == clean).all()


def test_auto_is_the_reference_where_there_is_no_gpu() -> None:
    args = inputs(SMALL, 4, jnp.dtype("bfloat16"))
    assert (experts(*args) == reference(*args)).all()


def test_the_table_covers_any_number_of_tokens() -> None:
    assert [most for most, _ in TABLE] == sorted(most for most, _ in TABLE)
    assert tiling_for(0.01) == TABLE[0][1]
    assert tiling_for(1e9) == TABLE[-1][1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(gate_up=jnp.zeros((4, 16, 8))), r"gate_up must be \[E, D, 2, F\]"),
        (dict(x=jnp.zeros((2, 15))), r"gate_up must be \[E, D, 2, F\]"),
        (dict(weights=jnp.zeros((2, 4))), r"chosen and weights must be \[2, topk\]"),
        (dict(x=jnp.zeros((2, 16), jnp.bfloat16)), "x is bfloat16, gate_up float32"),
        (dict(implementation="mosaic"), "pass auto, reference or triton"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    good = dict(
        x=jnp.zeros((2, 16)),
        chosen=jnp.zeros((2, 3), jnp.int32),
        weights=jnp.zeros((2, 3)),
        gate_up=jnp.zeros((4, 16, 2, 8)),
        down=jnp.zeros((4, 8, 16)),
    )
    with pytest.raises(ValueError, match=words):
        experts.__wrapped__(**{**good, **change})  # pyright: ignore[reportFunctionMemberAccess]


def test_a_choice_that_cannot_run_is_refused() -> None:
    args = inputs(SMALL, 2, jnp.dtype("float32"))
    with pytest.raises(NotImplementedError, match="bfloat16 and float16 experts, not float32"):
        experts(*args, implementation="triton")
    if jax.default_backend() == "cpu":
        args = inputs(SMALL, 2, jnp.dtype("bfloat16"))
        with pytest.raises(ValueError, match="interpret mode"):
            experts(*args, implementation="triton")
