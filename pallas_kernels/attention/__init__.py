"""Cached attention for few queries: new tokens against long caches, rings and each other.

`reference.py` shows what is computed. `triton.py` reads each key once for all queries.
`mosaic_h512.py` does that on Hopper at head dim 512, and `mosaic_h128.py` at head dim 128.
`spans.py` finds the keys that a tile of rows reads. `mosaic_launch.py` launches both Mosaic
kernels. `tuning.py` has tile sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import KVSegment, gathered, reference, reference_in_blocks
from pallas_kernels.attention.triton import Tiling, attention_triton
from pallas_kernels.attention.tuning import splits_for, tiling_at_once, tiling_for
from pallas_kernels.dispatch import (
    HOPPER,
    KV_DTYPES,
    MAX_NUMBERS,
    Candidate,
    capability,
    devices_of_mesh,
    dispatch,
    shared_bytes,
    why_not_mosaic,
    why_not_triton,
)

__all__ = ["KVSegment", "Tiling", "attention", "gathered", "reference"]

Implementation = Literal["auto", "reference", "triton", "mosaic"]

# More query tokens than this are a chunk of a prompt. "auto" takes the Triton kernel for one at
# head dims up to 256, and Mosaic at head dim 512, where it can run. Microseconds of XLA and of the
# kernel on an H200 (jax 0.11.2, bfloat16), for a layer's writes and reads of its cache:
#
#   rows x tokens        1x512     2x256     4x128     8x64        of a prompt that begins
#   31B, ring of 1088    737, 255  345, 159  302, 163  317, 200
#   31B, 8320 keys       899, 146                                  1x512 at 4096: 884, 520
#                                                                  1x512 at 7680: 878, 852
#   rows x tokens        1x2048    4x512     8x256     16x128
#   26B-A4B, ring        799, 237  551, 239  560, 212  581, 247
#   26B-A4B, 3072 keys   656, 389  637, 244            716, 264    1x2048 at 6144: 1667, 1472
#   E4B, 1x512: ring 95, 80, and 3072 keys 128, 101
#
# XLA reads all slots of a cache, and writes all scores; a kernel reads the keys that are there.
# Triton at head dim 512 takes 1407 at 7680, and so it is left to XLA.
MAX_TOKENS = 64
# To save memory, "auto" takes a kernel from this many bytes of float32 scores on. XLA would write
# all scores to memory. 512 tokens of a prompt of 31B have so many scores from 16384 slots on.
# Where no kernel can run, queries come in blocks of so many bytes.
MAX_SCORE_BYTES = 1 << 30
# For few tokens, "auto" takes a kernel from this many bytes of keys, values and scores on.
# MIN_BYTES_WIDE is for the Triton kernel at head dims over 256. The table has microseconds of
# XLA and of the kernel on an H200 (jax 0.11.2), net of the loop around them:
#
#   head dim 256, one query   3 MB: 5, 6     28 MB: 17, 15   57 MB: 27, 22   110 MB: 58, 37
#   draft blocks              3 MB: 9, 9     25 MB: 25, 14   134 MB: 152, 31
#   head dim 512, Triton      17 MB: 12, 20  42 MB: 30, 39   63 MB: 44, 52   107 MB: 59, 59
#   head dim 512, Mosaic      17 MB: 12, 17  31 MB: 24, 22   42 MB: 30, 27   63 MB: 44, 39
#                             107 MB: 59, 51
#
# The scores of draft blocks take as many bytes as their keys. 6 to 8 microseconds of the times of
# Mosaic are for the spans of keys, which are computed once for all layers.
MIN_BYTES = 8 << 20
MIN_BYTES_WIDE = 64 << 20
# With so few rows a kv head, the Triton kernel at head dim 512 has a tiling for Hopper that is
# faster than the table says. 8 sequences of 31B with a query each: 13 us for 300 keys (XLA 14), and
# 129 us for 8000 keys (XLA 148, Mosaic 146 with its spans and paddings).
FEW_ROWS = 16


def attention(
    q: Float[Array, "B T K G H"],
    q_positions: Int[Array, "B T"],
    segments: tuple[KVSegment, ...],
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    value_scale: float = 1.0,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "B T K G H"]:
    """Attend from each query to every key that it may see, over all segments at once.

    A query at position q sees a key at position k when all of these hold: the key exists (k >= 0);
    k > q - window, if there is a window; k <= q, if causal; `seen_by` of the segment allows it, if
    given. For a query that sees no key the result is finite but meaningless.

    Args:
      q: queries. G of them share a kv head.
      q_positions: positions of the queries.
      segments: keys and values in any order, in the dtype of the queries or a narrower one, which
        is converted as it is read. Slots behind the last key of a segment may hold
        anything for the kernels, even NaN. The reference needs finite values there. Kernels read a
        segment with `pages` where it is. The reference copies the pages of the batch first.
      scale: factor of the scores.
      window: number of positions that a query sees, its own included; None for all.
      causal: whether queries see no later keys.
      value_scale: factor of the result, where values are stored divided by it.
      implementation: "reference" runs anywhere. "triton" needs 16-bit queries, keys in 16 bits or
        fp8, and an NVIDIA GPU of compute capability 8.0 or newer, 8.9 for fp8 (or `interpret`).
        "mosaic" needs 16-bit queries, a GPU of compute capability 9.0, a multiple of 8 slots (in
        several pages: of 64 in each), no `seen_by`, and head dim 512 or 128. At head dim 512 it
        needs keys in 16 bits or fp8, one segment and no window. At head dim 128 it needs 16-bit
        keys, no `value_scale`, 8, 16, 32 or 64 query heads per kv head, and at most one further
        segment, of at most 128 slots. "auto"
        takes Mosaic, else Triton, where the kernel can run and one of two things holds: the kernel
        is faster (many keys for few tokens, short caches of few sequences on Hopper, most chunks of
        prompts), or the scores of the reference would fill memory. Elsewhere "auto" takes the
        reference, in blocks of queries where their scores would fill memory.
      tiling: tile sizes of the Triton kernel; None takes them from the table in `tuning.py`.
      interpret: whether to interpret the Triton kernel. It then runs on any device, slowly. For
        tests.

    Raises:
      ValueError: shapes or dtypes do not fit together.
      NotImplementedError: implementation is "triton" or "mosaic" and it cannot run.
    """
    _check(q, q_positions, segments)
    b, t, k, g, h = q.shape
    rows, heads, longest = t * g, b * k, max(s.positions.shape[1] for s in segments)
    kwargs = {"scale": scale, "window": window, "causal": causal}
    scaled = {**kwargs, "value_scale": value_scale}
    narrow = {s.k.dtype for s in segments} != {q.dtype}

    hopper = capability() == HOPPER
    sizes: dict[str, Any] = {"head_dim": h, "rows": rows, "heads": heads, "longest": longest}
    at_once = tiling_at_once(**sizes) if hopper and len(segments) == 1 and not narrow else None

    def mosaic(*args: Any) -> Array:
        splits = splits_for(rows=rows, heads=heads, longest=longest)
        return _mosaic_kernel(h)(*args, **(scaled if h == 512 else kwargs), splits=splits)

    def triton(q: Array, q_positions: Array, segments: tuple[KVSegment, ...]) -> Array:
        tiles = tiling or at_once
        if tiles is None:
            masked = any(s.seen_by is not None for s in segments)
            kind = {"narrow": narrow, "masked": masked, "hopper": hopper}
            tiles = tiling_for(**sizes, **kind, shared_memory=shared_bytes())
        kwargs = {**scaled, "tiling": tiles, "interpret": interpret}
        return attention_triton(q, q_positions, _counted_in_32_bits(segments), **kwargs)

    # At head dim 128 "auto" takes Mosaic only for more than one tile of rows. The kernel was not
    # measured with fewer rows. At head dim 512 Triton is as quick with few rows, and needs no
    # padding.
    mosaic_pays = hopper and (rows > FEW_ROWS if h == 512 else rows > 64)
    if narrow:
        # The form for fp8 keys, from a whole tile of rows on. For 4 sequences of 32768 keys of 31B,
        # 8 queries take 383 us (Triton 568, bfloat16 keys 294), and one query 365 (Triton 321).
        # Chunks of prompts were not measured.
        mosaic_pays = mosaic_pays and rows >= 64 and t <= MAX_TOKENS
    candidates = [
        Candidate(
            "mosaic",
            mosaic,
            reason=_why_not_mosaic(q, segments, window, value_scale, interpret),
            worth_it=mosaic_pays and _worth_it(q, segments, MIN_BYTES, for_prompts=h == 512),
        ),
        Candidate(
            "triton",
            triton,
            reason=_why_not_triton(q, segments, interpret),
            # XLA writes out keys that it converts, which is another cache.
            worth_it=narrow
            or at_once is not None
            or _worth_it(
                q,
                segments,
                MIN_BYTES if h <= 256 or (hopper and rows <= FEW_ROWS) else MIN_BYTES_WIDE,
                for_prompts=h <= 256,
            ),
        ),
    ]
    plain = functools.partial(reference_in_blocks, score_bytes=MAX_SCORE_BYTES, **scaled)
    return dispatch(implementation, candidates, plain, q, q_positions, segments)


def _worth_it(
    q: Array, segments: tuple[KVSegment, ...], fewest_bytes: int, *, for_prompts: bool
) -> bool:
    """Tell whether "auto" should take a kernel.

    It should for few tokens with many keys, where the scores would fill memory, and for chunks of
    prompts with a kernel that is quicker at them.
    """
    b, t, k, g, h = q.shape
    score_bytes = 4 * b * t * k * g * sum(s.positions.shape[1] for s in segments)
    read_bytes = score_bytes
    for s in segments:
        # XLA reads and writes pages before it reads their copy.
        times = 1 if s.pages is None else 3
        read_bytes += times * 2 * b * k * s.positions.shape[1] * h * s.k.dtype.itemsize
    is_quicker = (for_prompts or t <= MAX_TOKENS) and read_bytes >= fewest_bytes
    return is_quicker or score_bytes >= MAX_SCORE_BYTES


def _mosaic_kernel(head_dim: int) -> Callable[..., Array]:
    # Imported only when used, because older versions of jax lack what these files import.
    if head_dim == 512:
        from pallas_kernels.attention.mosaic_h512 import attention_mosaic_h512

        return attention_mosaic_h512
    from pallas_kernels.attention.mosaic_h128 import attention_mosaic_h128

    return attention_mosaic_h128


def _check(q: Array, q_positions: Array, segments: tuple[KVSegment, ...]) -> None:
    b, t, k, _, h = q.shape
    if q_positions.shape != (b, t):
        raise ValueError(
            f"for queries {q.shape}, positions must be {(b, t)}, not {q_positions.shape}"
        )
    if not segments:
        raise ValueError("there are no keys: pass one segment or more")
    for s in segments:
        size = s.positions.shape[-1]
        c = b if s.pages is None else s.k.shape[0]
        if s.pages is not None and (s.pages.ndim != 2 or s.pages.shape[0] != b):
            raise ValueError(f"for queries {q.shape}, pages must be [{b}, N], not {s.pages.shape}")
        pages = 1 if s.pages is None else s.pages.shape[1]
        page = size // pages
        if not s.k.shape == s.v.shape == (c, k, page, h) or s.positions.shape != (b, pages * page):
            raise ValueError(
                f"for queries {q.shape} and {pages} pages a row, keys and values must be "
                f"[{c}, {k}, S, {h}] and their positions [{b}, {pages} * S]; they are "
                f"{s.k.shape}, {s.v.shape} and {s.positions.shape}"
            )
        if s.seen_by is not None and s.seen_by.shape != (b, t, size):
            raise ValueError(f"seen_by must be {(b, t, size)}, not {s.seen_by.shape}")
        narrower = s.k.dtype.itemsize < q.dtype.itemsize
        if s.k.dtype != s.v.dtype or not (q.dtype == s.k.dtype or narrower):
            raise ValueError(
                "keys and values must have one dtype, that of the queries or a narrower one; "
                f"queries, keys and values are {q.dtype}, {s.k.dtype}, {s.v.dtype}"
            )


def _counted_in_32_bits(segments: tuple[KVSegment, ...]) -> tuple[KVSegment, ...]:
    """Replace each cache that is too large for the Triton kernel by a copy of the pages in use."""
    return tuple(gathered(s) if s.k.size >= MAX_NUMBERS else s for s in segments)


def _why_not_triton(q: Array, segments: tuple[KVSegment, ...], interpret: bool) -> str | None:
    """Return why the Triton kernel cannot take these keys on the GPU of this machine, or None."""
    if (h := segments[0].k.shape[3]) not in (16, 32, 64, 128, 256, 512):
        return f"the Triton kernel takes head dims that are a power of two from 16 to 512, not {h}"
    queries = jax.ShapeDtypeStruct((), q.dtype)
    segments = jax.eval_shape(_counted_in_32_bits, segments)
    return why_not_triton(queries, interpret=interpret) or why_not_triton(
        *(s.k for s in segments), interpret=interpret, dtypes=KV_DTYPES
    )


def _why_not_mosaic(
    q: Array,
    segments: tuple[KVSegment, ...],
    window: int | None,
    value_scale: float,
    interpret: bool,
) -> str | None:
    """Return why no Mosaic kernel can take these keys on the GPU of this machine, or None."""
    groups = q.shape[3]
    keys, *more = (s.k for s in segments)
    if reason := why_not_mosaic(interpret=interpret):
        return reason
    if (h := keys.shape[3]) not in (128, 512):
        return f"the Mosaic kernels are cut for head dims 128 and 512, not {h}"
    for x, dtypes in ((q, KV_DTYPES[:2]), (keys, KV_DTYPES if h == 512 else KV_DTYPES[:2])):
        if x.dtype not in dtypes:
            names = ", ".join(jnp.dtype(dtype).name for dtype in dtypes)
            return f"the Mosaic kernel of head dim {h} is cut for {names}, not {x.dtype}"
    if h == 128 and value_scale != 1:
        return "the Mosaic kernel of head dim 128 has no value_scale"
    if keys.shape[2] % 8:
        return f"the Mosaic kernel takes a multiple of 8 slots, not {keys.shape[2]}"
    pages = segments[0].pages
    if pages is not None and pages.shape[1] > 1 and keys.shape[2] % 64:
        return f"the Mosaic kernel takes pages of a multiple of 64 slots, not {keys.shape[2]}"
    if any(s.seen_by is not None for s in segments):
        return "the Mosaic kernel takes segments without seen_by"
    if h == 512 and (more or window is not None):
        return "the Mosaic kernel takes one segment and no window at head dim 512"
    if h == 128 and groups not in (8, 16, 32, 64):
        return f"the Mosaic kernel takes 8, 16, 32 or 64 heads of a kv head, not {groups}"
    if len(more) > 1 or any(k.shape[2] > 128 for k in more):
        sizes = [k.shape[2] for k in more]
        return f"the Mosaic kernel takes a second segment of at most 128 slots, not {sizes}"
    if devices := devices_of_mesh():
        return f"the Mosaic kernel runs on one device, not on a mesh of {devices}"
    return None
