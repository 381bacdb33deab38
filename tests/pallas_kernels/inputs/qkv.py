"""Shapes and inputs of `qkv`, as they occur in decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, DTypeLike

from pallas_kernels.qkv.reference import Destination
from tests.pallas_kernels.inputs import Random


@dataclasses.dataclass(frozen=True)
class Shape:
    """The heads of one layer.

    Attributes:
      kv_heads: number of kv heads.
      groups: queries of each kv head.
      head_dim: width of a head.
      extra: rows of each kv head beside its queries. 2 means a key and a value. 1 means that values
        are the raw keys. 0 means that the layer reads the keys and values of another layer.
      norm_values: whether values are normed.
    """

    kv_heads: int
    groups: int
    head_dim: int
    extra: int = 2
    norm_values: bool = True


def inputs(
    shape: Shape, batch: int, tokens: int, dtype: DTypeLike, seed: int = 0
) -> tuple[Array, Array | None, Array | None, Array, Array]:
    """Return a random projection, the weights of both norms, and cosines and sines of angles."""
    random, h, rows = Random(seed), shape.head_dim, shape.groups + shape.extra
    angles = np.asarray(random.uniform(0, 1000, batch, tokens, h // 2))
    return (
        random.normal(batch, tokens, shape.kv_heads, rows, h, dtype=dtype),
        random.normal(h, dtype=dtype) if shape.groups else None,
        random.normal(h, dtype=dtype) if shape.extra else None,
        jax.device_put(np.cos(angles)),
        jax.device_put(np.sin(angles)),
    )


def destination(
    shape: Shape,
    starts: Sequence[int],
    counts: Sequence[int],
    tokens: int,
    size: int,
    dtype: DTypeLike,
    *,
    pages: Sequence[Sequence[int]] | None = None,
    num_pages: int | None = None,
    seed: int = 1,
) -> Destination:
    """Return ring caches with random contents, and the slots to which some tokens go.

    Args:
      shape: heads of the layer.
      starts: position of the first token of each row.
      counts: number of tokens of each row that are written. The others are dropped.
      tokens: number of tokens of each row.
      size: slots of a ring, of all its pages together.
      dtype: dtype of the caches.
      pages: the pages of each row, which divide its slots evenly; None: row b has page b alone.
      num_pages: number of pages of the caches; by default as many as the batch has rows.
      seed: seed of the contents.
    """
    offset = np.arange(tokens)[None, :]
    index = (np.asarray(starts)[:, None] + offset) % size
    page = size if pages is None else size // np.shape(pages)[1]
    which = None if pages is None else np.take_along_axis(np.asarray(pages), index // page, axis=1)
    index = np.where(offset < np.asarray(counts)[:, None], index % page, page)
    full = (num_pages or len(starts), shape.kv_heads, page, shape.head_dim)
    random = Random(seed)
    k, v = (random.normal(*full, dtype=dtype) for _ in "kv")
    which = None if which is None else jax.device_put(which.astype(np.int32))
    return Destination(k, v, jax.device_put(index.astype(np.int32)), which)
