"""Trees of weights as trainers hold them, and the flat dict that everything here takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.quantised import QuantisedArray
from jaxspec.shapes import Params


def flat_params(params: Any) -> Params:
    """Return weights as a flat dict, from names such as `layers.0.mlp.down` to arrays.

    A flat dict of JAX arrays is returned as it is. Arrays are not copied, except those of numpy: they
    go to the default device.

    Args:
      params: a dict; or dicts within dicts (and lists), a `nnx.State`, or a module of nnx. The names of
        all levels are joined by dots. Arrays are of JAX or numpy, or are in a `nnx.Variable`. A
        `QuantisedArray` becomes the arrays it consists of.

    Raises:
      ValueError: something is no array, or two arrays have one name.
    """
    if isinstance(params, dict) and all_arrays(params):
        return params
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    if not isinstance(params, Mapping):
        raise ValueError(
            f"params are a {type(params).__name__}; expected a dict of arrays by name, nested or not, or "
            "an nnx.State"
        )
    flat: Params = {}
    for name, leaf in _leaves(params, ()):
        if name in flat:
            raise ValueError(f"params have two arrays with the name {name}")
        if isinstance(leaf, nnx.Variable):
            leaf = leaf[...]
        if isinstance(leaf, QuantisedArray):
            flat |= {f"{name}.{part}": jnp.asarray(x) for part, x in leaf.parts.items()}
            continue
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(f"params: {name} is a {type(leaf).__name__}; expected an array")
        flat[name] = jnp.asarray(leaf)
    return flat


def all_arrays(params: Mapping[str, Any]) -> bool:
    """Tell whether all values are arrays of JAX, by their types: few, where values are many."""
    one_of_each = {type(x): x for x in params.values()}
    return all(isinstance(x, jax.Array) for x in one_of_each.values())


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        yield ".".join(path), tree
        return
    for key, value in items:
        yield from _leaves(value, (*path, str(key)))
