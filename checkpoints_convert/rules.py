"""How the tensors of a Hugging Face checkpoint become our parameters, and back.

A `Rule` names source tensors, the parameter they fill, and the transform between them. A `RuleSet`
is a model's whole table; `match` holds it against the tensors of a checkpoint and gives a `Plan`,
or one error that lists every offender. Read `Rule`, then the transforms, then `match`. Nothing here
reads a file.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.errors import CheckpointError

Shape = tuple[int, ...]

_TILE = 512  # of 16-bit numbers: a tile and its transpose fit the second-level cache


# --- transforms ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transform:
    """An exact way between source tensors and one parameter: it moves numbers and changes none.

    Both ways take numpy arrays, which files are read into, and JAX's, traced ones too.
    """

    name: str
    to_param: Callable[[Sequence[Any], Shape], Any]
    to_sources: Callable[[Any, int], tuple[Any, ...]]
    integers: bool = (
        False  # kept as int32 in every dtype that weights are cast to; files have them as int64
    )


def _join(sources: Sequence[Any], axis: int = 0) -> Any:
    if len(sources) == 1:
        return sources[0]
    numpy = all(isinstance(s, np.ndarray) for s in sources)
    return (np if numpy else jnp).concatenate(sources, axis=axis)


def _transpose(x: Any) -> Any:
    """Swap the last two axes, by tiles: numpy's own strided copy misses the cache at every element."""
    if not isinstance(x, np.ndarray):
        return x.swapaxes(-1, -2)
    *rest, rows, columns = x.shape
    out = np.empty((*rest, columns, rows), x.dtype)
    for i in range(0, rows, _TILE):
        for j in range(0, columns, _TILE):
            tile = x[..., i : i + _TILE, j : j + _TILE]
            out[..., j : j + _TILE, i : i + _TILE] = tile.swapaxes(-1, -2)
    return out


def _from_linear(sources: Sequence[Any], shape: Shape) -> Any:
    return _transpose(_join(sources)).reshape(shape)


def _to_linear(param: Any, count: int) -> tuple[Any, ...]:
    rows = _transpose(param.reshape(param.shape[0], -1))
    return tuple(rows.reshape(count, -1, param.shape[0]))


def _to_output(param: Any, _: int) -> tuple[Any, ...]:
    return (_transpose(param.reshape(-1, param.shape[-1])),)


def _from_heads(sources: Sequence[Any], shape: Shape) -> Any:
    d, k, _, h = shape
    by_kv_head = _join([s.reshape(k, -1, h, d) for s in sources], axis=1)
    return _transpose(by_kv_head.reshape(-1, d)).reshape(shape)


def _to_heads(param: Any, count: int) -> tuple[Any, ...]:
    d, k, x, h = param.shape
    by_kv_head = _transpose(param.reshape(d, -1)).reshape(k, x, h, d)
    starts = [0, *range(x - count + 1, x + 1)]  # all but the first source have one head a kv head
    return tuple(by_kv_head[:, a:b].reshape(-1, d) for a, b in itertools.pairwise(starts))


def _from_experts(sources: Sequence[Any], shape: Shape) -> Any:
    return _transpose(sources[0]).reshape(shape)


def _to_experts(param: Any, _: int) -> tuple[Any, ...]:
    return (_transpose(param.reshape(param.shape[0], param.shape[1], -1)),)


same = Transform("same", lambda sources, shape: sources[0].reshape(shape), lambda x, _: (x,))
"""Embeddings, norms, scalars: as they are."""

integers = Transform("integers", same.to_param, same.to_sources, integers=True)
"""Token ids: as they are."""

permutation = Transform("permutation", same.to_param, same.to_sources, integers=True)
"""An order of all tokens, likewise. Conversion checks that none is left out."""

linear = Transform("linear", _from_linear, _to_linear)
"""[out, in] matrices, joined along out, become [in, *out]: one projection, or gate and up."""

