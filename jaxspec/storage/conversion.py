"""Conversion of Hugging Face files: to a directory in jaxspec's format, back, and into memory.

Read `convert`, then `Source`. `convert` and `to_hf` hold one parameter at a time. Peak memory is
the size of the largest parameter plus a few hundred MB. A parameter that is joined or transposed
counts twice. Output goes to a directory beside the destination, which is renamed at the end, see
`storage.aside`. Until then nothing is at the destination, and the directory does not load.
"""

from __future__ import annotations

import functools
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_convert import hf_io
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.hf_io import CONFIG_FILES, TOKENIZER_FILES
from checkpoints_convert.kv_scales import read_kv_scales
from checkpoints_convert.rules import (
    Fill,
    Plan,
    RuleSet,
    Shape,
    TensorSpec,
    fills_for,
    find_prefix,
    match,
    permutation,
)
from jaxspec.configs.base import ConfigError, GenerationDefaults
from jaxspec.families import Family, ModelConfig, family_of, graph_of, recognise
from jaxspec.memory import check_host_fits
from jaxspec.params import Graph
from jaxspec.quantised import QuantisedArray
from jaxspec.quantised.choice import check_format, formats_for
from jaxspec.shapes import Array
from jaxspec.storage.acceptance import FIELD, read_acceptance, write_acceptance
from jaxspec.storage.arrays import LazyArray, check_tree, read_params, save_params, stored_arrays
from jaxspec.storage.aside import written_aside
from jaxspec.storage.finite import See, checked
from jaxspec.storage.manifest import MANIFEST, Manifest

Progress = Callable[[str, int, int], None]
"""Called after every parameter with its name, the bytes done so far, and the total bytes."""


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
      kind: the family's name.
      tensors: the number of tensors in the Hugging Face checkpoint that were read or written.
      parameters: the number of jaxspec's parameters.
      nbytes: bytes read by `convert`, or written by `to_hf`.
      skipped: the number of skipped tensors, by reason.
      left_behind: bytes that an interrupted conversion had left, and that were removed.
    """

    kind: str
    destination: Path
    tensors: int
    parameters: int
    nbytes: int
    seconds: float
    skipped: dict[str, int]
    left_behind: int


@dataclass(frozen=True)
class Source:
    """A Hugging Face checkpoint that was opened and recognised. It lacks no tensor."""

    checkpoint: hf_io.HFCheckpoint
    family: Family
    config: ModelConfig
    generation: GenerationDefaults | None
    plan: Plan

    @functools.cached_property
    def kv_scales(self) -> tuple[tuple[float, float], ...] | None:
        """The scales of keys and values for each layer of a target; None where there are none."""
        if self.family.role != "target":
            return None
        layers = self.config.num_layers
        owners = [i for i in range(layers) if self.config.owns_kv(i)]
        return read_kv_scales(self.checkpoint, owners, layers)

    def dtype_of(self, fill: Fill) -> np.dtype:
        return hf_io.DTYPES[self.checkpoint.tensors[fill.sources[0]].dtype]

    def read(self, fill: Fill, dtype: np.dtype, see: See) -> np.ndarray:
        sources = [self.checkpoint.read(name, dtype) for name in fill.sources]
        for name, source in zip(fill.sources, sources, strict=True):
            see(name, source)
        return fill.to_param(sources)

    def arrays(self, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every parameter by name, cast to `dtype`.

        Raises:
          CheckpointError: at the end, if weights are not finite.
        """
        with checked(self.checkpoint.directory) as see:
            for fill in self.plan.fills:
                yield fill.path, self.read(fill, fill.cast(dtype), see)


def open_source(directory: Path) -> Source:
    """Open a Hugging Face directory and match its tensors with the model's parameters.

    Raises:
      CheckpointError: a file is missing or damaged, or tensors do not fit; they are listed.
      ConfigError: config.json is malformed, or describes a model that is not supported.
    """
    checkpoint = hf_io.open_checkpoint(directory)
    family, config, generation = read_configs(
        directory, checkpoint.config, checkpoint.generation_config
    )
    shapes = parameter_shapes(config)
    plan = match(rule_set(config, shapes), shapes, checkpoint.tensors, str(directory))
    for name, original in plan.copies.items():
        if not checkpoint.equal(name, original):
            raise CheckpointError(
                f"{directory}: {name} differs from {original}, but its config.json says that they are "
                "one (tie_word_embeddings); get the checkpoint again, or correct config.json"
            )
    for fill in plan.fills:
        if fill.transform is permutation:
            _check_ordering(checkpoint, fill.sources[0], str(directory))
    return Source(checkpoint, family, config, generation, plan)


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
    return family, model, defaults


