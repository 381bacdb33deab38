"""Tile sizes of the Triton kernel, by the mean number of tokens an expert has."""

from __future__ import annotations

from pallas_kernels.experts.triton import Block, Tiling

# For experts of 2816 x 704 (26B-A4B). Not measured yet: chosen so that nothing spills and blocks fill an H200.
TABLE = (
    # tokens an expert, on average; up to 8 tokens of 26B-A4B, few blocks: narrow ones
    (0.5, Tiling(16, Block(32, 128, warps=4, stages=4), Block(64, 64, warps=4, stages=4))),
    (4.0, Tiling(16, Block(64, 128, warps=4, stages=3), Block(128, 64, warps=4, stages=4))),
    (12.0, Tiling(32, Block(64, 64, warps=4, stages=4), Block(128, 64, warps=4, stages=4))),
    (
        float("inf"),
        Tiling(64, Block(128, 64, warps=8, stages=3), Block(128, 64, warps=8, stages=4)),
    ),
)


def tiling_for(tokens_an_expert: float) -> Tiling:
    """Return the tiling of the first row of the table that reaches so many tokens."""
    return next(tiling for most, tiling in TABLE if tokens_an_expert <= most)
