"""How many experts of each layer a target pass really uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.decode import propose
from jaxspec.drafters.tree import ancestors
from jaxspec.models.target import Target, placement_of
from jaxspec.shapes import Int, Params
from jaxspec.state import DecodeSpec, DecodeState


def distinct_experts(
    spec: DecodeSpec, target_params: Params, drafter_params: Params | None, state: DecodeState
) -> Int[jax.Array, " L"]:
    """Count the experts of each layer that the next target pass of all rows would use."""
    target: Target = spec.target.bind(target_params)
    tokens, sees = state.anchors[:, None], None
    if spec.drafter is not None:
        draft = propose(target, spec.drafter.bind(drafter_params or {}), spec, state)
        tokens = jnp.concatenate([tokens, draft.tokens], axis=1)
        sees = None if draft.parents is None else ancestors(draft.parents)
    count = jnp.full_like(state.lengths, tokens.shape[1])
    where = placement_of(tokens, state.lengths, count, ancestors=sees)
    return target.distinct_experts(tokens, where, state.caches)
