"""Tile sizes of the Triton kernel, by the mean number of tokens an expert has."""

from __future__ import annotations

from pallas_kernels.experts.triton import Block, Tiling

# Measured on an NVIDIA H200 (jax 0.11.2, bfloat16) for experts of 2816 x 704, 8 of 128 a token
# (26B-A4B), with 2 equal tokens and 8, 16, 32, 64, 128, 256 and 512: the kernels of a layer take
# 33, 146, 225, 308, 347, 357, 368 and 384 us, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0 and 1.1 times what
# reading the experts in use once takes at 4.3 TB/s. Blocks of 32 columns are slower for all that
# were tried (up to 32 tokens), and several programs for the inputs of one block no faster for 2. No
# block needs more than the 163 KiB of shared memory that a program has on an A100.
TABLE = (
    # most tokens an expert, on average
    (0.75, Tiling(16, Block(64, 128, warps=4, stages=4), Block(64, 64, warps=4, stages=4))),
    (4.0, Tiling(16, Block(64, 128, warps=4, stages=5), Block(128, 64, warps=4, stages=4))),
    (12.0, Tiling(16, Block(128, 64, warps=4, stages=5), Block(128, 64, warps=4, stages=4))),
    (24.0, Tiling(32, Block(128, 64, warps=8, stages=5), Block(128, 64, warps=4, stages=4))),
    (
        float("inf"),
        Tiling(64, Block(128, 64, warps=8, stages=4), Block(128, 64, warps=8, stages=4)),
    ),
)


def tiling_for(tokens_an_expert: float) -> Tiling:
    """Return the tiling of the first row of the table that reaches so many tokens."""
    return next(tiling for most, tiling in TABLE if tokens_an_expert <= most)
