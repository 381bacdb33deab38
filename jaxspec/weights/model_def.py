"""Keep modules and their weights apart.

A `ModelDef` is static and hashable. `Params` is a flat dict of arrays. Every jitted function takes a
`ModelDef` as a static argument and `Params` as an ordinary one, and calls `model_def.bind(params)` inside.
Swapping weights therefore compiles nothing. Training code, conversion and decoding share one plain
pytree.

A quantised weight is several arrays of that dict (`jaxspec.quantised`). `ModelDef.formats` names such
weights, and `ModelDef.bind` puts their arrays together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.quantised import QuantisedArray, get_format
from jaxspec.quantised.array import quantiser
from jaxspec.quantised.kv import KVFormat
from jaxspec.shapes import Array, Params
from jaxspec.weights.sharding import partition


def param(
    *shape: int,
    dtype: jnp.dtype,
    fan_in: int | None = None,
    axes: tuple[str | None, ...] = (),
    lookup: bool = False,
    contracting_axes: tuple[int, ...] = (),
    table: bool = False,
) -> nnx.Param:
    """Declare a weight.

    Args:
      fan_in: the number of inputs of a matrix. None marks norms and scales.
      axes: names of the axes that a mesh may split, see `sharding.RULES`. A weight without named
        axes is whole on every device. "experts" also says that a token uses only a few entries of
        the axis.
      lookup: whether the weight is a table of which a pass reads only the rows of its tokens. False
        for an embedding that is also the output head.
      contracting_axes: the axes that a product sums over, for a weight that may be quantised. () marks a
        weight that never is. What multiplies such a weight takes a `QuantisedArray` too.
      table: whether it holds a row for each token: an embedding, a head, or both.
    """
    return nnx.Param(
        jnp.zeros(shape, dtype),
        fan_in=fan_in,
        axes=axes,
        lookup=lookup,
        contracting_axes=contracting_axes,
        table=table,
    )


@dataclass(frozen=True)
class Declared:
    """The arguments of `param` for one weight, without its shape and dtype."""

    fan_in: int | None = None
    axes: tuple[str | None, ...] = ()
    lookup: bool = False
    contracting_axes: tuple[int, ...] = ()
    table: bool = False


@dataclass(frozen=True, repr=False)
class ModelDef:
    """A module class with its config and dtypes: all of a model except its weights.

    Attributes:
      module: an nnx.Module, constructed by (config, dtype=dtype).
      dtype: of products and of the weights that are not quantised, "float32" or "bfloat16".
      formats: the quantised weights with their formats, by name; see `with_formats`.
      kv: how a target stores keys and values; None in `dtype`.
    """

    module: type[Any]
    config: Any
    dtype: str
    formats: tuple[tuple[str, str], ...] = ()
    kv: KVFormat | None = None

    def of_dtype(self, dtype: str) -> ModelDef:
        """Return the same model with weights of another dtype.

        Raises:
          ValueError: it is neither "float32" nor "bfloat16".
        """
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, not {dtype!r}")
        return dataclasses.replace(self, dtype=dtype)

    def with_formats(self, formats: Mapping[str, str]) -> ModelDef:
        """Return the same model with these weights quantised, and no others.

        Args:
          formats: formats of `jaxspec.quantised` by the names of weights.

        Raises:
          ValueError: the model has no such weight, or it cannot be quantised.
          FormatError: a format is not known.
        """
        declared = self.declared()
        for name, format in formats.items():
            if name not in declared or not declared[name].contracting_axes:
                raise ValueError(f"{self.module.__name__} has no weight {name} to quantise")
            get_format(format)
        return dataclasses.replace(self, formats=tuple(sorted(formats.items())))

    @property
    def cache_dtype(self) -> jnp.dtype:
        """The dtype of keys and values in caches."""
        return jnp.dtype(self.dtype) if self.kv is None else self.kv.dtype

    @property
    def storage(self) -> str:
        """The dtype of the weights in words: "bfloat16", or "int8 and bfloat16, head int4".

        Head stands for its embedding, too, which is mostly the same table.
        """
        if not self.formats:
            return self.dtype
        formats = dict(self.formats)
        tables = {formats.pop(n) for n, w in self.declared().items() if w.table and n in formats}
        words = " and ".join((*dict.fromkeys(formats.values()), self.dtype))
        return f"{words}, head {' and '.join(sorted(tables))}" if tables else words

    @property
    def dtypes(self) -> str:
        """`storage`, and the dtype of keys and values where it is another: "bfloat16, K/V fp8"."""
        return self.storage if self.kv is None else f"{self.storage}, K/V {self.kv.name}"

    def __repr__(self) -> str:
        """Return one line."""
        return f"ModelDef({self.module.__name__}, {self.config}, {self.dtypes})"

    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of every array of this model's params, by name."""
        arrays = {}
        for name, weight in self.abstract_weights().items():
            parts = weight.parts if isinstance(weight, QuantisedArray) else None
            arrays |= {name: weight} if parts is None else _flat(name, parts)
        return arrays

    def abstract_weights(self) -> dict[str, jax.ShapeDtypeStruct | QuantisedArray]:
        """Return the shape and dtype of every weight, by name, whatever its format."""
        return _abstract_weights(self)

    def shardings(self, mesh: Mesh | AbstractMesh) -> dict[str, NamedSharding]:
        """Return where each array of the params lives on a mesh, by name. The mesh may be abstract.

        Scales follow the axes of their codes.
        """
        shardings = {}
        for name, sharding in self.unquantised().weight_shardings(mesh).items():
            shardings |= self.split_sharding(name, sharding)
        return shardings

    def weight_shardings(self, mesh: Mesh | AbstractMesh) -> dict[str, NamedSharding]:
        """Return where each weight lives on a mesh, by name, before it is quantised."""
        _, variables = _abstract(self)
        return {
            name: NamedSharding(mesh, partition(v.get_metadata().get("axes", ()), v.shape, mesh))
            for name, v in variables.items()
        }

    def split_sharding(self, name: str, sharding: NamedSharding) -> dict[str, NamedSharding]:
        """Return where the arrays of a weight live, given where the weight would live."""
        weight = self.abstract_weights()[name]
        if not isinstance(weight, QuantisedArray):
            return {name: sharding}
        spec = (*sharding.spec, *[None] * (weight.ndim - len(sharding.spec)))
        format, placed = get_format(weight.format), {}
        for part, array in weight.parts.items():
            follows = format.axes(part, weight.ndim, weight.contracting_axes)
            of_part = [None if i is None else spec[i] for i in follows]
            # Blocks of inputs may not divide where the inputs do. Such a part is whole everywhere.
            for axis, size in enumerate(array.shape):
                among = of_part[axis] or ()
                among = (among,) if isinstance(among, str) else among
                if size % math.prod(sharding.mesh.shape[name] for name in among):
                    of_part[axis] = None
            placed[part] = NamedSharding(sharding.mesh, PartitionSpec(*of_part))
        return _flat(name, placed)

    def unquantised(self) -> ModelDef:
        """Return the same model with every weight as numbers."""
        return dataclasses.replace(self, formats=()) if self.formats else self

    def pack(self, name: str, weight: Array | QuantisedArray) -> Params:
        """Return the arrays that hold a weight: itself, or those of its format.

        On a mesh they lie as the weight does. The weight is not kept. One of another format is
        quantised again, see `quantised.array.quantise`.
        """
        format = dict(self.formats).get(name)
        if format is None:
            assert not isinstance(weight, QuantisedArray)
            return {name: weight}
        abstract, placed, along = self.abstract_weights()[name], None, None
        assert isinstance(abstract, QuantisedArray)
        if isinstance(weight.sharding, NamedSharding):
            at = self.split_sharding(name, weight.sharding)
            placed = tuple((part, at[f"{name}.{part}"]) for part in sorted(abstract.parts))
            split = {i for i, axes in enumerate(weight.sharding.spec) if axes is not None}
            along = tuple(i for i in range(weight.ndim) if i not in split)
        make = quantiser(format, abstract.contracting_axes, placed, along)
        # Waiting bounds memory: without it weights that are not quantised yet would pile up.
        return _flat(name, jax.block_until_ready(make(weight)))

    def declared(self) -> dict[str, Declared]:
        """Return what `param` declared for each weight, by name."""
        fields = [f.name for f in dataclasses.fields(Declared)]
        _, variables = _abstract(self)
        metadata = {name: v.get_metadata() for name, v in variables.items()}
        return {n: Declared(**{f: m[f] for f in fields if f in m}) for n, m in metadata.items()}

    @property
    def head(self) -> str | None:
        """The name of the table that makes logits. None: no weight is declared to be one."""
        tables = [n for n, about in self.declared().items() if about.table and not about.lookup]
        return tables[0] if tables else None

    def check(self, params: Params) -> None:
        """Raise an error if this model cannot bind these weights.

        Raises:
          ValueError: names, shapes or dtypes differ from `abstract_params`. The message lists the
            first differences and counts the others.
        """
        wanted = _wanted(self)
        wrong = [f"{n}: missing" for n in wanted if n not in params]
        wrong += [f"{n}: unknown" for n in params if n not in wanted]
        wrong += [
            f"{n}: {params[n].dtype}{params[n].shape}, expected {dtype}{shape}"
            for n, (shape, dtype) in wanted.items()
            if n in params and (params[n].shape != shape or params[n].dtype != dtype)
        ]
        if wrong:
            raise ValueError(f"params do not fit {self.module.__name__}:\n  {listed(wrong)}")

    def bind(self, params: Params) -> Any:
        """Return the module with these weights in place.

        Raises:
          ValueError: as `check`.
        """
        self.check(params)
        graphdef, variables = _abstract(self)
        weights = self.weights(params)
        state = nnx.from_flat_state(
            [(_path(n), v.replace(weights[n])) for n, v in variables.items()]
        )
        module = nnx.merge(graphdef, state)
        return module if self.kv is None else module.store_kv(self.kv)

    def weights(self, params: Params) -> dict[str, Array | QuantisedArray]:
        """Return each weight by name: an array, or the arrays of a quantised one put together."""
        weights: dict[str, Array | QuantisedArray] = {}
        for name, weight in self.abstract_weights().items():
            if isinstance(weight, QuantisedArray):
                parts = {part: params[f"{name}.{part}"] for part in weight.parts}
                weights[name] = weight.with_parts(parts)
            else:
                weights[name] = params[name]
        return weights

    def dequantise(self, params: Params) -> Params:
        """Return the weights as numbers, for the model definition `unquantised`. It needs memory for them."""
        return {
            name: x.dequantise() if isinstance(x, QuantisedArray) else x
            for name, x in self.weights(params).items()
        }

    def bind_abstract(self) -> Any:
        """Return the module with abstract shapes in place of weights.

        It serves callers that need only what depends on the config.
        """
        return nnx.eval_shape(lambda: self.module(self.config, dtype=jnp.dtype(self.dtype)))

    def random_params(
        self, seed: int, shardings: Mapping[str, NamedSharding] | None = None
    ) -> Params:
        """Return random weights: matrices with variance 1 / fan_in, norms and scales 1.

        One compiled call makes each array. Memory therefore never holds more than one array beyond
        the result. The numbers do not depend on the devices. Quantised weights are made of the same
        numbers.

        Args:
          shardings: where each weight lives, as `weight_shardings` says. Each shard is made on its
            own device. None: all weights are made on the default device.
        """
        _, variables = _abstract(self)
        params = {}
        for i, (name, v) in enumerate(sorted(variables.items())):
            make = _random_array(
                v.shape,
                v.dtype,
                v.get_metadata().get("fan_in"),
                None if shardings is None else shardings[name],
            )
            params |= self.pack(name, make(seed, i))
        return params


