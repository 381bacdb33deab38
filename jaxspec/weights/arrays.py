"""The weights of a directory in jaxspec's format: the Orbax tree `params/`, a flat dict of arrays.

A quantised weight is stored as its arrays, such as `layers.0.mlp.down.codes` and
`layers.0.mlp.down.scales`. Only this file knows these names.

Read `save_params`, then `restore_weights`. Orbax is imported only when a function here needs it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoints_convert.errors import CheckpointError, listed
from checkpoints_convert.files import read_json
from jaxspec.quantised import QuantisedArray
from jaxspec.quantised.array import named_arrays
from jaxspec.weights.finite import checked, checked_on_devices
from jaxspec.weights.model_def import ModelDef

# The size of a chunk of a stored array. It bounds the memory of a write beside the array itself.
_CHUNK_BYTES = 128 << 20

# The most bytes of arrays that are read together. A larger array is read alone.
_BATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class LazyArray:
    """An array that is made just before it is written, and dropped afterwards."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]


@dataclass(frozen=True)
class LazyWeight:
    """A quantised weight that is made when the first of its arrays is written.

    Its arrays are made together. Those that are not written yet wait in memory. These are the scales,
    which are small: the codes come first, because arrays are written in the order of their names.

    Attributes:
      abstract: the weight with abstract arrays.
    """

    abstract: QuantisedArray
    make: Callable[[], QuantisedArray]

    def arrays(self) -> QuantisedArray:
        """Return the weight with a lazy array for each of its arrays."""
        waiting: dict[str, Any] = {}

        def part_of(part: str) -> np.ndarray:
            if part not in waiting:
                waiting.update(self.make().parts)
            return np.asarray(waiting.pop(part))

        return self.abstract.with_parts(
            {
                part: LazyArray(a.shape, np.dtype(a.dtype), functools.partial(part_of, part))
                for part, a in self.abstract.parts.items()
            }
        )


def save_params(directory: Path, weights: Mapping[str, LazyArray | LazyWeight]) -> None:
    """Write weights as one Orbax tree, one array after another.

    Peak memory is the largest array, what it takes to make that array, and a few chunks. Chunks are
    not compressed, because weights hardly compress.

    A separate thread writes, so that Ctrl-C works. Orbax writes with asyncio. In the main thread
    asyncio would catch Ctrl-C and cancel its task. A task that awaits nothing does not notice that.
    """
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    interrupted = threading.Event()
    arrays = named_arrays(
        {n: w.arrays() if isinstance(w, LazyWeight) else w for n, w in weights.items()}
    )

    class OneByOne(type_handlers.NumpyHandler):
        """Orbax's handler of numpy arrays, but it writes one array before it makes the next."""

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
            use_ocdbt=False,  # each array has a directory: data goes straight to its files
            use_compression=False,
            type_handler_registry=type_handlers.create_type_handler_registry(
                (LazyArray, OneByOne(deepcopy_host_arrays=False))
            ),
        )
        path = (directory / "params").resolve()
        args = ocp.args.PyTreeSave(arrays, save_args=chunked)
        with ocp.Checkpointer(handler) as checkpointer, ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(checkpointer.save, path, args=args).result()
            except KeyboardInterrupt:
                interrupted.set()
                raise


