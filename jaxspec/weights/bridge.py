"""Rename parameters in memory to Hugging Face names and back, for bridges to other programs.

    tensors = to_hf_names(params, pair.target)      # names of the checkpoint that the target came from
    params = from_hf_names(tensors, pair.target)

Both are pure functions of arrays. They use the same tables as the conversion of files. Both run
under `jax.jit`, which then copies only what the layouts require.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints_convert import bridge, hf_io
from checkpoints_convert.rules import find_prefix
from jaxspec.registry import ModelConfig
from jaxspec.shapes import Array, Params
from jaxspec.weights.conversion import refuse_quantised
from jaxspec.weights.draft_head import refuse_copy
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.manifest import MANIFEST, Manifest
from jaxspec.weights.source import parameter_shapes, rule_set
from jaxspec.weights.trees import flat_params


def to_hf_names(
    params: Any, model: LoadedModel | ModelConfig, *, prefix: str | None = None
) -> dict[str, Array]:
    """Turn parameters into the tensors of a Hugging Face checkpoint, by tensor name.

    The names are those of the files of the checkpoint. A head that is tied to the embedding is not
    among them. Dtypes do not change. Token ids therefore stay int32; a file has them as int64.

    Args:
      params: the parameters of the target or drafter, as `trees.flat_params` takes them.
      model: the loaded model that they belong to, whose checkpoint gives the prefix. Or its config.
      prefix: the prefix of a target's tensor names, such as "model." in text-only checkpoints of
        Gemma 4. None is that of the model's checkpoint; of a config it is the prefix of the
        releases, which is "model.language_model." for Gemma 4. Drafters' names have no prefix.

    Raises:
      CheckpointError: the model's directory is gone, or weights are quantised.
      ValueError: parameters are missing, not known, or of a wrong shape; they are listed.
    """
    config = model
    if isinstance(model, LoadedModel):
        refuse_copy(model)
        refuse_quantised(dict(model.model_def.formats), model.source)
        config, prefix = model.config, checkpoint_prefix(model) if prefix is None else prefix
    shapes = parameter_shapes(config)
    return bridge.to_hf_names(flat_params(params), rule_set(config, shapes), shapes, prefix=prefix)


def from_hf_names(
    tensors: Mapping[str, Array | np.ndarray], model: LoadedModel | ModelConfig
) -> Params:
    """Turn the tensors of a Hugging Face checkpoint into parameters, in the tensors' dtypes.

    Tensors without a place in the model, such as a vision tower, are left out. The conversion of
    files does the same.

    Args:
      tensors: the tensors by full name; their prefix is detected.
      model: the loaded target or drafter that the tensors belong to, or its config.

    Raises:
      CheckpointError: tensors are missing, not known, or of a wrong shape or dtype (they are
        listed). Outside of jit also: a head differs from the embedding that it is tied to.
    """
    config = model.config if isinstance(model, LoadedModel) else model
    shapes = parameter_shapes(config)
    return bridge.from_hf_names(tensors, rule_set(config, shapes), shapes)


def checkpoint_prefix(model: LoadedModel) -> str:
    """Return what stands before the tensor names of the checkpoint that a model came from.

    Only names are read. A model that came from no files has the prefix of the releases.

    Raises:
      CheckpointError: the files are damaged.
    """
    rules = rule_set(model.config, parameter_shapes(model.config))
    if (model.directory / MANIFEST).is_file():
        return find_prefix(rules, Manifest.read(model.directory).tensors)
    if (model.directory / "config.json").is_file():
        return find_prefix(rules, hf_io.open_checkpoint(model.directory).tensors)
    return rules.prefixes[0]