@functools.partial(jax.jit, static_argnums=0)
def cast_params(model_def: ModelDef, params: Params) -> Params:
    """Return weights in the dtypes of a model_def. It is compiled, so outside of jit a call is one program.

    Only floats are cast. What does not fit otherwise stays as it is, for `ModelDef.check` to find.
    """
    wanted = _wanted(model_def)

    def cast(name: str, x: Array) -> Array:
        floats = name in wanted and jnp.issubdtype(wanted[name][1], jnp.floating)
        if not floats or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(wanted[name][1])

    return {name: cast(name, x) for name, x in params.items()}


def listed(names: list[str], most: int = 20) -> str:
    """Return names line by line. Of many, the first are shown and the others counted."""
    more = [f"and {len(names) - most:,} more"] if len(names) > most else []
    return "\n  ".join([*names[:most], *more])


def _abstract(model_def: ModelDef) -> tuple[Any, dict[str, Any]]:
    """Return the module's definition and its variables, as if nothing were quantised."""
    return _abstract_module(dataclasses.replace(model_def, formats=(), kv=None))


@functools.cache
def _abstract_module(model_def: ModelDef) -> tuple[Any, dict[str, Any]]:
    graphdef, state = nnx.split(model_def.bind_abstract())
    return graphdef, {".".join(map(str, path)): v for path, v in nnx.to_flat_state(state)}


