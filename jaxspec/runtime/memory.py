"""Compute how much device memory a run needs, and refuse a run that cannot fit.

The numbers come from configs alone, before anything is allocated. They count weights, caches, the
logits of a step and stored prefixes, for the shards that one device holds. They do not count
activations. A run that is not refused here may still run out of memory by a little.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxspec import state as states
from jaxspec.cache import RING_MULTIPLE
from jaxspec.state import DecodeSpec
from jaxspec.weights import memory as weight_memory
from jaxspec.weights.memory import (
    DeviceMemoryError,
    describe_device,
    format_gib,
    shard_bytes,
    way_out,
    weight_bytes,
)
from jaxspec.weights.sharding import state_shardings

LOGITS_HELD = 3
"""A step holds all logits as they are, adjusted, and as probabilities. Compiled for an H200, steps of
256 rows of 26B-A4B take 12.4 GiB beside their arguments with DFlash, whose logits are 4 GiB, and 6.3
with MTP, whose logits are 2."""


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
        parts = [f"{format_gib(size)} {name}" for name, size in sizes.items() if size]
        return f"{format_gib(self.total)} GiB a device ({', '.join(parts)})"


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
        shard_bytes(shards),
        logits // mesh.size,
        prefix_bytes,
    )


def fits(spec: DecodeSpec, rows: int, cache_length: int, mesh: Mesh, **beside: int) -> bool:
    """Return whether decoding a batch fits into the devices, as far as that is known.

    Args:
      beside: as in `footprint`.
    """
    limit = weight_memory.bytes_limit(mesh)
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
    limit = weight_memory.bytes_limit(mesh)
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
    if most_rows := data * _largest(rows // data, lambda n: fit(rows=n * data)):
        ways.append(f"{most_rows} rows of this length fit")
    if longest := RING_MULTIPLE * _largest(
        cache_length // RING_MULTIPLE, lambda n: fit(length=n * RING_MULTIPLE)
    ):
        ways.append(f"{rows} rows of {longest} positions fit")
    if read_ahead and fit(ahead=0):
        ways.append(f"read_ahead={_largest(read_ahead - 1, lambda n: fit(ahead=n))} fits")
    if prefix_bytes and (left := limit - need.total + prefix_bytes) >= 0:
        ways.append(f"prefix_bytes={left} fits")
    what = f"{rows} rows" + (f", and {read_ahead} that are read ahead," if read_ahead else "")
    raise DeviceMemoryError(
        f"{what} with caches of {cache_length} positions need {need}, and {describe_device(mesh)} "
        "has "
        f"{format_gib(limit)} GiB: "
        f"{' or '.join(ways) or 'not one row fits; ' + way_out(spec.target.dtype, mesh)}"
    )


def _largest(below: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `below` that fits, or 0 if none fits."""
    return bisect.bisect_left(range(1, below + 1), True, key=lambda n: not fits(n))
