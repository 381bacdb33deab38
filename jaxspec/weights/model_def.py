"""Keep modules and their weights apart.

A `ModelDef` is static and hashable. `Params` is a flat dict of weights. Every jitted function takes a
`ModelDef` as a static argument and `Params` as an ordinary one, and calls `model_def.bind(params)` inside.
Swapping weights therefore compiles nothing. Training code, conversion and decoding share one plain
pytree.

A quantised weight is a `QuantisedArray` in that dict (`jaxspec.quantised`). `ModelDef.formats` names
such weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.mesh import partition
from jaxspec.quantised import QuantisedArray, get_format
from jaxspec.quantised.array import named_arrays, quantiser
from jaxspec.quantised.kv import KVFormat
from jaxspec.sampling import make_key
from jaxspec.shapes import Array, Params


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
      axes: names of the axes that a mesh may split, see `mesh.RULES`. A weight without named
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

    def abstract_params(self) -> dict[str, Any]:
        """Return the shape and dtype of every weight by name, in the structure of this model's params.

        A quantised weight is a `QuantisedArray` of abstract arrays.
        """
        return dict(_abstract_params(self))

    def placed_shapes(self, mesh: Mesh) -> dict[str, Any]:
        """Return `abstract_params` with the sharding of every array."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self.abstract_params(),
            self.shardings(mesh),
        )

    def shardings(self, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
        """Return the sharding of every weight by name, in the structure of this model's params.

        Scales follow the axes of their codes. The mesh may be abstract.
        """
        return {
            name: self.split_sharding(name, sharding)
            for name, sharding in self.unquantised().weight_shardings(mesh).items()
        }

    def weight_shardings(self, mesh: Mesh | AbstractMesh) -> dict[str, NamedSharding]:
        """Return the sharding of each weight by name, before it is quantised."""
        _, variables = _abstract(self)
        return {
            name: NamedSharding(mesh, partition(v.get_metadata().get("axes", ()), v.shape, mesh))
            for name, v in variables.items()
        }

    def split_sharding(self, name: str, sharding: NamedSharding) -> NamedSharding | QuantisedArray:
        """Return the shardings of a weight's arrays, given that of the weight before it is quantised."""
        weight = _abstract_params(self)[name]
        if not isinstance(weight, QuantisedArray):
            return sharding
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
        return weight.with_parts(placed)

    def unquantised(self) -> ModelDef:
        """Return the same model with every weight as numbers."""
        return dataclasses.replace(self, formats=()) if self.formats else self

    def pack(self, name: str, weight: Array | QuantisedArray) -> Array | QuantisedArray:
        """Return a weight in its format: itself, or quantised.

        On a mesh its arrays lie as the weight does. The weight is not kept. A weight that is
        quantised already is quantised again, see `quantised.array.quantise`.
        """
        abstract, placed, along = _abstract_params(self)[name], None, None
        if not isinstance(abstract, QuantisedArray):
            assert not isinstance(weight, QuantisedArray)
            return weight
        if isinstance(weight.sharding, NamedSharding):
            at = self.split_sharding(name, weight.sharding)
            assert isinstance(at, QuantisedArray)
            placed = tuple(sorted(at.parts.items()))
            split = {i for i, axes in enumerate(weight.sharding.spec) if axes is not None}
            along = tuple(i for i in range(weight.ndim) if i not in split)
        make = quantiser(abstract.format, abstract.contracting_axes, placed, along)
        # Waiting bounds memory: without it weights that are not quantised yet would pile up.
        return abstract.with_parts(jax.block_until_ready(make(weight)))

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
        expected, arrays = _expected(self), named_arrays(params)
        wrong = [f"{n}: missing" for n in expected if n not in arrays]
        wrong += [f"{n}: unknown" for n in arrays if n not in expected]
        wrong += [
            f"{n}: {arrays[n].dtype}{arrays[n].shape}, expected {dtype}{shape}"
            for n, (shape, dtype) in expected.items()
            if n in arrays and (arrays[n].shape != shape or arrays[n].dtype != dtype)
        ]
        if wrong:
            raise ValueError(f"params do not fit {self.module.__name__}:\n  {listed(wrong)}")

    def bind(self, params: Params) -> Any:
        """Return the module with these weights in place.

        Raises:
          ValueError: as `check`.
        """
        params = self.adopt(params)
        self.check(params)
        graphdef, variables = _abstract(self)
        state = nnx.from_flat_state(
            [(_path(n), v.replace(params[n])) for n, v in variables.items()]
        )
        module = nnx.merge(graphdef, state)
        return module if self.kv is None else module.store_kv(self.kv)

    def adopt(self, params: Params) -> Params:
        """Return params whose quantised weights have the formats and dtypes of this model.

        One format may have the arrays of another, as fp8-dynamic has those of fp8. `check` finds what
        does not fit. Params are returned as they are if nothing differs.

        The arrays of a quantised weight may be in params by themselves, under names such as
        `layers.0.mlp.down.codes`. That is deprecated.
        """
        adopted: Params = {}
        joined: set[str] = set()
        for name, abstract in _abstract_params(self).items() if self.formats else ():
            if not isinstance(abstract, QuantisedArray):
                continue
            weight = params.get(name)
            if isinstance(weight, QuantisedArray):
                if (
                    not weight.has_type_of(abstract)
                    and weight.parts.keys() == abstract.parts.keys()
                ):
                    adopted[name] = abstract.with_parts(weight.parts)
            elif all(f"{name}.{part}" in params for part in abstract.parts):
                parts = {part: params[f"{name}.{part}"] for part in abstract.parts}
                adopted[name] = abstract.with_parts(parts)
                joined |= {f"{name}.{part}" for part in parts}
        if joined:
            warnings.warn(
                f"params have {min(joined)}: pass the QuantisedArray of a weight in place of its arrays",
                DeprecationWarning,
                stacklevel=3,
            )
        if not adopted:
            return params
        return {name: x for name, x in params.items() if name not in joined} | adopted

    def dequantise(self, params: Params) -> Params:
        """Return the weights as numbers, for the model definition `unquantised`. It needs memory for them."""
        return {
            name: x.dequantise() if isinstance(x, QuantisedArray) else x
            for name, x in self.adopt(params).items()
        }

    def abstract_weights(self) -> dict[str, Any]:
        """Return `abstract_params()`. Deprecated."""
        warnings.warn(
            "ModelDef.abstract_weights is abstract_params now", DeprecationWarning, stacklevel=2
        )
        return self.abstract_params()

    def weights(self, params: Params) -> Params:
        """Return `adopt(params)`. Deprecated: params hold quantised weights as they are."""
        warnings.warn("ModelDef.weights is not needed any more", DeprecationWarning, stacklevel=2)
        return self.adopt(params)

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
        params: Params = {}
        for i, (name, v) in enumerate(sorted(variables.items())):
            make = _random_array(
                v.shape,
                v.dtype,
                v.get_metadata().get("fan_in"),
                None if shardings is None else shardings[name],
            )
            params[name] = self.pack(name, make(seed, i))
        return params


@functools.partial(jax.jit, static_argnums=0)
def cast_params(model_def: ModelDef, params: Params) -> Params:
    """Return weights in the dtypes of a model_def. It is compiled, so outside of jit a call is one program.

    Only floats are cast. What does not fit otherwise stays as it is, for `ModelDef.check` to find.
    """
    expected = _expected(model_def)

    def cast(name: str, x: Any) -> Any:
        if isinstance(x, QuantisedArray):
            return x.with_parts({part: cast(f"{name}.{part}", a) for part, a in x.parts.items()})
        floats = name in expected and jnp.issubdtype(expected[name][1], jnp.floating)
        if not floats or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(expected[name][1])

    return {name: cast(name, x) for name, x in model_def.adopt(params).items()}


def listed(names: list[str], limit: int = 20) -> str:
    """Return names line by line. Beyond `limit` they are counted."""
    more = [f"and {len(names) - limit:,} more"] if len(names) > limit else []
    return "\n  ".join([*names[:limit], *more])


def _abstract(model_def: ModelDef) -> tuple[Any, dict[str, Any]]:
    """Return the module's definition and its variables, as if nothing were quantised."""
    return _abstract_module(dataclasses.replace(model_def, formats=(), kv=None))


@functools.cache
def _abstract_module(model_def: ModelDef) -> tuple[Any, dict[str, Any]]:
    graphdef, state = nnx.split(model_def.bind_abstract())
    return graphdef, {".".join(map(str, path)): v for path, v in nnx.to_flat_state(state)}


@functools.cache
def _abstract_params(model_def: ModelDef) -> dict[str, jax.ShapeDtypeStruct | QuantisedArray]:
    _, variables = _abstract(model_def)
    formats, weights = dict(model_def.formats), {}
    for name, v in variables.items():
        weights[name] = jax.ShapeDtypeStruct(v.shape, v.dtype)
        if name in formats:
            contracting_axes = v.get_metadata()["contracting_axes"]
            parts = get_format(formats[name]).parts(v.shape, contracting_axes)
            about: dict[str, Any] = dict(
                shape=v.shape,
                dtype=v.dtype,
                contracting_axes=contracting_axes,
                axes=v.get_metadata().get("axes", ()),
            )
            weights[name] = QuantisedArray(parts, format=formats[name], **about)
    return weights


@functools.cache
def _expected(model_def: ModelDef) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of each array, by name.

    The result is cached, because reading it from the variables takes 10 ms for a large model.
    """
    arrays = named_arrays(model_def.abstract_params())
    return {name: (v.shape, v.dtype) for name, v in arrays.items()}


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


@functools.cache
def _random_array(
    shape: tuple[int, ...], dtype: Any, fan_in: int | None, sharding: NamedSharding | None
) -> Callable[[int, int], Array]:
    def make(seed: Array, index: Array) -> Array:
        if fan_in is None:
            return jnp.ones(shape, dtype)
        key = jax.random.fold_in(make_key(seed), index)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(math.sqrt(1 / fan_in), dtype)

    return jax.jit(make, out_shardings=sharding)
