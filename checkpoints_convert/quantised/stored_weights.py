"""Quantised weights as a file holds them, in a neutral form of numpy arrays.

Every class stands for numbers [*out, in]: inputs are last, as Hugging Face stores matrices. One
source matrix is [out, in], and stacked experts are [E, out, in]. `arrange` joins several source
matrices into one weight. `dequantise` is the formula of a format, in float32, and the reference of
all that reads such weights.

Codes of 4 bits are two a byte, whatever a file packs: the byte j of a row has the codes of inputs 2j,
in its low half, and 2j + 1. Most files have them so. Scales keep the dtype of the file. Nothing is
rounded. The classes that models multiply by are pytrees, so that `arrange` may run in a jitted
function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""The magnitudes of a 4-bit float, by its three low bits. The fourth bit is the sign."""

E2M1_CODES = np.concatenate([E2M1, -E2M1])
"""The number of each of the 16 codes."""

BLOCK = 128
"""Rows and columns of a block that shares a scale."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerChannel:
    """Codes with one scale for each output channel: code * scale.

    Attributes:
      codes: int8 or float8_e4m3fn [*out, in].
      scales: float32 [*out]. A scale of a whole matrix is repeated for its channels.
    """

    codes: np.ndarray
    scales: np.ndarray

    def dequantise(self) -> np.ndarray:
        """Return the numbers, float32 [*out, in]."""
        return self.codes.astype(np.float32) * self.scales.astype(np.float32)[..., None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedInt4:
    """4-bit integers with one scale for each group of inputs: (q - zero) * scale.

    Attributes:
      pairs: uint8 [*out, in / 2]: q + 8, from 0 to 15, two a byte.
      scales: float32, bfloat16 or float16 [*out, in / g].
      zeros: int8 [*out, in / g], from -8 to 7; None where all are 0.
    """

    pairs: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return 2 * self.pairs.shape[-1] // self.scales.shape[-1]

    def dequantise(self) -> np.ndarray:
        """Return the numbers, float32 [*out, in]."""
        q = low_first(self.pairs).astype(np.float32) - 8
        if self.zeros is not None:
            q -= _spread(self.zeros, self.group)
        return q * _spread(self.scales, self.group)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedFloat4:
    """4-bit floats (e2m1) with one scale for each group of inputs: e2m1 * scale * factor.

    Attributes:
      pairs: uint8 [*out, in / 2]: codes from 0 to 15, two a byte. `E2M1_CODES` has their numbers.
      scales: [*out, in / g]. float8_e4m3fn for NVFP4 (g = 16). uint8 for MXFP4 (g = 32), where u
        stands for 2^(u - 127).
      factor: float32 [*out], which multiplies: the global scale of the source matrix of each row.
        None where there is none (MXFP4).
    """

    pairs: np.ndarray
    scales: np.ndarray
    factor: np.ndarray | None = None

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return 2 * self.pairs.shape[-1] // self.scales.shape[-1]

    def dequantise(self) -> np.ndarray:
        """Return the numbers, float32 [*out, in]."""
        numbers = E2M1_CODES[low_first(self.pairs)] * _spread(power_of_two(self.scales), self.group)
        return numbers if self.factor is None else numbers * self.factor[..., None]


@dataclass(frozen=True)
class Blocks:
    """8-bit codes with one scale for some inputs of a row: code * scale.

    Attributes:
      codes: float8_e4m3fn or int8 [*out, in].
      scales: [*out, ceil(in / group)]. Those of a block of 128 x 128 are repeated for each row.
      group: the number of inputs that share a scale.
    """

    codes: np.ndarray
    scales: np.ndarray
    group: int = BLOCK

    def dequantise(self) -> np.ndarray:
        """Return the numbers, float32 [*out, in]."""
        scales = _spread(self.scales, self.group)[..., : self.codes.shape[-1]]
        return self.codes.astype(np.float32) * scales


@dataclass(frozen=True)
class Encoded:
    """Blocks of bytes that are read as numbers only.

    Attributes:
      blocks: uint8 [*out, n, bytes of a block].
      decode: returns the numbers of such blocks, float32 [*out, n, numbers of a block].
    """

    blocks: np.ndarray
    decode: Callable[[np.ndarray], np.ndarray]

    def dequantise(self) -> np.ndarray:
        """Return the numbers, float32 [*out, in]."""
        return self.decode(self.blocks).reshape(*self.blocks.shape[:-2], -1)


StoredWeight = PerChannel | GroupedInt4 | GroupedFloat4 | Blocks | Encoded

Arrange = Callable[[Sequence[Any]], Any]
"""Puts the rows of source matrices into their places: arrays [out, n] become one [*out, n]."""


def arrange(sources: Sequence[StoredWeight], rows: Arrange) -> StoredWeight:
    """Join source matrices into one weight. Every row keeps its codes and its scales.

    Args:
      sources: of one class, all with or all without the arrays that may be None.
      rows: how rows are joined. All arrays of the sources are joined in this way.
    """
    joined: dict[str, np.ndarray | None] = {}
    for field in dataclasses.fields(sources[0]):
        arrays = [getattr(source, field.name) for source in sources]
        if any(array is None for array in arrays):
            assert all(array is None for array in arrays), field.name
            joined[field.name] = None
        else:
            per_row = (type(sources[0]), field.name) in _PER_ROW
            moved = [array[..., None] if per_row else array for array in arrays]
            dtype = arrays[0].dtype
            if isinstance(arrays[0], np.ndarray):
                # As whole numbers, which numpy moves several times faster than small floats.
                moved = [array.view(f"u{dtype.itemsize}") for array in moved]
                out = np.ascontiguousarray(rows(moved)).view(dtype)
            else:
                out = rows(moved)
            joined[field.name] = out[..., 0] if per_row else out
    return dataclasses.replace(sources[0], **joined)


_PER_ROW = {(PerChannel, "scales"), (GroupedFloat4, "factor")}
"""The arrays without an axis of inputs."""

_SLAB_NUMBERS = 16 << 20


def numbers(source: StoredWeight, dtype: np.dtype) -> np.ndarray:
    """Return the numbers of a source matrix [*out, in] in a dtype.

    Rows are dequantised slab by slab, so that memory never holds the matrix in float32 too.
    """
    fields = {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
    arrays = {name: a for name, a in fields.items() if isinstance(a, np.ndarray)}
    first = next(iter(arrays.values()))
    rows, out, start = first.shape[0], None, 0
    step = max(1, _SLAB_NUMBERS * rows // max(1, first.size))
    while start < rows:
        slab = {name: a[start : start + step] for name, a in arrays.items()}
        piece = dataclasses.replace(source, **slab).dequantise()
        if out is None:
            out = np.empty((rows, *piece.shape[1:]), dtype)
        out[start : start + step] = piece
        start += step
    assert out is not None
    return out


def low_first(pairs: np.ndarray) -> np.ndarray:
    """Return the two codes of each byte of the last axis, that of the low half first."""
    # A byte hl becomes the word 0h0l, whose lower byte comes first.
    words = pairs.astype("<u2")
    words |= words << 4
    words &= 0x0F0F
    return words.view(np.uint8)


def as_pairs(codes: np.ndarray) -> np.ndarray:
    """Return codes from 0 to 15 two a byte, uint8. `low_first` undone."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def power_of_two(scales: np.ndarray) -> np.ndarray:
    """Return scales as float32. uint8 stands for powers of two, from 2^-127 on."""
    return as_floats(scales).astype(np.float32)


def as_floats(scales: np.ndarray) -> np.ndarray:
    """Return scales as floats of their bits. For powers of two 255 stands for NaN."""
    return scales.view(ml_dtypes.float8_e8m0fnu) if scales.dtype == np.uint8 else scales


def _spread(scales: np.ndarray, group: int) -> np.ndarray:
    """Return float32 scales, each repeated for the inputs of its group."""
    return np.repeat(scales.astype(np.float32), group, axis=-1)
