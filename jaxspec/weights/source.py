"""Sources of weights. `WeightSource` is the interface; `HFSource` reads a Hugging Face checkpoint.

Read `WeightSource`, `open_hf_source`, then `HFSource.weights`. A weight that the file holds quantised
is read as codes and scales, to the bit, where the model multiplies by such a format
(`jaxspec.quantised`). Elsewhere it is read as numbers. `native.py` reads a directory of ours.
"""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints_convert import hf_io
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import read_json
from checkpoints_convert.kv_scales import read_kv_scales
from checkpoints_convert.quantised import stored_weights
from checkpoints_convert.quantised.quantization_config import (
    QuantizationConfig,
    Spec,
    read_quantization_config,
)
from checkpoints_convert.quantised.view import View, open_view
from checkpoints_convert.rules import (
    FLOATS,
    ConversionPlan,
    Fill,
    RuleSet,
    Shape,
    Transform,
    find_prefix,
    integers,
    match,
    offsets,
    permutation,
    same,
)
from jaxspec.configs.base import ConfigError, GenerationDefaults
from jaxspec.options import shown
from jaxspec.quantised import QuantisedArray
from jaxspec.registry import Family, ModelConfig, family_of, recognise, recognise_vision
from jaxspec.shapes import Array
from jaxspec.weights.define import model_def_of
from jaxspec.weights.finite import See, checked
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.quantised_files import format_of, is_lossless, to_quantised
from jaxspec.weights.sharding import place

_LOG = logging.getLogger(__name__)


class WeightSource(abc.ABC):
    """A checkpoint that was opened and recognised, and whose weights can be read.

    Attributes:
      generation: the defaults of decoding; None for drafters.
    """

    family: Family
    config: ModelConfig
    generation: GenerationDefaults | None

    @abc.abstractmethod
    def kv_scales(self) -> tuple[tuple[float, float], ...] | None:
        """Return the scales of keys and values for each layer of a target; None where there are none.

        Raises:
          CheckpointError: some layers have none, or one is no positive number.
        """

    @abc.abstractmethod
    def model_def(self, dtype: str, quantize: str | None = None) -> ModelDef:
        """Return the model definition with the formats of what the checkpoint holds quantised.

        Args:
          quantize: the format of weights that have to be rounded again; None for int8.

        Raises:
          CheckpointError: a weight has a format that is not read, or that the model does not have.
        """

    @abc.abstractmethod
    def weights(
        self, model_def: ModelDef, mesh: Mesh | None = None
    ) -> Iterator[tuple[str, Array | QuantisedArray]]:
        """Yield each weight by name, on the devices.

        A weight that the checkpoint holds quantised is a `QuantisedArray`. All others are arrays,
        those too that `model_def` quantises beyond the checkpoint.

        Args:
          model_def: as `model_def` returned it, or with more formats.
          mesh: where to place the weights; None is the default device.

        Raises:
          CheckpointError: a file is damaged; or, at the end, weights are not finite.
        """


@dataclass(frozen=True)
class Recipe:
    """The way from the tensors of a file to a parameter. It moves codes and numbers.

    Attributes:
      transform, shape: of the parameter.
      format, contracting_axes: of a weight whose codes and scales the file has; None of all others.
    """

    transform: Transform
    shape: Shape
    format: str | None = None
    contracting_axes: tuple[int, ...] = ()

    def __call__(self, pieces: Sequence[Any]) -> Any:
        """Return an array, or a `QuantisedArray`.

        Args:
          pieces: as `HFSource.pieces` returned them, in numpy; or the same on a device, inside jit.
        """
        if self.format is None:
            return self.transform.to_param(pieces, self.shape)
        rows = self.transform.rows
        assert rows is not None
        joined = stored_weights.arrange(pieces, lambda arrays: rows(arrays, self.shape))
        return to_quantised(joined, self.format, self.shape, self.contracting_axes)

    @property
    def moves(self) -> bool:
        """True if the arrays lie in another order than the pieces."""
        return self.format is not None or self.transform not in (same, integers, permutation)

    def on_host(self, pieces: Sequence[Any]) -> np.ndarray | QuantisedArray:
        """Return arrays of numpy, whose numbers lie in order."""
        if self.format is not None:
            return jax.tree.map(np.ascontiguousarray, self(pieces))
        # As whole numbers, which numpy moves several times faster than bfloat16.
        dtype = pieces[0].dtype
        return self([piece.view(f"u{dtype.itemsize}") for piece in pieces]).view(dtype)

    def on_device(self, pieces: Sequence[Any]) -> Any:
        """Put pieces on the default device, and return the arrays there. It compiles once a recipe."""
        return _compiled(self)(pieces)


