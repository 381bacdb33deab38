"""The target's features of texts, kept in a directory. Read `FeatureFiles`, then `kept_features`.

    features.json           what they are of, and where each shard begins; written last
    00000.safetensors       arrays of the first texts, token after token, without padding

The directory appears when it is complete: what a killed process left is removed by the next one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from checkpoints_convert.errors import CheckpointError
from jaxspec.quantised.array import named_arrays
from jaxspec.shapes import Array, Params, UInt32
from jaxspec.training.passes import Features
from jaxspec.weights.atomic_dir import atomic_directory

SHARD_BYTES = 1 << 30
"""The size of a shard. A longer text has one of its own."""
ABOUT = "features.json"

Notify = Callable[[str], None]
Make = Callable[[np.ndarray], tuple[Features, np.ndarray]]
"""A function of the indices of some texts: their features, padded, and their lengths."""


@dataclass(frozen=True)
class FeatureFiles:
    """Features in a directory.

    Attributes:
      abstract: the features of one text of one token.
      starts: the first text of each shard.
      begins: the place of each text's first token in its shard.
      sizes: the tokens of each text.
    """

    directory: Path
    abstract: Features
    starts: Sequence[int]
    begins: np.ndarray
    sizes: np.ndarray

    def rows(self, indices: np.ndarray, width: int) -> Features:
        """Return the features of some texts, padded with zeros, as arrays of the host."""
        leaves, tree = jax.tree.flatten(self.abstract)
        made = [np.zeros((len(indices), width, *x.shape[2:]), x.dtype) for x in leaves]
        for row, index in enumerate(indices):
            shard = bisect_right(self.starts, index) - 1
            begin, size = int(self.begins[index]), int(self.sizes[index])
            file = _opened(self.directory / _shard(shard))
            for name, whole in zip(_names(self.abstract), made, strict=True):
                whole[row, :size] = file.get_slice(name)[begin : begin + size]
        return jax.tree.unflatten(tree, made)


@functools.lru_cache(maxsize=1024)
def _opened(path: Path) -> Any:
    """Map a shard into memory."""
    return safe_open(path, "numpy")


def kept_features(
    directory: Path,
    about: Mapping[str, str],
    abstract: Features,
    sizes: np.ndarray,
    make: Make,
    at_once: int,
    notify: Notify,
) -> FeatureFiles:
    """Return the features of texts from a directory, which is written first if it is not there.

    Args:
      about: what features depend on, by name.
      abstract: shapes and dtypes of the features of one text of one token.
      sizes: the tokens of each text.
      at_once: texts that `make` is called with.
      notify: called with the size before anything is written.

    Raises:
      CheckpointError: the directory holds features of something else, cannot be written, or is larger than
        the room on its disk.
    """
    if not directory.exists():
        _write(directory, about, abstract, sizes, make, at_once, notify)
    try:
        values = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise CheckpointError(
            f"{directory} is there and holds no features: name another directory for them"
        ) from None
    if other := [name for name, value in about.items() if values["about"].get(name) != value]:
        raise CheckpointError(
            f"{directory} holds features of another {', '.join(other)}: remove it, so that they are made again, or "
            "name another directory"
        )
    sizes_of_files = [_bytes_of(directory / _shard(i)) for i in range(len(values["bytes"]))]
    if sizes_of_files != values["bytes"]:
        raise CheckpointError(
            f"a file of {directory} is missing or cut off: remove the directory, so that it is made again"
        )
    starts = np.asarray(values["starts"])
    ends = np.concatenate([[0], np.cumsum(sizes)])
    of_shard = np.searchsorted(starts, np.arange(len(sizes)), side="right") - 1
    begins = ends[:-1] - ends[starts[of_shard]]
    return FeatureFiles(directory, abstract, values["starts"], begins, sizes)


def _bytes_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _write(
    directory: Path,
    about: Mapping[str, str],
    abstract: Features,
    sizes: np.ndarray,
    make: Make,
    at_once: int,
    notify: Notify,
) -> None:
    each = bytes_of_a_token(abstract)
    needed = each * int(np.sum(sizes))
    with atomic_directory(directory) as (temporary, _):
        free = shutil.disk_usage(temporary).free
        dtypes = " and ".join(sorted({str(x.dtype) for x in jax.tree.leaves(abstract)}))
        size = (
            f"features of {len(sizes)} texts in {directory}: {int(np.sum(sizes)):,} tokens of {each:,} bytes "
            f"({dtypes}) are {needed:,} bytes"
        )
        if needed > free:
            raise CheckpointError(
                f"{size}, and its disk has {free:,} free; name a directory of another disk, give fewer or shorter "
                "texts, or leave the directory out: then features are computed in every update"
            )
        notify(f"{size}; {free:,} are free")
        starts = []
        for first, arrays in _shards(abstract, sizes, make, at_once):
            save_file(arrays, temporary / _shard(len(starts)))
            starts.append(first)
        written = [_bytes_of(temporary / _shard(i)) for i in range(len(starts))]
        values = {"about": dict(about), "starts": starts, "bytes": written}
        (temporary / ABOUT).write_text(json.dumps(values), encoding="utf-8")


def _shards(
    abstract: Features, sizes: np.ndarray, make: Make, at_once: int
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the first text of each shard, and its arrays."""
    each, names = bytes_of_a_token(abstract), _names(abstract)
    first, held, pieces = 0, 0, [[] for _ in names]

    def joined() -> dict[str, np.ndarray]:
        return {name: np.concatenate(x) for name, x in zip(names, pieces, strict=True)}

    for begin in range(0, len(sizes), at_once):
        indices = np.arange(begin, min(begin + at_once, len(sizes)))
        made, lengths = make(indices)
        leaves = [np.asarray(x) for x in jax.tree.leaves(made)]
        for row, index in enumerate(indices):
            if held and held + each * int(sizes[index]) > SHARD_BYTES:
                yield first, joined()
                first, held, pieces = int(index), 0, [[] for _ in names]
            assert lengths[row] == sizes[index]
            for whole, piece in zip(leaves, pieces, strict=True):
                piece.append(whole[row, : lengths[row]])
            held += each * int(sizes[index])
    yield first, joined()


def bytes_of_a_token(abstract: Features) -> int:
    """Return the bytes of the features of one token."""
    return sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in jax.tree.leaves(abstract))


def _names(features: Features) -> list[str]:
    """Return a name for each array."""
    paths = jax.tree_util.tree_leaves_with_path(features)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def _shard(index: int) -> str:
    return f"{index:05d}.safetensors"


# --- digests of weights ------------------------------------------------------------------------------


def digest_of(params: Params) -> str:
    """Return a digest of weights, from sums that their device makes of all their bits."""
    sums = jax.device_get({name: _sum_of_bits(x) for name, x in named_arrays(params).items()})
    lines = [f"{name} {of.tolist()}" for name, of in sorted(sums.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@jax.jit
def _sum_of_bits(x: Array) -> UInt32[Array, "2"]:
    """Return the sum of an array's words, and that of each word times an odd number of its place, modulo 2^32."""
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    words, place = words.astype(jnp.uint32), jnp.ones(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = jnp.uint32(2 * math.prod(x.shape[axis + 1 :]) % 2**32)
        place += stride * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.stack([jnp.sum(words, dtype=jnp.uint32), jnp.sum(words * place, dtype=jnp.uint32)])
