"""The weights of a directory of ours: one Orbax tree, `params/`, a flat dict of arrays.

Read `save_params`, then `restore_params`. Orbax is imported when one of them is called.
"""

from __future__ import annotations

import contextlib
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

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.hf_io import read_json
from jaxspec.params import Graph
from jaxspec.shapes import Params

_CHUNK_BYTES = 128 << 20  # of a stored array; bounds what a write holds beside the array
_BATCH_BYTES = 256 << 20  # of arrays read together; a larger one is read alone


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