@functools.cache
def _compiled(recipe: Recipe) -> Callable[[Sequence[Any]], Any]:
    return jax.jit(recipe)


@dataclass(frozen=True)
class HFSource(WeightSource):
    """A Hugging Face checkpoint that was opened and recognised. It lacks no tensor."""

    checkpoint: hf_io.HFCheckpoint
    family: Family
    config: ModelConfig
    generation: GenerationDefaults | None
    plan: ConversionPlan
    view: View

    def kv_scales(self) -> tuple[tuple[float, float], ...] | None:
        """Read the scales, as `WeightSource.kv_scales` describes them."""
        if self.family.role != "target":
            return None
        layers = self.config.num_layers
        owners = [i for i in range(layers) if self.config.owns_kv(i)]
        return read_kv_scales(self.checkpoint, owners, layers)

    @property
    def skipped(self) -> dict[str, str]:
        """The tensors of the file that are not used, with the reason."""
        origins = self.view.origins
        named = {tensor: why for name, why in self.plan.skipped.items() for tensor in origins[name]}
        return named | self.view.skipped

    def tensors_of(self, fill: Fill) -> list[str]:
        """Return the tensors of the file that a parameter is made of."""
        return [tensor for name in fill.sources for tensor in self.view.origins[name]]

    def nbytes(self, fill: Fill) -> int:
        """Return the bytes of these tensors."""
        return sum(self.checkpoint.tensors[name].nbytes for name in self.tensors_of(fill))

    @functools.cached_property
    def _formats(self) -> Mapping[str, str]:
        return dict(self.model_def("bfloat16").formats)

    def dtype_of(self, fill: Fill) -> np.dtype:
        """Return the dtype of a parameter's numbers: float32 for codes that no format here keeps."""
        if self.spec_of(fill) is not None and fill.path not in self._formats:
            return np.dtype(np.float32)
        return hf_io.DTYPES[self.view.tensors[fill.sources[0]].dtype]

    def spec_of(self, fill: Fill) -> Spec | None:
        """Return how the file stores a parameter; None for plain numbers.

        Raises:
          CheckpointError: its sources have several formats.
        """
        specs = {name: self.view.spec(name) for name in fill.sources}
        if len(set(specs.values())) > 1:
            formats = ", ".join(f"{n} is {spec or 'plain numbers'}" for n, spec in specs.items())
            raise CheckpointError(
                f"{self.checkpoint.directory}: {formats}. They are one weight here, {fill.path}, and "
                "must have one format; take a build that treats them alike"
            )
        return specs[fill.sources[0]]

    def model_def(self, dtype: str, quantize: str | None = None) -> ModelDef:
        """Return the model definition, as `WeightSource.model_def` describes it."""
        model_def = model_def_of(self.config, dtype)
        formats, declared = {}, model_def.declared()
        for fill in self.plan.fills:
            spec, about = self.spec_of(fill), declared[fill.path]
            if spec is not None and about.contracting_axes:
                format = format_of(spec, fill.path, fill.shape, about.contracting_axes, quantize)
                formats |= {fill.path: format} if format is not None else {}
        return model_def.with_formats(formats)

    def read(
        self, fill: Fill, model_def: ModelDef, dtype: np.dtype, see: See
    ) -> np.ndarray | QuantisedArray:
        """Read a parameter: an array, or a `QuantisedArray` with the arrays that the file has.

        Arguments are those of `pieces`.
        """
        recipe, pieces = self.pieces(fill, model_def, dtype, see)
        return recipe.on_host(pieces)

    def pieces(
        self, fill: Fill, model_def: ModelDef, dtype: np.dtype, see: See
    ) -> tuple[Recipe, list[Any]]:
        """Read the tensors of a parameter, and return them with the recipe of the parameter.

        Args:
          model_def: as `self.model_def` returned it, or with more formats. Weights that it quantises
            beyond the file are returned as numbers.
          dtype: of arrays. Numbers that are to be quantised again are float32.
        """
        spec, format = self.spec_of(fill), dict(model_def.formats).get(fill.path)
        if spec is not None and format is not None:
            if is_lossless(spec):
                contracting_axes = model_def.declared()[fill.path].contracting_axes
                recipe = Recipe(fill.transform, fill.shape, format, contracting_axes)
                return recipe, [self.view.source(name, see) for name in fill.sources]
            dtype = np.dtype(np.float32)
        numbers = [self.view.numbers(name, dtype, see) for name in fill.sources]
        return Recipe(fill.transform, fill.shape), numbers

    def all_pieces(
        self, model_def: ModelDef, dtype: np.dtype
    ) -> Iterator[tuple[str, Recipe, list[Any]]]:
        """Yield every parameter by name, as `pieces` returns it.

        Raises:
          CheckpointError: at the end, if weights are not finite.
        """
        with checked(self.checkpoint.directory) as see:
            for fill in self.plan.fills:
                yield fill.path, *self.pieces(fill, model_def, fill.cast(dtype), see)

    def weights(
        self, model_def: ModelDef, mesh: Mesh | None = None
    ) -> Iterator[tuple[str, Array | QuantisedArray]]:
        """Yield each weight by name, as `WeightSource.weights` describes it."""
        abstract = model_def.abstract_params()
        split = {} if mesh is None else model_def.shardings(mesh)
        whole = {} if mesh is None else model_def.weight_shardings(mesh)
        on_device = mesh is None and _moves_fast()
        pieces_of_all = self.all_pieces(model_def, np.dtype(hf_io.numpy_dtype(model_def.dtype)))
        for name, recipe, pieces in read_ahead(pieces_of_all) if on_device else pieces_of_all:
            large = sum(x.nbytes for x in jax.tree.leaves(pieces)) >= _LARGE_BYTES
            worthwhile = on_device and large and recipe.moves
            array = recipe.on_device(pieces) if worthwhile else recipe.on_host(pieces)
            del pieces
            shardings = whole
            if isinstance(array, QuantisedArray):
                array, shardings = abstract[name].with_parts(array.parts), split
            if mesh is None:
                # `jnp.asarray` would compile a program for each shape.
                yield name, jax.tree.map(jax.device_put, array)
            else:
                yield name, jax.tree.map(place, array, shardings[name])
            del array


