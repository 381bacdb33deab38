"""The header of a safetensors file: which tensors it holds, of which shapes and dtypes, and where.

Read `read_header`. It reads no tensor, and believes nothing that a header says before it is checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.errors import CheckpointError, listed
from checkpoints_convert.files import MOST_BYTES, parse_json, refuse_pointer
from checkpoints_convert.rules import TensorSpec

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Dtypes by safetensors name. Most of them only occur in tensors that are skipped or refused."""


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor of a file, with the offset of its first byte in that file."""

    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return nbytes_of(self)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read and check the header of one file. Its tensors must fill the file without a gap.

    Raises:
      CheckpointError: the file cannot be read, is cut off, or is no safetensors file.
    """
    raw, size = _header_of(file)
    try:
        tensors = _entries(parse_json(raw), file, 8 + len(raw))
    except ValueError as error:
        raise CheckpointError(f"{file} is corrupt: its header is not readable ({error})") from None
    end = 8 + len(raw)
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise CheckpointError(
                f"{file} is corrupt: {listed([name])} begins at byte {tensor.offset}, not {end}"
            )
        end += tensor.nbytes
    if end != size:
        kind = "truncated" if end > size else "corrupt"
        raise CheckpointError(f"{file} is {kind}: its header describes {end} bytes, it has {size}")
    return tensors


def _header_of(file: Path) -> tuple[bytes, int]:
    """Return the header of a file, and the size of the whole file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(64)
            refuse_pointer(file, start)
            length = int.from_bytes(start[:8], "little")
            if len(start) < 8 or length > size - 8:
                raise CheckpointError(
                    f"{file} is corrupt or truncated: no whole safetensors header"
                )
            if length > MOST_BYTES:
                raise CheckpointError(
                    f"{file} is corrupt: its header has {length:,} bytes, and the format allows "
                    f"{MOST_BYTES:,}"
                )
            opened.seek(8)
            return opened.read(length), size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def _entries(header: Any, file: Path, data_start: int) -> dict[str, StoredTensor]:
    """Return the tensors that a parsed header describes.

    Raises:
      ValueError: it is no header; the message names the tensor.
    """
    if not isinstance(header, dict):
        raise ValueError(f"it holds a {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", None)
    is_text = isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values())
    if metadata is not None and not is_text:
        raise ValueError("__metadata__ must be an object of texts")
    tensors = {}
    for name, entry in header.items():
        try:
            tensors[name] = _entry(entry, file, data_start)
        except ValueError as error:
            raise ValueError(f"{listed([name])}: {error}") from None
    return tensors


def _entry(entry: Any, file: Path, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError("expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"its dtype {listed([repr(dtype)])} is not known")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError("its shape and its two data_offsets must be lists of sizes")
    start, end = offsets
    tensor = StoredTensor(tuple(shape), dtype, file, data_start + start)
    if tensor.nbytes != end - start:
        raise ValueError(f"it has {end - start} bytes for {dtype}{shape}")
    return tensor


def _are_sizes(values: Any) -> bool:
    """Return whether values are a list of sizes, of 63 bits as the format has them."""
    return (
        isinstance(values, list)
        and len(values) <= 16
        and all(type(n) is int and 0 <= n < 2**63 for n in values)
    )


def nbytes_of(spec: TensorSpec) -> int:
    """Return the bytes of a stored tensor."""
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
