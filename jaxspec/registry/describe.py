"""Descriptions that the conventions of several families share."""

from __future__ import annotations

from jaxspec.configs.base import TargetConfig


def shown_scale(target: TargetConfig, dtype: str, *, scaled: bool) -> str:
    """Describe the scale of the target's embeddings that a drafter uses.

    The factor is rounded to the target's dtype, as the embeddings are.

    Args:
      dtype: of the target.
      scaled: whether the drafter uses scaled embeddings.
    """
    import jax.numpy as jnp

    if target.embedding_scale == 1:
        return "none: the target does not scale either"
    if not scaled:
        return "off"
    return f"x {float(jnp.asarray(target.embedding_scale, jnp.dtype(dtype))):.5g}"
