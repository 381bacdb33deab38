"""Heads and attention over cached and fresh keys, by the kernels of `pallas_kernels`.

`Attention` is that of targets of all families. Drafters cache other things, and use the functions
behind it: `project_qkv` and `attend`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec import cache as kv
from jaxspec.cache import KVCache, KVSegment
from jaxspec.configs.base import LayerSpec
from jaxspec.mesh import (
    CACHE_AXES,
    ROWS,
    WHOLE,
    Axes,
    constrain,
    on_each_device,
    whole_rows,
)
from jaxspec.models.layers import rope_cos_sin, rope_frequencies, sums_of
from jaxspec.models.target import Placement, joined_row
from jaxspec.models.xla import in_order
from jaxspec.quantised import QuantisedArray
from jaxspec.quantised.kv import KVStorage
from jaxspec.shapes import Array, DTypeLike, Float, Int
from jaxspec.weights.model_def import param
from pallas_kernels.attention import attention
from pallas_kernels.qkv import QKV, Destination, qkv
from pallas_kernels.rounding import Rounded, Sums

# How axes are named in `mesh.RULES`. X: a key, a value, queries beside them or not.
QUERY_AXES: Any = Axes("batch", None, "kv_heads", "query_groups", None)  # B T K G H
KV_AXES: Any = Axes("batch", None, "kv_heads", None, None)  # B T K X H
Q_WEIGHT_AXES = ("inputs", "kv_heads", "query_groups", None)  # D K G H
KV_WEIGHT_AXES = ("inputs", "kv_heads", None, None)  # D K X H
OUT_WEIGHT_AXES = ("kv_heads", "query_groups", "inputs", None)  # K G H D


class Attention(nnx.Module):
    """Grouped-query attention of a target, with normed heads, rotary embedding and a cache.

    `qkv` is stored by kv head: its G query heads, then its key, then its value. The value is absent
    where values are the raw keys. Both are absent where the layer reads another layer's keys and
    values.

    Args:
      width: of the residual stream.
      spec: heads and window of the layer.
      owns_kv: whether it has keys and values of its own.
      lends_kv: whether other layers read its keys and values.
      values_are_keys: whether values are the raw keys (k = v).
      norm_values: whether values are normed, without a weight.
      score_scale: the factor of scores.
      rope_theta, rotary_factor, rope_factor: of `rope_frequencies`.
    """

    def __init__(
        self,
        width: int,
        spec: LayerSpec,
        *,
        owns_kv: bool = True,
        lends_kv: bool = False,
        values_are_keys: bool = False,
        norm_values: bool = False,
        score_scale: float,
        rope_theta: float,
        rotary_factor: float = 1.0,
        rope_factor: float = 1.0,
        eps: float,
        dtype: jnp.dtype,
    ):
        k, h = spec.num_kv_heads, spec.head_dim
        g = spec.num_heads // k
        extra = (1 if values_are_keys else 2) if owns_kv else 0
        axes = KV_WEIGHT_AXES if owns_kv else Q_WEIGHT_AXES
        self.qkv = param(
            width, k, g + extra, h, dtype=dtype, fan_in=width, axes=axes, contracting_axes=(0,)
        )
        self.q_norm = param(h, dtype=dtype)
        if owns_kv:
            self.k_norm = param(h, dtype=dtype)
        into: dict[str, Any] = dict(
            fan_in=k * g * h, axes=OUT_WEIGHT_AXES, contracting_axes=(0, 1, 2)
        )
        self.out = param(k, g, h, width, dtype=dtype, **into)
        self.owns_kv, self.lends_kv, self.norm_values = owns_kv, lends_kv, norm_values
        self.stored: KVStorage | None = None  # None: as computed; see `store_kv`
        self.score_scale, self.window, self.eps = score_scale, spec.window, eps
        self.rope = (rope_theta, rotary_factor, rope_factor)

    def store_kv(self, stored: KVStorage | None) -> None:
        """Set the storage of the keys and values that the queries see."""
        if stored is not None:
            self.stored = nnx.data(stored)

    def __call__(
        self,
        x: Float[Array, "B T D"] | Rounded,
        where: Placement,
        cache: KVCache | None,
        shared: tuple[KVSegment, ...] | None,
    ) -> tuple[Float[Array, "B T D"] | Sums, KVCache | None, tuple[KVSegment, ...]]:
        """Return the layer's output, its cache after the writes, and the K/V its queries saw.

        The output is `Sums` where the format of `out` rounds activations.

        Args:
          x: the residual stream, normed.
          cache: the layer's own; None to attend to this pass alone, or where `shared` is read.
          shared: the K/V of another layer's queries, for a layer without keys of its own.
        """
        if where.parts:
            return self._of_parts(x, where, cache, shared)
        # In a pass that may see later tokens, those that are older come from the cache alone.
        seen_by = None if self.window is None else where.seen_by
        # A tree's keys and values wait until it is known which tokens stay (`target.keep_rows`).
        to_write = cache if where.ancestors is None else None
        into = None
        if to_write is not None and seen_by is None:
            into = kv.early_destination(to_write, x.shape[1], *where.written)
        q, k, v = self._project(x, where.positions, into, has_cache=cache is not None)
        if k is None or v is None:
            assert shared is not None
            segments = shared
        elif to_write is not None:
            written = to_write, into, k, v, *where.written
            segments = kv.segments_of_pass(*written, lent=self.lends_kv, seen_by=seen_by)
        else:
            if self.stored is not None and cache is None:
                k, v = self.stored.rounded(k), self.stored.rounded(v)
            visible = seen_by if where.ancestors is None else where.ancestors
            segments = (kv.pass_segment(k, v, where.positions, where.count, visible),)
            if cache is not None:
                segments = (kv.view(cache, where.start, where.slots), *segments)
        out = self._attend(q, where.positions, segments, causal=seen_by is None)
        if to_write is not None and k is not None and v is not None:
            if into is None:
                out, (k, v) = in_order(out, (k, v))
            cache = kv.keep_pass(to_write, into, k, v, *where.written)
        return whole_rows(sums_of(out, self.out[...], inputs=3)), cache, segments

    def _of_parts(
        self,
        x: Float[Array, "1 T D"] | Rounded,
        where: Placement,
        cache: KVCache | None,
        shared: tuple[KVSegment, ...] | None,
    ) -> tuple[Float[Array, "1 T D"] | Sums, KVCache | None, tuple[KVSegment, ...]]:
        """Do as `__call__` in a pass whose rows have several widths. Each of these attends by itself.

        The segments are one a part. All keys and values are written before a query attends.
        """
        into, of_parts = None, kv.of_parts(cache, [part.count.size for part in where.parts])
        if cache is not None:
            into = kv.joined_destination(
                [
                    kv.early_destination(of_part, part.positions.shape[1], *part.written)
                    for of_part, part in zip(of_parts, where.parts, strict=True)
                ]
            )
        q, k, v = self._project(x, where.positions, into, has_cache=cache is not None)
        segments = shared
        if k is not None and v is not None:
            assert cache is not None
            cache = cache.replace(k=k, v=v)
            segments = tuple(
                kv.view(of_part.replace(k=k, v=v), part.start + part.count, part.slots)
                for of_part, part in zip(of_parts, where.parts, strict=True)
            )
        assert q is not None
        assert segments is not None
        outs = [
            self._attend(q_of_part, part.positions, (segment,))
            for q_of_part, part, segment in zip(where.split(q), where.parts, segments, strict=True)
        ]
        return whole_rows(sums_of(joined_row(outs), self.out[...], inputs=3)), cache, segments

    def _project(
        self,
        x: Float[Array, "B T D"] | Rounded,
        positions: Int[Array, "B T"],
        into: Destination | None,
        *,
        has_cache: bool,
    ) -> QKV:
        """Return the layer's queries, keys and values."""
        _, groups, head_dim, _ = self.out.shape
        return project_qkv(
            x,
            self.qkv[...],
            self.q_norm[...],
            self.k_norm[...] if self.owns_kv else None,
            positions,
            rope_frequencies(head_dim, *self.rope),
            groups=groups,
            eps=self.eps,
            norm_values=self.norm_values,
            into=into,
            stored=self.stored,
            # Derivatives pass `rounded`, but not a conversion to fp8.
            kv_dtype=None if self.stored is None or not has_cache else self.stored.dtype,
        )

    def _attend(
        self,
        q: Float[Array, "B T K G H"] | None,
        positions: Int[Array, "B T"],
        segments: tuple[KVSegment, ...],
        *,
        causal: bool = True,
    ) -> Float[Array, "B T K G H"]:
        """Let queries attend to keys, as the layer does."""
        assert q is not None
        options: dict[str, Any] = dict(scale=self.score_scale, window=self.window, causal=causal)
        return attend(q, positions, segments, **options, stored=self.stored)


