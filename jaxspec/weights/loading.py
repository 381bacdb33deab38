"""Load a model from a converted directory, from Hugging Face files, or from the hub.

Read `load_target`. `source.WeightSource` is the interface of both kinds of directories.
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
from jaxspec._deprecated import warn_renamed
from jaxspec.configs.base import GenerationDefaults
from jaxspec.options import FieldError
from jaxspec.quantised import QuantisedArray
from jaxspec.registry import Family, ModelConfig, families
from jaxspec.shapes import Params
from jaxspec.weights.define import model_def_of, quantised_def, with_kv_dtype
from jaxspec.weights.manifest import MANIFEST
from jaxspec.weights.memory import check_weights_fit
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.native import VISION, open_native_source, open_native_vision
from jaxspec.weights.sharding import make_mesh
from jaxspec.weights.source import (
    WeightSource,
    open_configs,
    open_hf_source,
    open_hf_vision,
    open_vision_config,
)
from jaxspec.weights.trees import flat_params

__all__ = ["CheckpointError", "LoadedModel", "default_dtype", "load_drafter", "load_target"]


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model ready to run: its definition, its weights on the devices, and its origin."""

    model_def: ModelDef
    params: Params
    config: ModelConfig
    generation: GenerationDefaults | None  # None for drafters
    directory: Path  # local, with the tokenizer files
    source: str  # the `source` that was passed to the loader
    vision: LoadedModel | None = None  # of a target: what embeds images for it

    def __repr__(self) -> str:
        """Return one line. The weights are left out, because they would fill pages."""
        size = sum(weight.size for weight in self.model_def.abstract_params().values())
        name = f"{self.source}: {self.model_def.module.__name__}"
        return f"LoadedModel({name}, {size / 1e6:,.1f}M {self.model_def.dtypes})"

    @property
    def graph(self) -> ModelDef:
        """The old name of `model_def`."""
        warn_renamed("LoadedModel.graph", "LoadedModel.model_def")
        return self.model_def

    def with_params(self, params: Any) -> LoadedModel:
        """Return the model with other weights, such as trained ones, as `trees.flat_params` takes them.

        Raises:
          ValueError: they do not fit the model definition; every difference is named.
        """
        params = flat_params(params, self.model_def)
        self.model_def.check(params)
        return dataclasses.replace(self, params=params)


def load_target(
    source: str,
    *,
    dtype: str,
    quantize: str | None = None,
    quantize_head: str | None = None,
    quantize_vision: str | None = None,
    kv_dtype: str | None = None,
    drafter: LoadedModel | None = None,
    vision: bool = False,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    mesh: Mesh | None = None,
    read_weights: bool = True,
) -> LoadedModel:
    """Load a target from a converted directory, a Hugging Face directory, or a hub id.

    Without `mesh`, arrays go to the default device one at a time. They are uncommitted, like all
    arrays that JAX places by itself. With `mesh`, each shard goes straight to its own device.
    A weight is quantised as soon as it is on the device. So a device holds the quantised weights, and
    the largest weight as numbers. A weight that a file holds quantised goes to the device unchanged.
    A GPU transposes and packs large weights itself, and holds one of them twice for that. The host
    reads the next weight meanwhile.

    Args:
      dtype: "float32" or "bfloat16". All arrays are cast to it.
      quantize: the format of linears and experts, such as "int8" or "int4"; None for what is
        stored. Those that are stored quantised stay as they are, but fp8 may become "fp8-dynamic".
      quantize_head: of embedding and head, likewise.
      quantize_vision: of the linears of the vision part. What a file holds quantised there becomes
        numbers first.
      kv_dtype: of keys and values in caches, "bfloat16", "float32" or "fp8"; None for `dtype`. fp8
        takes the scales of the checkpoint, if it has any.
      drafter: the drafter that is to draft for it.
      vision: whether to load the vision part of the checkpoint too, if it has one.
      read_weights: False for shapes in place of weights, to count memory. Of a hub id only the
        config files are fetched then.

    Raises:
      CheckpointError, ConfigError: the model is missing, incomplete, not a target, or not the one that
        the drafter was made for. That is known before weights are read.
      DeviceMemoryError: the weights need more memory than the devices have.
      FieldError: a format is not known, does not run here, or the model is quantised already.
    """
    formats = (quantize, quantize_head)
    return _load(
        "target",
        source,
        dtype,
        formats,
        quantize_vision,
        kv_dtype,
        drafter,
        vision,
        revision,
        token,
        offline,
        mesh,
        read_weights,
    )


