"""The tables that turn the tensors of a Hugging Face checkpoint into our parameters, and back.

A `Rule` names source tensors, the parameter they fill, and the transform between them. A `RuleSet`
is the whole table of a model. `match` compares the table with the tensors of a checkpoint. It
returns a `ConversionPlan`, or raises one error that lists every problem. Read `Rule` first, then the
transforms, then `match`. Nothing here reads a file.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.errors import CheckpointError, listed

Shape = tuple[int, ...]

_LOG = logging.getLogger(__name__)

# Rows and columns of a tile. A tile of 16-bit numbers and its transpose fit the L2 cache.
_TILE = 512


# --- transforms ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transform:
    """An exact conversion between source tensors and one parameter, in both directions.

    It moves numbers, and changes no floats. Both directions take numpy arrays, which file reads return,
    and JAX arrays, including traced ones.

    Attributes:
      name: name of the transform.
      to_param: returns the parameter for the source tensors and the shape of the parameter.
      to_sources: returns the source tensors for the parameter and the number of sources.
      rows: joins arrays [out, n], one for each source, into one [*out, n] for the shape of the
        parameter. What a row holds (codes, or scales of its groups) stays together. None where
        no product multiplies by the parameter.
      integers: whether the parameter holds integers. Such a parameter stays int32 in every dtype
        that weights are cast to. Files store it as int64.
    """

    name: str
    to_param: Callable[[Sequence[Any], Shape], Any]
    to_sources: Callable[[Any, int], tuple[Any, ...]]
    rows: Callable[[Sequence[Any], Shape], Any] | None = None
    integers: bool = False


def _join(sources: Sequence[Any], axis: int = 0) -> Any:
    if len(sources) == 1:
        return sources[0]
    numpy = all(isinstance(s, np.ndarray) for s in sources)
    return (np if numpy else jnp).concatenate(sources, axis=axis)


def _transpose(x: Any) -> Any:
    """Swap the last two axes, tile by tile.

    The strided copy of numpy would miss the cache at every element.
    """
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


def _linear_rows(sources: Sequence[Any], shape: Shape) -> Any:
    return _join(sources).reshape(*shape[1:], -1)


def _heads_rows(sources: Sequence[Any], shape: Shape) -> Any:
    _, k, _, h = shape
    return _join([s.reshape(k, -1, h, s.shape[-1]) for s in sources], axis=1)


def _from_heads(sources: Sequence[Any], shape: Shape) -> Any:
    return _transpose(_heads_rows(sources, shape).reshape(-1, shape[0])).reshape(shape)


def _to_heads(param: Any, count: int) -> tuple[Any, ...]:
    d, k, x, h = param.shape
    by_kv_head = _transpose(param.reshape(d, -1)).reshape(k, x, h, d)
    starts = [0, *range(x - count + 1, x + 1)]  # every later source has 1 head per kv head
    return tuple(by_kv_head[:, a:b].reshape(-1, d) for a, b in itertools.pairwise(starts))


def _experts_rows(sources: Sequence[Any], shape: Shape) -> Any:
    return sources[0].reshape(shape[0], *shape[2:], -1)


def _from_experts(sources: Sequence[Any], shape: Shape) -> Any:
    return _transpose(sources[0]).reshape(shape)


def _to_experts(param: Any, _: int) -> tuple[Any, ...]:
    return (_transpose(param.reshape(param.shape[0], param.shape[1], -1)),)


same = Transform(
    "same",
    lambda sources, shape: sources[0].reshape(shape),
    lambda x, _: (x,),
    lambda sources, shape: sources[0],
)
"""Copies embeddings, norms and scalars as they are."""

row = Transform(
    "row", lambda sources, shape: sources[0].reshape(shape), lambda x, _: (x.reshape(1, -1),)
)
"""Turns a matrix of one row, which makes one number, into a vector."""

integers = Transform("integers", same.to_param, same.to_sources, integers=True)
"""Copies token ids as they are."""

scalars = Transform(
    "scalars",
    lambda sources, shape: _join([source.reshape(1) for source in sources]),
    lambda x, count: tuple(x[i].reshape(()) for i in range(count)),
)
"""Joins single numbers, each a tensor without axes, into one axis."""

permutation = Transform("permutation", same.to_param, same.to_sources, integers=True)
"""Copies an ordering of all tokens as it is. Conversion checks that no token is left out."""


def _indices(x: Any) -> Any:
    return (np if isinstance(x, np.ndarray) else jnp).arange(x.size, dtype=x.dtype)


offsets = Transform(
    "offsets",
    lambda sources, shape: sources[0] + _indices(sources[0]),
    lambda x, _: (x - _indices(x),),
    integers=True,
)
"""Turns distances from an index to a token id into ids. Conversion checks that no id is there twice."""

linear = Transform("linear", _from_linear, _to_linear, _linear_rows)
"""Joins [out, in] matrices along out into [in, *out]: one projection, or gate and up."""

linear_out = Transform("linear_out", _from_linear, _to_output, lambda sources, shape: sources[0])
"""Turns one [out, in] matrix into [*in, out]: the output projection of attention."""

heads = Transform("heads", _from_heads, _to_heads, _heads_rows)
"""Joins q, k and v matrices [heads * H, D] into [D, K, G + 2, H].