linear_out = Transform("linear_out", _from_linear, _to_output)
"""One [out, in] matrix becomes [*in, out]: the projection that ends attention."""

heads = Transform("heads", _from_heads, _to_heads)
"""q, k, v matrices [heads * H, D] become [D, K, G + 2, H]: each kv head's queries, key, value.

With fewer sources the trailing ones are absent (k = v, shared K/V); k and v alone: [D, K, 2, H].
"""

experts = Transform("experts", _from_experts, _to_experts)
"""Stacked [E, out, in] matrices become [E, in, *out]; gate rows come before up rows."""


# --- rules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Source tensor name or names, without the checkpoint's prefix, and the parameter they fill.

    `{i}` stands for a layer number, in both. `outside`: a checkpoint has these names without the
    prefix, as that of a head which stands beside the model.
    """

    pattern: str | tuple[str, ...]
    path: str
    transform: Transform
    outside: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.pattern,) if isinstance(self.pattern, str) else self.pattern

    def names(self, prefix: str) -> tuple[str, ...]:
        """Return the full names of the source tensors, in a checkpoint with this prefix."""
        return self.sources if self.outside else tuple(prefix + s for s in self.sources)

    def at(self, layer: int) -> Rule:
        return Rule(
            tuple(s.replace("{i}", str(layer)) for s in self.sources),
            self.path.replace("{i}", str(layer)),
            self.transform,
            self.outside,
        )


@dataclass(frozen=True)
class Skip:
    """Tensors that are left out, by regular expression over whole names, and what they are.

    With `copy_of` they are left out only where they equal that source tensor, bit for bit.
    """

    pattern: str
    reason: str
    copy_of: str | None = None


@dataclass(frozen=True)
class RuleSet:
    """Everything the conversion knows about one model."""

    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...]  # what may stand before every source name, the releases' first
    skips: tuple[Skip, ...] = ()
    refused: tuple[
        tuple[str, str], ...
    ] = ()  # layouts known but not supported: pattern, what to say
    advice: tuple[tuple[str, str], ...] = ()  # tensors that may be missing: pattern, the way out


def for_layers(rules: Iterable[Rule], layers: int, params: Iterable[str]) -> tuple[Rule, ...]:
    """Write `rules` out for every layer, keeping those whose parameter the model has."""
    names = set(params)
    written = [r.at(i) for r in rules for i in (range(layers) if "{i}" in r.path else (0,))]
    return tuple(r for r in written if r.path in names)


# --- matching ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Shape of a stored tensor and its dtype, in the names that safetensors uses."""

    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Fill:
    """One parameter and the tensors, by full name, that fill it."""

    path: str
    shape: Shape
    sources: tuple[str, ...]
    transform: Transform

    def cast(self, dtype: np.dtype) -> np.dtype:
        """Return what this parameter has where weights have `dtype`."""
        return np.dtype(np.int32) if self.transform.integers else dtype

    def to_param(self, sources: Sequence[np.ndarray]) -> np.ndarray:
        # On raw bits: numpy moves plain integers several times faster than bfloat16.
        bits = [s.view(_bits(s.dtype)) for s in sources]
        return self.transform.to_param(bits, self.shape).view(sources[0].dtype)

    def to_sources(self, param: np.ndarray) -> tuple[np.ndarray, ...]:
        parts = self.transform.to_sources(param.view(_bits(param.dtype)), len(self.sources))
        return tuple(np.ascontiguousarray(part).view(param.dtype) for part in parts)

    def source_shapes(self) -> tuple[Shape, ...]:
        return _source_shapes(self.transform, self.shape, len(self.sources))


@dataclass(frozen=True)
class Plan:
    """What to do with every tensor of a checkpoint."""

    fills: tuple[Fill, ...]
    skipped: dict[str, str]  # name: why
    copies: dict[str, str]  # skipped name: the tensor it must equal


FLOATS, INTEGERS = ("F32", "BF16", "F16"), ("I64", "I32")


