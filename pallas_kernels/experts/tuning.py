"""Tile sizes of the Triton kernel, by the mean number of tokens an expert has."""

from __future__ import annotations

from pallas_kernels.experts.triton import Block, Tiling

# Measured on an NVIDIA H200 (jax 0.11.2, bfloat16) for experts of 2816 x 704, 8 of 128 a token (26B-A4B), with 1, 8,
# 16, 32, 128, 256 and 512 tokens: the kernels of a layer take 37, 161, 239, 329, 371, 399 and 402 us, 1.5, 1.0, 0.9,
# 0.9, 0.9, 1.0 and 1.0 times what reading the experts in use once takes at 3.85 TB/s.
TABLE = (
    # most tokens an expert, on average
    (0.75, Tiling(16, Block(64, 128, warps=4, stages=3), Block(64, 64, warps=4, stages=4))),
    (4.0, Tiling(16, Block(64, 128, warps=4, stages=4), Block(128, 64, warps=4, stages=4))),
    (12.0, Tiling(16, Block(128, 64, warps=4, stages=4), Block(128, 64, warps=4, stages=4))),
    (24.0, Tiling(32, Block(128, 64, warps=8, stages=3), Block(128, 64, warps=4, stages=4))),
    (
        float("inf"),
        Tiling(64, Block(128, 64, warps=8, stages=4), Block(128, 64, warps=8, stages=4)),
    ),
)


def tiling_for(tokens_an_expert: float) -> Tiling:
    """Return the tiling of the first row of the table that reaches so many tokens."""
    return next(tiling for most, tiling in TABLE if tokens_an_expert <= most)