_LARGE_BYTES = 4 << 20
"""From this size on a device moves numbers to their places. Others are not worth compiling for."""


def _moves_fast() -> bool:
    """Return whether the default device transposes faster than the host, as all but the CPU do."""
    return jax.default_backend() != "cpu"


def read_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """Yield items, and make the next one in a thread meanwhile. So at most two are in memory."""
    end = object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item
            del item


def open_hf_source(directory: Path) -> HFSource:
    """Open a Hugging Face directory and match its tensors with the model's parameters.

    Raises:
      CheckpointError: a file is missing or damaged, or tensors do not fit; they are listed.
      ConfigError: config.json is malformed, or describes a model that is not supported.
    """
    checkpoint = hf_io.open_checkpoint(directory)
    hf_io.note_unread(checkpoint)
    family, config, defaults = read_configs(
        directory, checkpoint.config, checkpoint.generation_config
    )
    try:
        config = family.fit_to(config, checkpoint.tensors)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from None
    return _matched(checkpoint, family, config, defaults)


def open_hf_vision(directory: Path) -> HFSource | None:
    """Open the vision part of a Hugging Face directory. Return None if it has none.

    A checkpoint whose config.json has a vision part and whose files have no tensor of it is a text
    model, as some programs write it.

    Raises:
      CheckpointError, ConfigError: as `open_hf_source`; some of the tensors are missing, say.
    """
    checkpoint = hf_io.open_checkpoint(directory)
    recognised = _recognised_vision(directory, checkpoint.config)
    if recognised is None:
        return None
    family, config = recognised
    rules = rule_set(config, parameter_shapes(config))
    names = {name for p in rules.prefixes for rule in rules.rules for name in rule.names(p)}
    if not names & set(checkpoint.tensors):
        return None
    return _matched(checkpoint, family, config, None)


