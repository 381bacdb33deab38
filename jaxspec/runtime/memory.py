"""Compute how much device memory a run needs, and refuse a run that cannot fit.

The numbers come from configs alone, before anything is allocated. They count weights, caches, the
logits of a step and stored prefixes, for the shards that one device holds. They do not count
activations. A run that is not refused here may still run out of memory by a little.

A GPU knows its memory. A CPU's is what `host_memory` finds, so it is limited by control groups and
`ulimit` too.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec import state as states
from jaxspec.cache import RING_MULTIPLE
from jaxspec.state import DecodeSpec
from jaxspec.weights import host_memory
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import state_shardings

LOGITS_HELD = 3
"""A step holds all logits as they are, adjusted, and as probabilities. Compiled for an H200, steps of
256 rows of 26B-A4B take 12.4 GiB beside their arguments with DFlash, whose logits are 4 GiB, and 6.3
with MTP, whose logits are 2."""


class DeviceMemoryError(ValueError):
    """Raised if a run needs more memory than a device has, or a conversion more than the machine.

    The message has both sizes and says what fits.
    """


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The memory that a run needs on each device, in bytes."""

    weights: int
    caches: int  # of target and drafter
    logits: int  # float32, of all tokens that a step verifies, as often as a step holds them
    prefixes: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.logits + self.prefixes

    def __str__(self) -> str:
        """Return the total and its parts in GiB."""
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        parts = [f"{gib(size)} {name}" for name, size in sizes.items() if size]
        return f"{gib(self.total)} GiB a device ({', '.join(parts)})"


def footprint(
    spec: DecodeSpec,
    rows: int,
    cache_length: int,
    mesh: Mesh,
    *,
    read_ahead: int = 0,
    prefix_bytes: int = 0,
) -> Footprint:
    """Return the memory that decoding needs on each device.

    Args:
      cache_length: how many positions each cache has room for.
      read_ahead: rows beside these, which have caches and take no part in steps.
      prefix_bytes: of each device, for stored prefixes.
    """
    models = [spec.target] if spec.drafter is None else [spec.target, spec.drafter]
    state = jax.eval_shape(
        functools.partial(
            states.init_state,
            spec,
            rows + read_ahead,
            cache_length=cache_length,
            num_stop_ids=1,
            cache_dtype=spec.target.cache_dtype,
        )
    )
    caches = (state.caches, state.drafter)
    shards = zip(
        jax.tree.leaves(caches), jax.tree.leaves(state_shardings(caches, mesh)), strict=True
    )
    logits = LOGITS_HELD * 4 * rows * spec.step_tokens * spec.target.config.vocab_size
    return Footprint(
        sum(weight_bytes(model, mesh) for model in models),
        _bytes(shards),
        logits // mesh.size,
        prefix_bytes,
    )


def weight_bytes(model_def: ModelDef, mesh: Mesh) -> int:
    """Return the size of a model's weights on each device, in bytes."""
    shardings = model_def.shardings(mesh)
    return _bytes((a, shardings[name]) for name, a in model_def.abstract_params().items())


def bytes_limit(mesh: Mesh) -> int | None:
    """Return the bytes that the arrays of a program may have on each device. None: not known.

    CPU devices share the memory of their machine: what this process can still take, and what the
    arrays have that are there already.
    """
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in mesh.local_devices]
    if any(limits):
        return min(limit for limit in limits if limit)
    room = _room(mesh)
    if room is None:
        return None
    held = sum(_local_bytes(a) for a in jax.live_arrays("cpu"))
    return (room.nbytes + held) // max(1, len(mesh.local_devices))


def check_weights_fit(model_def: ModelDef, mesh: Mesh, *beside: ModelDef) -> None:
    """Raise an error if the weights of a model alone need more memory than a device has.

    Args:
      beside: models whose weights are there too.

    Raises:
      DeviceMemoryError: the weights do not fit.
    """
    limit = bytes_limit(mesh)
    needed = sum(weight_bytes(model, mesh) for model in (model_def, *beside))
    if limit is not None and needed > limit:
        raise DeviceMemoryError(
            f"the weights need {gib(needed)} GiB a device in {model_def.dtype}, and {_device(mesh)} has "
            f"{gib(limit)} GiB: {_way_out(model_def.dtype, mesh)}"
        )


