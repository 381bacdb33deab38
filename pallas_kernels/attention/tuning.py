"""Tile sizes of the Triton kernel by head dim and rows, and shares of the keys of all kernels.

Measured on an NVIDIA H200 (jax 0.11.2, bfloat16), the best of sweeps, 8 sequences of 16 queries
unless said: what a profiler counts for the kernels alone, over keys that are not in L2, in us, and
times what reading those takes at 4.3 TB/s.

                                  31B                             26B-A4B
    head dim 256, ring of 1088    Triton 39, 1.2                  Triton 26, 1.6
    head dim 512, 8192 keys       Mosaic 169, 1.4                 Mosaic 88, 1.4
        32768 keys                Mosaic 326, 1.3 (4 sequences)   Mosaic 324, 1.3
    head dim 128, draft block,
        2048 keys                 Mosaic 26, 1.7 (Triton 33)      Triton 25, 1.6
        8192 keys                 Mosaic 74, 1.2 (Triton 102)     Triton 72, 1.2
        32768 keys                Mosaic 266, 1.1 (Triton 407)    Triton 259, 1.0
        ring of 2112              Mosaic 27, 1.7                  Triton 29, 1.8

31B's draft block, Mosaic and Triton, in short contexts: 1 sequence of 1024 keys 7 and 12, of 2048
keys 9 and 15, 8 of 256 keys 10 and 12, of 512 keys 13 and 15.

With so many rows at head dim 512, twice the products of a large matrix product in bytes: 128 rows
want 490 TFLOP/s to keep up with memory. In one Triton program they have no room beside their
results; two that each make half of the columns (`parts`) take 359 us for 31B's 8192 keys, two of 64
rows each 427 us, both net of a loop around them.
"""

from __future__ import annotations

from pallas_kernels.attention.triton import Tiling

# Programs that an H200 (132 multiprocessors) runs at once, at least. A few more of them than that,
# and most of it waits for those: 5 splits instead of 4 of 26B-A4B's 32 programs at head dim 512
# took 371 us instead of 244.
FULL = 132
# A split has at least so many keys, or it takes longer to start and to add up than to read.
FEWEST_KEYS = 128

TABLE = (
    # head dims up to, most rows: (keys, warps, stages, parts)
    (128, 16, (64, 4, 3, 1)),
    (128, 64, (64, 4, 3, 1)),
    (128, 128, (64, 8, 3, 1)),
    (256, 16, (64, 4, 2, 1)),
    (256, 32, (64, 4, 3, 1)),
    (256, 64, (64, 8, 2, 1)),
    (512, 16, (32, 4, 2, 1)),
    (512, 64, (32, 8, 2, 1)),
    (512, 128, (32, 8, 2, 2)),
)
# Chunks of prompts, by head dim: what lets no two warps do the same products (Triton gives each 16
# rows). 512 tokens of 31B: 307 us against XLA's 723 at head dim 256 (4 sequences, ring of 1088),
# 2507 against 1961 at 512 (1, 16384 keys).
MANY_ROWS = 128
CHUNKS = (
    (128, Tiling(MANY_ROWS, 64, 8, 3, 1)),
    (256, Tiling(MANY_ROWS, 64, 8, 2, 1)),
    (512, Tiling(MANY_ROWS, 32, 8, 2, 1, parts=2)),
)


def tiling_for(*, head_dim: int, rows: int, heads: int, longest: int) -> Tiling:
    """Return the tiling of the first row of the table that has room.

    Args:
      head_dim: width of keys and values.
      rows: query heads of one kv head times tokens.
      heads: kv heads of all sequences.
      longest: slots of the longest segment.
    """
    for most, tiling in CHUNKS:
        if head_dim <= most and rows > MANY_ROWS and heads * rows >= FULL * MANY_ROWS:
            return tiling
    power = max(16, 1 << (rows - 1).bit_length())
    fits = [row for row in TABLE if head_dim <= row[0]]
    same = [row for row in fits if row[0] == fits[0][0]] if fits else []
    if not same:
        raise ValueError(f"the table of tilings ends at head dim {TABLE[-1][0]}, not {head_dim}")
    _, most, (keys, warps, stages, parts) = next((r for r in same if power <= r[1]), same[-1])
    tile = min(power, most)
    programs = heads * -(-rows // tile) * parts
    return Tiling(tile, keys, warps, stages, _splits(programs, longest), parts)


def splits_for(*, rows: int, heads: int, longest: int) -> int:
    """Return how many blocks of a Mosaic kernel share the keys of a tile of 64 rows.

    Args:
      rows: query heads of one kv head times tokens.
      heads: kv heads of all sequences.
      longest: slots of the longest segment.
    """
    return _splits(heads * -(-rows // 64), longest)


def _splits(programs: int, longest: int) -> int:
    return max(1, min(FULL // programs, longest // FEWEST_KEYS))
