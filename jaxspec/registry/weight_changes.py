"""Changes of weights that are plausible in any drafter of a few layers: see `Conventions.weight_changes`.

They are what converters get wrong: norms stored as 1 + weight or not, matrices turned, layers in
another order. Each changes all layers alike, because a wrong rule does so too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxspec.registry.base import WeightChange

if TYPE_CHECKING:
    from jaxspec.shapes import Array, Params

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_PROJECTIONS = {"q": 1, "qkv": 1, "out": -1}
"""Attention's matrices by the end of their name: where the axes of inputs end and those of outputs begin."""


def common_changes(params: Params) -> Iterator[WeightChange]:
    """Yield what may be wrong with the weights of any drafter."""
    yield from offset_norms(params)
    yield from transposed(params)
    yield from swapped_layers(params)


def changed(params: Params, names: list[str], change: Callable[[Array], Array]) -> Params:
    """Return the parameters, some of them changed."""
    return {**params, **{name: change(params[name]) for name in names}}


def is_quantised(weight: Any) -> bool:
    """Return whether a weight is a `QuantisedArray`, whose numbers no change is made of."""
    return hasattr(weight, "parts")


def offset_norms(params: Params) -> Iterator[WeightChange]:
    """Yield norms whose scales are stored as they are, or less 1. Engines disagree on that too."""
    names = [name for name in params if name.endswith("norm")]
    for by, name, fix in (
        (1, "norm scales stored less 1: 1 + weight", "add 1 to {where}"),
        (-1, "norm scales stored with 1 added: weight - 1", "subtract 1 from {where}"),
    ):

        def apply(params: Params, by: int = by) -> Params:
            return changed(params, names, lambda x: (x + by).astype(x.dtype))

        yield WeightChange(name, "every norm", fix, apply)


def transposed(params: Params) -> Iterator[WeightChange]:
    """Yield square projections with their inputs and outputs exchanged. Others would not load."""
    for kind, cut in _PROJECTIONS.items():
        names = [
            name
            for name, x in params.items()
            if name.rpartition(".")[2] == kind
            and not is_quantised(x)
            and math.prod(x.shape[:cut]) ** 2 == x.size
        ]
        if not names:
            continue

        def turn(x: Array, cut: int = cut) -> Array:
            return x.reshape(math.prod(x.shape[:cut]), -1).T.reshape(x.shape)

        def apply(params: Params, names: list[str] = names, turn: Callable = turn) -> Params:
            return changed(params, names, turn)

        where = ", ".join(names)
        yield WeightChange(f"{where} transposed", where, "transpose {where}", apply)


def swapped_layers(params: Params) -> Iterator[WeightChange]:
    """Yield neighbouring layers in each other's place, where their weights have the same shapes."""
    layers: dict[int, dict[str, str]] = {}
    for name in params:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = name
    for i in sorted(layers)[:-1]:
        one, other = layers[i], layers[i + 1]
        if one.keys() != other.keys() or any(
            params[one[part]].shape != params[other[part]].shape for part in one
        ):
            continue

        def apply(
            params: Params, one: dict[str, str] = one, other: dict[str, str] = other
        ) -> Params:
            there = {one[part]: params[other[part]] for part in one}
            return {**params, **there, **{other[part]: params[one[part]] for part in one}}

        where = f"layers {i} and {i + 1}"
        yield WeightChange(f"{where} exchanged", where, "exchange {where}", apply)
