"""Descriptions that the conventions of several families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxspec.configs.base import TargetConfig

if TYPE_CHECKING:
    from jaxspec.weights.model_def import ModelDef


def shown_scale(target: ModelDef, *, scaled: bool) -> str:
    """Describe the scale of the target's embeddings that a drafter uses.

    The factor is rounded to the target's dtype, as the embeddings are.

    Args:
      scaled: whether the drafter uses scaled embeddings.
    """
    import jax.numpy as jnp

    config: TargetConfig = target.config
    if config.embedding_scale == 1:
        return "none: the target does not scale either"
    if not scaled:
        return "off"
    return f"x {float(jnp.asarray(config.embedding_scale, jnp.dtype(target.dtype))):.5g}"