@functools.cache
def _abstract_weights(model_def: ModelDef) -> dict[str, jax.ShapeDtypeStruct | QuantisedArray]:
    _, variables = _abstract(model_def)
    formats, weights = dict(model_def.formats), {}
    for name, v in variables.items():
        weights[name] = jax.ShapeDtypeStruct(v.shape, v.dtype)
        if name in formats:
            contracting_axes = v.get_metadata()["contracting_axes"]
            parts = get_format(formats[name]).parts(v.shape, contracting_axes)
            about: dict[str, Any] = dict(
                shape=v.shape, dtype=v.dtype, contracting_axes=contracting_axes
            )
            weights[name] = QuantisedArray(parts, format=formats[name], **about)
    return weights


@functools.cache
def _wanted(model_def: ModelDef) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of each weight, by name.

    The result is cached, because reading it from the variables takes 10 ms for a large model.
    """
    return {name: (v.shape, v.dtype) for name, v in model_def.abstract_params().items()}


def _flat(name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a weight by their names in params."""
    return {f"{name}.{part}": array for part, array in parts.items()}


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


@functools.cache
def _random_array(
    shape: tuple[int, ...], dtype: Any, fan_in: int | None, sharding: NamedSharding | None
) -> Callable[[int, int], Array]:
    def make(seed: Array, index: Array) -> Array:
        if fan_in is None:
            return jnp.ones(shape, dtype)
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(math.sqrt(1 / fan_in), dtype)

    return jax.jit(make, out_shardings=sharding)
