"""Tile sizes of the Triton kernel, by head dim and query rows.

Chosen by what compiles for an H200 without spilled registers. Measured there once, 8 sequences of 16 queries, in us and
times what reading the keys takes at 3.85 TB/s: head dim 256, ring of 1088 (26B-A4B): 38, 2.0; head dim 512, 8192 keys:
454, 3.3 (31B) and 371, 5.3 (26B-A4B; 4 splits instead of 5: 244); head dim 128, 8192 keys (31B's draft block): 162, 2.3
(two splits: 123). So head dim 512 is where there is most to gain.
"""

from __future__ import annotations

from pallas_kernels.attention.triton import Tiling

# Programs that fill an H200 (132 multiprocessors); fewer leave bandwidth unused.
FULL = 132
# A split has at least so many keys, or it takes longer to start and to add up than to read.
FEWEST_KEYS = 128

TABLE = (
    # head dims up to, most rows: (keys, warps, stages)
    (128, 16, (64, 4, 3)),
    (128, 64, (64, 4, 3)),
    (128, 128, (64, 8, 3)),
    (256, 16, (64, 4, 2)),
    (256, 64, (64, 8, 2)),
    (512, 16, (32, 4, 2)),
    (512, 64, (32, 8, 2)),
)


def tiling_for(*, head_dim: int, rows: int, heads: int, longest: int) -> Tiling:
    """Return the tiling of the first row of the table that has room.

    Args:
        head_dim: Width of keys and values.
        rows: Query heads of one kv head times tokens.
        heads: kv heads of all sequences.
        longest: Slots of the longest segment.
    """
    power = max(16, 1 << (rows - 1).bit_length())
    fits = [row for row in TABLE if head_dim <= row[0]]
    same = [row for row in fits if row[0] == fits[0][0]] if fits else []
    if not same:
        raise ValueError(f"the table of tilings ends at head dim {TABLE[-1][0]}, not {head_dim}")
    _, most, (keys, warps, stages) = next((r for r in same if power <= r[1]), same[-1])
    tile = min(power, most)
    programs = heads * -(-rows // tile)
    splits = max(1, min(-(-FULL // programs), longest // FEWEST_KEYS))
    return Tiling(tile, keys, warps, stages, splits)
