"""Checkpoints: our directory format, and loading a model from it or from Hugging Face files.

A directory of ours holds `params/` (an Orbax tree, one flat dict), `manifest.json`, and the
source's config and tokenizer files as they were. Read `Manifest`, then `load_target`. What tensors of other
projects are called is not known here: `checkpoints_convert` is imported when one is met.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec import __version__
from jaxspec.configs.base import ConfigError, GenerationDefaults, from_json, to_json
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.mtp import MTPConfig
from jaxspec.params import Graph
from jaxspec.shapes import Params
from jaxspec.sharding import make_mesh, place

Kind = Literal["target", "dflash", "mtp"]
ModelConfig = Gemma4Config | DFlashConfig | MTPConfig

MANIFEST = "manifest.json"
_CONFIGS: dict[str, type[Any]] = {
    "target": Gemma4Config,
    "dflash": DFlashConfig,
    "mtp": MTPConfig,
}
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)

_FORMAT = 1
_CHUNK_BYTES = 128 << 20  # of a stored array; bounds what a write holds beside the array
_BATCH_BYTES = 256 << 20  # of arrays read together; a larger one is read alone


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file or the tensors."""


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model ready to run: its static half, its weights on the device, and where it came from."""

    graph: Graph
    params: Params
    config: Any  # a ModelConfig
    generation: GenerationDefaults | None  # None for drafters
    directory: Path  # local; tokenizer files are here
    source: str  # as it was asked for

    def __repr__(self) -> str:
        """Return one line: weights would be pages."""
        size = sum(array.size for array in self.params.values())
        name = f"{self.source}: {self.graph.module.__name__}"
        return f"LoadedModel({name}, {size / 1e6:,.1f}M {self.graph.dtype})"


@dataclass(frozen=True)
class Manifest:
    """What a directory of ours says about itself."""

    kind: Kind
    config: ModelConfig
    generation: GenerationDefaults | None
    source: str
    revision: str | None
    dtype: str  # of the stored parameters; "mixed" where the source mixes them
    tensors: dict[str, str]  # every source tensor that was used, with its dtype there
    skipped: list[str]

    def write(self, directory: Path) -> None:
        """Write manifest.json, without which a directory does not load: the last file to write."""
        values = {
            "format": _FORMAT,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "config": to_json(self.config),
            "generation": None if self.generation is None else to_json(self.generation),
            "jaxspec_version": __version__,
        }
        (directory / MANIFEST).write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read a directory's manifest.json.

        Raises:
          CheckpointError: it is not one of ours, or of another format.
        """
        file = directory / MANIFEST
        values = read_json(file)
        if values.pop("format", None) != _FORMAT:
            raise CheckpointError(
                f"{file} is not a jaxspec manifest of format {_FORMAT}; convert again"
            )
        values.pop("jaxspec_version", None)
        try:
            generation = values.pop("generation")
            config_class = _CONFIGS[values["kind"]]
            return cls(
                config=from_json(config_class, values.pop("config")),
                generation=None
                if generation is None
                else from_json(GenerationDefaults, generation),
                **values,
            )
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise CheckpointError(f"{file} is corrupt: {error}") from None


# --- loading -------------------------------------------------------------------------------------