def project_qkv(
    x: Float[Array, "B T D"] | Rounded,
    weight: Float[Array, "D K X H"] | QuantisedArray,
    q_norm: Float[Array, " H"] | None,
    k_norm: Float[Array, " H"] | None,
    positions: Int[Array, "B T"],
    frequencies: Float[Array, " H2"],
    *,
    groups: int,
    eps: float,
    norm_values: bool = False,
    into: Destination | None = None,
    stored: KVStorage | None = None,
    kv_dtype: DTypeLike | None = None,
) -> QKV:
    """Return queries, keys and values of rows:

        q = rope(rms_norm(x W_q, q_norm)),    k = rope(rms_norm(x W_k, k_norm)),    v = x W_v

    One kernel does all that follows the product, and writes keys and values to a cache too
    (`pallas_kernels.qkv`).

    Args:
      weight: of each kv head its queries, then its key, then its value (absent where it is the raw
        key).
      q_norm, k_norm: weights of the norms; None where there are no queries, or no keys.
      groups: queries of a kv head.
      norm_values: whether values are normed, without a weight.
      into: caches to write keys and values to, which are returned in their place.
      stored: the storage of keys and values, also of those that the queries meet; None: as
        computed.
      kv_dtype: of keys and values in the result; None for that of the caches, or else of x.
    """
    value_factor = 1.0
    if stored is not None:
        # No multiplication of their own: the scale of keys is in the weights of the norms.
        q_norm = None if q_norm is None else stored.q_norm(q_norm)
        k_norm = None if k_norm is None else stored.k_norm(k_norm)
        value_factor = 1 / stored.v_scale
    # Queries beside a key and a value cannot be split by themselves. Until they are cut out, none
    # is.
    axes = QUERY_AXES if k_norm is None else KV_AXES
    projected = constrain(sums_of(whole_rows(x), weight), *axes)
    angles = rope_cos_sin(positions, frequencies)
    kwargs: dict[str, Any] = dict(eps=eps, norm_values=norm_values)
    kwargs |= dict(kv_dtype=kv_dtype, value_factor=value_factor)

    def run(projected: Array | Sums, *args: Any) -> QKV:
        # Queries of a head may be on several devices where no key stands beside them.
        of_head = groups if k_norm is not None else projected.shape[3]
        return qkv(projected, *args, groups=of_head, **kwargs)

    args = projected, q_norm, k_norm, *angles, into
    of_outputs: Any = Axes(*axes[2:])
    of_projected = Sums(axes, ROWS, of_outputs) if isinstance(projected, Sums) else axes
    of_caches = None if into is None else kv.DESTINATION_AXES
    of_args = of_projected, WHOLE, WHOLE, ROWS, ROWS, of_caches
    q, k, v = on_each_device(run, args, of_args, QKV(axes, CACHE_AXES, CACHE_AXES))
    if q is not None:
        q = constrain(q, *axes)
    if k is not None and v is not None:
        k, v = constrain(k, *CACHE_AXES), constrain(v, *CACHE_AXES)
    return QKV(q, k, v)


