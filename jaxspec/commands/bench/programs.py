"""The programs of a case: how they are fed. What they compute is `decode`'s."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import RING_MULTIPLE
from jaxspec.engine.request import sampling_values
from jaxspec.options import Sampling
from jaxspec.runtime.prefill import PREFILL_CHUNK, chunk_of
from jaxspec.runtime.runtime import NewRows, Runtime, cache_length_for
from jaxspec.shapes import Int
from jaxspec.state import DecodeSpec, DecodeState, PrefillChunk


def bench_cache_length(spec: DecodeSpec, positions: int) -> int:
    """Return the length of caches for so many positions and a step's own tokens."""
    return cache_length_for(spec, positions, multiple=RING_MULTIPLE)


def admission_of(runtime: Runtime, max_new_tokens: int, seed: int, sampling: Sampling) -> NewRows:
    """Admit a request without stop ids to every slot."""
    batch = runtime.batch_size
    seeds = np.stack([np.full(batch, seed), np.arange(batch)], axis=1)
    limits, no_stop = [max_new_tokens] * batch, np.full((batch, 1), -1)
    asked = sampling_values(runtime.spec, [sampling] * batch)
    return runtime.admission(range(batch), limits, no_stop, asked, seeds)


def chunks_of(prompts: np.ndarray, longest: int) -> list[PrefillChunk]:
    """Cut prompts of one length, one for each slot, into chunks without padding.

    Args:
      longest: tokens of a pass, where that is more than `PREFILL_CHUNK` of each row.
    """
    batch, length = prompts.shape
    width = max(PREFILL_CHUNK, longest // batch)
    return [
        chunk_of(
            {i: (p, begin) for i, p in enumerate(prompts)}, batch, min(width, length - begin), batch
        )
        for begin in range(0, length, width)
    ]


def feed(
    runtime: Runtime, state: DecodeState, chunk: PrefillChunk
) -> Callable[[DecodeState], DecodeState]:
    """Return what feeds this chunk to a state; its program is compiled now."""
    prefill = runtime.program("prefill", state, chunk)
    return lambda state: prefill(state, chunk)


def stand_after(context: int, anchors: Int[jax.Array, " B"], state: DecodeState) -> DecodeState:
    """Make admitted rows look as if a prompt had been prefilled."""
    return dataclasses.replace(
        state,
        lengths=jnp.full_like(state.lengths, context),
        anchors=anchors,
        active=jnp.full_like(state.active, True),
        tokens=state.tokens.at[:, 0].set(anchors),
        num_tokens=jnp.full_like(state.num_tokens, 1),
        num_steps=jnp.zeros_like(state.num_steps),
    )


def with_random_caches(state: DecodeState, seed: int) -> DecodeState:
    """Fill caches and what else a drafter keeps, array by array, with numbers of the size that norms leave."""
    leaves, structure = jax.tree.flatten((state.caches, state.drafter))
    for i, old in enumerate(leaves):
        leaves[i] = _normal_like(old.sharding)(old, seed, i)
    caches, drafter = jax.tree.unflatten(structure, leaves)
    return dataclasses.replace(state, caches=caches, drafter=drafter)


@functools.cache
def _normal_like(sharding: Any) -> Callable[[jax.Array, int, int], jax.Array]:
    def make(old: jax.Array, seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        # Numbers of fp8 are made as bfloat16. Real ones are larger by a scale, which costs the same.
        made = jnp.bfloat16 if old.dtype.itemsize == 1 else old.dtype
        return jax.random.normal(key, old.shape, made).astype(old.dtype)

    return jax.jit(make, donate_argnums=0, out_shardings=sharding)
