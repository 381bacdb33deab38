"""Rename parameters in memory to Hugging Face names and back, for bridges to other JAX trees.

    tensors = to_hf_names(params, config)
    params = from_hf_names(tensors, config)

Both are pure functions of arrays. They use the same tables as the conversion of files. Both run
under `jax.jit`, which then copies only what the layouts require.
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
    """Turn parameters into the tensors of a Hugging Face checkpoint, by tensor name.

    Dtypes do not change. Token ids therefore stay int32; a file has them as int64.

    Args:
      params: the parameters of the target or drafter that `config` describes.
      prefix: the prefix of a target's tensor names, such as "model." in text-only checkpoints of
        Gemma 4. None is the prefix of the releases, which is "model.language_model." for Gemma 4.
        Drafters' names have no prefix.

    Raises:
      ValueError: parameters are missing, not known, or of a wrong shape; they are listed.
    """
    shapes = parameter_shapes(config)
    return bridge.to_hf_names(params, rule_set(config, shapes), shapes, prefix=prefix)


def from_hf_names(tensors: Mapping[str, Array | np.ndarray], config: ModelConfig) -> Params:
    """Turn the tensors of a Hugging Face checkpoint into parameters, in the tensors' dtypes.

    Tensors without a place in the model, such as a vision tower, are left out. The conversion of
    files does the same.

    Args:
      tensors: the tensors by full name; their prefix is detected.
      config: the config of the target or drafter that the tensors belong to.

    Raises:
      CheckpointError: tensors are missing, not known, or of a wrong shape or dtype (they are
        listed). Outside of jit also: a head differs from the embedding that it is tied to.
    """
    shapes = parameter_shapes(config)
    return bridge.from_hf_names(tensors, rule_set(config, shapes), shapes)
