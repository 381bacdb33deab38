"""Route, multiply and add up: the kernels of `experts`, one after another."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.experts import coded, permute, triton
from pallas_kernels.experts.routing import ALIGN, num_tiles, route, route_together
from pallas_kernels.experts.tile_config import MmaConfig, MosaicConfig
from pallas_kernels.experts.triton import Block
from pallas_kernels.int4_matmul.coding import Codes, Coding
from pallas_kernels.int4_matmul.triton import TileConfig


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Rows of a tile, and tile sizes of both products.

    Rows are a power of two, at least 16; or 8, for codes. Mosaic takes those of its configs.

    Attributes:
      gate_up, down: `TileConfig`s for the kernels of `coded.py`, `Block`s for those of `triton.py`,
        `MosaicConfig`s for those of `mosaic.py`, `MmaConfig`s for those of `mma.py`. A `Block` may
        come before a `TileConfig`.
    """

    rows: int
    gate_up: Block | TileConfig | MosaicConfig | MmaConfig
    down: Block | TileConfig | MosaicConfig | MmaConfig


def experts_triton(
    x: Float[Array, "T D"],
    logits: Float[Array, "S T E"],
    expert_scale: Float[Array, " E"],
    gate_up: Float[Array, "X D 2 F"] | Codes,
    down: Float[Array, "X F D"] | Codes,
    real: Bool[Array, " T"] | None = None,
    first: Int[Array, ""] | None = None,
    *,
    coding: Coding | None,
    top_k: int,
    tiling: Tiling,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Launch the kernels. Arguments as in `pallas_kernels.experts.experts`, which checks them."""
    sizes: dict[str, Any] = dict(rows=tiling.rows, interpret=interpret)
    held = _num_experts(down)
    of_router: dict[str, Any] = dict(held=held, top_k=top_k, dtype=x.dtype)
    routed = route(logits, expert_scale, real, first, **of_router, **sizes)
    gate_up_config, second = (
        dataclasses.replace(config, rows=tiling.rows) if isinstance(config, TileConfig) else config
        for config in (tiling.gate_up, tiling.down)
    )
    by_pair = isinstance(second, TileConfig)  # whether hidden numbers are in the order of pairs
    if isinstance(gate_up_config, TileConfig):
        assert isinstance(gate_up, Codes)
        assert by_pair
        kwargs: dict[str, Any] = dict(
            coding=coding, top_k=top_k, config=gate_up_config, interpret=interpret
        )
        hidden = coded.multiply_gate_up(routed, x, gate_up, **kwargs)
    else:
        assert isinstance(gate_up_config, Block)
        kwargs = dict(top_k=top_k, block=gate_up_config, by_pair=by_pair, **sizes)
        hidden = triton.multiply_gate_up(routed, x, *_arrays(gate_up), **kwargs)
    if isinstance(second, TileConfig):
        assert isinstance(down, Codes)
        kwargs = dict(coding=coding, config=second, interpret=interpret)
        out = coded.multiply_down(routed, hidden, down, **kwargs)
    else:
        assert isinstance(second, Block)
        out = triton.multiply_down(routed, hidden, *_arrays(down), block=second, **sizes)
    pairs = out.reshape(x.shape[0], top_k, -1).astype(jnp.float32)
    if first is not None:
        # Nothing was written for pairs of experts that another device has.
        pairs = jnp.where(routed.weight.reshape(-1, top_k, 1) != 0, pairs, 0)
    total = jnp.sum(pairs, axis=1).astype(x.dtype)
    if real is None:
        return total
    # Nothing was written for pairs of padding. What is there may not be finite.
    return jnp.where(real[:, None], total, jnp.zeros((), x.dtype))


def _num_experts(weight: Array | Codes) -> int:
    return (weight.codes if isinstance(weight, Codes) else weight).shape[0]


def _arrays(weight: Array | Codes) -> tuple[Array, Array | None]:
    return (weight.codes, weight.factors) if isinstance(weight, Codes) else (weight, None)


def experts_mosaic(
    x: Float[Array, "T D"],
    logits: Float[Array, "S T E"],
    expert_scale: Float[Array, " E"],
    gate_up: Codes,
    down: Codes,
    real: Bool[Array, " T"] | None = None,
    first: Int[Array, ""] | None = None,
    *,
    top_k: int,
    tiling: Tiling,
) -> Float[Array, "T D"]:
    """Launch the kernels of `mma.py` or of `mosaic.py` for codes, behind those that route."""
    from pallas_kernels.experts import mma, mosaic  # not in every jax

    tokens, gate_up_config, second = x.shape[0], tiling.gate_up, tiling.down
    few_rows = isinstance(gate_up_config, MmaConfig)
    same_rows = few_rows and tokens <= ALIGN == tiling.rows
    kwargs: dict[str, Any] = dict(top_k=top_k, dtype=x.dtype, rows=tiling.rows, same_rows=same_rows)
    held = _num_experts(down)
    placed = route_together(logits, expert_scale, real, first, held=held, **kwargs)
    ones = jnp.ones(tokens, jnp.int32) if real is None else real.astype(jnp.int32)
    if same_rows:
        rows = jnp.pad(x, ((0, ALIGN - tokens), (0, 0)))
    else:
        padded = ALIGN * num_tiles(placed.weight.size, held, ALIGN)
        rows = permute.spread(x, placed, ones, padded, in_order=few_rows)
    if few_rows:
        assert isinstance(second, MmaConfig)
        out = mma.multiply(
            placed, rows, gate_up, down, (gate_up_config, second), same_rows=same_rows
        )
    else:
        assert isinstance(gate_up_config, MosaicConfig)
        assert isinstance(second, MosaicConfig)
        out = mosaic.multiply(placed, rows, gate_up, down, (gate_up_config, second))
    return permute.add_up(out, placed, ones)