def fits(spec: DecodeSpec, rows: int, cache_length: int, mesh: Mesh, **beside: int) -> bool:
    """Tell whether decoding a batch fits into the devices, as far as that is known.

    Args:
      beside: as in `footprint`.
    """
    limit = bytes_limit(mesh)
    return limit is None or footprint(spec, rows, cache_length, mesh, **beside).total <= limit


def check_fits(
    spec: DecodeSpec,
    rows: int,
    cache_length: int,
    mesh: Mesh,
    *,
    read_ahead: int = 0,
    prefix_bytes: int = 0,
) -> None:
    """Raise an error if decoding a batch needs more memory than a device has.

    Args:
      read_ahead, prefix_bytes: as in `footprint`.

    Raises:
      DeviceMemoryError: the batch does not fit. The message has the most rows, the longest caches,
        the most rows read ahead and the most bytes for prefixes that fit, everything else as it is.
    """
    limit = bytes_limit(mesh)
    if limit is None:
        return
    beside = dict(read_ahead=read_ahead, prefix_bytes=prefix_bytes)
    need = footprint(spec, rows, cache_length, mesh, **beside)
    if need.total <= limit:
        return
    data = mesh.shape["data"]

    def fit(rows: int = rows, length: int = cache_length, ahead: int = read_ahead) -> bool:
        of = footprint(spec, rows, length, mesh, read_ahead=ahead, prefix_bytes=prefix_bytes)
        return of.total <= limit

    ways = []
    if most_rows := data * _most(rows // data, lambda n: fit(rows=n * data)):
        ways.append(f"{most_rows} rows of this length fit")
    if longest := RING_MULTIPLE * _most(
        cache_length // RING_MULTIPLE, lambda n: fit(length=n * RING_MULTIPLE)
    ):
        ways.append(f"{rows} rows of {longest} positions fit")
    if read_ahead and fit(ahead=0):
        ways.append(f"read_ahead={_most(read_ahead - 1, lambda n: fit(ahead=n))} fits")
    if prefix_bytes and (left := limit - need.total + prefix_bytes) >= 0:
        ways.append(f"prefix_bytes={left} fits")
    what = f"{rows} rows" + (f", and {read_ahead} that are read ahead," if read_ahead else "")
    raise DeviceMemoryError(
        f"{what} with caches of {cache_length} positions need {need}, and {_device(mesh)} has "
        f"{gib(limit)} GiB: {' or '.join(ways) or 'not one row fits; ' + _way_out(spec.target.dtype, mesh)}"
    )


def check_host_fits(nbytes: int, what: str) -> None:
    """Raise an error if this process cannot take so many bytes of its machine's memory.

    Args:
      what: what needs them, as the subject of a sentence.

    Raises:
      DeviceMemoryError: it cannot.
    """
    room = host_memory.room()
    if room is not None and nbytes > room.nbytes:
        raise DeviceMemoryError(
            f"{what} needs {gib(nbytes)} GiB, and {room.where} has {gib(room.nbytes)} GiB: {room.way_out}"
        )


def gib(nbytes: float) -> str:
    """Format a number of bytes in GiB, with one decimal."""
    return f"{nbytes / 2**30:,.1f}"


def _bytes(shards: Iterable[tuple[Any, Any]]) -> int:
    return sum(math.prod(s.shard_shape(a.shape)) * a.dtype.itemsize for a, s in shards)


def _local_bytes(array: jax.Array) -> int:
    """Return the bytes that an array has on all devices of this process."""
    shard = math.prod(array.sharding.shard_shape(array.shape))
    return shard * array.dtype.itemsize * len(array.sharding.addressable_devices)


def _most(below: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `below` that fits, or 0 if none fits."""
    return bisect.bisect_left(range(1, below + 1), True, key=lambda n: not fits(n))


def _room(mesh: Mesh) -> host_memory.Room | None:
    """Return what the machine of a mesh of CPUs has left, and None for other devices."""
    return host_memory.room() if mesh.devices.flat[0].platform == "cpu" else None


def _device(mesh: Mesh) -> str:
    room = _room(mesh)
    return mesh.devices.flat[0].device_kind if room is None else room.where


def _way_out(dtype: str, mesh: Mesh) -> str:
    room = _room(mesh)
    half = "bfloat16 halves this; " if dtype == "float32" else ""
    split = "a mesh with a larger model axis splits it over more devices"
    return half + (split if room is None else room.way_out)