def load_target(
    source: str,
    *,
    dtype: str,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Load a Gemma 4 target from a directory of ours, a Hugging Face directory, or a hub id.

    Arrays go to the default device one at a time, uncommitted like any that JAX places by itself, or to the
    devices of `mesh`, each shard straight to its own. They are cast to `dtype`, "float32" or "bfloat16".

    Raises:
      CheckpointError, ConfigError: it is not there, not whole, or not a target.
      DeviceMemoryError: its weights are larger than the devices.
    """
    return _load(("target",), source, dtype, revision, token, offline, mesh)


def load_drafter(
    source: str,
    *,
    dtype: str,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Load a DFlash drafter or an MTP assistant; everything else is as in `load_target`."""
    return _load(("dflash", "mtp"), source, dtype, revision, token, offline, mesh)


def _load(
    kinds: tuple[Kind, ...],
    source: str,
    dtype: str,
    revision: str | None,
    token: str | None,
    offline: bool,
    mesh: Mesh | None,
) -> LoadedModel:
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, not {dtype!r}")
    from checkpoints_convert import convert, hf_io
    from jaxspec.memory import check_weights_fit

    directory = hf_io.resolve(source, revision=revision, token=token, offline=offline)
    if (directory / MANIFEST).is_file():
        manifest = Manifest.read(directory)
        _check_kind(source, manifest.kind, kinds)
        graph = graph_of(manifest.config, dtype)
        check_weights_fit(graph, mesh or _default_mesh())
        params = restore_params(directory, graph, mesh)
        return LoadedModel(graph, params, manifest.config, manifest.generation, directory, source)
    opened = convert.open_source(directory)
    _check_kind(source, opened.kind, kinds)
    graph = graph_of(opened.config, dtype)
    check_weights_fit(graph, mesh or _default_mesh())
    arrays = opened.arrays(jnp.dtype(dtype))
    if mesh is None:
        params = {name: jnp.asarray(array) for name, array in arrays}
    else:
        shardings = graph.shardings(mesh)
        params = {name: place(array, shardings[name]) for name, array in arrays}
    return LoadedModel(graph, params, opened.config, opened.generation, directory, source)


def graph_of(config: ModelConfig, dtype: str) -> Graph:
    """Return the static half of the model that a config describes."""
    from jaxspec.drafters.dflash import DFlashDrafter
    from jaxspec.drafters.mtp import MTPDrafter
    from jaxspec.models.gemma4 import Gemma4

    modules = {Gemma4Config: Gemma4, DFlashConfig: DFlashDrafter, MTPConfig: MTPDrafter}
    return Graph(modules[type(config)], config, dtype)


def _check_kind(source: str, kind: Kind, wanted: tuple[Kind, ...]) -> None:
    if kind not in wanted:
        names = {"target": "a target", "dflash": "a DFlash drafter", "mtp": "an MTP assistant"}
        expected = " or ".join(names[k] for k in wanted)
        raise CheckpointError(f"{source} is {names[kind]}; expected {expected}")


# --- the Orbax tree ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LazyArray:
    """An array that is made when its turn to be written comes, and dropped after."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]


def save_params(directory: Path, arrays: Mapping[str, LazyArray]) -> None:
    """Write arrays as one Orbax tree, one after the other.

    Peak memory is that of the largest array and of what making it takes, plus a few chunks, which
    are not compressed: weights are noise to a compressor.

    A thread of its own writes. In the main one asyncio, which Orbax writes by, would take Ctrl-C for itself and
    cancel a task, which a task that waits for nothing does not notice.
    """
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    interrupted = threading.Event()

    class OneByOne(type_handlers.NumpyHandler):
        """Orbax's own way to write numpy arrays, but waiting for each before the next is made."""

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            for value, info, arg in zip(values, infos, args, strict=True):
                if interrupted.is_set():
                    raise InterruptedError("interrupted")
                for written in await super().serialize([value.make()], [info], [arg]):
                    written.result()
            return []

        def memory_size(self, values: Any) -> Any:
            sizes = [int(np.prod(v.shape)) * v.dtype.itemsize for v in values]
            return [(size, size) for size in sizes]

    chunked = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
    with _orbax_errors(f"{directory / 'params'} cannot be written"):
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False,  # a directory an array: data goes straight to its file
            use_compression=False,
            type_handler_registry=type_handlers.create_type_handler_registry(
                (LazyArray, OneByOne(deepcopy_host_arrays=False))
            ),
        )
        path = (directory / "params").resolve()
        args = ocp.args.PyTreeSave(dict(arrays), save_args=chunked)
        with ocp.Checkpointer(handler) as checkpointer, ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(checkpointer.save, path, args=args).result()
            except KeyboardInterrupt:
                interrupted.set()
                raise


def restore_params(directory: Path, graph: Graph, mesh: Mesh | None = None) -> Params:
    """Read a directory of ours onto the default device or a mesh, cast to the graph's dtype.

    Raises:
      CheckpointError: names or shapes are not the graph's (all are listed), or a file is damaged.
    """
    import orbax.checkpoint as ocp

    expected = graph.abstract_params()
    check_tree(directory, {name: a.shape for name, a in expected.items()})
    if mesh is None:
        # By way of the host: Orbax commits what it places, and so what is computed from it.
        arrays = zip(expected.items(), read_params(directory, list(expected)), strict=True)
        return {n: jnp.asarray(x.astype(a.dtype, copy=False)) for (n, a), x in arrays}
    shardings = graph.shardings(mesh)
    restore_args = {
        name: ocp.ArrayRestoreArgs(dtype=a.dtype, sharding=shardings[name], global_shape=a.shape)
        for name, a in expected.items()
    }
    return dict(_restored(directory, restore_args))