Each kv head has its G queries, then its key, then its value. Layers with k = v have no value, and
layers with shared K/V have queries only. k and v alone become [D, K, 2, H].
"""

experts = Transform("experts", _from_experts, _to_experts, _experts_rows)
"""Turns stacked [E, out, in] matrices into [E, in, *out]. Gate rows come before up rows."""


# --- rules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Names one or more source tensors, the parameter they fill, and the transform between them.

    Attributes:
      pattern: name or names of the source tensors, without the prefix of the checkpoint. `{i}`
        stands for a layer number.
      path: name of the parameter. `{i}` stands for a layer number.
      transform: the conversion between the source tensors and the parameter.
      outside: whether a checkpoint has these names without the prefix. An example is an output head
        that is stored beside the model.
    """

    pattern: str | tuple[str, ...]
    path: str
    transform: Transform
    outside: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.pattern,) if isinstance(self.pattern, str) else self.pattern

    def names(self, prefix: str) -> tuple[str, ...]:
        """Return the full names of the source tensors in a checkpoint with this prefix."""
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
    """Names tensors that conversion leaves out.

    Attributes:
      pattern: regular expression that matches the whole name of such a tensor.
      reason: what the tensors are.
      copy_of: a source tensor that the skipped tensor must equal bit for bit. None skips the tensor
        whatever it holds.
    """

    pattern: str
    reason: str
    copy_of: str | None = None


@dataclass(frozen=True)
class Stack:
    """Names matrices that a checkpoint may store one by one in place of one stacked tensor.

    Attributes:
      pattern: the end of the name of the stacked tensor, [E, out, in].
      parts: the modules of one matrix, whose rows follow each other. Of "experts.gate_up_proj"
        they are those of "experts.7", say.
    """

    pattern: str
    parts: tuple[str, ...]

    def names(self, stacked: str, index: int) -> tuple[str, ...]:
        """Return the names of matrix `index` of a stacked tensor."""
        return tuple(f"{stacked.rpartition('.')[0]}.{index}.{part}.weight" for part in self.parts)


