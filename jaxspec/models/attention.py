"""Heads and attention over cached and fresh keys: where models meet `pallas_kernels` for them."""

from __future__ import annotations

from jaxspec.cache import KVSegment
from jaxspec.models.layers import project, rope_turns
from jaxspec.shapes import Array, Float, Int
from jaxspec.sharding import CACHE_AXES, constrain, whole
from pallas_kernels.attention import Segment, attention
from pallas_kernels.qkv import QKV, Destination, qkv

# How axes are named in `sharding.RULES`.
QUERY_AXES = ("batch", None, "kv_heads", "query_groups", None)  # B T K G H
KV_AXES = ("batch", None, "kv_heads", None, None)  # B T K X H: X a key, a value, queries or not
Q_WEIGHT_AXES = ("inputs", "kv_heads", "query_groups", None)  # D K G H
KV_WEIGHT_AXES = (
    "inputs",
    "kv_heads",
    None,
    None,
)  # D K X H: keys and values, queries beside them or not
OUT_WEIGHT_AXES = ("kv_heads", "query_groups", "inputs", None)  # K G H D


def heads(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D K X H"],
    q_norm: Float[Array, " H"] | None,
    k_norm: Float[Array, " H"] | None,
    positions: Int[Array, "B T"],
    frequencies: Float[Array, " H2"],
    *,
    groups: int,
    eps: float,
    norm_values: bool = True,
    into: Destination | None = None,
) -> QKV:
    """Project rows to queries, keys and values; norm and rotate them as `pallas_kernels.qkv` says.

    Args:
      weight: of each kv head its queries, then its key, then its value (absent where it is the raw key).
      q_norm, k_norm: weights of the norms; None where there are no queries, or no keys.
      groups: queries of a kv head.
      into: caches to write keys and values to, which are returned in their place.
    """
    # Queries beside a key and a value cannot be split by themselves: until they are cut out, none is.
    axes = QUERY_AXES if k_norm is None else KV_AXES
    projected = constrain(project(whole(x), weight), *axes)
    turns = rope_turns(positions, frequencies)
    q, k, v = qkv(
        projected, q_norm, k_norm, *turns, into, groups=groups, eps=eps, norm_values=norm_values
    )
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
) -> Float[Array, "B T K G H"]:
    """Attend from each query to every key its position allows, over all segments at once.

    A key at position k is seen from q when it exists (k >= 0), k > q - window, if causal k <= q, and if the
    segment says which queries see it, it is one of them (branches of a draft tree do not see each other).
    Scores and softmax are float32. A query that sees nothing (padding) gives finite rubbish.

    Args:
      window: keys a query sees, itself included; None for all.
      segments: their keys need not be in order, and no position may stand in two of them.
    """
    out = attention(
        constrain(q, *QUERY_AXES),
        q_positions,
        tuple(Segment(s.k, s.v, s.positions, s.seen_by) for s in segments),
        scale=scale,
        window=window,
        causal=causal,
    )
    return constrain(out, *QUERY_AXES)
