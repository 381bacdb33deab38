"""A quantised weight: what models hold in place of an array."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.quantised.formats import named
from jaxspec.shapes import Array, Float, Int
from pallas_kernels.grouped import Codes, Coding


@jax.tree_util.register_pytree_node_class
class QuantisedArray:
    """A weight as the arrays of a format. It is a pytree of these arrays.

    Attributes:
      parts: the arrays by name: "codes", "scales", and what else the format has.
      format: the name of the format, see `formats.named`.
      shape, dtype: of the weight that it stands for.
      summed: the axes of `shape` that a product sums over.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        format: str,
        shape: tuple[int, ...],
        dtype: Any,
        summed: tuple[int, ...],
    ):
        """Keep the arrays as they are. `quantise` makes them."""
        self.parts = dict(parts)
        self.format = format
        self.shape = tuple(shape)
        self.dtype = jnp.dtype(dtype)
        self.summed = summed

    @property
    def codes(self) -> Array:
        """The array of small numbers."""
        return self.parts["codes"]

    @property
    def scales(self) -> Array:
        """The factors of the codes."""
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

    def dequantise(self) -> Float[Array, "..."]:
        """Return the weight that it stands for: the plain reference of every product."""
        return named(self.format).dequantise(self)

    def multiply(self, rows: Float[Array, "R *in"], dtype: Any) -> Float[Array, "R *out"]:
        """Multiply rows by the weight. The axes of rows after the first meet the summed axes.

        Args:
          dtype: of the result. Sums and scales are float32.
        """
        return named(self.format).multiply(rows, self, dtype)

    def codes_of_experts(self) -> tuple[Codes, Coding | None]:
        """Return the arrays as `pallas_kernels.experts` takes them."""
        return named(self.format).codes_of_experts(self)

    def __getitem__(self, index: Any) -> Any:
        """Return itself for `...`, and for token ids the rows of a table, as numbers."""
        if index is Ellipsis:
            return self
        return self.rows(index)

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids D"]:
        """Look rows of a table up, as numbers."""
        return named(self.format).rows(self, ids)

    def with_parts(self, parts: Mapping[str, Any]) -> QuantisedArray:
        """Return a weight of the same format and shape with other arrays."""
        about: dict[str, Any] = dict(shape=self.shape, dtype=self.dtype, summed=self.summed)
        return QuantisedArray(parts, format=self.format, **about)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        names = tuple(sorted(self.parts))
        about = (names, self.format, self.shape, self.dtype, self.summed)
        return tuple(self.parts[name] for name in names), about

    @classmethod
    def tree_unflatten(cls, about: Any, leaves: Any) -> QuantisedArray:
        names, format, shape, dtype, summed = about
        parts = dict(zip(names, leaves, strict=True))
        return cls(parts, format=format, shape=shape, dtype=dtype, summed=summed)

    def __repr__(self) -> str:
        """Return one line, without numbers."""
        return f"QuantisedArray({self.format}, {list(self.shape)}, {self.dtype})"


def quantise(
    x: Float[Array, "..."], format: str, summed: tuple[int, ...], dtype: Any = None
) -> QuantisedArray:
    """Return a weight in a format.

    Args:
      summed: the axes of x that a product sums over.
      dtype: what `QuantisedArray.dtype` says; None for that of x.
    """
    parts = named(format).quantise(x, summed)
    return QuantisedArray(
        parts, format=format, shape=x.shape, dtype=dtype or x.dtype, summed=summed
    )
