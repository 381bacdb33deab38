"""A quantised weight, which models hold in place of an array."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxspec.mesh import ROWS, Axes, mesh_left_to_xla, on_each_device, partition
from jaxspec.quantised.format import get_format
from jaxspec.shapes import Array, Float, Int
from pallas_kernels.common.reference_ops import Activation, gated
from pallas_kernels.int4_matmul import Codes, Coding
from pallas_kernels.rounding import Rounded, Sums, round_rows


class QuantisedArray:
    """A weight as the arrays of a format. It is a pytree of these arrays.

    Attributes:
      parts: the arrays by name: "codes", "scales", and what else the format has.
      format: the name of the format, see `format.get_format`.
      shape, dtype: of the weight that it stands for.
      contracting_axes: the axes of `shape` that a product sums over.
      axes: the names of the axes that a mesh may split, see `mesh.RULES`. `ModelDef.adopt`
        gives them to a weight without names.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        format: str,
        shape: tuple[int, ...],
        dtype: Any,
        contracting_axes: tuple[int, ...],
        axes: tuple[str | None, ...] = (),
    ):
        """Keep the arrays as they are. `quantise` makes them."""
        self.parts = dict(parts)
        self.format = format
        self.shape = tuple(shape)
        self.dtype = jnp.dtype(dtype)
        self.contracting_axes = contracting_axes
        self.axes = axes

    @property
    def codes(self) -> Any:
        """The array of small numbers. In a tree of shapes or shardings, that of the array."""
        return self.parts["codes"]

    @property
    def scales(self) -> Any:
        """The factors of the codes, likewise."""
        return self.parts["scales"]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all its arrays."""
        return sum(part.size * part.dtype.itemsize for part in self.parts.values())

    @property
    def sharding(self) -> Sharding:
        """The sharding of the weight: that of its codes, on the axes of the weight."""
        at = self.codes.sharding
        if not isinstance(at, NamedSharding):
            return at
        axes = get_format(self.format).axes("codes", self.ndim, self.contracting_axes)
        split = dict(zip(axes, at.spec, strict=False))
        return NamedSharding(at.mesh, PartitionSpec(*(split.get(i) for i in range(self.ndim))))

    @property
    def rounds_activations(self) -> bool:
        """True if a product rounds activations. Tables, whose logits feel it most, and experts do not."""
        return 0 in self.contracting_axes and get_format(self.format).rounds_activations

    def dequantise(self) -> Float[Array, "..."]:
        """Return the weight that it stands for: the plain reference of every product."""
        return get_format(self.format).dequantise(self)

    def multiply(
        self, rows: Float[Array, "R *in"], dtype: Any, *, rounding: bool = False
    ) -> Float[Array, "R *out"]:
        """Multiply rows by the weight. The axes of rows after the first meet the contracting axes.

        Args:
          dtype: of the result. Sums and scales are float32.
          rounding: whether rows are rounded where the format does that, for a table too.
        """
        if self.rounds_activations or (rounding and get_format(self.format).rounds_activations):
            return self.multiply_rounded(rows, dtype).values(dtype)
        inputs, outputs = self._inputs_and_outputs()

        def run(rows: Array, parts: dict[str, Array]) -> Array:
            return get_format(self.format).multiply(rows, self._local(parts), dtype)

        return on_each_device(
            run,
            (rows, self.parts),
            (Axes("batch", *inputs), self._names_of_parts()),
            Axes("batch", *outputs),
            contracting=Axes(*inputs),
        )

    def multiply_gated(
        self, rows: Float[Array, "R D"], activation: Activation, dtype: Any
    ) -> Float[Array, "R F"]:
        """Return activation(rows @ gate) * (rows @ up) of a weight [D, 2, F] of gate and up.

        Args:
          dtype: of the result.
        """
        if self.rounds_activations or self._is_split_by_inputs():
            return gated(self.multiply(rows, dtype), activation)

        def run(rows: Array, parts: dict[str, Array]) -> Array:
            return get_format(self.format).multiply_gated(
                rows, self._local(parts), activation, dtype
            )

        args, axes = (rows, self.parts), (ROWS, self._names_of_parts())
        return on_each_device(run, args, axes, Axes("batch", self._names()[-1]))

    def multiply_rounded(self, rows: Float[Array, "R *in"] | Rounded, dtype: Any) -> Sums:
        """Multiply rows that are rounded as the format says, at the latest here.

        Args:
          dtype: of the sums, which are yet to be multiplied with scales.
        """
        if not isinstance(rows, Rounded):
            codes, scales = round_rows(rows.reshape(rows.shape[0], -1))
            rows = Rounded(codes.reshape(rows.shape), scales)

        def run(codes: Array, parts: dict[str, Array]) -> Array:
            part = Rounded(codes, rows.scales)  # scales meet the sums, which are whole by then
            return get_format(self.format).multiply_rounded(part, self._local(parts), dtype).sums

        inputs, outputs = self._inputs_and_outputs()
        axes = Axes("batch", *inputs), self._names_of_parts()
        args, result = (rows.codes, self.parts), Axes("batch", *outputs)
        sums = on_each_device(run, args, axes, result, contracting=Axes(*inputs))
        return Sums(sums, rows.scales, self.scales)

    def _names(self) -> tuple[str | None, ...]:
        """Return a name, or None, for each axis of the weight, of those that devices may split."""
        names = [*self.axes, *[None] * (self.ndim - len(self.axes))]
        last = self.contracting_axes[-1]
        if self.shape[last] % get_format(self.format).block:
            names[last] = None
        return tuple(names)

    def _inputs_and_outputs(self) -> tuple[list[str | None], list[str | None]]:
        """Return the names of the axes that a product sums over, and of the others."""
        names = self._names()
        outputs = [name for i, name in enumerate(names) if i not in self.contracting_axes]
        return [names[i] for i in self.contracting_axes], outputs

    def _names_of_parts(self) -> dict[str, Axes]:
        """Return the names of the axes of each array. Axes of blocks and groups have their weight's."""
        names, axes = self._names(), get_format(self.format).axes
        return {
            part: Axes(
                *(
                    None if i is None else names[i]
                    for i in axes(part, self.ndim, self.contracting_axes)
                )
            )
            for part in self.parts
        }

    def _local(self, parts: Mapping[str, Array]) -> QuantisedArray:
        """Return the part of the weight that one device has, given its parts of the arrays."""
        shape, axes = list(self.shape), get_format(self.format).axes
        for part, array in parts.items():
            for size, whole, axis in zip(
                array.shape,
                self.parts[part].shape,
                axes(part, self.ndim, self.contracting_axes),
                strict=True,
            ):
                if axis is not None and size < whole:
                    shape[axis] = self.shape[axis] * size // whole
        weight = self.with_parts(parts)
        weight.shape = tuple(shape)
        return weight

    def _is_split_by_inputs(self) -> bool:
        """Return whether the current mesh splits gate and up by what a product sums over."""
        mesh = mesh_left_to_xla()
        return mesh is not None and partition(self._names(), self.shape, mesh)[0] is not None

    def codes_of_experts(self) -> tuple[Codes, Coding | None]:
        """Return the arrays as `pallas_kernels.experts` takes them."""
        return get_format(self.format).codes_of_experts(self)

    def __getitem__(self, index: Any) -> Any:
        """Return itself for `...`, and for token ids the rows of a table, as numbers."""
        if index is Ellipsis:
            return self
        return self.rows(index)

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids D"]:
        """Return rows of a table, as numbers."""
        return get_format(self.format).rows(self, ids)

    def has_type_of(self, other: QuantisedArray) -> bool:
        """Return whether both have one format, shape, dtype, and axes of one meaning."""
        return (self.format, self.shape, self.dtype, self.contracting_axes, self.axes) == (
            other.format,
            other.shape,
            other.dtype,
            other.contracting_axes,
            other.axes,
        )

    def with_parts(self, parts: Mapping[str, Any]) -> QuantisedArray:
        """Return a weight of the same format and shape with other arrays."""
        about: dict[str, Any] = dict(
            shape=self.shape,
            dtype=self.dtype,
            contracting_axes=self.contracting_axes,
            axes=self.axes,
        )
        return QuantisedArray(parts, format=self.format, **about)

    def __repr__(self) -> str:
        """Return one line, without numbers."""
        return f"QuantisedArray({self.format}, {list(self.shape)}, {self.dtype})"


