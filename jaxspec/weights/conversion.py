"""Conversion of Hugging Face files: to a directory in jaxspec's format, back, and into memory.

Read `convert`; `source.py` reads the files. `convert` and `to_hf` hold one parameter at a time. Peak memory is
the size of the largest parameter plus a few hundred MB. A parameter that is joined or transposed
counts twice. Output goes to a directory beside the destination, which is renamed at the end, see
`atomic_dir`. Until then nothing is at the destination, and the directory does not load.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert import hf_io
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.hf_io import CONFIG_FILES, TOKENIZER_FILES
from checkpoints_convert.rules import Fill, TensorSpec, fills_for, find_prefix
from jaxspec.quantised import QuantisedArray
from jaxspec.quantised.choice import check_format
from jaxspec.registry import ModelConfig
from jaxspec.shapes import Array
from jaxspec.weights.arrays import (
    LazyArray,
    LazyWeight,
    check_tree,
    read_params,
    save_params,
    stored_arrays,
)
from jaxspec.weights.atomic_dir import atomic_directory
from jaxspec.weights.define import model_def_of, quantised_def
from jaxspec.weights.finite import checked
from jaxspec.weights.manifest import MANIFEST, Manifest
from jaxspec.weights.measured_acceptance import FIELD, read_acceptance, write_acceptance
from jaxspec.weights.memory import check_host_fits
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.native import VISION
from jaxspec.weights.source import (
    HFSource,
    open_hf_source,
    open_hf_vision,
    parameter_shapes,
    rule_set,
)

Progress = Callable[[str, int, int], None]
"""Called after every parameter with its name, the bytes done so far, and the total bytes."""


@dataclass(frozen=True)
class Report:
    """The result of a conversion.

    Attributes:
      kind: the family's name.
      tensors: the number of tensors in the Hugging Face checkpoint that were read or written.
      parameters: the number of jaxspec's parameters.
      nbytes: bytes read by `convert`, or written by `to_hf`.
      skipped: the number of skipped tensors, by reason.
      left_behind: bytes that an interrupted conversion had left, and that were removed.
      shared: whether a drafter's embedding is left out, because it is the target's. None: no target
        was given, or the drafter has no embedding.
    """

    kind: str
    destination: Path
    tensors: int
    parameters: int
    nbytes: int
    seconds: float
    skipped: dict[str, int]
    left_behind: int
    shared: bool | None = None


# --- from Hugging Face ---------------------------------------------------------------------------


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    quantize_head: str | None = None,
    target: str | Path | None = None,
    text_only: bool = False,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert a Hugging Face checkpoint into a directory in jaxspec's format.

    Args:
      source: a directory or a hub id.
      destination: the directory to write, which must not exist yet.
      dtype: "float32" or "bfloat16" casts all parameters; None keeps the dtypes of the source, and
        makes float32 of codes that become numbers, which loses nothing.
      quantize: the format of linears and experts, such as "int8" or "int4"; None leaves them as numbers.
      quantize_head: of embedding and head, likewise.
      target: a directory or hub id of the target, in Hugging Face's layout, of a source that is a
        drafter. A drafter's embedding that equals the target's to the bit is left out, and the
        drafter uses the target's.
      text_only: whether to leave the vision part out.

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
    with atomic_directory(Path(destination)) as (temporary, left_behind):
        directory = hf_io.resolve(source, revision=revision, token=token, offline=offline)
        if directory.parent.name == "snapshots":  # the hub's cache names it by commit
            revision = directory.name
        if (directory / MANIFEST).is_file():
            raise CheckpointError(f"{directory} is converted already; --to-hf is the way back")
        opened, shared = open_hf_source(directory), None
        if target is not None:
            of_target = hf_io.resolve(target, revision=None, token=token, offline=offline)
            opened, shared = _with_shared_embedding(opened, open_hf_source(of_target))
        if not opened.plan.fills:
            raise CheckpointError(f"{directory} has no weights to convert; use it as it is")
        has_images = opened.family.role == "target" and not text_only
        vision = open_hf_vision(directory) if has_images else None
        parts = [opened] if vision is None else [opened, vision]
        total = sum(part.nbytes(fill) for part in parts for fill in part.plan.fills)
        done = 0

        def count(part: HFSource, fill: Fill) -> None:
            nonlocal done
            done += part.nbytes(fill)
            if progress is not None:
                progress(fill.path, done, total)

        for part in parts:
            _check_memory(part.plan.fills, part.dtype_of)
        stored = opened.model_def(dtype or "bfloat16", quantize)
        model_def = quantised_def(stored, str(directory), quantize, quantize_head, "quantize")
        skipped = dict(opened.skipped)
        if vision is not None:
            used = {name for fill in vision.plan.fills for name in vision.tensors_of(fill)}
            skipped = {name: why for name, why in skipped.items() if name not in used}
        kv_scales = opened.kv_scales()  # refused before anything is written
        about: dict[str, Any] = dict(source=str(source), revision=revision)
        if vision is not None:
            (inside := temporary / VISION).mkdir()
            of_numbers = model_def_of(vision.config, dtype or "bfloat16")
            _write_part(vision, of_numbers, inside, dtype, count, **about, skipped=[])
        _copy_files(directory, temporary)
        about |= dict(kv_scales=kv_scales, skipped=sorted(skipped))
        _write_part(opened, model_def, temporary, dtype, count, **about)
    return Report(
        opened.family.name,
        Path(destination),
        sum(len(part.tensors_of(fill)) for part in parts for fill in part.plan.fills),
        sum(len(part.plan.fills) for part in parts),
        total,
        time.perf_counter() - started,
        dict(Counter(skipped.values())),
        left_behind,
        shared,
    )


def _with_shared_embedding(drafter: HFSource, target: HFSource) -> tuple[HFSource, bool | None]:
    """Leave a drafter's embedding out if it is the target's, and say whether it is.

    Raises:
      ConfigError: the drafter does not fit the target.
      ValueError: the source is no drafter, or the target is none.
    """
    if (drafter.family.role, target.family.role) != ("drafter", "target"):
        raise ValueError(
            f"target is for drafters: {drafter.checkpoint.directory} is {drafter.family.title}, and "
            f"{target.checkpoint.directory} is {target.family.title}"
        )
    drafter.config.check_fits(target.config)
    if not getattr(drafter.config, "own_embedding", False):
        return drafter, None
    (own,) = (fill for fill in drafter.plan.fills if fill.path == "embedding")
    declared = model_def_of(target.config, "bfloat16").declared()
    tables = [name for name, about in declared.items() if about.table]
    embedding = next((name for name in tables if declared[name].lookup), tables[0])
    (theirs,) = (fill for fill in target.plan.fills if fill.path == embedding)
    (name,), (other,) = drafter.tensors_of(own), target.tensors_of(theirs)
    if not hf_io.equal(drafter.checkpoint, name, target.checkpoint, other):
        return drafter, False
    why = "equal to the target's embedding to the bit, which is used in its place"
    plan = drafter.plan
    fills = tuple(fill for fill in plan.fills if fill is not own)
    plan = replace(plan, fills=fills, skipped={**plan.skipped, name: why})
    config = replace(drafter.config, own_embedding=False)
    return replace(drafter, config=config, plan=plan), True


def _write_part(
    opened: HFSource,
    model_def: ModelDef,
    directory: Path,
    dtype: str | None,
    count: Callable[[HFSource, Fill], None],
    **about: Any,
) -> None:
    """Write one model of a checkpoint into an empty directory: its arrays, then its manifest.

    Args:
      model_def: with the formats that weights are stored in.
      dtype: as in `convert`.
      count: called after each parameter.
      about: fields of the manifest.
    """

    def stored_as(fill: Fill) -> np.dtype:
        stored = opened.dtype_of(fill) if dtype is None else hf_io.numpy_dtype(dtype)
        return fill.cast(stored)

    def lazily(fill: Fill) -> LazyArray | LazyWeight:
        def read() -> np.ndarray | QuantisedArray:
            array = opened.read(fill, model_def, stored_as(fill), see)
            count(opened, fill)
            return array

        def quantised() -> QuantisedArray:
            made = read()
            if isinstance(made, QuantisedArray):
                return made
            packed = model_def.pack(fill.path, jnp.asarray(made))
            return jax.tree.map(np.asarray, packed)

        abstract = expected[fill.path]
        if isinstance(abstract, QuantisedArray):
            return LazyWeight(abstract, quantised)
        return LazyArray(fill.shape, stored_as(fill), read)  # type: ignore[arg-type]

    fills, source = opened.plan.fills, opened.checkpoint.directory
    expected = model_def.abstract_params()
    weights = {fill.path: lazily(fill) for fill in fills}
    with checked(source) as see:
        save_params(directory, weights)
    formats = dict(model_def.formats)
    of_floats = [f for f in fills if not f.transform.integers and f.path not in formats]
    dtypes = {stored_as(fill).name for fill in of_floats}
    compute = "float32" if "float32" in dtypes else "bfloat16"
    Manifest(
        kind=opened.family.name,
        config=opened.config,
        generation=opened.generation,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        tensors={
            name: opened.checkpoint.tensors[name].dtype
            for fill in fills
            for name in opened.tensors_of(fill)
        },
        measured_acceptance=opened.checkpoint.config.get(FIELD),
        formats=formats or None,
        compute_dtype=compute if formats else None,
        cache_dtype=compute if formats else None,
        **about,
    ).write(directory)


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
    parts = [_Stored(directory)]
    if (directory / VISION / MANIFEST).is_file():
        parts.append(_Stored(directory / VISION))
    manifest = parts[0].manifest
    with atomic_directory(Path(destination)) as (temporary, left_behind):
        groups = [group for part in parts for group in part.groups()]
        total = hf_io.write_tensors(temporary, groups, progress)
        for part in parts:
            for _ in part.arrays:  # none is left: at its end the reader refuses what is not finite
                pass
        _copy_files(directory, temporary)
        if manifest.measured_acceptance not in (None, read_acceptance(temporary)):  # recorded since
            write_acceptance(temporary, manifest.measured_acceptance)
    return Report(
        manifest.kind,
        Path(destination),
        sum(len(part.manifest.tensors) for part in parts),
        sum(len(part.fills) for part in parts),
        total,
        time.perf_counter() - started,
        {"not kept by the conversion": len(manifest.skipped)} if manifest.skipped else {},
        left_behind,
    )


class _Stored:
    """One model of a directory of ours, which can be written back as tensors."""

    def __init__(self, directory: Path):
        self.manifest = Manifest.read(directory)
        refuse_quantised(dict(self.manifest.formats or {}), str(directory))
        shapes = parameter_shapes(self.manifest.config)
        check_tree(directory, shapes)
        rules = rule_set(self.manifest.config, shapes)
        self.fills = fills_for(rules, shapes, find_prefix(rules, self.manifest.tensors))
        if {name for fill in self.fills for name in fill.sources} != set(self.manifest.tensors):
            raise CheckpointError(
                f"{directory} was made of tensors in another layout, such as experts one by one or "
                "GGUF, which "
                "is not written back: take the checkpoint that it was converted from, or write the "
                "layout of "
                "the releases with save_hf"
            )
        stored = stored_arrays(directory)
        _check_memory(self.fills, lambda fill: stored[fill.path].dtype)
        self.arrays = read_params(directory, [fill.path for fill in self.fills])

    def groups(self) -> list[hf_io.Group]:
        """Return the tensors of each parameter. They have to be made in order."""
        return [
            _group(fill, self.manifest.tensors, lambda: next(self.arrays)) for fill in self.fills
        ]


def refuse_quantised(formats: Mapping[str, str], where: str) -> None:
    """Refuse to write quantised weights as Hugging Face tensors, whose numbers are gone.

    Raises:
      CheckpointError: some weights are quantised.
    """
    if formats:
        raise CheckpointError(
            f"{where} holds {len(formats)} quantised weights "
            f"({', '.join(sorted({*formats.values()}))}). "
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
    hf_io.write_tensors(directory, tensor_groups(config, params, prefix, dtype))


def tensor_groups(
    config: ModelConfig, params: Mapping[str, Array], prefix: str, dtype: str
) -> list[hf_io.Group]:
    """Return parameters as the tensors that `write_weights` writes. Arguments are as there."""
    shapes = parameter_shapes(config)
    stored = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    return [
        _group(
            fill,
            dict.fromkeys(fill.sources, "I64" if fill.transform.integers else stored),
            lambda f=fill: np.asarray(params[f.path]),
        )
        for fill in fills_for(rule_set(config, shapes), shapes, prefix)
    ]


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
