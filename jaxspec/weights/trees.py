"""Trees of weights as trainers hold them, and the flat dict that everything here takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxspec.quantised import QuantisedArray
from jaxspec.shapes import Params
from jaxspec.weights.model_def import ModelDef, cast_params, listed
from jaxspec.weights.sharding import decoding_mesh, mesh_left_to_xla


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


def accept_params(model_def: ModelDef | None, params: Any, *, cast: bool) -> Params | None:
    """Return weights that a caller gave, flat, and in the dtypes of a model_def if `cast`; None stays None."""
    if params is None:
        return None
    params = flat_params(params)
    return cast_params(model_def, params) if cast and model_def is not None else params


class KnownParams:
    """Checks the weights that a caller passes in every call. Unchanged shardings make it quick."""

    def __init__(self) -> None:
        self._shardings: dict[str, Any] = {}  # by role: shardings of the last params
        self._kinds: dict[str, list[str]] = {}  # by role: names of one param per sharding

    def check(self, role: str, model_def: ModelDef, params: Any) -> Params:
        """Raise an error if params do not fit; otherwise return one param of each sharding.

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
        shardings = {name: value.sharding for name, value in params.items()}
        known = self._shardings.get(role)
        # The shardings are equal in nearly every call. Comparing them takes a third of the
        # time of a check of each param.
        if shardings == known:
            return {name: params[name] for name in self._kinds[role]}
        # In later calls, new shapes or dtypes make JAX trace again, and tracing checks them.
        if known is None or params.keys() != known.keys():
            model_def.check(params)
            known = shardings
        wrong = [
            f"{name}: {s}, before {known[name]}"
            for name, s in shardings.items()
            if not s.is_equivalent_to(known[name], params[name].ndim)
        ]
        if wrong:
            raise ValueError(
                f"the {role}'s params are sharded otherwise than in the first call; put them back with "
                f"jax.device_put, or make another Sampler:\n  {listed(wrong, 5)}"
            )
        kinds = {sharding: name for name, sharding in shardings.items()}
        self._shardings[role], self._kinds[role] = shardings, list(kinds.values())
        return {name: params[name] for name in self._kinds[role]}


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
    return jax.device_put(flat_params(params), model_def.shardings(decoding_mesh(mesh)))


def constrain_params(params: Params, model_def: ModelDef) -> Params:
    """Tell XLA, inside a jitted function, to bring weights to where decoding wants them.

    What another axis than `model` splits, such as `fsdp`, is brought together once and not in every
    step. Do nothing where no mesh is left to XLA.
    """
    if (mesh := mesh_left_to_xla()) is None:
        return params
    specs = {name: sharding.spec for name, sharding in model_def.shardings(mesh).items()}
    return lax.with_sharding_constraint(params, specs)
