"""Cached attention for few queries: a block of new tokens against long caches, rings and each other.

Read `reference.py` for what is computed, `triton.py` for how each key is read once for all queries,
`tuning.py` for tile sizes.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import Segment, reference
from pallas_kernels.attention.triton import Tiling, attention_triton
from pallas_kernels.attention.tuning import tiling_for

Implementation = Literal["auto", "reference", "triton"]

# Query tokens up to which "auto" takes the kernel for speed: more of them are prefill, which is not bound by reading keys.
MOST_TOKENS = 64
# Bytes of float32 scores from which it does for want of memory: XLA writes them all down. 31B, 512 tokens of a prompt:
# from 16384 slots on.
MOST_SCORE_BYTES = 1 << 30
# Key slots of one sequence from which it does, and bytes of keys, values and scores of all of them. On an H200 (jax
# 0.11.2), both in us without what the loop around them takes: 1 sequence, 384 slots, one query of 26B-A4B XLA 5, the
# kernel 6; 32 sequences 58 and 37 at head dim 256 (16 queries, 110 MB), 44 and 52 at 512 (63 MB), 31B at 512 (8 queries,
# 107 MB) 59 and 59. A draft block (2048 slots, 134 MB), whose scores are as large as its keys, 152 and 31.
FEWEST_SLOTS = 1024
FEWEST_BYTES = 64 << 20


def attention(
    q: Float[Array, "B T K G H"],
    q_positions: Int[Array, "B T"],
    segments: tuple[Segment, ...],
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "B T K G H"]:
    """Attend from each query to every key its position allows, over all segments at once.

    A key at position k is seen from q when it exists (k >= 0), k > q - window, if causal k <= q, and if the
    segment says which queries see it, it is one of them. A query that sees nothing gives finite rubbish.

    Args:
        q: Queries, of which G share a kv head.
        q_positions: Their positions.
        segments: Keys and values in any order. Slots behind a segment's last key may hold anything, also
            NaN; the reference wants them finite.
        scale: What scores are multiplied with.
        window: Keys a query sees, itself included; None for all.
        causal: Whether queries see no later keys.
        implementation: "triton" needs an NVIDIA GPU of compute capability 8.0 or newer (or `interpret`)
            and 16-bit keys; "auto" takes it where it can run, and keys are many for few tokens or scores would
            fill memory, and "reference" elsewhere.
        tiling: Tile sizes of the kernel, instead of the table's.
        interpret: Run the kernel on any device, slowly, to test it.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
        NotImplementedError: If implementation is "triton" and it cannot run.
    """
    _check(q, q_positions, segments)
    if implementation not in ("auto", "reference", "triton"):
        raise ValueError(f"implementation is {implementation!r}; pass auto, reference or triton")
    plain = functools.partial(reference, scale=scale, window=window, causal=causal)
    b, t, k, g, h = q.shape
    slots = sum(s.k.shape[2] for s in segments)
    key_bytes = sum(2 * s.k.size * s.k.dtype.itemsize for s in segments)
    score_bytes = 4 * b * t * k * g * slots
    many_keys = slots >= FEWEST_SLOTS or key_bytes + score_bytes >= FEWEST_BYTES
    worth_it = (t <= MOST_TOKENS and many_keys) or score_bytes >= MOST_SCORE_BYTES
    if implementation == "reference" or (implementation == "auto" and not worth_it):
        return plain(q, q_positions, segments)
    reason = _why_not(segments, interpret)
    if reason and implementation == "triton":
        raise NotImplementedError(f"{reason}; pass implementation='auto' or 'reference'")
    if reason:
        return plain(q, q_positions, segments)
    longest = max(s.k.shape[2] for s in segments)
    tiling = tiling or tiling_for(head_dim=h, rows=t * g, heads=b * k, longest=longest)
    kernel = functools.partial(
        attention_triton,
        scale=scale,
        window=window,
        causal=causal,
        tiling=tiling,
        interpret=interpret,
    )
    if implementation == "triton":
        return kernel(q, q_positions, segments)
    return lax.platform_dependent(q, q_positions, segments, cuda=kernel, default=plain)


def _check(q: Array, q_positions: Array, segments: tuple[Segment, ...]) -> None:
    b, t, k, _, h = q.shape
    if q_positions.shape != (b, t):
        raise ValueError(
            f"for queries {q.shape}, positions must be {(b, t)}, not {q_positions.shape}"
        )
    if not segments:
        raise ValueError("there are no keys: pass one segment or more")
    for s in segments:
        size = s.positions.shape[-1]
        if not s.k.shape == s.v.shape == (b, k, size, h) or s.positions.shape != (b, size):
            raise ValueError(
                f"for queries {q.shape}, keys and values must be [{b}, {k}, S, {h}] and their positions "
                f"[{b}, S]; they are {s.k.shape}, {s.v.shape} and {s.positions.shape}"
            )
        if s.seen_by is not None and s.seen_by.shape != (b, t, size):
            raise ValueError(f"seen_by must be {(b, t, size)}, not {s.seen_by.shape}")
        if not q.dtype == s.k.dtype == s.v.dtype:
            raise ValueError(
                f"queries, keys and values must have one dtype; they are {q.dtype}, {s.k.dtype}, "
                f"{s.v.dtype}"
            )


def _why_not(segments: tuple[Segment, ...], interpret: bool) -> str | None:
    """Say why the kernel cannot run for these keys on this machine's GPU, if it has one."""
    keys = segments[0].k
    h, largest = keys.shape[3], max(s.k.size for s in segments)
    if not interpret and keys.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the Triton kernel is cut for bfloat16 and float16 keys, not {keys.dtype}"
    if h not in (16, 32, 64, 128, 256, 512):
        return f"the Triton kernel takes head dims that are a power of two from 16 to 512, not {h}"
    if largest >= 2**31:
        return f"the Triton kernel's offsets are 32 bits, and the keys are {largest} numbers"
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and not mesh.are_all_axes_manual:
        return f"the Triton kernel runs on one device, not on a mesh of {mesh.size}"
    if not interpret and jax.default_backend() == "gpu":
        device = jax.devices()[0]
        capability = str(getattr(device, "compute_capability", "0"))
        if device.platform == "gpu" and float(capability) < 8.0:
            return f"the Triton kernel needs compute capability 8.0; {device.device_kind} has {capability}"
    return None
