"""Weights as a caller passes them, and the flat dict that programs take.

Read `flat_params`. `KnownParams` checks the same weights again in every call, so it is quick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxspec._deprecated import renamed_keywords
from jaxspec.mesh import mesh_left_to_xla
from jaxspec.quantised import QuantisedArray
from jaxspec.quantised.array import named_arrays
from jaxspec.shapes import Params
from jaxspec.weights.model_def import ModelDef, cast_params, listed
from jaxspec.weights.sharding import decoding_mesh


def flat_params(params: Any, model_def: ModelDef | None = None) -> Params:
    """Return weights as a flat dict, by names such as `layers.0.mlp.down`.

    A flat dict of JAX arrays is returned as it is. Arrays are not copied, except those of numpy: they
    go to the default device.

    Args:
      params: a dict; or dicts within dicts (and lists), a `nnx.State`, or a module of nnx. The names of
        all levels are joined by dots. Arrays are of JAX or numpy, are in a `nnx.Variable`, or make up
        a `QuantisedArray`.
      model_def: the model that quantised weights are for, see `ModelDef.adopt`.

    Raises:
      ValueError: something is no array, or two arrays have one name.
    """
    if not (isinstance(params, dict) and all_arrays(params)):
        params = _flattened(params)
    return params if model_def is None else model_def.adopt(params)


def _flattened(params: Any) -> Params:
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
            flat[name] = jax.tree.map(jnp.asarray, leaf)
            continue
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(f"params: {name} is a {type(leaf).__name__}; expected an array")
        flat[name] = jnp.asarray(leaf)
    return flat


def all_arrays(params: Mapping[str, Any]) -> bool:
    """Return whether all values are arrays of JAX, or quantised arrays of these."""
    one_of_each = {type(x): x for x in params.values()}  # there are few types, and many values
    return all(isinstance(x, jax.Array | QuantisedArray) for x in one_of_each.values()) and all(
        isinstance(part, jax.Array)
        for x in params.values()
        if type(x) is QuantisedArray
        for part in x.parts.values()
    )


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


def accept_params(model_def: ModelDef | None, params: Any, *, cast: bool) -> Params | None:
    """Return a caller's weights, flat, and in the dtypes of `model_def` if `cast`. None stays None."""
    if params is None:
        return None
    params = flat_params(params, model_def)
    return cast_params(model_def, params) if cast and model_def is not None else params


class KnownParams:
    """Checks the weights that a caller passes in every call. Unchanged shardings make it quick."""

    def __init__(self) -> None:
        self._shardings: dict[str, Any] = {}  # by role: structure and shardings of the last params
        self._samples: dict[
            str, dict[str, int]
        ] = {}  # by role: the index of one array per sharding
        self._first: dict[str, tuple[Any, ...]] = {}  # by role: shardings of the first params

    @property
    def placement(self) -> tuple[tuple[Any, ...], ...]:
        """The shardings of the first params of each role. Later ones are equivalent."""
        return tuple(self._first.values())

    def check(self, role: str, model_def: ModelDef, params: Any) -> Params:
        """Raise an error if params do not fit; otherwise return one array of each sharding.

        The result is for callers that need only the shardings.

        Raises:
          ValueError: params are not jax.Arrays by name, do not fit the model_def, or have other
            shardings than in the call before.
        """
        if not (isinstance(params, dict) and all_arrays(params)):
            raise ValueError(
                f"the {role}'s params must be jax.Arrays by name, as `load` returns them; jnp.asarray makes "
                "one of an array of numpy"
            )
        arrays, structure = jax.tree.flatten(params)
        shardings = [x.sharding for x in arrays]
        known = self._shardings.get(role)
        # Structure and shardings are equal in nearly every call. Comparing them takes a third of the
        # time of a check of each array.
        if (structure, shardings) == known:
            return {name: arrays[i] for name, i in self._samples[role].items()}
        # In later calls, new shapes or dtypes make JAX trace again, and tracing checks them.
        if known is None or structure != known[0]:
            model_def.check(params)
            known = structure, shardings
            self._first[role] = tuple(shardings)
        names = list(named_arrays(dict(sorted(params.items()))))
        wrong = [
            f"{name}: {new}, before {old}"
            for name, x, new, old in zip(names, arrays, shardings, known[1], strict=True)
            if not new.is_equivalent_to(old, x.ndim)
        ]
        if wrong:
            raise ValueError(
                f"the {role}'s params are sharded otherwise than in the first call; put them back with "
                f"jax.device_put, or make another Sampler:\n  {listed(wrong, 5)}"
            )
        samples = {sharding: i for i, sharding in enumerate(shardings)}
        self._shardings[role] = structure, shardings
        self._samples[role] = {names[i]: i for i in samples.values()}
        return {name: arrays[i] for name, i in self._samples[role].items()}


@renamed_keywords(graph="model_def")
def place_params(params: Any, model_def: ModelDef, mesh: Mesh) -> Params:
    """Move weights from any mesh to where decoding needs them.

    Weights that are already in place are not copied. Weights that an axis like `fsdp` split are
    gathered, because decoding reads every weight in every step.

    Args:
      params: the weights, as `trees.flat_params` takes them.
      model_def: the model definition of the model that the weights belong to, such as `LoadedModel.model_def`.
      mesh: any mesh of the devices, such as that of a training program; see `decoding_mesh`. Where its
        axis for parts of weights is not named `model`, pass `make_mesh(data=..., model=...)`.
    """
    return jax.device_put(flat_params(params, model_def), model_def.shardings(decoding_mesh(mesh)))


def constrain_params(params: Params, model_def: ModelDef) -> Params:
    """Constrain weights, inside a jitted function, to the shardings of decoding.

    XLA gathers weights that another axis than `model` splits, such as `fsdp`, once and not in every
    step. Do nothing where no mesh is left to XLA.
    """
    if (mesh := mesh_left_to_xla()) is None:
        return params
    params = model_def.adopt(params)
    specs = jax.tree.map(lambda sharding: sharding.spec, model_def.shardings(mesh))
    return lax.with_sharding_constraint(params, specs)
