"""Cached attention for few queries: the kernel, interpreted, against all scores and one softmax."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import MAX_SCORE_BYTES, KVSegment, attention, reference
from pallas_kernels.attention.reference import reference_in_blocks
from pallas_kernels.attention.spans import masked_span, visible_span
from pallas_kernels.attention.triton import Tiling
from pallas_kernels.attention.tuning import TABLE, splits_for, tiling_at_once, tiling_for
from pallas_kernels.common.reference_ops import stored_as
from tests.pallas_kernels.inputs import as_float32, compiled, difference
from tests.pallas_kernels.inputs.attention import FULL_31B, Shape, cached, fresh, in_pages, queries

SLIDING = Shape(4, 2, 32, window=24)
FULL = Shape(6, 2, 64)
DRAFT = Shape(4, 2, 16, causal=False)
# Several blocks of keys and of rows, with and without splits, with a rest.
TILING = Tiling(rows=16, keys=16, warps=4, stages=2, splits=1)
SPLIT = Tiling(rows=16, keys=16, warps=4, stages=2, splits=3)
# Each split is one block of a cache of at most 112 slots.
AT_ONCE = Tiling(rows=16, keys=16, warps=4, stages=2, splits=7)
PARTS = Tiling(rows=32, keys=16, warps=4, stages=2, splits=2, parts=2)


@functools.partial(compiled, static_argnames=("shape", "tiling"))
def interpreted(shape: Shape, q: Any, at: Any, segments: Any, tiling: Tiling = TILING) -> jax.Array:
    return attention(
        q,
        at,
        segments,
        scale=shape.head_dim**-0.5,
        window=shape.window,
        causal=shape.causal,
        implementation="triton",
        tiling=tiling,
        interpret=True,
    )


@functools.partial(compiled, static_argnames="shape")
def plain(shape: Shape, q: Any, at: Any, segments: Any) -> jax.Array:
    scale = shape.head_dim**-0.5
    return reference(q, at, segments, scale=scale, window=shape.window, causal=shape.causal)


def check(
    shape: Shape, q: Any, at: Any, segments: tuple[KVSegment, ...], tiling: Tiling = TILING
) -> None:
    ours = interpreted(shape, q, at, segments, tiling)
    theirs = plain(shape, q, at, segments)
    up = lambda x: as_float32(x) if x.dtype == jnp.bfloat16 else x  # noqa: E731
    exact = plain(shape, *jax.tree.map(up, (q, at, segments)))
    error = difference(ours, exact)
    if q.dtype == jnp.float32:  # the same sums in another order
        assert error < 1e-5
    else:
        assert error <= 2 * difference(theirs, exact)


@pytest.mark.parametrize(
    ("shape", "dtype", "tiling"),
    [
        (SLIDING, "bfloat16", SPLIT),
        (DRAFT, "float32", TILING),
        pytest.param(SLIDING, "float32", TILING, marks=pytest.mark.slow),
        pytest.param(FULL, "bfloat16", TILING, marks=pytest.mark.slow),
        pytest.param(FULL, "float32", SPLIT, marks=pytest.mark.slow),
        pytest.param(DRAFT, "bfloat16", SPLIT, marks=pytest.mark.slow),
    ],
)
def test_a_cache_and_fresh_keys(shape: Shape, dtype: str, tiling: Tiling) -> None:
    """Rows of any length, and more rows and keys than a block has."""
    lengths, kind = [7, 8, 47, 100], jnp.dtype(dtype)
    q, at = queries(shape, lengths, 7, kind)
    before = cached(shape, [length - 7 for length in lengths], 100, kind)
    check(shape, q, at, (before, fresh(shape, at, kind)), tiling)


@pytest.mark.parametrize("tokens", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_ring(tokens: int) -> None:
    lengths, kind = [5, 31, 33, 200], jnp.dtype("bfloat16")
    q, at = queries(SLIDING, lengths, tokens, kind)
    check(SLIDING, q, at, (cached(SLIDING, lengths, 32, kind, ring=True),), SPLIT)


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        (SLIDING, "bfloat16", 100),
        (FULL, "float32", 112),
        pytest.param(DRAFT, "bfloat16", 20, marks=pytest.mark.slow),
    ],
)
def test_splits_of_one_block(shape: Shape, dtype: str, size: int) -> None:
    """Some splits see no key, one is cut off by the end of the cache, and more rows than a tile has."""
    lengths, kind = [9, 16, 17, size], jnp.dtype(dtype)
    q, at = queries(shape, lengths, 9, kind)
    check(shape, q, at, (cached(shape, lengths, size, kind),), AT_ONCE)


def test_more_splits_than_are_averaged_at_once() -> None:
    lengths, kind = [1, 150, 400], jnp.dtype("bfloat16")
    q, at = queries(FULL, lengths, 1, kind)
    tiling = Tiling(rows=16, keys=16, warps=4, stages=2, splits=21)
    check(FULL, q, at, (cached(FULL, lengths, 400, kind),), tiling)


@pytest.mark.parametrize("shape", [FULL, pytest.param(SLIDING, marks=pytest.mark.slow)])
def test_a_chunk_of_a_prompt(shape: Shape) -> None:
    """Many tiles of queries, each of which sees keys of its own, and columns of values in parts."""
    lengths, kind = [24, 60], jnp.dtype("bfloat16")
    q, at = queries(shape, lengths, 24, kind)
    before = cached(shape, [length - 24 for length in lengths], 48, kind)
    check(shape, q, at, (before, fresh(shape, at, kind)), PARTS)


def test_branches_of_a_tree_do_not_see_each_other() -> None:
    lengths, kind = [5, 31, 200], jnp.dtype("bfloat16")
    q, at = queries(FULL, lengths, 5, kind)
    before = cached(FULL, [length - 5 for length in lengths], 208, kind)
    check(FULL, q, at, (before, fresh(FULL, at, kind, tree=True)))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 96])
@pytest.mark.parametrize("room_kib", [99, 227], ids=["RTX", "Hopper"])
def test_the_table_at_real_widths(
    head_dim: int, tokens: int, window: int | None, room_kib: int
) -> None:
    shape, lengths, kind = Shape(8, 1, head_dim, window), [tokens, 301, 512], jnp.dtype("bfloat16")
    q, at = queries(shape, lengths, tokens, kind)
    sizes: dict[str, Any] = dict(head_dim=head_dim, rows=8 * tokens, heads=3, longest=512)
    tiling = tiling_for(**sizes, shared_memory=room_kib << 10)
    check(shape, q, at, (cached(shape, lengths, 512, kind),), tiling)


@pytest.mark.parametrize(
    ("shape", "tiling"),
    [
        (SLIDING, TILING),
        (SLIDING, SPLIT),
        pytest.param(DRAFT, TILING, marks=pytest.mark.slow),
        pytest.param(FULL, AT_ONCE, marks=pytest.mark.slow),
    ],
)
def test_what_is_behind_the_last_key_does_no_harm(shape: Shape, tiling: Tiling) -> None:
    lengths, kind = [0, 1, 17, 40], jnp.dtype("float32")
    q, at = queries(shape, lengths, 1, kind)
    spoilt, clean = (cached(shape, lengths, 40, kind, empty=x) for x in (float("nan"), 0.0))
    got = interpreted(shape, q, at, (spoilt,), tiling)
    assert difference(got, interpreted(shape, q, at, (clean,), tiling)) == 0
    assert np.isfinite(got).all()


def some_pages(rows: int, of_row: int) -> tuple[np.ndarray, int]:
    """Return pages of rows, in any order, and the number of pages in all.

    The last row has no page. It reads the last page, which the first row has.
    """
    total = rows * of_row + 2
    pages = np.random.default_rng(0).permutation(total - 1)[: rows * of_row].reshape(rows, of_row)
    pages[0, 0] = total - 1
    pages[-1] = total + np.arange(of_row)
    return pages, total


@pytest.mark.parametrize(
    ("shape", "dtype", "tiling", "slots", "of_row", "tree"),
    [
        (SLIDING, "float32", SPLIT, 32, 1, False),
        (SLIDING, "float32", SPLIT, 32, 2, False),  # a block of keys is a page
        (FULL, "bfloat16", TILING, 100, 5, True),  # pages that no block divides
        (DRAFT, "bfloat16", SPLIT, 128, 4, False),  # pages of two blocks
        pytest.param(FULL, "bfloat16", TILING, 100, 1, True, marks=pytest.mark.slow),
        pytest.param(SLIDING, "bfloat16", TILING, 32, 1, True, marks=pytest.mark.slow),
        pytest.param(SLIDING, "bfloat16", TILING, 32, 4, True, marks=pytest.mark.slow),
        pytest.param(FULL, "float32", PARTS, 100, 1, False, marks=pytest.mark.slow),
        pytest.param(FULL, "float32", PARTS, 112, 7, False, marks=pytest.mark.slow),
        pytest.param(DRAFT, "bfloat16", SPLIT, 100, 1, False, marks=pytest.mark.slow),
        pytest.param(DRAFT, "float32", TILING, 100, 10, False, marks=pytest.mark.slow),
    ],
)
def test_a_cache_is_read_by_pages(
    shape: Shape, dtype: str, tiling: Tiling, slots: int, of_row: int, tree: bool
) -> None:
    """Pages in any order, of a cache whose other pages hold NaN. To the bit as without pages."""
    ring = shape.window is not None
    lengths, kind = [7, 47, 100, 7], jnp.dtype(dtype)
    q, at = queries(shape, lengths, 7, kind)
    before = cached(shape, [length - 7 for length in lengths], slots, kind, ring=ring)
    own = (fresh(shape, at, kind, tree=tree),)
    many = in_pages(before, *some_pages(len(lengths), of_row))
    check(shape, q, at, (many, *own), tiling)
    there = interpreted(shape, q, at, (many, *own), tiling)
    assert difference(there, interpreted(shape, q, at, (before, *own), tiling)) == 0


def test_splits_of_one_block_are_read_by_pages() -> None:
    lengths, kind = [9, 16, 17, 100], jnp.dtype("bfloat16")
    q, at = queries(FULL, lengths, 9, kind)
    before = cached(FULL, lengths, 112, kind)
    pages = np.random.default_rng(0).permutation(4 * 7).reshape(4, 7)
    many = in_pages(before, pages, pages.size)
    there = interpreted(FULL, q, at, (many,), AT_ONCE)
    assert difference(there, interpreted(FULL, q, at, (before,), AT_ONCE)) == 0


def test_a_cache_that_is_too_large_for_the_kernel_is_read_through_a_copy() -> None:
    """Its offsets are 32 bits. Of 512 pages of 8192 keys, a batch of 4 reads 34 million numbers."""
    cache = jax.ShapeDtypeStruct((512, 2, 8192, 512), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((4, 1, 2, 8, 512), jnp.bfloat16)
    index = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    few = KVSegment(cache, cache, index(4, 8192), pages=index(4, 1))  # type: ignore[arg-type]
    call = functools.partial(attention, scale=1.0, implementation="triton")
    jaxpr = str(jax.make_jaxpr(call)(q, index(4, 1), (few,)))
    assert jaxpr.count(":bf16[4,1,2,8192,512] = gather[") == 2
    whole = few._replace(positions=index(512, 8192), pages=None)
    q = jax.ShapeDtypeStruct((512, *q.shape[1:]), q.dtype)
    with pytest.raises(NotImplementedError, match="offsets are 32 bits"):
        jax.eval_shape(call, q, index(512, 1), (whole,))


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [(None, True, (0, 12)), (None, False, (0, 20)), (4, True, (7, 12)), (4, False, (7, 20))],
)
def test_the_span_is_what_some_query_sees(
    window: int | None, causal: bool, expected: Sequence[int]
) -> None:
    positions = jnp.where(jnp.arange(24) < 20, jnp.arange(24), -1)[None]
    ends = jnp.array([[10, 2]]), jnp.array([[11, 3]])  # of two tiles of queries
    got = visible_span(*ends, positions, window=window, causal=causal)
    assert got[:, 0].tolist() == [list(expected)]
    assert got[0, 1, 1] == (4 if causal else 20)
    nothing = visible_span(*ends, jnp.full((1, 24), -1), window=window, causal=causal)
    assert nothing.tolist() == [[[24, 0]] * 2]


def test_a_mask_is_needed_where_some_query_does_not_see_what_others_do() -> None:
    """A ring of 24 slots: queries at 22 to 25, window 20, of which slots 2 to 9 hold what some do not see."""
    slot = jnp.arange(24)
    positions = jnp.where(slot < 2, slot + 24, slot)[None]
    ends = jnp.array([[22]]), jnp.array([[25]])
    options: dict[str, Any] = dict(window=20, causal=True)
    seen = visible_span(*ends, positions, **options)
    assert seen.tolist() == [[[0, 24]]]
    assert masked_span(seen, *ends, positions, **options).tolist() == [[[0, 24]]]
    past = jnp.array([[26]]), jnp.array([[29]])  # all of whom see what is in the first slots
    seen = visible_span(*past, positions, **options)
    assert masked_span(seen, *past, positions, **options).tolist() == [[[2, 10]]]
    everything: dict[str, Any] = dict(window=None, causal=False)
    seen = visible_span(*ends, positions, **everything)
    assert masked_span(seen, *ends, positions, **everything).tolist() == [[[24, 0]]]


def test_auto_is_the_reference_where_there_is_no_gpu() -> None:
    q, at = queries(FULL, [9], 3, jnp.dtype("bfloat16"))
    segments = (cached(FULL, [9], 16, jnp.dtype("bfloat16")),)
    assert (attention(q, at, segments, scale=0.125) == plain(FULL, q, at, segments)).all()


def test_the_table_has_a_row_for_every_shape() -> None:
    for head_dim in (16, 128, 256, 512):
        for rows in (1, 16, 17, 128, 1000):
            tiling = tiling_for(head_dim=head_dim, rows=rows, heads=2, longest=8192)
            config = (tiling.keys, tiling.warps, tiling.stages, tiling.parts)
            assert config in [row[2] for row in TABLE]
            assert 16 <= tiling.rows <= max(16, 2 * rows)
    assert tiling_for(head_dim=256, rows=32, heads=128, longest=8192).splits <= 2
    assert tiling_for(head_dim=256, rows=32, heads=1, longest=64).splits == 1


def test_tilings_load_ahead_what_shared_memory_holds() -> None:
    """Many programs share a processor, and at head dim 512 only Hopper has room for a third stage."""
    one = functools.partial(tiling_for, rows=2, longest=1088)
    assert one(head_dim=256, heads=128).stages == 3
    assert one(head_dim=256, heads=512).stages == 2
    assert one(head_dim=512, heads=32).stages == 2
    assert one(head_dim=512, heads=32, hopper=True).stages == 3
    assert one(head_dim=512, heads=32, hopper=True, narrow=True).stages == 3


@pytest.mark.parametrize("room_kib", [99, 163], ids=["RTX", "A100"])
@pytest.mark.parametrize("head_dim", [16, 128, 256, 512])
def test_tilings_fit_gpus_with_less_shared_memory_than_hopper(head_dim: int, room_kib: int) -> None:
    """XLA refuses a kernel that asks for more, and with it the whole program."""
    for rows in (1, 16, 17, 32, 64, 100, 128, 1000):
        for heads, narrow, masked in itertools.product((2, 512), (False, True), (False, True)):
            kind = dict(narrow=narrow, masked=masked)
            sizes: dict[str, Any] = dict(head_dim=head_dim, rows=rows, heads=heads, longest=4096)
            tiling = tiling_for(**sizes, **kind, shared_memory=room_kib << 10)
            size = tiling.shared_bytes(head_dim, 1 if narrow else 2, masked=masked)
            assert size <= room_kib << 10
            assert tiling.keys >= 16
            assert tiling.rows >= min(32, rows)  # else keys would be read again and again
            largest = tiling_for(**sizes, **kind)
            if largest.shared_bytes(head_dim, 1 if narrow else 2, masked=masked) <= room_kib << 10:
                assert tiling == largest


def test_short_caches_are_loaded_at_once() -> None:
    one = functools.partial(tiling_at_once, rows=2, heads=16)
    assert one(head_dim=256, longest=384) == Tiling(16, 64, 4, 2, splits=6)
    assert one(head_dim=512, longest=250) == Tiling(16, 32, 4, 2, splits=8)
    assert one(head_dim=256, longest=64) is None  # one block: nothing to split
    assert one(head_dim=256, longest=1088) is None  # more programs than a GPU runs at once
    assert tiling_at_once(head_dim=512, rows=32, heads=2, longest=384) is None  # no room


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(q_positions=jnp.zeros((1, 3), int)), r"positions must be \(1, 2\)"),
        (dict(segments=()), "pass one segment or more"),
        (dict(q=jnp.zeros((1, 2, 3, 2, 16))), r"keys and values must be \[1, 3, S, 16\]"),
        (dict(q=jnp.zeros((1, 2, 1, 2, 16), jnp.bfloat16)), "one dtype"),
        (dict(implementation="cuda"), "pass auto, reference, triton or mosaic"),
        (dict(pages=jnp.zeros(2, int)), r"pages must be \[1, N\], not \(2,\)"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    segment = KVSegment(
        jnp.zeros((1, 1, 8, 16)), jnp.zeros((1, 1, 8, 16)), jnp.zeros((1, 8), jnp.int32)
    )
    good = dict(
        q=jnp.zeros((1, 2, 1, 2, 16)),
        q_positions=jnp.zeros((1, 2), int),
        segments=(segment,),
        scale=1.0,
    )
    if "pages" in change:
        change = dict(segments=(segment._replace(pages=change["pages"]),))
    call: Any = getattr(attention, "__wrapped__", attention)
    with pytest.raises(ValueError, match=words):
        call(**{**good, **change})


def test_a_choice_that_cannot_run_is_refused() -> None:
    q, at = queries(FULL, [9], 3, jnp.dtype("float32"))
    segments = (cached(FULL, [9], 16, jnp.dtype("float32")),)
    with pytest.raises(NotImplementedError, match="bfloat16 and float16, not float32"):
        attention(q, at, segments, scale=1.0, implementation="triton")


needs_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernel needs jax 0.11.2"
)
WIDE, NARROW = Shape(16, 2, 512), Shape(16, 2, 128, causal=False)


@needs_new_jax
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(shape=FULL), "head dims 128 and 512, not 64"),
        (dict(shape=Shape(8, 2, 128)), "8, 16, 32 or 64 heads of a kv head, not 4"),
        (dict(size=20), "a multiple of 8 slots, not 20"),
        (dict(dtype="float32"), "bfloat16, float16, not float32"),
        (
            dict(shape=NARROW, fp8=True),
            "head dim 128 is cut for bfloat16, float16, not float8_e4m3",
        ),
        (dict(dtype="float32", fp8=True), "bfloat16, float16, not float32"),
        (dict(shape=Shape(16, 2, 512, window=24)), "one segment and no window"),
        (dict(interpret=True), "is not interpreted"),
    ],
)
def test_what_the_mosaic_kernel_cannot_do_is_named(change: dict[str, Any], words: str) -> None:
    shape, dtype = change.get("shape", WIDE), jnp.dtype(change.get("dtype", "bfloat16"))
    q, at = queries(shape, [9], 3, dtype)
    segments = (cached(shape, [9], change.get("size", 16), dtype),)
    if "fp8" in change:
        segments = (narrowed(segments[0]),)
    with pytest.raises(NotImplementedError, match=words):
        attention(
            q,
            at,
            segments,
            scale=1.0,
            window=shape.window,
            implementation="mosaic",
            interpret="interpret" in change,
        )


def test_the_blocks_of_the_mosaic_kernel_fill_a_gpu_at_once() -> None:
    assert splits_for(rows=128, heads=32, longest=8192) == 2
    assert splits_for(rows=8, heads=4, longest=8192) == 33
    assert splits_for(rows=8, heads=4, longest=256) == 2
    assert splits_for(rows=4096, heads=32, longest=8192) == 1


@pytest.mark.gpu
@needs_new_jax
@pytest.mark.parametrize(
    ("shape", "lengths", "size", "tokens"),
    [
        (WIDE, [16, 500, 1000], 1000, 16),  # two tiles of rows, a last block that is not whole
        (WIDE, [8, 0, 63, 64, 65], 256, 8),  # one, and a row that is empty
        (WIDE, [1, 2, 2500], 2560, 1),  # many shares
        (WIDE, [300, 900], 1024, 256),  # a chunk of a prompt
        (Shape(32, 4, 512, causal=False), [12, 700], 704, 12),
        (NARROW, [16, 17, 144, 145, 1000], 1000, 16),
        (
            NARROW,
            [12, 0, 700, 268, 269],
            704,
            12,
        ),  # tiles of rows, and fresh keys, that are not whole
        (Shape(64, 1, 128, causal=False), [1, 5, 4096], 4096, 1),  # one tile, many shares
        (Shape(8, 1, 128, window=512), [16, 500, 1000, 5000], 536, 16),  # a ring
        (Shape(8, 1, 128), [300, 900], 1024, 256),  # a chunk of a prompt
    ],
)
def test_the_mosaic_kernels(shape: Shape, lengths: Sequence[int], size: int, tokens: int) -> None:
    kind, draft = jnp.dtype("bfloat16"), shape.head_dim == 128 and tokens <= 16
    options = dict(scale=shape.head_dim**-0.5, causal=shape.causal, window=shape.window)
    q, at = queries(shape, lengths, tokens, kind)
    before = [max(length - tokens, 0) if draft else length for length in lengths]
    ring, own = shape.window is not None, (fresh(shape, at, kind),) if draft else ()
    clean, spoilt = (
        (cached(shape, before, size, kind, ring=ring, empty=x), *own) for x in (0.0, float("nan"))
    )
    ours = attention(q, at, spoilt, implementation="mosaic", **options).astype(jnp.float32)
    theirs = plain(shape, q, at, clean).astype(jnp.float32)
    up = lambda x: x.astype(jnp.float32) if x.dtype == kind else x  # noqa: E731
    exact = plain(shape, *jax.tree.map(up, (q, at, clean)))
    seen = jnp.asarray(lengths) > 0
    assert jnp.isfinite(ours).all()
    error, allowed = (jnp.max(jnp.abs(x - exact)[seen]) for x in (ours, theirs))
    assert error <= 2 * allowed


@pytest.mark.gpu
@needs_new_jax
@pytest.mark.parametrize(
    ("shape", "lengths", "size", "tokens"),
    [
        (WIDE, [16, 500, 1000], 1000, 16),  # two tiles of rows: each block loads half for the other
        (WIDE, [8, 0, 63, 64, 65], 256, 8),  # one, and a row that is empty
        (WIDE, [1, 2, 2500], 2560, 1),  # many shares
        (Shape(32, 4, 512, causal=False), [12, 700], 704, 12),
    ],
)
def test_the_mosaic_kernel_converts_fp8(
    shape: Shape, lengths: Sequence[int], size: int, tokens: int
) -> None:
    kind = jnp.dtype("bfloat16")
    q, at = queries(shape, lengths, tokens, kind)
    clean, spoilt = (
        narrowed(cached(shape, lengths, size, kind, empty=x)) for x in (0.0, float("nan"))
    )
    how: dict[str, Any] = dict(scale=shape.head_dim**-0.5 / 200, causal=shape.causal)
    ours = attention(q, at, (spoilt,), implementation="mosaic", value_scale=1 / 200, **how)
    theirs = reference(q, at, (clean,), window=None, value_scale=1 / 200, **how)
    wide = clean._replace(k=clean.k.astype(jnp.float32), v=clean.v.astype(jnp.float32))
    exact = reference(q.astype(jnp.float32), at, (wide,), window=None, **how) / 200
    assert ours.dtype == kind
    assert jnp.isfinite(ours).all()
    seen = jnp.asarray(lengths) > 0
    error, allowed = (jnp.max(jnp.abs(x.astype(jnp.float32) - exact)[seen]) for x in (ours, theirs))
    assert error <= 2 * allowed


@pytest.mark.gpu
@needs_new_jax
@pytest.mark.parametrize(
    ("shape", "tokens", "fp8"),
    [
        (WIDE, 16, False),
        (WIDE, 16, True),
        (WIDE, 1, False),
        (NARROW, 16, False),
        (Shape(8, 1, 128, window=512), 256, False),
    ],
)
@pytest.mark.parametrize("page", [None, 64, 128])
def test_the_mosaic_kernels_read_a_cache_by_pages(
    shape: Shape, tokens: int, fp8: bool, page: int | None
) -> None:
    """To the bit as from a cache of these rows alone, and the other pages hold NaN."""
    lengths, kind, ring = [tokens, 500, 1000], jnp.dtype("bfloat16"), shape.window is not None
    q, at = queries(shape, lengths, tokens, kind)
    slots = 768 if ring else 1000 if page is None else 1024
    before = cached(shape, lengths, slots, kind, ring=ring)
    before = narrowed(before) if fp8 else before
    own = () if shape is not NARROW else (fresh(shape, at, kind),)
    how: dict[str, Any] = dict(scale=shape.head_dim**-0.5, causal=shape.causal)
    run = functools.partial(attention, q, at, window=shape.window, implementation="mosaic", **how)
    pages, total = some_pages(4, 1 if page is None else slots // page)
    many = in_pages(before, pages[:3], total)
    assert (run((many, *own)) == run((before, *own))).all()
    # A row of no sequence sees no key, and so may have no page.
    idle = before._replace(positions=before.positions.at[1].set(-1))
    there = in_pages(idle, pages[[0, 3, 2]], total)
    assert (run((there, *own)) == run((idle, *own)))[jnp.array([0, 2])].all()


def narrowed(segment: KVSegment) -> KVSegment:
    """Return the same keys and values in fp8, stored 200 times as large; some are clipped."""
    fp8 = jnp.float8_e4m3fn
    k, v = (stored_as(jax.device_put(as_float32(x) * 200), fp8) for x in (segment.k, segment.v))
    return segment._replace(k=k, v=v)


@pytest.mark.parametrize(
    ("shape", "tree", "tiling"),
    [
        (SLIDING, False, SPLIT),
        (FULL, True, TILING),
        pytest.param(Shape(4, 2, 256, window=24), False, SPLIT, marks=pytest.mark.slow),
        pytest.param(Shape(8, 1, 512), False, PARTS, marks=pytest.mark.slow),
        pytest.param(DRAFT, False, TILING, marks=pytest.mark.slow),  # not causal
    ],
)
def test_keys_in_fp8_are_what_they_are_in_float32(shape: Shape, tree: bool, tiling: Tiling) -> None:
    """Numbers of fp8 are exact in 16 bits, so only the usual roundings are left."""
    lengths, kind = [7, 33, 47, 100], jnp.dtype("bfloat16")
    ring = shape.window is not None
    q, at = queries(shape, lengths, 7, kind)
    before = cached(shape, [n - 7 for n in lengths], 64 if ring else 100, kind, ring=ring)
    segments = narrowed(before), narrowed(fresh(shape, at, kind, tree=tree))
    how: dict[str, Any] = dict(scale=0.25 / 200, window=shape.window, causal=shape.causal)
    run = functools.partial(attention, **how, value_scale=1 / 200)
    by_kernel = functools.partial(run, implementation="triton", tiling=tiling, interpret=True)
    ours = compiled(by_kernel)(q, at, segments)
    theirs = compiled(functools.partial(run, implementation="reference"))(q, at, segments)
    wide = tuple(s._replace(k=as_float32(s.k), v=as_float32(s.v)) for s in segments)
    exact = compiled(functools.partial(reference, **how))(as_float32(q), at, wide) / np.float32(200)
    assert ours.dtype == theirs.dtype == kind
    assert difference(ours, exact) <= 2 * difference(theirs, exact) < 0.1 * np.abs(exact).max()


def test_wider_keys_than_queries_are_refused() -> None:
    lengths, kind = [7], jnp.dtype("bfloat16")
    q, at = queries(FULL, lengths, 1, kind)
    with pytest.raises(ValueError, match="that of the queries or a narrower one"):
        attention(q, at, (cached(FULL, lengths, 16, jnp.dtype("float32")),), scale=1.0)


@pytest.mark.parametrize("score_bytes", [1, 40_000])
def test_blocks_of_queries_are_all_queries_at_once(score_bytes: int) -> None:
    """A pass over an image: its tokens see each other, and the cache before them."""
    shape, tokens = Shape(4, 2, 16, window=24, causal=False), 37
    cache = cached(shape, [50, 9], 64, jnp.dtype("float32"))
    q, at = queries(shape, [50 + tokens, 9 + tokens], tokens, jnp.dtype("float32"))
    image = np.arange(tokens) // 11
    seen_by = np.tri(tokens, dtype=bool) | (image[:, None] == image[None, :])
    pass_ = fresh(shape, at, jnp.dtype("float32"))
    pass_ = pass_._replace(seen_by=jax.device_put(np.tile(seen_by, (2, 1, 1))))
    how = dict(scale=0.3, window=shape.window, causal=shape.causal)
    in_blocks = functools.partial(reference_in_blocks, score_bytes=score_bytes, **how)
    ours, theirs = (
        compiled(f)(q, at, (cache, pass_)) for f in (in_blocks, functools.partial(reference, **how))
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def test_the_memory_of_the_largest_image_is_bounded() -> None:
    """1,120 tokens of 31B at 32,768 keys have 4.7 GB of scores, in a full layer, if all are there at once."""
    tokens, slots, shape = 1152, 32_768, FULL_31B
    keys = jax.ShapeDtypeStruct((1, shape.kv_heads, slots, shape.head_dim), jnp.bfloat16)
    heads = (shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    q = jax.ShapeDtypeStruct((1, tokens, *heads), jnp.bfloat16)
    at = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    cache = KVSegment(keys, keys, jax.ShapeDtypeStruct((1, slots), jnp.int32))

    def temporary(run: Any) -> int:
        how = functools.partial(run, scale=1.0, window=None, causal=True)
        sizes = jax.jit(how).lower(q, at, (cache,)).compile().memory_analysis()
        return sizes.temp_size_in_bytes

    assert temporary(reference) > 4 * tokens * shape.heads * slots
    assert temporary(attention) < 4 * MAX_SCORE_BYTES
