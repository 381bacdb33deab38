"""Refuse weights that are not finite, while their bytes are in memory anyway.

A target with one NaN would agree with itself in every draft, and a drafter's acceptance would be
low without a reason. Read `checked`; `check_on_devices` is for arrays that never were on the host.
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
from jaxspec.shapes import Array, Params
from jaxspec.weights.sharding import fetch

See = Callable[[str, np.ndarray], None]
"""Takes a tensor's name and its values, which must not change before the next call."""

_SLAB_BYTES = 4 << 20  # fits a cache, since values are read twice
_NAMED = 5  # tensors that a message names


@contextlib.contextmanager
def checked(where: Path) -> Iterator[See]:
    """Yield a function that looks at weights. What it found is told when the context ends.

    Large arrays are looked at in a thread, while the caller reads the next one or writes this one.
    At most one array waits.

    Raises:
      CheckpointError: values are not finite. It names the tensors.
    """
    found: dict[str, str] = {}
    waiting: list[Future[None]] = []

    def look(name: str, array: np.ndarray) -> None:
        if count := num_unsound(array):
            found[name] = _told(count, array.size)

    def see(name: str, array: np.ndarray) -> None:
        if array.nbytes <= _SLAB_BYTES:
            return look(name, array)
        if waiting:
            waiting.pop().result()
        waiting.append(pool.submit(look, name, array))

    with ThreadPoolExecutor(1) as pool:
        yield see
    for last in waiting:
        last.result()
    _refuse(where, found)


def check_on_devices(where: Path, params: Params) -> None:
    """Look at weights where they are: one small program for each shape.

    Raises:
      CheckpointError: as in `checked`.
    """
    counts = fetch(
        {n: _count(x) for n, x in params.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    )
    wrong = {n: int(count) for n, count in counts.items() if count}
    _refuse(where, {n: _told(count, params[n].size) for n, count in wrong.items()})


@jax.jit
def _count(x: Array) -> Array:
    return jnp.sum(~jnp.isfinite(x), dtype=jnp.uint32)


def num_unsound(array: np.ndarray) -> int:
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


def _told(count: int, size: int) -> str:
    return f"{count:,} of {size:,} values NaN or infinite"


def _refuse(where: Path, found: Mapping[str, str]) -> None:
    if not found:
        return
    lines = [f"{name}: {what}" for name, what in found.items()]
    if more := lines[_NAMED:]:
        lines[_NAMED:] = [f"and {len(more)} more tensor{'' if len(more) == 1 else 's'}"]
    raise CheckpointError(
        f"{where} has weights that are not finite; get it again, or take an earlier step of its training:\n  "
        + "\n  ".join(lines)
    )
