"""Refuse weights that do not fit into memory, before they are loaded.

Sizes come from model definitions alone. Those of arrays are for the shards that one device holds.
A GPU knows its memory. A CPU's is what `host_memory` finds, so control groups and `ulimit` limit
it too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.weights.host_memory import AvailableMemory, available_memory
from jaxspec.weights.model_def import ModelDef

SEE_DRY_RUN = "--dry-run of a command prints what fits, here and on other devices"


class DeviceMemoryError(ValueError):
    """Raised if a run needs more memory than a device has, or a conversion more than the machine.

    The message has both sizes and says what fits.
    """


def bytes_limit(mesh: Mesh) -> int | None:
    """Return the bytes that the arrays of a program may have on each device. None: not known.

    CPU devices share the memory of their machine: what this process can still take, and what the
    arrays have that are there already.
    """
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in mesh.local_devices]
    if any(limits):
        return min(limit for limit in limits if limit)
    available = _available_memory(mesh)
    if available is None:
        return None
    held = sum(_local_bytes(a) for a in jax.live_arrays("cpu"))
    return (available.nbytes + held) // max(1, len(mesh.local_devices))


def bytes_free(mesh: Mesh) -> int | None:
    """Return the bytes that each device has left now. None: not known."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    if any("bytes_limit" in of for of in stats):
        return min(of["bytes_limit"] - of["bytes_in_use"] for of in stats if "bytes_limit" in of)
    available = _available_memory(mesh)
    return None if available is None else available.nbytes // max(1, len(mesh.local_devices))


@functools.cache  # a table of rows that fit asks hundreds of times
def weight_bytes(model_def: ModelDef, mesh: Mesh) -> int:
    """Return the size of a model's weights on each device, in bytes."""
    arrays = jax.tree.leaves(model_def.abstract_params())
    return shard_bytes(zip(arrays, jax.tree.leaves(model_def.shardings(mesh)), strict=True))


def largest_weight_bytes(model_def: ModelDef, mesh: Mesh) -> int:
    """Return the size of a model's largest weight on each device, in bytes."""
    arrays = jax.tree.leaves(model_def.abstract_params())
    shardings = jax.tree.leaves(model_def.shardings(mesh))
    return max(shard_bytes([pair]) for pair in zip(arrays, shardings, strict=True))


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
            f"the weights need {format_gib(needed)} GiB a device in {model_def.dtype}, and "
            f"{describe_device(mesh)} has "
            f"{format_gib(limit)} GiB: {way_out(model_def.dtype, mesh)}; {SEE_DRY_RUN}"
        )


def check_host_fits(nbytes: int, what: str) -> None:
    """Raise an error if this process cannot take so many bytes of its machine's memory.

    Args:
      what: what needs them, as the subject of a sentence.

    Raises:
      DeviceMemoryError: it cannot.
    """
    available = available_memory()
    if available is not None and nbytes > available.nbytes:
        raise DeviceMemoryError(
            f"{what} needs {format_gib(nbytes)} GiB, and {available.where} has "
            f"{format_gib(available.nbytes)} GiB: {available.way_out}"
        )


def format_gib(nbytes: float) -> str:
    """Format a number of bytes in GiB, with one decimal."""
    return f"{nbytes / 2**30:,.1f}"


def shard_bytes(shards: Iterable[tuple[Any, Any]]) -> int:
    """Return the bytes that arrays have on each device, given each array's shape and sharding."""
    return sum(math.prod(s.shard_shape(a.shape)) * a.dtype.itemsize for a, s in shards)


def _local_bytes(array: jax.Array) -> int:
    """Return the bytes that an array has on all devices of this process."""
    shard = math.prod(array.sharding.shard_shape(array.shape))
    return shard * array.dtype.itemsize * len(array.sharding.addressable_devices)


def _available_memory(mesh: Mesh) -> AvailableMemory | None:
    """Return what the machine of a mesh of CPUs has left, and None for other devices."""
    return available_memory() if mesh.devices.flat[0].platform == "cpu" else None


def describe_device(mesh: Mesh) -> str:
    """Return the name of the memory that bounds a mesh, as the subject of a sentence."""
    available = _available_memory(mesh)
    return mesh.devices.flat[0].device_kind if available is None else available.where


def way_out(dtype: str, mesh: Mesh) -> str:
    """Return advice for models that do not fit."""
    available = _available_memory(mesh)
    half = "bfloat16 halves this; " if dtype == "float32" else ""
    split = "a mesh with a larger model axis splits it over more devices"
    return half + (split if available is None else available.way_out)
