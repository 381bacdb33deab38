"""Refuse weights that are not finite, while their bytes are in memory anyway.

A target with one NaN would agree with itself in every draft, and a drafter's acceptance would be
low without a reason. Read `checked`. `checked_on_devices` is for arrays that never were on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.errors import CheckpointError
from jaxspec.shapes import Array
from jaxspec.weights.sharding import fetch

See = Callable[[str, np.ndarray], None]
"""Checks a tensor, by its name and values. The values must not change before the next call."""

_SLAB_BYTES = 4 << 20  # fits a cache, since values are read twice
_NAMED = 5  # tensors that a message names


@contextlib.contextmanager
def checked(where: Path) -> Iterator[See]:
    """Yield a function that checks a weight. The context raises its error when it ends.

    A thread checks large arrays, while the caller reads the next one or writes this one. At most one
    array waits.

    Raises:
      CheckpointError: values are not finite. It names the tensors.
    """
    non_finite: dict[str, str] = {}
    waiting: list[Future[None]] = []

    def check(name: str, array: np.ndarray) -> None:
        if count := num_non_finite(array):
            non_finite[name] = _message(count, array.size)

    def see(name: str, array: np.ndarray) -> None:
        if array.nbytes <= _SLAB_BYTES:
            return check(name, array)
        if waiting:
            waiting.pop().result()
        waiting.append(pool.submit(check, name, array))

    with ThreadPoolExecutor(1) as pool:
        yield see
    for last in waiting:
        last.result()
    _refuse(where, non_finite)


@contextlib.contextmanager
def checked_on_devices(where: Path) -> Iterator[Callable[[str, Array], None]]:
    """Yield a function that checks a weight where it is: one small program for each shape.

    The context raises its error when it ends.

    Raises:
      CheckpointError: as in `checked`.
    """
    counts: dict[str, Array] = {}
    sizes: dict[str, int] = {}

    def see(name: str, array: Array) -> None:
        if jnp.issubdtype(array.dtype, jnp.floating):
            counts[name], sizes[name] = _count(array), array.size

    yield see
    wrong = {name: int(count) for name, count in fetch(counts).items() if count}
    _refuse(where, {name: _message(count, sizes[name]) for name, count in wrong.items()})


@jax.jit
def _count(x: Array) -> Array:
    return jnp.sum(~jnp.isfinite(x), dtype=jnp.uint32)


def num_non_finite(array: np.ndarray) -> int:
    """Return how many values are NaN or infinite; 0 for integers.

    As whole numbers, the bits of such a value are the largest of its sign. Two maxima find them, and
    need neither a copy nor a float that could overflow.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return 0
    size = array.dtype.itemsize
    signed, unsigned = np.dtype(f"i{size}"), np.dtype(f"u{size}")
    infinity = np.asarray(np.inf, array.dtype).view(unsigned)
    minus_infinity = np.asarray(-np.inf, array.dtype).view(unsigned)
    flat, step, count = array.reshape(-1), _SLAB_BYTES // size, 0
    for start in range(0, flat.size, step):
        slab = flat[start : start + step].view(unsigned)
        if slab.max() >= minus_infinity or slab.view(signed).max() >= infinity:
            count += int(np.count_nonzero(slab & ~(infinity ^ minus_infinity) >= infinity))
    return count


def _message(count: int, size: int) -> str:
    return f"{count:,} of {size:,} values NaN or infinite"


def _refuse(where: Path, non_finite: Mapping[str, str]) -> None:
    if not non_finite:
        return
    lines = [f"{name}: {message}" for name, message in non_finite.items()]
    if more := lines[_NAMED:]:
        lines[_NAMED:] = [f"and {len(more)} more tensor{'' if len(more) == 1 else 's'}"]
    raise CheckpointError(
        f"{where} has weights that are not finite; get it again, or take an earlier step of its training:\n  "
        + "\n  ".join(lines)
    )
