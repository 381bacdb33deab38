"""The formats of quantised weights: their interface, and the registry of all of them."""

from __future__ import annotations

import abc
from typing import Any, Protocol, runtime_checkable

import jax

from jaxspec.shapes import Array, Float, Int
from pallas_kernels.common.reference_ops import Activation
from pallas_kernels.int4_matmul import Codes, Coding
from pallas_kernels.rounding import Rounded, Sums

Shape = tuple[int, ...]


class FormatError(ValueError):
    """A format is not known, or cannot be used here. The message says which one can."""


@runtime_checkable
class QuantisedWeight(Protocol):
    """A quantised weight as formats see it. `array.QuantisedArray` has its fields and their meaning."""

    parts: dict[str, Any]
    shape: Shape
    dtype: Any
    contracting_axes: tuple[int, ...]

    @property
    def codes(self) -> Any: ...

    @property
    def scales(self) -> Any: ...

    @property
    def ndim(self) -> int: ...


class Format(abc.ABC):
    """A way to store a weight in fewer bits, and to multiply by it.

    Attributes:
      name: the name in manifests and in `--quantize`.
      title: its description in listings.
      on_load: whether weights can be quantised to it while they are loaded.
      least_capability: the compute capability that an NVIDIA GPU must have for it.
      block: inputs that are stored together. Devices have whole blocks.
      rounds_activations: whether linears multiply 8-bit floats with activations rounded to such.
    """

    name: str
    title: str
    on_load: bool = True
    least_capability: float
    rounds_activations: bool = False
    block: int = 1

    @abc.abstractmethod
    def parts(
        self, shape: Shape, contracting_axes: tuple[int, ...]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the arrays of a weight, by name."""

    @abc.abstractmethod
    def axes(
        self, part: str, ndim: int, contracting_axes: tuple[int, ...]
    ) -> tuple[int | None, ...]:
        """Return for each axis of a part the axis of the weight that it follows.

        A mesh splits the part as it splits that axis. None: the axis is never split.
        """

    @abc.abstractmethod
    def quantise(
        self, x: Float[Array, "..."], contracting_axes: tuple[int, ...]
    ) -> dict[str, Array]:
        """Return the arrays of a weight."""

    @abc.abstractmethod
    def dequantise(self, weight: QuantisedWeight) -> Float[Array, "..."]:
        """Return the weight as numbers of its dtype."""

    @abc.abstractmethod
    def multiply(
        self, rows: Float[Array, "R *in"], weight: QuantisedWeight, dtype: Any
    ) -> Float[Array, "R *out"]:
        """Multiply rows by a weight, without writing it out as numbers."""

    @abc.abstractmethod
    def multiply_gated(
        self,
        rows: Float[Array, "R D"],
        weight: QuantisedWeight,
        activation: Activation,
        dtype: Any,
    ) -> Float[Array, "R F"]:
        """Return activation(rows @ gate) * (rows @ up), without rounding activations.

        Args:
          weight: gate and up, [D, 2, F].
        """

    def multiply_rounded(self, rows: Rounded, weight: QuantisedWeight, dtype: Any) -> Sums:
        """Multiply rounded rows by a weight, where the format rounds activations.

        Args:
          dtype: of the sums.
        """
        raise NotImplementedError(f"{self.name} rounds no activations")

    @abc.abstractmethod
    def rows(self, weight: QuantisedWeight, ids: Int[Array, "*ids"]) -> Float[Array, "*ids D"]:
        """Return rows of a table as numbers."""

    @abc.abstractmethod
    def codes_of_experts(self, weight: QuantisedWeight) -> tuple[Codes, Coding | None]:
        """Return the weight of experts as `pallas_kernels.experts` takes it, and its coding.

        The coding is None for codes of 8 bits.
        """


_FORMATS: dict[str, Format] = {}


def register(format: Format) -> Format:
    """Add a format to the registry, and return it."""
    assert format.name not in _FORMATS, format.name
    _FORMATS[format.name] = format
    return format


def names(*, on_load: bool = False) -> tuple[str, ...]:
    """Return the names of all formats, or of those that weights can be quantised to on load."""
    return tuple(name for name, f in _FORMATS.items() if f.on_load or not on_load)


def get_format(name: str) -> Format:
    """Return the format with a name.

    Raises:
      FormatError: there is none; the message lists the known ones.
    """
    if name not in _FORMATS:
        raise FormatError(f"format {name!r} is not known; expected one of {', '.join(_FORMATS)}")
    return _FORMATS[name]