@dataclass(frozen=True)
class RuleSet:
    """Everything that the conversion knows about one model.

    Attributes:
      rules: one rule for every parameter.
      prefixes: what may stand before every source name. The first is the prefix of the releases.
      skips: tensors that are left out.
      advice: what to do about tensors that may be missing. Each is a pattern of source names and
        the advice, which is added to the error.
      stacks: tensors that may be stored matrix by matrix.
      aliases: parts of names that some programs write, and what stands for them here.
    """

    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...]
    skips: tuple[Skip, ...] = ()
    advice: tuple[tuple[str, str], ...] = ()
    stacks: tuple[Stack, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


def for_layers(rules: Iterable[Rule], layers: int, params: Iterable[str]) -> tuple[Rule, ...]:
    """Expand `rules` for every layer. Keep the rules whose parameter is in `params`."""
    names = set(params)
    written = [r.at(i) for r in rules for i in (range(layers) if "{i}" in r.path else (0,))]
    return tuple(r for r in written if r.path in names)


# --- matching ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Shape of a stored tensor, and its dtype under its safetensors name."""

    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Fill:
    """One parameter, and the full names of the tensors that fill it."""

    path: str
    shape: Shape
    sources: tuple[str, ...]
    transform: Transform

    def cast(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of this parameter when weights are cast to `dtype`."""
        return np.dtype(np.int32) if self.transform.integers else dtype

    def to_sources(self, param: np.ndarray) -> tuple[np.ndarray, ...]:
        parts = self.transform.to_sources(param.view(_bits(param.dtype)), len(self.sources))
        return tuple(np.asarray(part, order="C").view(param.dtype) for part in parts)

    def source_shapes(self) -> tuple[Shape, ...]:
        return _source_shapes(self.transform, self.shape, len(self.sources))


@dataclass(frozen=True)
class ConversionPlan:
    """The use of every tensor of a checkpoint.

    Attributes:
      fills: the parameters and the tensors that fill them.
      skipped: for each skipped tensor, the reason.
      copies: for some skipped tensors, the name of the tensor that each must equal.
    """

    fills: tuple[Fill, ...]
    skipped: dict[str, str]
    copies: dict[str, str]


_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_OF_PEFT = "base_model.model."


def unwrapped(names: Iterable[str], where: str) -> dict[str, str]:
    """Return names without the parts that wrappers of trainers add, by the names as they are.

    Wrappers are those of data parallelism, `torch.compile`, checkpointing of activations, and peft.

    Args:
      where: the name of the checkpoint, for messages.

    Raises:
      CheckpointError: two names become one, or a LoRA adapter is not merged.
    """
    plain: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        if any(part in ("lora_A", "lora_B", "base_layer") for part in parts):
            raise CheckpointError(
                f"{where} holds a model with a LoRA adapter that is not merged ({listed([name])}); merge "
                "them with `merge_and_unload()` of peft, and save the result"
            )
        kept = ".".join(part for part in parts if part not in _WRAPPERS)
        plain[name] = kept.removeprefix(_OF_PEFT)
    if len(set(plain.values())) < len(plain):
        first = {short: name for name, short in reversed(plain.items())}
        name, short = next((n, s) for n, s in plain.items() if first[s] != n)
        raise CheckpointError(
            f"{where} holds {listed([short])} twice, as {listed([first[short], name])}; leave one"
        )
    if wrapped := next((name for name, short in plain.items() if name != short), None):
        _LOG.warning("%s: %s is read as %s, and so on", where, wrapped, plain[wrapped])
    return plain


FLOATS, INTEGERS = ("F32", "BF16", "F16"), ("I64", "I32")


def find_prefix(rules: RuleSet, names: Iterable[str]) -> str:
    """Return the prefix under which most of the source tensors are found."""
    present = set(names)
    return max(
        rules.prefixes, key=lambda p: sum(s in present for r in rules.rules for s in r.names(p))
    )


def fills_for(rules: RuleSet, params: Mapping[str, Shape], prefix: str) -> tuple[Fill, ...]:
    """Apply every rule. Assert that the rules fill each parameter exactly once."""
    paths = [r.path for r in rules.rules]
    assert sorted(paths) == sorted(params), sorted(set(paths) ^ set(params)) or "filled twice"
    return tuple(Fill(r.path, params[r.path], r.names(prefix), r.transform) for r in rules.rules)


def match(
    rules: RuleSet, params: Mapping[str, Shape], tensors: Mapping[str, TensorSpec], where: str
) -> ConversionPlan:
    """ConversionPlan what to do with every tensor of a checkpoint: fill a parameter, or be skipped.

    Args:
      rules: the table of the model.
      params: name and shape of every parameter of the model.
      tensors: every tensor of the checkpoint.
      where: the name of the checkpoint, for messages.

    Raises:
      CheckpointError: tensors are missing, not known, or of a wrong shape or dtype; the message
        lists the first of them and counts the others.
    """
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
            f"{where} does not fit its config.json, {len(wrong):,} problems:\n  "
            + "\n  ".join([listed(sorted(wrong), "\n  "), *_advice(rules, prefix, tensors)])
        )
    return ConversionPlan(fills, skipped, copies)


def _advice(rules: RuleSet, prefix: str, tensors: Mapping[str, TensorSpec]) -> list[str]:
    missing = [
        s
        for r in rules.rules
        for s, name in zip(r.sources, r.names(prefix), strict=True)
        if name not in tensors
    ]
    return [
        advice for pattern, advice in rules.advice if any(re.fullmatch(pattern, s) for s in missing)
    ]


@functools.cache
def _source_shapes(transform: Transform, shape: Shape, count: int) -> tuple[Shape, ...]:
    param = jax.ShapeDtypeStruct(shape, np.dtype(np.uint16))
    parts = jax.eval_shape(lambda x: transform.to_sources(x, count), param)
    return tuple(part.shape for part in parts)


def _bits(dtype: np.dtype) -> str:
    return f"u{dtype.itemsize}"
