"""Tile sizes of the Triton kernel, by the mean number of tokens an expert has."""

from __future__ import annotations

from pallas_kernels.experts.triton import Block, Tiling

# Measured on an NVIDIA H200 (jax 0.11.2, bfloat16) for experts of 2816 x 704, 8 of 128 a token (26B-A4B), with 1, 8,
# 16, 32, 128 and 512 tokens: 36, 173, 271, 343, 399 and 498 us a layer, 1.5, 1.1, 1.0, 1.0, 1.0 and 1.3 times what
# reading the experts in use once takes at 3.85 TB/s.
TABLE = (
    # most tokens an expert, on average
    (0.75, Tiling(16, Block(64, 128, warps=4, stages=3), Block(64, 64, warps=4, stages=4))),
    (4.0, Tiling(16, Block(64, 128, warps=4, stages=3), Block(128, 64, warps=4, stages=4))),
    (12.0, Tiling(16, Block(128, 64, warps=4, stages=4), Block(64, 64, warps=4, stages=4))),
    (
        float("inf"),
        Tiling(64, Block(128, 64, warps=8, stages=4), Block(128, 64, warps=8, stages=4)),
    ),
)


def tiling_for(tokens_an_expert: float) -> Tiling:
    """Return the tiling of the first row of the table that reaches so many tokens."""
    return next(tiling for most, tiling in TABLE if tokens_an_expert <= most)
