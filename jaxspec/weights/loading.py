"""Load a model from a converted directory, from Hugging Face files, or from the hub.

Read `load_target`. `storage` describes what a converted directory holds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from checkpoints_convert import hf_io
from checkpoints_convert.errors import CheckpointError
from jaxspec.configs.base import GenerationDefaults
from jaxspec.registry import Family, ModelConfig, families, get_family
from jaxspec.shapes import Array, Params
from jaxspec.weights.arrays import restore_params
from jaxspec.weights.define import model_def_of, quantised_def, with_kv_dtype
from jaxspec.weights.manifest import MANIFEST, Manifest
from jaxspec.weights.memory import check_weights_fit
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh, place
from jaxspec.weights.source import open_source, read_ahead
from jaxspec.weights.trees import flat_params

__all__ = ["CheckpointError", "LoadedModel", "default_dtype", "load_drafter", "load_target"]


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model ready to run: its model_def, its weights on the devices, and its origin."""

    model_def: ModelDef
    params: Params
    config: ModelConfig
    generation: GenerationDefaults | None  # None for drafters
    directory: Path  # local, with the tokenizer files
    source: str  # the `source` that was passed to the loader

    def __repr__(self) -> str:
        """Return one line. The weights are left out, because they would fill pages."""
        size = sum(weight.size for weight in self.model_def.abstract_weights().values())
        name = f"{self.source}: {self.model_def.module.__name__}"
        return f"LoadedModel({name}, {size / 1e6:,.1f}M {self.model_def.dtypes})"

    def with_params(self, params: Any) -> LoadedModel:
        """Return the model with other weights, such as trained ones, as `trees.flat_params` takes them.

        Raises:
          ValueError: they do not fit the model definition; every difference is named.
        """
        params = flat_params(params)
        self.model_def.check(params)
        return dataclasses.replace(self, params=params)


def load_target(
    source: str,
    *,
    dtype: str,
    quantize: str | None = None,
    quantize_head: str | None = None,
    kv_dtype: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Load a target from a converted directory, a Hugging Face directory, or a hub id.

    Without `mesh`, arrays go to the default device one at a time. They are uncommitted, like all
    arrays that JAX places by itself. With `mesh`, each shard goes straight to its own device.
    A weight that is to be quantised is so as soon as it is on the device. So a device holds the
    quantised weights, and the largest weight as numbers. What a file holds quantised goes to the
    device as it is. A GPU transposes and packs large weights itself, and holds one of them twice
    for that. The host reads the next weight meanwhile.

    Args:
      dtype: "float32" or "bfloat16". All arrays are cast to it.
      quantize: the format of linears and experts, such as "int8" or "int4"; None for what is
        stored. Those that are stored quantised stay as they are, but fp8 may become "fp8-dynamic".
      quantize_head: of embedding and head, likewise.
      kv_dtype: of keys and values in caches, "bfloat16", "float32" or "fp8"; None for `dtype`. fp8
        takes the scales of the checkpoint, if it has any.

    Raises:
      CheckpointError, ConfigError: the model is missing, incomplete, or not a target.
      DeviceMemoryError: the weights need more memory than the devices have.
      FieldError: a format is not known, does not run here, or the model is quantised already.
    """
    formats = (quantize, quantize_head)
    return _load("target", source, dtype, formats, kv_dtype, revision, token, offline, mesh)


def load_drafter(
    source: str,
    *,
    dtype: str,
    quantize: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Load a drafter of any family. Arguments and errors are as in `load_target`.

    A head of the drafter's own is quantised with the rest.
    """
    formats = (quantize, quantize)
    return _load("drafter", source, dtype, formats, None, revision, token, offline, mesh)


def _load(
    role: Literal["target", "drafter"],
    source: str,
    dtype: str,
    formats: tuple[str | None, str | None],
    kv_dtype: str | None,
    revision: str | None,
    token: str | None,
    offline: bool,
    mesh: Mesh | None,
) -> LoadedModel:
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, not {dtype!r}")
    option = "quantize" if role == "target" else "quantize_drafter"
    directory = hf_io.resolve(source, revision=revision, token=token, offline=offline)
    if (directory / MANIFEST).is_file():
        manifest = Manifest.read(directory)
        _check_role(source, get_family(manifest.kind), role)
        stored = manifest.model_def(dtype)
        model_def = quantised_def(stored, source, *formats, option)
        model_def = with_kv_dtype(model_def, kv_dtype, manifest.kv_scales)
        check_weights_fit(model_def, mesh or _default_mesh())
        params = restore_params(directory, model_def, mesh, stored)
        return LoadedModel(
            model_def, params, manifest.config, manifest.generation, directory, source
        )
    opened = open_source(directory)
    _check_role(source, opened.family, role)
    stored = opened.quantised_def(model_def_of(opened.config, dtype), formats[0])
    model_def = quantised_def(stored, source, *formats, option)
    model_def = with_kv_dtype(model_def, kv_dtype, opened.kv_scales if kv_dtype == "fp8" else None)
    check_weights_fit(model_def, mesh or _default_mesh())
    shardings = (
        {} if mesh is None else {**model_def.weight_shardings(mesh), **model_def.shardings(mesh)}
    )

    def placed(name: str, array: Any) -> Array:
        return jnp.asarray(array) if mesh is None else place(array, shardings[name])

    there = mesh is None and _moves_fast()
    params: Params = {}
    pieces_of_all = opened.all_pieces(model_def, jnp.dtype(dtype))
    for name, recipe, pieces in read_ahead(pieces_of_all) if there else pieces_of_all:
        large = sum(x.nbytes for x in jax.tree.leaves(pieces)) >= _LARGE_BYTES
        worthwhile = there and large and recipe.moves
        array = recipe.on_device(pieces) if worthwhile else recipe.on_host(pieces)
        del pieces
        if isinstance(array, dict):  # as the file has them
            params |= {f"{name}.{part}": placed(f"{name}.{part}", x) for part, x in array.items()}
        else:
            params |= model_def.pack(name, placed(name, array))
        del array
    return LoadedModel(model_def, params, opened.config, opened.generation, directory, source)


_LARGE_BYTES = 4 << 20
"""From this size on a device moves numbers to their places. Others are not worth compiling for."""


def _moves_fast() -> bool:
    """Tell whether the default device transposes faster than the host, as all but the CPU do."""
    return jax.default_backend() != "cpu"


def _check_role(source: str, family: Family, wanted: Literal["target", "drafter"]) -> None:
    if family.role == wanted:
        return
    if wanted == "target":
        raise CheckpointError(f"{source} is {family.title}; expected a target")
    expected = " or ".join(drafter.title for drafter in families("drafter"))
    raise CheckpointError(f"{source} is a target; expected {expected}")


def _default_mesh() -> Mesh:
    return make_mesh(devices=list(jnp.zeros(()).devices()))


def default_dtype() -> str:
    """Return the dtype that suits the default device."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"