def restore_weights(
    directory: Path, model_def: ModelDef, mesh: Mesh | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield each weight of a directory in jaxspec's format by name, on the devices.

    Args:
      model_def: of what the directory holds. Arrays are cast to its dtypes.
      mesh: where to place the weights; None is the default device.

    Raises:
      CheckpointError: names or shapes are not the model definition's (they are listed), a file is
        damaged; or, at the end, weights are not finite.
    """
    import orbax.checkpoint as ocp

    weights = model_def.abstract_params()
    expected = named_arrays(weights)
    check_tree(directory, {name: a.shape for name, a in expected.items()})
    if mesh is None:
        # Arrays go through the host. Orbax commits the arrays that it places to their device, and
        # everything computed from them would be committed too.
        stored = zip(expected.values(), read_params(directory, list(expected)), strict=True)
        # `jnp.asarray` would compile a program for each shape.
        yield from _joined(
            weights, (jax.device_put(x.astype(a.dtype, copy=False)) for a, x in stored)
        )
        return
    shardings = named_arrays(model_def.shardings(mesh))
    restore_args = {
        name: ocp.ArrayRestoreArgs(dtype=a.dtype, sharding=shardings[name], global_shape=a.shape)
        for name, a in expected.items()
    }

    def placed() -> Iterator[Any]:
        with checked_on_devices(directory) as see:
            for name, x in _restored(directory, restore_args):
                see(name, x)
                yield x
                del x

    yield from _joined(weights, placed())


def _joined(weights: Mapping[str, Any], arrays: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each weight by name, made of its arrays, which come in the order of `named_arrays`.

    Raises:
      CheckpointError: `arrays` raises it at its end.
    """
    for name, abstract in weights.items():
        if isinstance(abstract, QuantisedArray):
            yield name, abstract.with_parts({p: next(arrays) for p in sorted(abstract.parts)})
        else:
            yield name, next(arrays)
    for _ in arrays:
        raise AssertionError("more arrays than weights have")


def read_params(directory: Path, names: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield stored arrays in the order of `names`, in host memory and in their stored dtypes.

    Raises:
      CheckpointError: a file is damaged; or, at the end, weights are not finite.
    """
    import orbax.checkpoint as ocp

    restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    with checked(directory) as see:
        for name, array in _restored(directory, restore_args):
            see(name, array)
            yield array


def _restored(directory: Path, restore_args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield arrays in the order of `restore_args`.

    Arrays are read in batches, which bounds memory. Reading them one at a time would be slow,
    because every restore first parses the metadata of the whole tree.
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
    """Compare the stored names and shapes with a model's.

    Raises:
      CheckpointError: they differ; the differences are listed.
    """
    stored = stored_arrays(directory)
    wrong = [f"{n}: missing" for n in expected if n not in stored]
    wrong += [f"{n}: not known" for n in stored if n not in expected]
    wrong += [
        f"{n}: shape {list(stored[n].shape)}, expected {list(shape)}"
        for n, shape in expected.items()
        if n in stored and tuple(stored[n].shape) != tuple(shape)
    ]
    if wrong:
        raise CheckpointError(f"{directory} does not fit its manifest:\n  " + listed(wrong, "\n  "))


def _check_chunks(directory: Path, names: Iterable[str]) -> None:
    """Refuse missing or truncated files before Orbax reads them.

    When a read fails, Orbax abandons the other reads while they run. These print tracebacks of
    their own some time later. Orbax also reads a missing chunk as zeros.
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
            f"{directory / 'params'} is damaged; copy or convert it again:\n  "
            + listed(wrong, "\n  ")
        )


def stored_arrays(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of every stored array, by name."""
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
    """Read the `.zarray` file of one array.

    Orbax would read the metadata of the whole tree, and would fail if one file of it is bad.
    """
    metadata = read_json(folder / ".zarray")
    if missing := [key for key in ("shape", "chunks", "dtype") if key not in metadata]:
        raise CheckpointError(f"{folder / '.zarray'} is damaged: it lacks {', '.join(missing)}")
    return metadata


@contextlib.contextmanager
def _orbax_errors(what: str) -> Iterator[None]:
    """Turn every Orbax error into a `CheckpointError` of one line.

    Orbax's log messages about multi-host features are silenced meanwhile.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for a bad file
        cause: BaseException = error
        while cause.__cause__ is not None:  # the first error of the chain names the file
            cause = cause.__cause__
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise CheckpointError(f"{what}: {reason}") from error
    finally:
        logger.setLevel(level)
