"""Parameters under Hugging Face names, and back: pure functions on arrays, for bridges to other JAX trees.

    tensors = to_hf_names(params, config)
    params = from_hf_names(tensors, config)

They read the same tables as the conversion of files, and run under `jax.jit`, where nothing is copied
that the layouts do not force to be.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from checkpoints_convert import bridge
from jaxspec.families import ModelConfig
from jaxspec.shapes import Array, Params
from jaxspec.storage.conversion import parameter_shapes, rule_set


def to_hf_names(
    params: Params, config: ModelConfig, *, prefix: str | None = None
) -> dict[str, Array]:
    """Return the tensors of a Hugging Face checkpoint that these parameters are, in their own dtypes.

    Token ids stay int32; a file has them as int64.

    Args:
      params: of the target or drafter that `config` describes.
      prefix: what stands before a target's names: "model." in text-only checkpoints of Gemma 4;
        None for that of the releases, which for Gemma 4 is "model.language_model.". Drafters' names
        have none.

    Raises:
      ValueError: parameters are missing, not known, or of a wrong shape; all are listed.
    """
    shapes = parameter_shapes(config)
    return bridge.to_hf_names(params, rule_set(config, shapes), shapes, prefix=prefix)


def from_hf_names(tensors: Mapping[str, Array | np.ndarray], config: ModelConfig) -> Params:
    """Return the parameters that these tensors of a Hugging Face checkpoint are, in their own dtypes.

    What has no place in the model, such as a vision tower, is left out, as in the conversion of files.

    Args:
      tensors: by full name; the prefix is found.
      config: of the target or drafter that they are.

    Raises:
      CheckpointError: tensors are missing, not known, or of a wrong shape or dtype, all of which are
        listed; or, outside of jit, a head differs from the embedding that it is tied to.
    """
    shapes = parameter_shapes(config)
    return bridge.from_hf_names(tensors, rule_set(config, shapes), shapes)
