"""Tile sizes of the Triton kernel by head dim and rows, and key splits of all kernels.

The sizes are the best of sweeps on an NVIDIA H200 (jax 0.11.2, bfloat16), with 8 sequences of 16
queries unless stated. The table below has microseconds that a profiler counts for the kernels
alone, with keys that are not in L2. The second number is the multiple of the time that reading
the keys takes at 4.3 TB/s.

                                  31B                             26B-A4B
    head dim 256, ring of 1088    Triton 39, 1.2                  Triton 26, 1.6
    head dim 512, 8192 keys       Mosaic 169, 1.4                 Mosaic 88, 1.4
        32768 keys                Mosaic 326, 1.3 (4 sequences)   Mosaic 324, 1.3
    head dim 128, draft block,
        2048 keys                 Mosaic 26, 1.7 (Triton 33)      Triton 25, 1.6
        8192 keys                 Mosaic 74, 1.2 (Triton 102)     Triton 72, 1.2
        32768 keys                Mosaic 266, 1.1 (Triton 407)    Triton 259, 1.0
        ring of 2112              Mosaic 27, 1.7                  Triton 29, 1.8

The draft block of 31B takes these times in short contexts, with Mosaic and with Triton: 1 sequence
of 1024 keys 7 and 12, 1 of 2048 keys 9 and 15, 8 sequences of 256 keys 10 and 12, 8 of 512 keys 13
and 15.

At head dim 512 with so many rows, the products are many for the bytes that are read: 128 rows need
490 TFLOP/s to keep up with memory. One Triton program has no room for 128 rows beside their
results. Two programs that each make half of the columns (`parts`) take 359 us for the 8192 keys of
31B. Two programs of 64 rows each take 427 us. Both times are net of a loop around the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from pallas_kernels.attention.triton import Tiling
from pallas_kernels.dispatch import HOPPER_SHARED_BYTES, processors

# Least number of keys of a split. With fewer, starting and adding up take longer than reading.
MIN_KEYS = 128

# One query of each sequence, microseconds, bfloat16, keys not in L2 (31B and 26B-A4B at head dim
# 256 have 16 and 8 kv heads; at head dim 512, 4 and 2):
#
#   head dim 256, blocks of 32 keys    2 stages   3 stages
#   31B, 8 sequences of 1000 keys      58         42
#   26B-A4B, 32 of 1000                75         72
#   31B, 32 of 300                     49         54
#   31B, 32 of 1000                    131        149
#   head dim 512, blocks of 32 keys    2 stages   3 stages   Mosaic
#   31B, 8 sequences of 8000 keys      151        127        131
#   31B, 4 of 32000                    283        244        246
#   31B, 32 of 1500                    113        100        112
#   31B, 32 of 300                     33         31         38
#
# With more programs than run at once, fewer stages let more of them run. At head dim 512 three
# stages need the shared memory of Hopper.
#
# Blocks of fp8 keys take half of the room, so at head dim 512 one more is loaded ahead. 4 sequences
# of 32768 keys of 31B: one query 321 us instead of 360, 8 queries 568 us instead of 620.
TABLE = (
    # Each row: largest head dim, most rows, (keys, warps, stages, parts).
    (128, 16, (64, 4, 3, 1)),
    (128, 64, (64, 4, 3, 1)),
    (128, 128, (64, 8, 3, 1)),
    (256, 16, (32, 4, 3, 1)),
    (256, 32, (64, 4, 3, 1)),
    (256, 64, (64, 8, 2, 1)),
    (512, 16, (32, 4, 2, 1)),
    (512, 64, (32, 8, 2, 1)),
    (512, 128, (32, 8, 2, 2)),
)
# Tilings for chunks of prompts, by largest head dim. With these, no two warps do the same products:
# Triton gives 16 rows to each warp. 512 tokens of 31B take 307 us, and 723 us in XLA, at head dim
# 256 (4 sequences, ring of 1088). At head dim 512 (1 sequence, 16384 keys) they take 2507 us, and
# 1961 us in XLA.
MANY_ROWS = 128
CHUNKS = (
    (128, Tiling(MANY_ROWS, 64, 8, 3, 1)),
    (256, Tiling(MANY_ROWS, 64, 8, 2, 1)),
    (512, Tiling(MANY_ROWS, 32, 8, 2, 1, parts=2)),
)


# Tilings of short caches, in which each split is one block: all keys and values are loaded at once.
# One sequence of 300 keys in a cache of 384 slots, microseconds, with the average of the splits:
#
#                         31B   26B-A4B   E4B   31B, 8 queries   26B-A4B, 16 queries
#   head dim 256          6.7   6.1       5.3   7.1              7.2
#   with 3 splits         7.9   8.5       7.0   9.4              9.0
#   XLA                   8.5   7.7       7.1   12.1             11.4
#   head dim 512          6.2   6.5       6.4
#   XLA                   8.2   7.6       7.6
#
# With more programs than run at once this is slower: 13.4 instead of 11.1 for 1000 keys of 31B.
AT_ONCE = (
    # Each row: largest head dim, most rows, keys.
    (256, 32, 64),
    (512, 16, 32),
)


def tiling_at_once(*, head_dim: int, rows: int, heads: int, longest: int) -> Tiling | None:
    """Return a tiling in which each split is one block, or None where programs would be too many.

    Arguments as in `tiling_for`.
    """
    tile, row = _tile(rows), next((row for row in AT_ONCE if head_dim <= row[0]), None)
    if row is None or tile > row[1]:
        return None
    keys = row[2]
    splits = -(-longest // keys)
    return (
        Tiling(tile, keys, 4, 2, splits) if splits > 1 and heads * splits <= processors() else None
    )


def tiling_for(
    *,
    head_dim: int,
    rows: int,
    heads: int,
    longest: int,
    narrow: bool = False,
    masked: bool = False,
    hopper: bool = False,
    shared_memory: int = HOPPER_SHARED_BYTES,
) -> Tiling:
    """Return the tiling of the Triton kernel for these sizes.

    Chunks of prompts have tilings of their own. Otherwise it is the first row of the table with
    room for these rows at this head dim. Where shared memory is too small for it, it is a smaller
    one.

    Args:
      head_dim: width of keys and values.
      rows: query heads of one kv head times tokens.
      heads: kv heads of all sequences.
      longest: slots of the longest segment.
      narrow: whether keys are fp8.
      masked: whether a segment has a mask.
      hopper: whether the GPU is a Hopper.
      shared_memory: bytes of shared memory that a program can have.
    """
    tilings = _tilings(head_dim, rows, heads, narrow=narrow, hopper=hopper)
    if not hopper:  # whose tilings were all measured, and count otherwise
        size = functools.partial(
            Tiling.shared_bytes, head_dim=head_dim, key_bytes=1 if narrow else 2, masked=masked
        )
        tilings = (tiling for tiling in tilings if size(tiling) <= shared_memory)
    tiling = next(tilings)
    programs = heads * -(-rows // tiling.rows) * tiling.parts
    return dataclasses.replace(tiling, splits=_splits(programs, longest))


def _tilings(
    head_dim: int, rows: int, heads: int, *, narrow: bool, hopper: bool
) -> Iterator[Tiling]:
    """Yield the tiling for these sizes, and then smaller ones, all without splits."""
    for max_head_dim, tiling in CHUNKS:
        if (
            head_dim <= max_head_dim
            and rows > MANY_ROWS
            and heads * rows >= processors() * MANY_ROWS
        ):
            yield tiling
            break
    fits = [row for row in TABLE if head_dim <= row[0]]
    if not fits:
        raise ValueError(f"the table of tilings ends at head dim {TABLE[-1][0]}, not {head_dim}")
    same = [row for row in fits if row[0] == fits[0][0]]
    first = next((i for i, row in enumerate(same) if _tile(rows) <= row[1]), len(same) - 1)
    for _, max_rows, (keys, warps, stages, parts) in reversed(same[: first + 1]):
        tile = min(_tile(rows), max_rows)
        programs = heads * -(-rows // tile) * parts
        if head_dim > 256 and ((narrow and tile <= 64) or (hopper and tile <= 16)):
            stages += 1
        if 128 < head_dim <= 256 and tile <= 16 and programs > 2 * processors():
            stages -= 1
        for fewer in range(stages, 1, -1):
            yield Tiling(tile, keys, warps, fewer, 1, parts)
        if tile > 16 and parts == 1:
            yield Tiling(tile, keys // 2, warps, 2, 1, parts)
        if tile > 32 and parts == 1:
            yield Tiling(32, keys, warps, 2, 1, parts)


def splits_for(*, rows: int, heads: int, longest: int) -> int:
    """Return among how many blocks a Mosaic kernel splits the keys of a tile of 64 rows.

    Args:
      rows: query heads of one kv head times tokens.
      heads: kv heads of all sequences.
      longest: slots of the longest segment.
    """
    return _splits(heads * -(-rows // 64), longest)


def _tile(rows: int) -> int:
    """Return the rows of a tile that has room for all of these."""
    return max(16, 1 << (rows - 1).bit_length())


def _splits(programs: int, longest: int) -> int:
    # A GPU runs a program on each of its processors at once, at least. With a few programs more,
    # most of it waits for these few. For the 32 programs of 26B-A4B at head dim 512, 5 splits took
    # 371 us and 4 splits 244 us on an H200.
    return max(1, min(processors() // programs, longest // MIN_KEYS))
