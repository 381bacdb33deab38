"""The programs of a case: how they are compiled and fed. What they compute is `decode`'s."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.cache import RING_MULTIPLE
from jaxspec.engine import PREFILL_CHUNK, row_keys
from jaxspec.models.xla import COMPILER_OPTIONS
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Int, Params
from jaxspec.state import Admission, DecodeSpec, DecodeState, PrefillChunk


def cache_length_for(spec: DecodeSpec, positions: int) -> int:
    """Return the length of caches for so many positions and a step's own tokens."""
    return -(-(positions + spec.step_tokens) // RING_MULTIPLE) * RING_MULTIPLE


def compiled(function: Any, mesh: Mesh, state: int, *args: Any) -> Any:
    """Compile a program that takes a state at that place, may use its memory and returns the next."""
    jitted = jax.jit(
        function,
        donate_argnums=state,
        out_shardings=jax.tree.map(lambda x: x.sharding, args[state]),
        compiler_options=COMPILER_OPTIONS,
    )
    with jax.set_mesh(mesh):
        return jitted.lower(*args).compile()


def admission_of(batch: int, max_new_tokens: int, seed: int) -> Admission:
    """Admit a greedy request without stop ids to every slot."""
    zeros = jnp.zeros(batch, jnp.int32)
    seeds = np.stack([np.full(batch, seed), np.arange(batch)], axis=1).astype(np.uint32)
    return Admission(
        slots=jnp.arange(batch, dtype=jnp.int32),
        max_new_tokens=zeros + max_new_tokens,
        stop_ids=jnp.full((batch, 1), -1, jnp.int32),
        sampling=SamplingParams.make(batch),
        keys=row_keys(jnp.asarray(seeds)),
    )


def chunks_of(prompts: np.ndarray) -> list[PrefillChunk]:
    batch, length = prompts.shape
    chunks = []
    for begin in range(0, length, PREFILL_CHUNK):
        tokens = prompts[:, begin : begin + PREFILL_CHUNK]
        end = begin + tokens.shape[1]
        chunks.append(
            PrefillChunk(
                slots=jnp.arange(batch, dtype=jnp.int32),
                tokens=jnp.asarray(tokens),
                start=jnp.full(batch, begin, jnp.int32),
                count=jnp.full(batch, end - begin, jnp.int32),
                is_last=jnp.full(batch, end == length),
            )
        )
    return chunks


def feed(
    prefill: Any, weights: tuple[Params, Params | None], chunk: PrefillChunk, state: DecodeState
) -> DecodeState:
    return prefill(*weights, state, chunk)


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
        return jax.random.normal(key, old.shape, old.dtype)

    return jax.jit(make, donate_argnums=0, out_shardings=sharding)
