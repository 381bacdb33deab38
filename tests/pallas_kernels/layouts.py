"""The elements of an array that each thread of a warpgroup holds, by a layout of Mosaic."""

from __future__ import annotations

from typing import Any

import numpy as np


def owned(layout: Any, shape: tuple[int, int]) -> dict[Any, dict[Any, list[int]]]:
    """Return for each thread (warp, lane) which elements of an array its registers hold."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, kept = x.ndim - len(tile), x.shape[: x.ndim - len(tile)]
        sizes = [n for size, t in zip(x.shape[lead:], tile, strict=True) for n in (size // t, t)]
        x = x.reshape(*kept, *sizes)
        x = x.transpose(*range(lead), *range(lead, x.ndim, 2), *range(lead + 1, x.ndim, 2))
    warps, lanes, vector = layout.warp_dims, layout.lane_dims, layout.vector_dim
    found: dict[Any, dict[Any, list[int]]] = {}
    for at in np.ndindex(*x.shape):
        warp, lane = (
            int(np.ravel_multi_index([at[d] for d in dims], [x.shape[d] for d in dims]))
            for dims in (warps, lanes)
        )
        shared = {x.ndim + d for d in (*warps, *lanes, vector)}
        register = tuple(0 if d in shared else i for d, i in enumerate(at))
        found.setdefault((warp, lane), {}).setdefault(register, []).append(int(x[at]))
    return found
