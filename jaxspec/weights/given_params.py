"""Weights that a caller gives, brought into the form that programs take, and checked.

`KnownParams` checks the same weights again in every call, so it is quick.
"""

from __future__ import annotations

from typing import Any

from jaxspec.shapes import Params
from jaxspec.weights.model_def import ModelDef, cast_params, listed
from jaxspec.weights.trees import all_arrays, flat_params


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