def attend(
    q: Float[Array, "B T K G H"],
    q_positions: Int[Array, "B T"],
    segments: tuple[KVSegment, ...],
    *,
    scale: float,
    window: int | None,
    causal: bool = True,
    stored: KVStorage | None = None,
) -> Float[Array, "B T K G H"]:
    """Attend from each query to every key its position allows, over all segments at once.

    A query at position q sees a key at position k if k >= 0, k > q - window, and, if causal, k <=
    q. A segment may limit the queries that see a key: branches of a draft tree do not see each
    other. Scores and softmax are float32. A query that sees nothing (padding) gives meaningless
    finite numbers.

    Args:
      window: keys a query sees, itself included; None for all.
      segments: their keys need not be in order, and no position may stand in two of them.
      stored: the storage of keys and values, the same as in `project_qkv` for the queries.
    """
    q = constrain(q, *QUERY_AXES)
    value_scale = 1.0 if stored is None else stored.v_scale
    options: dict[str, Any] = dict(scale=scale, window=window, causal=causal)
    run = functools.partial(attention, **options, value_scale=value_scale)
    args = q, q_positions, segments
    keys = (kv.SEGMENT_AXES,) * len(segments)
    return on_each_device(run, args, (QUERY_AXES, ROWS, keys), QUERY_AXES)