def open_vision_config(directory: Path) -> ModelConfig | None:
    """Return the config of the vision part of a Hugging Face directory, whose weights need not be there.

    Raises:
      CheckpointError, ConfigError: as `open_hf_source`.
    """
    recognised = _recognised_vision(directory, read_json(directory / "config.json"))
    return None if recognised is None else recognised[1]


def _recognised_vision(
    directory: Path, config: Mapping[str, Any]
) -> tuple[Family, ModelConfig] | None:
    try:
        return recognise_vision(config)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from None


def _matched(
    checkpoint: hf_io.HFCheckpoint,
    family: Family,
    config: ModelConfig,
    generation: GenerationDefaults | None,
) -> HFSource:
    """Match the tensors of a checkpoint with the parameters of a model."""
    directory = checkpoint.directory
    shapes = parameter_shapes(config)
    rules = rule_set(config, shapes)
    try:
        quantization = read_quantization_config(checkpoint.config, checkpoint.quantization)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    if family.role == "vision" and _holds_numbers(checkpoint, rules):
        quantization = None  # builds leave it as it is, and not all say so in their config.json
    view = open_view(checkpoint, rules, quantization, str(directory))
    plan = match(rules, shapes, view.tensors, str(directory))
    for name, original in plan.copies.items():
        if not view.quantised & {name, original}:
            _check_copy(checkpoint, view.origins[name][0], view.origins[original][0], directory)
    for fill in plan.fills:
        if fill.transform is permutation:
            _check_ordering(checkpoint, fill.sources[0], str(directory))
        if fill.transform is offsets:
            _check_offsets(checkpoint, fill.sources[0], config.vocab_size, str(directory))
    return HFSource(checkpoint, family, config, generation, plan, view)


@dataclass(frozen=True)
class ConfigSource(WeightSource):
    """The config files of a Hugging Face checkpoint, without its tensors. They tell its shapes and formats."""

    directory: Path
    family: Family
    config: ModelConfig
    generation: GenerationDefaults | None
    quantization: QuantizationConfig | None

    def kv_scales(self) -> tuple[tuple[float, float], ...] | None:
        """Return scales of 1: no size depends on them."""
        return ((1.0, 1.0),) * self.config.num_layers if self.family.role == "target" else None

    def model_def(self, dtype: str, quantize: str | None = None) -> ModelDef:
        """Return the model definition with the formats that config.json announces."""
        model_def = model_def_of(self.config, dtype)
        if self.quantization is None:
            return model_def
        shapes, declared, formats = parameter_shapes(self.config), model_def.declared(), {}
        rules = rule_set(self.config, shapes)
        for rule in rules.rules:
            name, axes = rule.names(rules.prefixes[0])[0], declared[rule.path].contracting_axes
            for stack in rules.stacks:
                name = stack.names(name, 0)[0] if name.endswith(stack.pattern) else name
            spec = self.quantization.of(name.removesuffix(".weight"))
            if spec is None or not axes:
                continue
            spec = replace(spec, scales=spec.scales or "BF16")  # only files know; F16 is as wide
            format = format_of(spec, rule.path, shapes[rule.path], axes, quantize)
            formats |= {rule.path: format} if format is not None else {}
        return model_def.with_formats(formats)

    def weights(
        self, model_def: ModelDef, mesh: Mesh | None = None
    ) -> Iterator[tuple[str, Array | QuantisedArray]]:
        """Refuse: there are none."""
        raise CheckpointError(f"{self.directory} was opened without its weights")


