"""Words that the conventions of several families need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxspec.configs.base import TargetConfig

if TYPE_CHECKING:
    from jaxspec.params import Graph


def shown_scale(target: Graph, *, scaled: bool) -> str:
    """Say by what embeddings are multiplied that a drafter borrows: the factor is rounded as they are."""
    import jax.numpy as jnp

    config: TargetConfig = target.config
    if config.embedding_scale == 1:
        return "none: the target does not scale either"
    if not scaled:
        return "off"
    return f"x {float(jnp.asarray(config.embedding_scale, jnp.dtype(target.dtype))):.5g}"