def load_drafter(
    source: str,
    *,
    dtype: str,
    quantize: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    mesh: Mesh | None = None,
    read_weights: bool = True,
) -> LoadedModel:
    """Load a drafter of any family. Arguments and errors are as in `load_target`.

    A head of the drafter's own is quantised with the rest.
    """
    formats = (quantize, quantize)
    hub = revision, token, offline, mesh, read_weights
    return _load("drafter", source, dtype, formats, None, None, None, False, *hub)


def open_vision(directory: Path) -> WeightSource | None:
    """Open the vision part of a directory of ours or of Hugging Face's. Return None if it has none.

    Raises:
      CheckpointError, ConfigError: as `open_source`.
    """
    if (directory / MANIFEST).is_file():
        return open_native_vision(directory)
    return open_hf_vision(directory)


def _load(
    role: Literal["target", "drafter"],
    source: str,
    dtype: str,
    formats: tuple[str | None, str | None],
    quantize_vision: str | None,
    kv_dtype: str | None,
    drafter: LoadedModel | None,
    vision: bool,
    revision: str | None,
    token: str | None,
    offline: bool,
    mesh: Mesh | None,
    read_weights: bool,
) -> LoadedModel:
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, not {dtype!r}")
    option = "quantize" if role == "target" else "quantize_drafter"
    directory = hf_io.resolve(
        source, revision=revision, token=token, offline=offline, configs_only=not read_weights
    )
    is_local = Path(source).expanduser().is_dir()
    checkpoint = open_source(directory) if read_weights or is_local else open_configs(directory)
    _check_role(source, checkpoint.family, role)
    if drafter is not None:
        drafter.config.check_fits(checkpoint.config)
    stored = checkpoint.model_def(dtype, formats[0])
    model_def = quantised_def(stored, source, *formats, option)
    kv_scales = checkpoint.kv_scales() if kv_dtype == "fp8" else None
    model_def = with_kv_dtype(model_def, kv_dtype, kv_scales)
    of_images = open_vision(directory) if vision and (read_weights or is_local) else None
    vision_config = None if of_images is None else of_images.config
    if vision and not (read_weights or is_local):
        vision_config = open_vision_config(directory)
    vision_def = None if vision_config is None else model_def_of(vision_config, dtype)
    if quantize_vision is not None:
        if vision_def is None:
            raise FieldError("quantize_vision", f"{source} has no vision part here: leave it out")
        vision_def = quantised_def(vision_def, source, quantize_vision, None, "quantize_vision")
    beside = () if vision_def is None else (vision_def,)
    if read_weights:
        check_weights_fit(model_def, mesh or _default_mesh(), *beside)
        params = _read(checkpoint, model_def, mesh)
    else:
        params = model_def.placed_shapes(mesh or _default_mesh())
    loaded = LoadedModel(
        model_def, params, checkpoint.config, checkpoint.generation, directory, source
    )
    if vision_def is None or vision_config is None:
        return loaded
    at = directory / VISION if (directory / MANIFEST).is_file() else directory
    of_vision: Params = vision_def.placed_shapes(mesh or _default_mesh())
    if of_images is not None and read_weights:
        of_vision = _read(of_images, vision_def, mesh)
    embedder = LoadedModel(vision_def, of_vision, vision_config, None, at, source)
    return dataclasses.replace(loaded, vision=embedder)


def _read(source: WeightSource, model_def: ModelDef, mesh: Mesh | None) -> Params:
    """Read weights onto devices. Quantise each as soon as it is there."""
    params: Params = {}
    for name, weight in source.weights(model_def, mesh):
        is_packed = isinstance(weight, QuantisedArray)
        params[name] = weight if is_packed else model_def.pack(name, weight)
        del weight
    return model_def.adopt(params)


def open_source(directory: Path) -> WeightSource:
    """Open a directory of ours or of Hugging Face's.

    Raises:
      CheckpointError, ConfigError: it is no checkpoint, or one that is damaged or not supported.
    """
    if (directory / MANIFEST).is_file():
        return open_native_source(directory)
    return open_hf_source(directory)


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