def _check_ordering(checkpoint: hf_io.HFCheckpoint, name: str, where: str) -> None:
    """Refuse a token ordering that leaves out tokens. Nothing else would fail on it."""
    ids = checkpoint.read(name)
    absent = np.setdiff1d(np.arange(ids.size), ids)
    if absent.size:
        raise CheckpointError(
            f"{where}: {name} must list every token from 0 to {ids.size - 1} once, but {absent.size} "
            f"are not in it, {absent[0]} the first; get the checkpoint again"
        )


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every parameter of the model that a config describes, by name."""
    return {n: tuple(a.shape) for n, a in graph_of(config, "bfloat16").abstract_params().items()}


def rule_set(config: ModelConfig, params: Iterable[str]) -> RuleSet:
    """Return the conversion rules of the model that a config describes.

    Args:
      params: the names of the model's parameters.
    """
    return family_of(config).rules(config, params)


# --- from Hugging Face ---------------------------------------------------------------------------


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    quantize_head: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert a Hugging Face checkpoint into a directory in jaxspec's format.

    Args:
      source: a directory or a hub id.
      destination: the directory to write, which must not exist yet.
      dtype: "float32" or "bfloat16" casts all parameters; None keeps the dtypes of the source.
      quantize: the format of linears and experts, "int8" or "fp8"; None leaves them as numbers.
      quantize_head: of embedding and head, likewise.

    Raises:
      CheckpointError: the source is damaged or incomplete, its weights are not finite, or the
        destination cannot be written.
      ConfigError: the source's config.json describes a model that is not supported.
      DeviceMemoryError: the largest parameter does not fit into memory.
      ValueError: `dtype` is another word, or a format is not known.
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, not {dtype!r}")
    for option, format in (("quantize", quantize), ("quantize_head", quantize_head)):
        if format is not None:
            check_format(option, format)
    started = time.perf_counter()
    with written_aside(Path(destination)) as (aside, left_behind):
        directory = hf_io.resolve(source, revision=revision, token=token, offline=offline)
        if directory.parent.name == "snapshots":  # the hub's cache names it by commit
            revision = directory.name
        if (directory / MANIFEST).is_file():
            raise CheckpointError(f"{directory} is converted already; --to-hf is the way back")
        opened = open_source(directory)
        tensors, fills = opened.checkpoint.tensors, opened.plan.fills
        total = sum(tensors[name].nbytes for fill in fills for name in fill.sources)
        done = 0
        plain = graph_of(opened.config, dtype or "bfloat16")
        graph = plain.with_formats(formats_for(plain, quantize, quantize_head))

        def stored_as(fill: Fill) -> np.dtype:
            stored = opened.dtype_of(fill) if dtype is None else hf_io.numpy_dtype(dtype)
            return fill.cast(stored)

        def lazily(fill: Fill) -> dict[str, LazyArray]:
            stored = stored_as(fill)

            def make() -> np.ndarray:
                nonlocal done
                array = opened.read(fill, stored, see)
                done += sum(tensors[name].nbytes for name in fill.sources)
                if progress is not None:
                    progress(fill.path, done, total)
                return array

            if fill.path in dict(graph.formats):
                return _quantised(graph, fill.path, make)
            return {fill.path: LazyArray(fill.shape, stored, make)}

        _check_memory(fills, opened.dtype_of)
        arrays = {name: array for fill in fills for name, array in lazily(fill).items()}
        with checked(directory) as see:
            save_params(aside, arrays)
        _copy_files(directory, aside)
        of_floats = [fill for fill in fills if not fill.transform.integers]
        dtypes = {stored_as(fill).name for fill in of_floats}
        compute = "float32" if "float32" in dtypes else "bfloat16"
        Manifest(
            kind=opened.family.name,
            config=opened.config,
            generation=opened.generation,
            source=str(source),
            revision=revision,
            dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
            tensors={name: tensors[name].dtype for fill in fills for name in fill.sources},
            skipped=sorted(opened.plan.skipped),
            measured_acceptance=opened.checkpoint.config.get(FIELD),
            formats=dict(graph.formats) or None,
            compute_dtype=compute if graph.formats else None,
            cache_dtype=compute if graph.formats else None,
            kv_scales=opened.kv_scales,
        ).write(aside)
    return Report(
        opened.family.name,
        Path(destination),
        sum(len(fill.sources) for fill in fills),
        len(fills),
        total,
        time.perf_counter() - started,
        dict(Counter(opened.plan.skipped.values())),
        left_behind,
    )


def _quantised(graph: Graph, name: str, make: Callable[[], np.ndarray]) -> dict[str, LazyArray]:
    """Return the arrays of a weight that is quantised when the first of them is written.

    The arrays are made together. What is not written yet waits in memory: that is the scales, which
    are small. The codes come first, because names are written in order.
    """
    weight = graph.abstract_weights()[name]
    assert isinstance(weight, QuantisedArray)
    waiting: dict[str, np.ndarray] = {}

    def part_of(part: str) -> np.ndarray:
        if part not in waiting:
            packed = graph.pack(name, jnp.asarray(make()))
            waiting.update({part: np.asarray(packed[f"{name}.{part}"]) for part in weight.parts})
        return waiting.pop(part)

    return {
        f"{name}.{part}": LazyArray(a.shape, np.dtype(a.dtype), functools.partial(part_of, part))
        for part, a in weight.parts.items()
    }


# --- to Hugging Face -----------------------------------------------------------------------------


def to_hf(
    source: str | Path, destination: str | Path, *, progress: Progress | None = None
) -> Report:
    """Convert a directory in jaxspec's format back to Hugging Face layout and dtypes.

    All tensors of the original checkpoint are restored, except those that the manifest lists as
    skipped. They are restored bit for bit, unless the conversion narrowed their dtype.

    Args:
      source: a directory that `convert` wrote.
      destination: the directory to write, which must not exist yet.

    Raises:
      CheckpointError: the source is damaged or not in jaxspec's format, or the destination cannot
        be written.
    """
    started = time.perf_counter()
    directory = Path(source)
    if not (directory / MANIFEST).is_file():
        raise CheckpointError(f"{directory} is not a directory of ours: it has no {MANIFEST}")
    manifest = Manifest.read(directory)
    refuse_quantised(dict(manifest.formats or {}), str(directory))
    shapes = parameter_shapes(manifest.config)
    check_tree(directory, shapes)
    rules = rule_set(manifest.config, shapes)
    fills = fills_for(rules, shapes, find_prefix(rules, manifest.tensors))
    if {name for fill in fills for name in fill.sources} != set(manifest.tensors):
        raise CheckpointError(f"{directory}: the manifest's tensors are not those of its config")
    stored = stored_arrays(directory)
    _check_memory(fills, lambda fill: stored[fill.path].dtype)
    arrays = read_params(directory, [fill.path for fill in fills])
    with written_aside(Path(destination)) as (aside, left_behind):
        total = hf_io.write_tensors(
            aside,
            [_group(fill, manifest.tensors, lambda: next(arrays)) for fill in fills],
            progress,
        )
        for _ in arrays:  # none is left: at its end the reader refuses what is not finite
            pass
        _copy_files(directory, aside)
        if manifest.measured_acceptance not in (None, read_acceptance(aside)):  # recorded since
            write_acceptance(aside, manifest.measured_acceptance)
    return Report(
        manifest.kind,
        Path(destination),
        len(manifest.tensors),
        len(fills),
        total,
        time.perf_counter() - started,
        {"not kept by the conversion": len(manifest.skipped)} if manifest.skipped else {},
        left_behind,
    )


def refuse_quantised(formats: Mapping[str, str], where: str) -> None:
    """Refuse to write quantised weights as Hugging Face tensors, whose numbers are gone.

    Raises:
      CheckpointError: some weights are quantised.
    """
    if formats:
        raise CheckpointError(
            f"{where} holds {len(formats)} quantised weights ({', '.join(sorted({*formats.values()}))}). "
            "Hugging Face tensors are made of the original numbers: use the checkpoint that it was "
            "converted from"
        )


def write_weights(
    config: ModelConfig,
    params: Mapping[str, Array],
    directory: Path,
    *,
    prefix: str,
    dtype: str = "bfloat16",
) -> None:
    """Write parameters as safetensors under Hugging Face names. The caller writes config.json.

    Args:
      prefix: the prefix of the tensor names: "model." for a text-only target, "" for a drafter.
      dtype: the dtype of all written tensors except integers, "float32" or "bfloat16".
    """
    shapes = parameter_shapes(config)
    stored = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    fills = fills_for(rule_set(config, shapes), shapes, prefix)
    hf_io.write_tensors(
        directory,
        [
            _group(
                fill,
                dict.fromkeys(fill.sources, "I64" if fill.transform.integers else stored),
                lambda f=fill: np.asarray(params[f.path]),
            )
            for fill in fills
        ],
    )


def _group(fill: Fill, dtypes: Mapping[str, str], load: Callable[[], np.ndarray]) -> hf_io.Group:
    specs = {
        name: TensorSpec(shape, dtypes[name])
        for name, shape in zip(fill.sources, fill.source_shapes(), strict=True)
    }
    return hf_io.Group(specs, lambda: fill.to_sources(load()))


def _check_memory(fills: Iterable[Fill], dtype_of: Callable[[Fill], np.dtype]) -> None:
    """Refuse a conversion whose largest parameter alone is larger than memory.

    Raises:
      DeviceMemoryError: it is.
    """

    def nbytes(fill: Fill) -> int:
        copies = 1 if fill.transform.name in ("same", "integers", "permutation") else 2
        return copies * math.prod(fill.shape) * dtype_of(fill).itemsize

    largest = max(fills, key=nbytes)
    check_host_fits(nbytes(largest), f"converting the largest parameter, {largest.path},")


def _copy_files(source: Path, destination: Path) -> None:
    """Copy config and tokenizer files. config.json is the last: a directory without it does not load."""
    for name in (*TOKENIZER_FILES, *reversed(CONFIG_FILES)):
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
