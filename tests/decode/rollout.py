"""Decoding many rows at once with the compiled programs alone: no engine, no requests.

A spec and its shapes are one program; what the rows ask for are values in it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decode
from jaxspec import state as states
from jaxspec.decode_loop import decode_loop
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Array, Params
from jaxspec.state import Admission, DecodeSpec, DecodeState, PrefillChunk


def rollout(
    spec: DecodeSpec,
    target_params: Params,
    drafter_params: Params | None,
    prompts: Array,
    lengths: Array,
    sampling: SamplingParams,
    *,
    new_tokens: int,
    seed: int = 0,
    chunk: int | None = None,
) -> DecodeState:
    """Return the state after every row generated `new_tokens` tokens.

    Args:
      prompts: [B, T]; row b has the first `lengths[b]` tokens.
      chunk: prefill so many tokens at a time; None feeds all at once.
    """
    b, t = prompts.shape
    rows = jnp.arange(b)
    state = states.init_state(
        spec,
        b,
        cache_length=t + new_tokens + spec.step_tokens,
        num_stop_ids=1,
        cache_dtype=jnp.dtype("float32"),
    )
    seeds = np.stack([np.full(b, seed), np.arange(b)], axis=1).astype(np.uint32)
    state = _admit(
        state,
        Admission(
            rows,
            jnp.full(b, new_tokens),
            jnp.full((b, 1), -1),
            sampling,
            jnp.asarray(seeds),
        ),
    )
    for begin in range(0, t, chunk or t):
        tokens = prompts[:, begin : begin + (chunk or t)]
        count = jnp.clip(lengths - begin, 0, tokens.shape[1])
        is_last = (count > 0) & (lengths <= begin + tokens.shape[1])
        fed = PrefillChunk(rows, tokens, jnp.minimum(lengths, begin), count, is_last)
        state = _prefill(spec, target_params, drafter_params, state, fed)
    return _decode(spec, target_params, drafter_params, state, jnp.int32(new_tokens))


_admit: Any = jax.jit(states.admit)
_prefill: Any = jax.jit(decode.prefill, static_argnums=0)
_decode: Any = jax.jit(decode_loop, static_argnums=0)


def num_programs() -> int:
    """Return how many programs were compiled so far."""
    return sum(f._cache_size() for f in (_admit, _prefill, _decode))
