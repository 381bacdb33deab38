"""What a run holds in device memory, from configs alone: known, and refused, before anything is allocated.

Weights, caches and the logits of a step are counted, for the shards that one device holds. Activations are not: what
is refused here cannot fit, and what is let through may still fail by a little.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec import state as states
from jaxspec.cache import RING_MULTIPLE
from jaxspec.params import Graph
from jaxspec.sharding import state_shardings
from jaxspec.state import DecodeSpec


class DeviceMemoryError(ValueError):
    """A run that is larger than the devices; the message says by how much, and what fits."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes on each device."""

    weights: int
    caches: int  # those of the drafter too
    logits: int  # float32, of all tokens that a step verifies

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.logits

    def __str__(self) -> str:
        """Return all of it in GiB."""
        parts = [f"{gib(getattr(self, f.name))} {f.name}" for f in dataclasses.fields(self)]
        return f"{gib(self.total)} GiB a device ({', '.join(parts)})"


def footprint(spec: DecodeSpec, rows: int, cache_length: int, mesh: Mesh) -> Footprint:
    """Return what decoding so many rows with caches of so many positions holds."""
    models = [spec.target] if spec.drafter is None else [spec.target, spec.drafter]
    state = jax.eval_shape(
        functools.partial(
            states.init_state,
            spec,
            rows,
            cache_length=cache_length,
            num_stop_ids=1,
            cache_dtype=jnp.dtype(spec.target.dtype),
        )
    )
    caches = (state.caches, state.drafter)
    shards = zip(
        jax.tree.leaves(caches), jax.tree.leaves(state_shardings(caches, mesh)), strict=True
    )
    logits = 4 * rows * spec.step_tokens * spec.target.config.vocab_size
    return Footprint(
        sum(weight_bytes(model, mesh) for model in models), _bytes(shards), logits // mesh.size
    )


def weight_bytes(graph: Graph, mesh: Mesh) -> int:
    """Return what a model's weights take on each device."""
    shardings = graph.shardings(mesh)
    return _bytes((a, shardings[name]) for name, a in graph.abstract_params().items())


def bytes_limit(mesh: Mesh) -> int | None:
    """Return what a program may allocate on each device, or None where that is not known: on CPUs."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in mesh.local_devices]
    return min((limit for limit in limits if limit), default=None)


def check_weights_fit(graph: Graph, mesh: Mesh) -> None:
    """Refuse a model whose weights alone are larger than the devices.

    Raises:
      DeviceMemoryError: they are.
    """
    limit = bytes_limit(mesh)
    if limit is not None and (needed := weight_bytes(graph, mesh)) > limit:
        raise DeviceMemoryError(
            f"the weights need {gib(needed)} GiB a device in {graph.dtype}, and {_device(mesh)} has "
            f"{gib(limit)} GiB: {_split(graph.dtype)}"
        )


def check_fits(spec: DecodeSpec, rows: int, cache_length: int, mesh: Mesh) -> None:
    """Refuse a batch that is larger than the devices.

    Raises:
      DeviceMemoryError: it is; the message has the most rows and the longest caches that fit.
    """
    limit = bytes_limit(mesh)
    if limit is None:
        return
    need = footprint(spec, rows, cache_length, mesh)
    if need.total <= limit:
        return
    data = mesh.shape["data"]

    def fits(rows: int, cache_length: int) -> bool:
        return footprint(spec, rows, cache_length, mesh).total <= limit

    most_rows = data * _most(rows // data, lambda n: fits(n * data, cache_length))
    longest = RING_MULTIPLE * _most(
        cache_length // RING_MULTIPLE, lambda n: fits(rows, n * RING_MULTIPLE)
    )
    ways = [f"{most_rows} rows of this length fit"] if most_rows else []
    ways += [f"{rows} rows of {longest} positions fit"] if longest else []
    raise DeviceMemoryError(
        f"{rows} rows with caches of {cache_length} positions need {need}, and {_device(mesh)} has "
        f"{gib(limit)} GiB: {' or '.join(ways) or 'not one row fits; ' + _split(spec.target.dtype)}"
    )


def gib(nbytes: float) -> str:
    """Return bytes in GiB, with one decimal."""
    return f"{nbytes / 2**30:,.1f}"


def _bytes(shards: Iterable[tuple[Any, Any]]) -> int:
    return sum(math.prod(s.shard_shape(a.shape)) * a.dtype.itemsize for a, s in shards)


def _most(below: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 0 to `below` that fits."""
    return bisect.bisect_left(range(1, below + 1), True, key=lambda n: not fits(n))


def _device(mesh: Mesh) -> str:
    return mesh.devices.flat[0].device_kind


def _split(dtype: str) -> str:
    half = "bfloat16 halves this; " if dtype == "float32" else ""
    return f"{half}a mesh with a larger model axis splits it over more devices"
