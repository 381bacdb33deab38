"""Attention over cached and fresh keys: where models meet `pallas_kernels.attention`."""

from __future__ import annotations

from jaxspec.cache import KVSegment
from jaxspec.shapes import Array, Float, Int
from jaxspec.sharding import constrain
from pallas_kernels.attention import Segment, attention

# How axes are named in `sharding.RULES`.
QUERY_AXES = ("batch", None, "kv_heads", "query_groups", None)  # B T K G H
KV_AXES = ("batch", None, "kv_heads", None)  # B T K H
Q_WEIGHT_AXES = ("inputs", "kv_heads", "query_groups", None)  # D K G H
KV_WEIGHT_AXES = (
    "inputs",
    "kv_heads",
    None,
    None,
)  # D K X H: keys and values, queries beside them or not
OUT_WEIGHT_AXES = ("kv_heads", "query_groups", "inputs", None)  # K G H D


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