def find_prefix(rules: RuleSet, names: Iterable[str]) -> str:
    """Return the prefix under which most of the source tensors are found."""
    present = set(names)
    return max(
        rules.prefixes, key=lambda p: sum(s in present for r in rules.rules for s in r.names(p))
    )


def fills_for(rules: RuleSet, params: Mapping[str, Shape], prefix: str) -> tuple[Fill, ...]:
    """Apply every rule: each parameter is filled exactly once, or the table is wrong."""
    paths = [r.path for r in rules.rules]
    assert sorted(paths) == sorted(params), sorted(set(paths) ^ set(params)) or "filled twice"
    return tuple(Fill(r.path, params[r.path], r.names(prefix), r.transform) for r in rules.rules)


def match(
    rules: RuleSet, params: Mapping[str, Shape], tensors: Mapping[str, TensorSpec], where: str
) -> Plan:
    """Give every tensor of a checkpoint its place.

    Args:
      params: name and shape of every parameter of the model.
      tensors: every tensor of the checkpoint.
      where: the checkpoint's name, for messages.

    Raises:
      CheckpointError: tensors are missing, not known, or of a wrong shape or dtype; all are listed.
    """
    for pattern, message in rules.refused:
        found = [n for n in tensors if re.fullmatch(pattern, n)]
        if found:
            raise CheckpointError(
                f"{where}: {message} (found {found[0]} and {len(found) - 1} more)"
            )
    prefix = find_prefix(rules, tensors)
    fills = fills_for(rules, params, prefix)
    used = {name for fill in fills for name in fill.sources}
    skipped: dict[str, str] = {}
    copies: dict[str, str] = {}
    wrong: list[str] = []
    for name in tensors:
        if name in used:
            continue
        skip = next((s for s in rules.skips if re.fullmatch(s.pattern, name)), None)
        if skip is None:
            wrong.append(f"{name}: not known")
            continue
        skipped[name] = skip.reason
        if skip.copy_of is not None:
            copies[name] = prefix + skip.copy_of
    for fill in fills:
        allowed = INTEGERS if fill.transform.integers else FLOATS
        for name, shape in zip(fill.sources, fill.source_shapes(), strict=True):
            if name not in tensors:
                wrong.append(f"{name}: missing")
            elif tensors[name].shape != shape:
                wrong.append(f"{name}: shape {list(tensors[name].shape)}, expected {list(shape)}")
            elif tensors[name].dtype not in allowed:
                wrong.append(
                    f"{name}: dtype {tensors[name].dtype}, expected one of {', '.join(allowed)}"
                )
        dtypes = {tensors[name].dtype for name in fill.sources if name in tensors}
        if len(dtypes) > 1:
            wrong.append(
                f"{' and '.join(fill.sources)}: dtypes {sorted(dtypes)}, expected the same"
            )
    if wrong:
        raise CheckpointError(
            f"{where} does not fit its config.json, {len(wrong)} problems:\n  "
            + "\n  ".join([*sorted(wrong), *_advice(rules, prefix, tensors)])
        )
    return Plan(fills, skipped, copies)


def _advice(rules: RuleSet, prefix: str, tensors: Mapping[str, TensorSpec]) -> list[str]:
    missing = [
        s
        for r in rules.rules
        for s, name in zip(r.sources, r.names(prefix), strict=True)
        if name not in tensors
    ]
    return [say for pattern, say in rules.advice if any(re.fullmatch(pattern, s) for s in missing)]


@functools.cache
def _source_shapes(transform: Transform, shape: Shape, count: int) -> tuple[Shape, ...]:
    param = jax.ShapeDtypeStruct(shape, np.dtype(np.uint16))
    parts = jax.eval_shape(lambda x: transform.to_sources(x, count), param)
    return tuple(part.shape for part in parts)


def _bits(dtype: np.dtype) -> str:
    return f"u{dtype.itemsize}"