# A registered dataclass, because JAX flattens one without a call of Python. Params are flattened in
# every call of a program.
jax.tree_util.register_dataclass(
    QuantisedArray,
    data_fields=["parts"],
    meta_fields=["format", "shape", "dtype", "contracting_axes", "axes"],
)


def named_arrays(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arrays of weights by name. That of a part is `weight.part`, as files have it."""
    arrays: dict[str, Any] = {}
    for name, weight in weights.items():
        if isinstance(weight, QuantisedArray):
            arrays |= {f"{name}.{part}": weight.parts[part] for part in sorted(weight.parts)}
        else:
            arrays[name] = weight
    return arrays


def quantise(
    x: Float[Array, "..."] | QuantisedArray,
    format: str,
    contracting_axes: tuple[int, ...],
    dtype: Any = None,
) -> QuantisedArray:
    """Return a weight in a format.

    Args:
      x: the weight. One that is quantised is quantised again, from what it stands for in float32.
      contracting_axes: the axes of x that a product sums over.
      dtype: what `QuantisedArray.dtype` says; None for that of x.
    """
    parts = get_format(format).quantise(_numbers(x), contracting_axes)
    return QuantisedArray(
        parts,
        format=format,
        shape=x.shape,
        dtype=dtype or x.dtype,
        contracting_axes=contracting_axes,
    )


def _numbers(x: Float[Array, "..."] | QuantisedArray) -> Float[Array, "..."]:
    """Return a weight as it is, or what a quantised one stands for, in float32."""
    if not isinstance(x, QuantisedArray):
        return x
    about: dict[str, Any] = dict(
        format=x.format, shape=x.shape, contracting_axes=x.contracting_axes
    )
    return QuantisedArray(x.parts, dtype=jnp.float32, **about).dequantise()


SLICE_NUMBERS = 16 << 20
"""How many numbers of a weight are quantised together: 64 MB in float32."""


def quantise_in_slices(
    x: Float[Array, "..."] | QuantisedArray,
    format: str,
    contracting_axes: tuple[int, ...],
    *,
    along: tuple[int, ...] | None = None,
    numbers: int | None = None,
) -> dict[str, Array]:
    """Return the arrays of a weight in a format: those of `quantise`, to the bit, in little memory.

    Every output is quantised by itself. So a loop takes some outputs after others and writes what it
    makes into place. XLA would keep up to two copies in float32 of a weight that is quantised at once.

    Args:
      x: as in `quantise`.
      contracting_axes: the axes of x that a product sums over.
      along: the axes that may be cut: those that no mesh splits. None for all.
      numbers: of a slice, unless one output has more; None for `SLICE_NUMBERS`.
    """
    kept = [i for i in (range(x.ndim) if along is None else along) if i not in contracting_axes]
    numbers = numbers or SLICE_NUMBERS
    if x.size <= numbers or not kept:
        return quantise(x, format, contracting_axes).parts
    axis = max(kept, key=lambda i: x.shape[i])
    step = min(x.shape[axis], max(1, numbers * x.shape[axis] // x.size))
    # As whole numbers: on a CPU a slice of bfloat16 makes XLA widen all of the weight.
    bits = jax.tree.map(_bits, x)

    def fill(index: Array, parts: dict[str, Array]) -> dict[str, Array]:
        # The last slice may reach past the end. It then starts earlier, here and below.
        piece = _outputs(bits, x, index * step, step, axis)
        made = quantise(piece, format, contracting_axes).parts
        return {
            name: lax.dynamic_update_slice_in_dim(
                part, _in_order(made[name]), index * step, axes[name].index(axis)
            )
            for name, part in parts.items()
        }

    about = get_format(format).parts(x.shape, contracting_axes)
    axes = {name: get_format(format).axes(name, x.ndim, contracting_axes) for name in about}
    empty = {name: jnp.zeros(part.shape, part.dtype) for name, part in about.items()}
    return lax.fori_loop(0, -(-x.shape[axis] // step), fill, empty)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _outputs(bits: Any, like: Any, start: Array, count: int, axis: int) -> Any:
    """Return some outputs of a weight, given its bits and itself, of which only dtypes are read."""
    if isinstance(like, QuantisedArray):
        axes = get_format(like.format).axes
        parts = {
            name: _outputs(
                bits.parts[name],
                part,
                start,
                count,
                axes(name, like.ndim, like.contracting_axes).index(axis),
            )
            for name, part in like.parts.items()
        }
        shape = (*like.shape[:axis], count, *like.shape[axis + 1 :])
        about: dict[str, Any] = dict(
            format=like.format, dtype=like.dtype, contracting_axes=like.contracting_axes
        )
        return QuantisedArray(parts, shape=shape, **about)
    piece = lax.dynamic_slice_in_dim(bits, start, count, axis)
    return _in_order(lax.bitcast_convert_type(piece, like.dtype))


def _in_order(piece: Array) -> Array:
    # Else XLA lays the whole weight out anew, in memory, as suits what is made of a slice.
    return with_layout_constraint(piece, Layout(tuple(range(piece.ndim))))


@functools.cache
def quantiser(
    format: str,
    contracting_axes: tuple[int, ...],
    shardings: tuple[tuple[str, NamedSharding], ...] | None,
    along: tuple[int, ...] | None,
) -> Callable[[Array | QuantisedArray], dict[str, Array]]:
    """Return a compiled function from a weight to the arrays of its format.

    Args:
      shardings: where the arrays lie on a mesh, by name; None on the default device.
      along: as in `quantise_in_slices`.
    """

    def run(weight: Array | QuantisedArray) -> dict[str, Array]:
        return quantise_in_slices(weight, format, contracting_axes, along=along)

    return jax.jit(run, out_shardings=None if shardings is None else dict(shardings))
