"""Layouts of quantised weights: which tensors a weight is stored as, and how to read them.

A weight is a few tensors of one module, such as `weight_packed` and `weight_scale`. `recognise` looks
at their shapes and dtypes, and says what they hold. `read` returns the numbers in a neutral form of
`stored_weights.py`. Source matrices are [out, in], or [E, out, in] where experts are stacked.

Sources of the formulas: compressed-tensors 0.20, nvidia-modelopt 0.47, vLLM's `auto_awq.py` and
`auto_gptq.py`, and llama.cpp's `ggml-quants.c`. `tests/checkpoints_convert/test_golden_vectors.py` compares with
numbers that these made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.quantised.quantization_config import Spec
from checkpoints_convert.quantised.stored_weights import (
    BLOCK,
    Blocks,
    Encoded,
    GroupedFloat4,
    GroupedInt4,
    PerChannel,
    StoredWeight,
    as_pairs,
    low_first,
)
from checkpoints_convert.rules import Shape, TensorSpec

Parts = Mapping[str, TensorSpec]
"""The tensors of a module, by the last part of their names."""

Read = Callable[[str], np.ndarray]
"""Reads a tensor of a module, by the last part of its name."""

WEIGHTS = ("weight_packed", "qweight", "weight", "q4_0", "q6_k", "q8_0")
"""The last parts of names that hold codes. "weight" holds plain numbers as well."""

CODES = ("F8_E4M3", "I8", "U8")
"""The dtypes of codes under "weight"."""

SCALES = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "scales",
    "qzeros",
    "g_idx",
    "pre_quant_scale",
)
"""The last parts of names that belong to codes."""

UNUSED = {
    "input_scale": "scales of activations, which stay as they are",
    "input_global_scale": "scales of activations, which stay as they are",
    "input_zero_point": "scales of activations, which stay as they are",
    "output_scale": "scales of activations, which stay as they are",
    "k_scale": "scales of a quantised K/V cache",
    "v_scale": "scales of a quantised K/V cache",
    "q_scale": "scales of a quantised K/V cache",
}
"""The last parts of names that are skipped, and what they are."""

_AWQ_NIBBLES = np.asarray([0, 4, 1, 5, 2, 6, 3, 7])
"""In which nibble of a word AWQ puts each of eight outputs."""


def is_quantised(parts: Parts, configured: bool) -> bool:
    """Return whether the tensors of a module are a quantised weight, valid or not.

    Args:
      configured: whether the config has a quantisation. Then codes without scales count as a
        quantised weight, too.
    """
    if any(part != "weight" and part in parts for part in (*WEIGHTS, *SCALES)):
        return True
    return configured and "weight" in parts and parts["weight"].dtype in CODES


def recognise(name: str, parts: Parts, configured: Spec | None) -> tuple[Spec, Shape]:
    """Return how a quantised weight is stored, and its shape, by the tensors of its module.

    Args:
      name: of the weight, for messages.
      configured: what its config says. It decides where shapes allow two answers.

    Raises:
      CheckpointError: tensors are missing, or do not fit each other.
    """
    for part, why in (("weight_g_idx", _ACT_ORDER), ("pre_quant_scale", _PRE_SCALED)):
        if part in parts:
            raise CheckpointError(f"{name}: {why}")
    for part in WEIGHTS:
        if part in parts:
            if foreign := sorted(set(parts) - _BELONG.get(part, {part})):
                raise CheckpointError(
                    f"{name}: {', '.join(foreign)} beside {part} do not belong to it; one of them is of another build"
                )
            return _RECOGNISE[part](name, parts, configured)
    raise CheckpointError(
        f"{name}: its codes are missing, there are only {', '.join(sorted(parts))}"
    )


_BELONG = {
    "weight": {"weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_shape"},
    "weight_packed": {
        *("weight_packed", "weight_scale", "weight_global_scale", "weight_shape"),
        "weight_zero_point",
    },
    "qweight": {"qweight", "scales", "qzeros", "g_idx"},
}
"""The tensors that may lie beside the codes of each layout."""

_ACT_ORDER = (
    "its groups are ordered by activation (act-order, desc_act), which is not read: take a build "
    "without, or the bfloat16 release with --quantize int8"
)
_PRE_SCALED = (
    "its activations are scaled before they meet the weight (pre_quant_scale), which is not read: "
    "take a build without, or the bfloat16 release with --quantize int8"
)


def read(name: str, spec: Spec, shape: Shape, parts: Parts, get: Read) -> StoredWeight:
    """Read a weight.

    Args:
      spec, shape: as `recognise` returned them.
      get: reads a tensor of the module.

    Raises:
      CheckpointError: the numbers contradict what shapes and config said.
    """
    for part in WEIGHTS:
        if part in parts:
            return _READ[part](name, spec, shape, parts, get)
    raise AssertionError(name)


# --- weight: codes of 8 bits, or ModelOpt's NVFP4 ------------------------------------------------


def _recognise_weight(name: str, parts: Parts, configured: Spec | None) -> tuple[Spec, Shape]:
    weight = parts["weight"]
    if weight.dtype == "U8":
        shape = (*weight.shape[:-1], 2 * weight.shape[-1])
        return _nvfp4(name, parts, shape, "weight_scale_2")
    if weight.dtype not in ("F8_E4M3", "I8"):
        extra = sorted(set(parts) - {"weight"})
        raise CheckpointError(f"{name}: is {weight.dtype}, and has {', '.join(extra)} beside it")
    kind = "fp8" if weight.dtype == "F8_E4M3" else "int8"
    inverse = "weight_scale_inv" in parts
    if inverse and "weight_scale" in parts:
        raise CheckpointError(f"{name}: has weight_scale and weight_scale_inv, which are one thing")
    scale = _needed(name, parts, "weight_scale_inv" if inverse else "weight_scale")
    _of_dtype(name, scale, "scales", ("F32", "BF16", "F16"))
    fits = [per for per, shapes in _scale_shapes(weight.shape).items() if scale.shape in shapes]
    if kind == "int8" and "block" in fits:
        fits.remove("block")
    if not fits:
        raise CheckpointError(
            f"{name}: its scales have the shape {list(scale.shape)}, which fits neither the matrix, nor "
            f"its channels, nor blocks of {BLOCK} x {BLOCK} of {list(weight.shape)}"
        )
    per = configured.per if configured is not None and configured.per in fits else fits[0]
    return Spec(kind, per), weight.shape


def _scale_shapes(shape: Shape) -> dict[str, set[Shape]]:
    """Return which shapes scales may have, by what shares one."""
    *experts, rows, columns = shape
    stack = tuple(experts)
    return {
        "tensor": {stack, (*stack, 1), (*stack, 1, 1)},
        "channel": {(*stack, rows), (*stack, rows, 1)},
        "block": {(*stack, math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))},
    }


def _read_weight(name: str, spec: Spec, shape: Shape, parts: Parts, get: Read) -> StoredWeight:
    if spec.kind == "nvfp4":
        return _read_nvfp4(name, get("weight"), get("weight_scale"), get("weight_scale_2"))
    codes = get("weight")
    scales = get("weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale")
    if spec.per == "block":
        rows = np.repeat(scales, BLOCK, axis=-2)[..., : shape[-2], :]
        return Blocks(codes, rows)
    return _per_channel(spec, shape, codes, scales)


def _per_channel(spec: Spec, shape: Shape, codes: np.ndarray, scales: np.ndarray) -> PerChannel:
    scales = scales.astype(np.float32)
    if spec.per == "channel":
        scales = scales.reshape(shape[:-1])
    else:
        scales = np.broadcast_to(scales.reshape(*shape[:-2], 1), shape[:-1])
    return PerChannel(codes, scales)


# --- weight_packed: compressed-tensors' 4 bits, and 8 -------------------------------------------------


def _recognise_packed(name: str, parts: Parts, configured: Spec | None) -> tuple[Spec, Shape]:
    packed = parts["weight_packed"]
    *rows, words = packed.shape
    if packed.dtype == "U8":
        scale = _needed(name, parts, "weight_scale")
        if scale.dtype in ("U8", "F8_E8M0"):
            spec, shape = Spec("mxfp4", "group", 32), (*rows, 2 * words)
            _groups(name, shape, scale.shape, 32)
            return spec, shape
        return _nvfp4(name, parts, (*rows, 2 * words), "weight_global_scale")
    _of_dtype(name, packed, "codes", ("I32",))
    scale = _needed(name, parts, "weight_scale")
    _of_dtype(name, scale, "scales", ("F32", "BF16", "F16"))
    if configured is not None and configured.kind == "int8":
        return _packed_int8(name, parts, (*rows, 4 * words), scale.shape, configured)
    shape = (*rows, 8 * words)
    symmetric = "weight_zero_point" not in parts
    spec = _int4(name, shape, scale.shape, scale.dtype, configured, symmetric)
    if not symmetric:
        zeros, groups = parts["weight_zero_point"], scale.shape[-1]
        expected = (*shape[:-2], math.ceil(shape[-2] / 8), groups)
        if zeros.shape != expected or zeros.dtype != "I32":
            raise CheckpointError(
                f"{name}: its zero points are {zeros.dtype}{list(zeros.shape)}, expected "
                f"I32{list(expected)}"
            )
    return spec, shape


def _packed_int8(
    name: str, parts: Parts, shape: Shape, scales: Shape, configured: Spec
) -> tuple[Spec, Shape]:
    """Return the format of four 8-bit integers a word. Shapes alone would allow 4 bits as well."""
    if "weight_zero_point" in parts:
        raise CheckpointError(f"{name}: has zero points of 8 bits, which are not read")
    if configured.per == "group":
        _groups(name, shape, scales, configured.group)
    elif scales not in _scale_shapes(shape)[configured.per]:
        raise CheckpointError(
            f"{name}: its scales have the shape {list(scales)}, announced is {configured}"
        )
    return configured, shape


def _read_packed(name: str, spec: Spec, shape: Shape, parts: Parts, get: Read) -> StoredWeight:
    packed, scales = get("weight_packed"), get("weight_scale")
    if spec.kind == "nvfp4":
        with np.errstate(all="ignore"):  # this dialect stores what to divide by
            factor = np.float32(1) / get("weight_global_scale")
        return _read_nvfp4(name, packed, scales, factor)
    if spec.kind == "mxfp4":
        return GroupedFloat4(packed, scales.view(np.uint8))
    if "weight_shape" in parts:
        stored = tuple(get("weight_shape").reshape(-1)[-2:].tolist())
        if stored != shape[-2:]:
            raise CheckpointError(
                f"{name}: its weight_shape is {list(stored)}, its codes have {list(shape[-2:])}"
            )
    if spec.kind == "int8":  # stored is code + 128
        codes = (np.ascontiguousarray(packed).view(np.uint8) ^ np.uint8(128)).view(np.int8)
        if spec.per == "group":
            return Blocks(codes, scales, spec.group)
        return _per_channel(spec, shape, codes, scales)
    zeros = None
    if not spec.symmetric:
        turned = get("weight_zero_point").swapaxes(-1, -2)  # packed along outputs
        zeros = (_nibbles(turned)[..., : shape[-2]].swapaxes(-1, -2) - 8).astype(np.int8)
    return GroupedInt4(np.ascontiguousarray(packed).view(np.uint8), scales, zeros)


def _nvfp4(name: str, parts: Parts, shape: Shape, factor: str) -> tuple[Spec, Shape]:
    scale, whole = _needed(name, parts, "weight_scale"), _needed(name, parts, factor)
    _of_dtype(name, scale, "scales", ("F8_E4M3",))
    _of_dtype(name, whole, "global scale", ("F32",))
    _groups(name, shape, scale.shape, 16)
    if math.prod(whole.shape) != math.prod(shape[:-2]):
        raise CheckpointError(
            f"{name}: its {factor} has the shape {list(whole.shape)}, expected one number a matrix"
        )
    return Spec("nvfp4", "group", 16), shape


def _read_nvfp4(
    name: str, codes: np.ndarray, scales: np.ndarray, factor: np.ndarray
) -> GroupedFloat4:
    """Return NVFP4 with the factor of each matrix repeated for its rows. It multiplies."""
    if not (np.isfinite(factor) & (factor > 0)).all():
        raise CheckpointError(
            f"{name}: its global scale multiplies by {factor.reshape(-1)[:4].tolist()}; expected positive "
            "numbers. Get the file again"
        )
    rows = codes.shape[:-1]
    factor = np.broadcast_to(factor.astype(np.float32).reshape(*rows[:-1], 1), rows)
    return GroupedFloat4(codes, scales, factor)


# --- qweight: AWQ and GPTQ -----------------------------------------------------------------------


def _recognise_qweight(name: str, parts: Parts, configured: Spec | None) -> tuple[Spec, Shape]:
    codes, scale = parts["qweight"], _needed(name, parts, "scales")
    _of_dtype(name, codes, "codes", ("I32",))
    _of_dtype(name, scale, "scales", ("F16", "BF16", "F32"))
    zeros = _needed(name, parts, "qzeros")
    if codes.shape[-1] == scale.shape[-1]:  # GPTQ packs along inputs
        shape = (codes.shape[-1], 8 * codes.shape[-2])
    elif 8 * codes.shape[-1] == scale.shape[-1]:  # AWQ packs along outputs
        shape = (8 * codes.shape[-1], codes.shape[-2])
    else:
        raise CheckpointError(
            f"{name}: codes {list(codes.shape)} and scales {list(scale.shape)} fit neither AWQ nor GPTQ"
        )
    expected = (scale.shape[0], shape[0] // 8)
    if zeros.shape != expected or zeros.dtype != "I32":
        raise CheckpointError(
            f"{name}: its zero points are {zeros.dtype}{list(zeros.shape)}, expected I32{list(expected)}"
        )
    symmetric = configured is not None and configured.symmetric
    return _int4(name, shape, scale.shape[::-1], scale.dtype, configured, symmetric), shape


def _read_qweight(name: str, spec: Spec, shape: Shape, parts: Parts, get: Read) -> StoredWeight:
    codes, zeros, scales = get("qweight"), get("qzeros"), get("scales")
    if codes.shape[-1] != scales.shape[-1]:
        pairs = as_pairs(_nibbles(codes)[..., _of_awq(shape[0])].T)
        z = _nibbles(zeros)[..., _of_awq(shape[0])].T
    else:
        if "g_idx" in parts:
            ordered = np.arange(shape[1]) // (shape[1] // scales.shape[0])
            if not np.array_equal(get("g_idx"), ordered):
                raise CheckpointError(f"{name}: {_ACT_ORDER}")
        pairs = np.ascontiguousarray(codes.T).view(np.uint8)
        # The first version of the layout stores zero points less 1, in four bits.
        z = (_nibbles(zeros) + 1).T & 15
    if spec.symmetric and (z != 8).any():
        raise CheckpointError(
            f"{name}: config.json says that it is symmetric, but some zero points are not 8"
        )
    moved = None if spec.symmetric else (z - 8).astype(np.int8)
    return GroupedInt4(pairs, np.ascontiguousarray(scales.T), moved)


def _of_awq(outputs: int) -> np.ndarray:
    """Return which nibble holds each output."""
    return np.arange(outputs) // 8 * 8 + _AWQ_NIBBLES[np.arange(outputs) % 8]


# --- GGUF ----------------------------------------------------------------------------------------


def _recognise_q4_0(name: str, parts: Parts, configured: Spec | None) -> tuple[Spec, Shape]:
    return Spec("int4", "group", 32, scales="F16"), _of_blocks(parts["q4_0"].shape, 18, 32)


def _read_q4_0(name: str, spec: Spec, shape: Shape, parts: Parts, get: Read) -> StoredWeight:
    """Read blocks of 32: a float16 scale, then 16 bytes. The low nibbles are the first half."""
    blocks = get("q4_0").reshape(*shape[:-1], -1, 18)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    nibbles = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
    return GroupedInt4(as_pairs(nibbles.reshape(shape)), scales)


def _recognise_q8_0(name: str, parts: Parts, configured: Spec | None) -> tuple[Spec, Shape]:
    return Spec("int8", "group", 32), _of_blocks(parts["q8_0"].shape, 34, 32)


def _read_q8_0(name: str, spec: Spec, shape: Shape, parts: Parts, get: Read) -> StoredWeight:
    return Encoded(get("q8_0").reshape(*shape[:-1], -1, 34), _decode_q8_0)


def _decode_q8_0(blocks: np.ndarray) -> np.ndarray:
    """Decode blocks of 32: a float16 scale, then 32 signed bytes."""
    return blocks[..., 2:].view(np.int8) * _float16(blocks[..., :2])


def _recognise_q6_k(name: str, parts: Parts, configured: Spec | None) -> tuple[Spec, Shape]:
    return Spec("int6", "group", 16), _of_blocks(parts["q6_k"].shape, 210, 256)


def _read_q6_k(name: str, spec: Spec, shape: Shape, parts: Parts, get: Read) -> StoredWeight:
    return Encoded(get("q6_k").reshape(*shape[:-1], -1, 210), _decode_q6_k)


def _decode_q6_k(blocks: np.ndarray) -> np.ndarray:
    """Decode blocks of 256: low four bits, high two bits, 16 scales of 8 bits, a float16 scale."""
    stack = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*stack, 2, 1, 64) >> np.asarray([[0], [4]], np.uint8)
    high = blocks[..., 128:192].reshape(*stack, 2, 1, 32)
    high = high >> np.asarray([[0], [2], [4], [6]], np.uint8)
    q = (low & 15).reshape(*stack, 256) | (high & 3).reshape(*stack, 256) << 4
    scales = blocks[..., 192:208].view(np.int8) * _float16(blocks[..., 208:])
    return (q.astype(np.int8) - 32) * np.repeat(scales, 16, axis=-1)


def _float16(stored: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)


def _of_blocks(shape: Shape, nbytes: int, numbers: int) -> Shape:
    return (*shape[:-1], shape[-1] // nbytes * numbers)


# --- what several layouts need -------------------------------------------------------------------

_RECOGNISE: dict[str, Callable[[str, Parts, Spec | None], tuple[Spec, Shape]]] = {
    "weight": _recognise_weight,
    "weight_packed": _recognise_packed,
    "qweight": _recognise_qweight,
    "q4_0": _recognise_q4_0,
    "q8_0": _recognise_q8_0,
    "q6_k": _recognise_q6_k,
}
_READ: dict[str, Callable[[str, Spec, Shape, Parts, Read], Any]] = {
    "weight": _read_weight,
    "weight_packed": _read_packed,
    "qweight": _read_qweight,
    "q4_0": _read_q4_0,
    "q8_0": _read_q8_0,
    "q6_k": _read_q6_k,
}


def _int4(
    name: str, shape: Shape, scales: Shape, dtype: str, configured: Spec | None, symmetric: bool
) -> Spec:
    """Return the format of 4-bit integers with scales of a shape [*out, groups]."""
    if scales[:-1] != shape[:-1] or not scales[-1] or shape[-1] % scales[-1]:
        raise CheckpointError(
            f"{name}: its scales have the shape {list(scales)}, which does not divide "
            f"{list(shape)} into groups; expected [{', '.join(map(str, shape[:-1]))}, "
            f"{shape[-1]} / group]"
        )
    if scales[-1] == 1 and (configured is None or configured.per == "channel"):
        return Spec("int4", "channel", 0, symmetric, dtype)
    return Spec("int4", "group", shape[-1] // scales[-1], symmetric, dtype)


def _groups(name: str, shape: Shape, scales: Shape, group: int) -> None:
    if scales != (*shape[:-1], shape[-1] // group) or shape[-1] % group:
        raise CheckpointError(
            f"{name}: its scales have the shape {list(scales)}, expected one for every {group} inputs "
            f"of {list(shape)}"
        )


def _needed(name: str, parts: Parts, part: str) -> TensorSpec:
    if part not in parts:
        raise CheckpointError(f"{name}: its {part} is missing")
    return parts[part]


def _of_dtype(name: str, tensor: TensorSpec, what: str, allowed: tuple[str, ...]) -> None:
    if tensor.dtype not in allowed:
        raise CheckpointError(
            f"{name}: its {what} are {tensor.dtype}, expected {' or '.join(allowed)}"
        )


def _nibbles(words: np.ndarray) -> np.ndarray:
    """Return the eight numbers of each 32-bit word of the last axis, lowest bits first."""
    return low_first(np.ascontiguousarray(words).view(np.uint8))
