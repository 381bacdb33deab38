"""Save trained weights: as a directory in jaxspec's format, or as a Hugging Face checkpoint.

    jaxspec.save("tuned", pair.target, params)
    jaxspec.save_hf("tuned-hf", pair.target, params)

Both write beside the destination and rename at the end, so that nothing half written is ever found
there. Both hold one parameter at a time in host memory.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_convert import hf_io
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.rules import fills_for
from jaxspec.quantised import QuantisedArray
from jaxspec.registry import family_of
from jaxspec.shapes import Array, Params
from jaxspec.weights.arrays import LazyArray, LazyWeight, save_params
from jaxspec.weights.atomic_dir import atomic_directory
from jaxspec.weights.bridge import checkpoint_prefix
from jaxspec.weights.conversion import _copy_files, refuse_quantised, tensor_groups
from jaxspec.weights.define import model_def_of
from jaxspec.weights.draft_head import refuse_copy
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.manifest import MANIFEST, Manifest
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.native import VISION
from jaxspec.weights.source import open_hf_source, parameter_shapes, rule_set
from jaxspec.weights.trees import flat_params

_STORED = {"float32": "F32", "bfloat16": "BF16"}


def save(directory: str | Path, model: LoadedModel, params: Any = None) -> None:
    """Write weights as a directory in jaxspec's format, which `load` takes.

    Args:
      directory: must not exist yet.
      model: the loaded target or drafter that the weights belong to. Its config and tokenizer
        files are copied.
      params: the weights, as `trees.flat_params` takes them; None for the model's own. They are
        stored in the dtype they have, which is float32 or bfloat16.

    Raises:
      CheckpointError: the directory exists, or cannot be written; or the model is a drafter with a
        copy of its target's head.
      ValueError: the weights do not fit the model; every difference is named.
    """
    refuse_copy(model)
    params, dtype = _checked(model, params)
    with atomic_directory(Path(directory)) as (temporary, _):
        if model.vision is not None:
            (inside := temporary / VISION).mkdir()
            _write(inside, model.vision, *_checked(model.vision, None))
        _copy_files(model.directory, temporary)
        _write(temporary, model, params, dtype)


def _write(directory: Path, model: LoadedModel, params: Params, dtype: str) -> None:
    """Write one model into a directory: its arrays, then its manifest."""
    config = model.config
    shapes = parameter_shapes(config)
    fills = fills_for(rule_set(config, shapes), shapes, checkpoint_prefix(model))
    save_params(directory, {name: _lazily(x) for name, x in params.items()})
    Manifest(
        kind=family_of(config).name,
        config=config,
        generation=model.generation,
        source=model.source,
        revision=None,
        dtype=dtype,
        formats=dict(model.model_def.formats) or None,
        compute_dtype=dtype if model.model_def.formats else None,
        cache_dtype=_cache_dtype(model.model_def, dtype),
        kv_scales=_kv_scales(model),
        tensors={
            name: "I64" if fill.transform.integers else _STORED[dtype]
            for fill in fills
            for name in fill.sources
        },
        skipped=[],
    ).write(directory)


def save_hf(directory: str | Path, model: LoadedModel, params: Any = None) -> None:
    """Write weights as a Hugging Face checkpoint, under the names of the one that the model came from.

    Of a multimodal checkpoint only what was loaded is written: the text decoder, and the vision part
    of a target that was loaded with it, whose weights are those of `model`.
    Arguments and errors are as in `save`. The dtype in config.json becomes that of the weights.

    Raises:
      CheckpointError: also if the model came without a config.json.
    """
    refuse_copy(model)
    refuse_quantised(dict(model.model_def.formats), model.source)
    params, dtype = _checked(model, params)
    if not (model.directory / "config.json").is_file():
        raise CheckpointError(
            f"{model.directory} has no config.json, which a Hugging Face checkpoint needs; `save` writes "
            "a directory that needs none"
        )
    groups = tensor_groups(model.config, params, checkpoint_prefix(model), dtype)
    if (vision := model.vision) is not None:
        of_vision, stored = _checked(vision, None)
        groups += tensor_groups(vision.config, of_vision, checkpoint_prefix(vision), stored)
    with atomic_directory(Path(directory)) as (temporary, _):
        hf_io.write_tensors(temporary, groups)
        _copy_files(model.directory, temporary)
        file = temporary / "config.json"
        values = _with_dtype(json.loads(file.read_bytes()), dtype)
        file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _checked(model: LoadedModel, params: Any) -> tuple[Params, str]:
    """Return weights that fit the model, and their dtype, which need not be the one it was loaded in."""
    params = model.params if params is None else flat_params(params, model.model_def)
    quantised = dict(model.model_def.formats)
    plain = [
        params[n] for n in model.model_def.abstract_params() if n in params and n not in quantised
    ]
    dtypes = {str(x.dtype) for x in plain if jnp.issubdtype(x.dtype, jnp.floating)}
    dtype = dtypes.pop() if len(dtypes) == 1 else model.model_def.dtype
    model_def = model_def_of(model.config, dtype if dtype in _STORED else model.model_def.dtype)
    model_def.with_formats(quantised).check(params)
    return params, dtype


def _cache_dtype(model_def: ModelDef, dtype: str) -> str | None:
    if model_def.kv is None:
        return dtype if model_def.formats else None
    return model_def.kv.name


def _kv_scales(model: LoadedModel) -> tuple[tuple[float, float], ...] | None:
    """Return the scales of keys and values of a checkpoint, whatever the caches of this run hold.

    Scales that no caches can use are left out.
    """
    if family_of(model.config).role != "target":
        return None
    if (model.directory / MANIFEST).is_file():
        return Manifest.read(model.directory).kv_scales
    if (model.directory / "config.json").is_file():
        with contextlib.suppress(CheckpointError):
            return open_hf_source(model.directory).kv_scales()
    return None if model.model_def.kv is None else model.model_def.kv.scales


def _lazily(x: Array | QuantisedArray) -> LazyArray | LazyWeight:
    if isinstance(x, QuantisedArray):
        return LazyWeight(x, lambda: x)
    return LazyArray(x.shape, np.dtype(x.dtype), lambda: np.asarray(x))


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json that says this dtype wherever it says one."""
    return {
        key: dtype
        if key in ("dtype", "torch_dtype") and isinstance(value, str)
        else _with_dtype(value, dtype)
        if isinstance(value, dict)
        else value
        for key, value in config.items()
    }
