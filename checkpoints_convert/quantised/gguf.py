"""The tensors of a GGUF file under their Hugging Face names, for Gemma 4.

Read `read_gguf`. It reads no tensor. The file's own config and vocabulary are skipped: config.json and
the tokenizer's files have to lie beside it. A quantised tensor is bytes here, under a name that says
of which type ("….down_proj.q4_0"); `layouts.py` reads such blocks.

Unlike those of Gemma 2 and 3, norms are stored as they are. Queries and keys are in the order of
Hugging Face.

Source: llama.cpp's gguf-py 0.19 (`constants.py`, `tensor_mapping.py`, `gguf_reader.py`).
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import BinaryIO

from checkpoints_convert.errors import CheckpointError, listed
from checkpoints_convert.headers import StoredTensor

_MAGIC = b"GGUF"
_ALIGNMENT = 32
_MOST_BYTES = 1 << 27  # of one string, and of tensors in number
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value of metadata, by its type."""

_PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
_BLOCKS = {2: ("q4_0", 32, 18), 8: ("q8_0", 32, 34), 14: ("q6_k", 256, 210)}
"""The name of a type of blocks, the numbers of a block, and its bytes."""

_NAMES = {
    "token_embd": "embed_tokens.weight",
    "output_norm": "norm.weight",
    "per_layer_token_embd": "embed_tokens_per_layer.weight",
    "per_layer_model_proj": "per_layer_model_projection.weight",
    "per_layer_proj_norm": "per_layer_projection_norm.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
    "post_ffw_norm": "post_feedforward_layernorm.weight",
    "post_ffw_norm_1": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2": "post_feedforward_layernorm_2.weight",
    "ffn_gate_inp": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate.weight",
    "proj": "per_layer_projection.weight",
    "post_norm": "post_per_layer_input_norm.weight",
}
_COMPUTED = "rope_freqs"


def read_gguf(file: Path) -> dict[str, StoredTensor]:
    """Read and check the header of a GGUF file.

    Raises:
      CheckpointError: the file cannot be read, is cut off or damaged, is not of a Gemma 4 model, or
        has tensors of a type that is not read.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            return _read(_Header(file, opened, size), size)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def _read(header: _Header, size: int) -> dict[str, StoredTensor]:
    file = header.file
    if header.take(4) != _MAGIC:
        raise CheckpointError(f"{file} is no GGUF file")
    version = header.number("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{file} has version {version} of GGUF; 2 and 3 are read")
    tensors, values = header.number("<Q"), header.number("<Q")
    if max(tensors, values) > _MOST_BYTES:
        raise CheckpointError(f"{file} is corrupt: it says that it has {tensors:,} tensors")
    settings = {}
    for _ in range(values):
        key = header.text()
        settings[key] = header.value(header.number("<I"))
    if (family := settings.get("general.architecture")) != "gemma4":
        raise CheckpointError(f"{file} is of a model of {family!r}; only gemma4 is read from GGUF")
    entries = [header.tensor() for _ in range(tensors)]
    alignment = settings.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{file} is corrupt: general.alignment is {alignment!r}")
    start = -(-header.position // alignment) * alignment
    stored: dict[str, StoredTensor] = {}
    unknown: list[str] = []
    for name, shape, kind, offset in entries:
        known = _hugging_face_name(name)
        if known == "":
            continue
        if kind not in _PLAIN and kind not in _BLOCKS:
            unknown.append(f"{name} has type {kind}")
            continue
        tensor = _stored(file, shape, kind, start + offset)
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError(f"{file} is truncated: {name} ends behind its end")
        known = known or name
        if kind in _BLOCKS:
            known = f"{known.removesuffix('.weight')}.{_BLOCKS[kind][0]}"
        if known in stored:
            raise CheckpointError(f"{file} is corrupt: {name} occurs twice")
        stored[known] = tensor
    if unknown:
        types = ", ".join([*_PLAIN.values(), *(name.upper() for name, _, _ in _BLOCKS.values())])
        raise CheckpointError(
            f"{file} has tensors of types that are not read ({types} are); take a Q4_0 build:\n  "
            + listed(unknown, "\n  ")
        )
    return stored


def _hugging_face_name(name: str) -> str | None:
    """Return the name of a tensor at Hugging Face; "" for one that is computed, None if not known."""
    short = name.removesuffix(".weight")
    if short == _COMPUTED:
        return ""
    if short in _NAMES:
        return f"model.{_NAMES[short]}"
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", short)
    if layer is None or layer[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}"


def _stored(file: Path, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
    if kind in _PLAIN:
        return StoredTensor(shape, _PLAIN[kind], file, offset)
    _, numbers, nbytes = _BLOCKS[kind]
    if not shape or shape[-1] % numbers:
        raise CheckpointError(f"{file} is corrupt: blocks of {numbers} do not divide {list(shape)}")
    return StoredTensor((*shape[:-1], shape[-1] // numbers * nbytes), "U8", file, offset)


class _Header:
    """Reads values of a header, one after another."""

    def __init__(self, file: Path, opened: BinaryIO, size: int):
        self.file, self._opened, self._left, self.position = file, opened, size, 0

    def take(self, count: int) -> bytes:
        if count > self._left or count > _MOST_BYTES:
            raise CheckpointError(f"{self.file} is corrupt or truncated: no whole GGUF header")
        self._left -= count
        self.position += count
        return self._opened.read(count)

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> int | str | None:
        """Return a text or a whole number of metadata; skip everything else."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _SIZES:
                self.take(count * _SIZES[inner])
                return None
            for _ in range(count):
                self.value(inner)
            return None
        if kind not in _SIZES:
            raise CheckpointError(f"{self.file} is corrupt: metadata of type {kind}")
        return int.from_bytes(self.take(_SIZES[kind]), "little")

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type and offset of a tensor. Shapes are stored last axis first."""
        name, axes = self.text(), self.number("<I")
        if axes > 8:
            raise CheckpointError(f"{self.file} is corrupt: {listed([name])} has {axes} axes")
        shape = tuple(self.number("<Q") for _ in range(axes))[::-1]
        if math.prod(shape) > 1 << 48:
            raise CheckpointError(f"{self.file} is corrupt: {listed([name])} has shape {shape}")
        return name, shape, self.number("<I"), self.number("<Q")