def read_params(directory: Path, names: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield arrays of a directory of ours in the order of `names`, in host memory and as stored."""
    import orbax.checkpoint as ocp

    restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    return (array for _, array in _restored(directory, restore_args))


def _restored(directory: Path, restore_args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield arrays in the order of `restore_args`, read a batch at a time to bound memory.

    Not one at a time: every restore parses the metadata of the whole tree first.
    """
    import orbax.checkpoint as ocp

    stored = stored_arrays(directory)
    _check_chunks(directory, restore_args)
    sizes = {name: stored[name].size * stored[name].dtype.itemsize for name in restore_args}
    for batch in _batches(sizes):
        args = ocp.args.PyTreeRestore(
            item={name: stored[name] for name in batch},
            restore_args={name: restore_args[name] for name in batch},
            partial_restore=True,
        )
        with (
            _orbax_errors(f"{directory / 'params'} is damaged"),
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        ):
            arrays = checkpointer.restore((directory / "params").resolve(), args=args)
        for name in batch:
            yield name, arrays.pop(name)


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    batch, total = [], 0
    for name, nbytes in sizes.items():
        if batch and total + nbytes > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += nbytes
    yield batch


def check_tree(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Hold the stored names and shapes against a model's; differences are a `CheckpointError`."""
    stored = stored_arrays(directory)
    wrong = [f"{n}: missing" for n in expected if n not in stored]
    wrong += [f"{n}: not known" for n in stored if n not in expected]
    wrong += [
        f"{n}: shape {list(stored[n].shape)}, expected {list(shape)}"
        for n, shape in expected.items()
        if n in stored and tuple(stored[n].shape) != tuple(shape)
    ]
    if wrong:
        raise CheckpointError(f"{directory} does not fit its manifest:\n  " + "\n  ".join(wrong))


def _check_chunks(directory: Path, names: Iterable[str]) -> None:
    """Refuse files that are missing or cut short, before Orbax reads them.

    When a read fails, Orbax abandons the others while they run, and they print tracebacks of their own
    some time later. It also reads a missing chunk as zeros.
    """
    wrong = []
    for name in names:
        metadata = _zarr_metadata(directory / "params" / name)
        shape, chunk = metadata["shape"], metadata["chunks"]
        expected = math.prod(chunk) * jnp.dtype(metadata["dtype"]).itemsize
        grid = (range(-(-s // c)) for s, c in zip(shape, chunk, strict=True))
        for index in itertools.product(*grid):
            file = directory / "params" / name / ".".join(map(str, index))
            size = file.stat().st_size if file.exists() else 0
            if size != expected:
                wrong.append(f"{file.relative_to(directory)}: {size} bytes, expected {expected}")
    if wrong:
        raise CheckpointError(
            f"{directory / 'params'} is damaged; copy or convert it again:\n  " + "\n  ".join(wrong)
        )


def stored_arrays(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return name, shape and dtype of every array in a directory of ours."""
    try:
        folders = sorted(path for path in (directory / "params").iterdir() if path.is_dir())
    except OSError as error:
        raise CheckpointError(f"{directory / 'params'} is damaged: {error}") from None
    metadata = {folder.name: _zarr_metadata(folder) for folder in folders}
    return {
        name: jax.ShapeDtypeStruct(tuple(m["shape"]), jnp.dtype(m["dtype"]))
        for name, m in metadata.items()
    }


def _zarr_metadata(folder: Path) -> dict[str, Any]:
    """Read what Zarr keeps beside the chunks of an array; Orbax would read all of a tree's, or fail on one."""
    metadata = read_json(folder / ".zarray")
    if missing := [key for key in ("shape", "chunks", "dtype") if key not in metadata]:
        raise CheckpointError(f"{folder / '.zarray'} is damaged: it lacks {', '.join(missing)}")
    return metadata


@contextlib.contextmanager
def _orbax_errors(what: str) -> Iterator[None]:
    """Give errors of Orbax one kind and one line, and keep its remarks on multi-host features quiet."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for a bad file
        cause: BaseException = error
        while cause.__cause__ is not None:  # the first of the chain names the file
            cause = cause.__cause__
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise CheckpointError(f"{what}: {reason}") from error
    finally:
        logger.setLevel(level)


def _default_mesh() -> Mesh:
    return make_mesh(devices=list(jnp.zeros(()).devices()))


# --- small readers -------------------------------------------------------------------------------


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; anything else in the file is a `CheckpointError`."""
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__}, expected a JSON object")
    return values