def open_configs(directory: Path) -> ConfigSource:
    """Open the config files of a Hugging Face directory, whose weights need not be there.

    Raises:
      CheckpointError, ConfigError: as `open_hf_source`.
    """
    files = (*hf_io.CONFIG_FILES, hf_io.QUANTIZATION_FILE)
    read = {name: read_json(directory / name) for name in files if (directory / name).is_file()}
    if "config.json" not in read:
        raise CheckpointError(f"{directory} is not a model: it has no config.json")
    config = read["config.json"]
    configs = read_configs(directory, config, read.get("generation_config.json"))
    try:
        quantization = read_quantization_config(config, read.get(hf_io.QUANTIZATION_FILE))
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    return ConfigSource(directory, *configs, quantization)


def _holds_numbers(checkpoint: hf_io.HFCheckpoint, rules: RuleSet) -> bool:
    """Return whether a checkpoint has all source tensors of a table, as plain numbers."""
    prefix = find_prefix(rules, checkpoint.tensors)
    names = [name for rule in rules.rules for name in rule.names(prefix)]
    tensors = checkpoint.tensors
    return all(name in tensors and tensors[name].dtype in FLOATS for name in names)


def read_configs(
    directory: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None
) -> tuple[Family, ModelConfig, GenerationDefaults | None]:
    """Read the parsed config files of a directory.

    Returns:
      The family, the model's config, and the defaults of decoding, which only a target has.

    Raises:
      ConfigError: naming the directory, the file and the key that is wrong.
    """
    try:
        family = recognise(config)
        model, defaults = family.read(config, generation_config), None
        if family.role == "target":
            defaults = GenerationDefaults.from_hf(generation_config, config)
            defaults.check_fits(model.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from None
    if defaults is not None and (ignored := defaults.unapplied(generation_config)):
        _LOG.warning(
            "%s: generation_config.json has %s, which jaxspec does not apply",
            directory,
            ", ".join(f"{key} = {shown(value)}" for key, value in ignored.items()),
        )
    return family, model, defaults


def _check_copy(checkpoint: hf_io.HFCheckpoint, name: str, original: str, where: Path) -> None:
    """Refuse a tied head that is not the embedding."""
    if not checkpoint.equal(name, original):
        raise CheckpointError(
            f"{where}: {name} differs from {original}, but its config.json says that they are "
            "one (tie_word_embeddings); get the checkpoint again, or correct config.json"
        )


def _check_ordering(checkpoint: hf_io.HFCheckpoint, name: str, where: str) -> None:
    """Refuse a token ordering that leaves out tokens. Nothing else would fail on it."""
    ids = checkpoint.read(name)
    absent = np.setdiff1d(np.arange(ids.size), ids)
    if absent.size:
        raise CheckpointError(
            f"{where}: {name} must list every token from 0 to {ids.size - 1} once, but {absent.size} "
            f"are not in it, {absent[0]} the first; get the checkpoint again"
        )


def _check_offsets(checkpoint: hf_io.HFCheckpoint, name: str, vocab_size: int, where: str) -> None:
    """Refuse a reduced vocabulary with ids that are no tokens of the target, or with one id twice."""
    offsets = checkpoint.read(name).astype(np.int64)
    ids = offsets + np.arange(offsets.size)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(
            f"{where}: {name} makes ids from {ids.min()} to {ids.max()}, and the target has tokens 0 to "
            f"{vocab_size - 1}; get the checkpoint of this target"
        )
    if np.unique(ids).size < ids.size:
        raise CheckpointError(
            f"{where}: {name} makes {ids.size - np.unique(ids).size} ids twice. It must hold the "
            "distance from the index of each of the drafter's tokens to its id"
        )


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every parameter of the model that a config describes, by name."""
    return {
        n: tuple(a.shape) for n, a in model_def_of(config, "bfloat16").abstract_params().items()
    }


def rule_set(config: ModelConfig, params: Iterable[str]) -> RuleSet:
    """Return the conversion rules of the model that a config describes.

    Args:
      params: the names of the model's parameters.
    """
    return family_of(config).rules(config, params)
