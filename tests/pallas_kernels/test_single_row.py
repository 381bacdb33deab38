"""A row that is alone goes twice where that is faster, and nowhere else; the result is the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.common.single_row import repeat_if_single


def product(rows: jax.Array) -> jax.Array:
    return repeat_if_single(
        lambda r: r @ jnp.ones((4, 3)),
        rows,
        single=rows.shape[0] == 1,
        repeat=lambda r: (jnp.repeat(r, 2, axis=0),),
        first=lambda out: out[:1],
    )


@pytest.mark.parametrize(
    ("rows", "platform", "multiplied"),
    [(1, "cuda", 2), (1, "cpu", 1), (3, "cuda", 3), (3, "cpu", 3)],
)
def test_one_row_becomes_two_on_its_platform_alone(
    rows: int, platform: str, multiplied: int
) -> None:
    x = jnp.ones((rows, 4))
    text = jax.jit(product).trace(x).lower(lowering_platforms=(platform,)).as_text()
    (dot,) = (line for line in text.splitlines() if "dot_general" in line)
    assert f"-> tensor<{multiplied}x3xf32>" in dot
    assert jnp.all(product(x) == 4)
    assert product(x).shape == (rows, 3)
