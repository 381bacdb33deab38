"""Quantised checkpoints as they are out there, written from the numbers of a plain one.

Written apart from our readers. A `Writer` turns a matrix [out, in] into the tensors of its module, and
returns the numbers that these stand for. `write` makes a checkpoint of one. It takes the layout of
`hf_layout`, stores experts one by one or stacked, and returns the numbers that a reader must find.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.checkpoints_convert import hf_layout

Tensors = dict[str, np.ndarray]
Writer = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

# A 26B-A4B whose widths divide into groups of 32, and a 31B-like model whose layers have k = v.
_SIZES: dict[str, Any] = dict(
    vocab_size=40, hidden_size=64, intermediate_size=96, head_dim=32, global_head_dim=64
)
CONFIGS: dict[str, dict[str, Any]] = {
    "26b-a4b": hf_layout.TINY["26b-a4b"]
    | _SIZES
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    | {"moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 3}
    | {"layer_types": hf_layout.TINY["26b-a4b"]["layer_types"][:2]},
    "e2b": hf_layout.TINY["e2b"]
    | _SIZES
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size_per_layer_input": 32},
}
QUANTISED = r".*\.(self_attn\.[qkvo]_proj|mlp\.\w+_proj)\.weight|.*\.experts\..+"
"""The tensors that builds quantise: linears of attention, MLP and experts."""


def fp8(strategy: str) -> Writer:
    """FP8 of compressed-tensors: a scale a channel, a matrix, or a block of 128 x 128."""

    def write(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        if strategy == "block":
            return _blocks(w, "weight_scale")
        over = 1 if strategy == "channel" else None
        scale = (np.abs(w).max(axis=over, keepdims=strategy == "channel") / 448).astype(BF16)
        scale = np.asarray(scale).reshape(-1, 1) if strategy == "channel" else scale.reshape(())
        codes = np.clip(w / scale.astype(np.float32), -448, 448).astype(E4M3)
        numbers = codes.astype(np.float32) * scale.astype(np.float32)
        return {"weight": codes, "weight_scale": scale}, numbers

    return write


def int8(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """INT8 of compressed-tensors, a scale a channel."""
    scale = (np.abs(w).max(axis=1, keepdims=True) / 127).astype(np.float32)
    codes = np.clip(np.round(w / scale), -128, 127).astype(np.int8)
    return {"weight": codes, "weight_scale": scale}, codes * scale


def block_fp8(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """FP8 in blocks as DeepSeek and Qwen name them."""
    return _blocks(w, "weight_scale_inv")


def _blocks(w: np.ndarray, name: str) -> tuple[Tensors, np.ndarray]:
    rows, columns = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
    scale = np.zeros((rows, columns), np.float32)
    codes, numbers = np.zeros(w.shape, E4M3), np.zeros(w.shape, np.float32)
    for i in range(rows):
        for j in range(columns):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = np.abs(w[at]).max() / 448
            codes[at] = (w[at] / scale[i, j]).astype(E4M3)
            numbers[at] = codes[at].astype(np.float32) * scale[i, j]
    return {"weight": codes, name: scale}, numbers


def _quantise_int4(
    w: np.ndarray, group: int, symmetric: bool, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return codes 0 to 15, scales and zero points [out, groups], and the numbers."""
    groups = w.reshape(len(w), -1, group)
    if symmetric:
        scale = (np.abs(groups).max(-1) / 7.5).astype(dtype)
        zeros = np.full(scale.shape, 8, np.int32)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = ((high - low) / 15).astype(dtype)
        zeros = np.clip(np.round(-low / scale.astype(np.float32)), 0, 15).astype(np.int32)
    wide = scale.astype(np.float32)[..., None]
    codes = np.clip(np.round(groups / wide) + zeros[..., None], 0, 15).astype(np.int32)
    numbers = ((codes - zeros[..., None]) * wide).reshape(w.shape).astype(np.float32)
    return codes.reshape(w.shape), scale, zeros, numbers


def _packed(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack eight numbers of the last axis into each int32, number `order[i]` into nibble i."""
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    for i in range(8):
        words |= eights[..., order[i]] << np.uint32(4 * i)
    return words.view(np.int32)


def pack_quantized(group: int, symmetric: bool, dtype: np.dtype = BF16) -> Writer:
    """4-bit groups of compressed-tensors (w4a16)."""

    def write(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes, scale, zeros, numbers = _quantise_int4(w, group, symmetric, dtype)
        tensors = {
            "weight_packed": _packed(codes),
            "weight_scale": scale,
            "weight_shape": np.asarray(w.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(_packed(zeros.T).T)
        return tensors, numbers

    return write


def pack_int8(group: int | None) -> Writer:
    """8 bits of compressed-tensors in words (w8a16): a scale a channel, or for each group."""

    def write(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        groups = w.reshape(len(w), -1, group or w.shape[1])
        scale = (np.abs(groups).max(-1) / 127).astype(BF16)
        wide = scale.astype(np.float32)[..., None]
        codes = np.clip(np.round(groups / wide), -128, 127).astype(np.int16)
        words = (codes + 128).astype(np.uint8).reshape(w.shape).view(np.int32)
        shape = np.asarray(w.shape, np.int64)
        tensors = {"weight_packed": words, "weight_scale": scale, "weight_shape": shape}
        return tensors, (codes * wide).reshape(w.shape).astype(np.float32)

    return write


def awq(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """AWQ, groups of 32 with zero points; eight outputs a word, in its own order."""
    codes, scale, zeros, numbers = _quantise_int4(w, 32, False, np.dtype(np.float16))
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _packed(codes.T, order),
        "qzeros": _packed(zeros.T, order),
        "scales": np.ascontiguousarray(scale.T),
    }, numbers


def gptq(symmetric: bool, *, shuffled: bool = False) -> Writer:
    """GPTQ, groups of 32; eight inputs a word, zero points stored less 1."""

    def write(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes, scale, zeros, numbers = _quantise_int4(w, 32, symmetric, np.dtype(np.float16))
        index = np.arange(w.shape[1], dtype=np.int32) // 32
        return {
            "qweight": np.ascontiguousarray(_packed(codes).T),
            "qzeros": _packed((zeros.T - 1) & 15),
            "scales": np.ascontiguousarray(scale.T),
            "g_idx": index[::-1].copy() if shuffled else index,
        }, numbers

    return write


def _e2m1(x: np.ndarray) -> np.ndarray:
    """Return the nearest codes."""
    nearest = np.abs(np.abs(x)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    return nearest | (np.signbit(x).astype(np.uint8) << 3)


def nvfp4(dialect: str) -> Writer:
    """NVFP4 of compressed-tensors ("ct") or ModelOpt ("modelopt"): their global scales are inverse."""

    def write(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        whole = np.float32(np.abs(w).max() / 2688)
        groups = w.reshape(len(w), -1, 16) / whole
        scale = (np.abs(groups).max(-1) / 6).astype(E4M3)
        codes = _e2m1(groups / np.maximum(scale.astype(np.float32), 1e-9)[..., None])
        flat = codes.reshape(w.shape)
        pairs = flat[:, ::2] | flat[:, 1::2] << 4
        signs = np.where(codes & 8, -1, 1).astype(np.float32)
        tensors = {"weight_scale": scale}
        if dialect == "ct":
            divide = np.float32(1) / whole
            tensors |= {"weight_packed": pairs, "weight_global_scale": divide.reshape(1)}
            tensors["input_global_scale"] = np.ones(1, np.float32)
            whole = np.float32(1) / divide
        else:
            tensors |= {"weight": pairs, "weight_scale_2": np.asarray(whole)}
            tensors["input_scale"] = np.asarray(1, np.float32)
        wide = scale.astype(np.float32)[..., None]
        return tensors, ((signs * E2M1[codes & 7] * wide).reshape(w.shape) * whole)

    return write


def mxfp4(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """MXFP4 of compressed-tensors: powers of two for groups of 32."""
    groups = w.reshape(len(w), -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scale = np.exp2(exponent).astype(np.float32)[..., None]
    codes = _e2m1(np.clip(groups / scale, -6, 6))
    flat = codes.reshape(w.shape)
    signs = np.where(codes & 8, -1, 1).astype(np.float32)
    return {
        "weight_packed": flat[:, ::2] | flat[:, 1::2] << 4,
        "weight_scale": (exponent + 127).astype(np.uint8),
    }, (signs * E2M1[codes & 7] * scale).reshape(w.shape)


def write(
    directory: Path,
    name: str,
    writer: Writer | Mapping[str, Writer],
    quantization: Any,
    *,
    moe: str = "",
    stacked: bool = False,
    beside: Any = None,
    edit: Callable[[Tensors], None] = lambda tensors: None,
) -> tuple[dict[str, np.ndarray], Tensors]:
    """Write a checkpoint of random numbers, and return what a plain one would hold.

    Args:
      name: of `CONFIGS`.
      writer: makes tensors of a matrix; or writers by patterns of names.
      quantization: what config.json says.
      moe: ".moe" for builds whose experts are named so.
      stacked: whether experts are one tensor.
      beside: the contents of hf_quant_config.json.
      edit: changes the tensors before they are written.

    Returns:
      The numbers by the names of a plain checkpoint, and all tensors written.
    """
    config, rng = CONFIGS[name], np.random.default_rng(7)
    writers = writer if isinstance(writer, Mapping) else {QUANTISED: writer}
    prefix = "model.language_model."
    numbers: dict[str, np.ndarray] = {}
    tensors: Tensors = {}
    for full, shape in hf_layout.target_shapes(config, prefix).items():
        draw = rng.normal(size=shape).astype(np.float32) / 8
        if len(shape) == 1:
            draw = np.abs(draw) + 0.5
        chosen = next((w for p, w in writers.items() if re.fullmatch(p, full)), None)
        base = full.removesuffix(".weight")
        if chosen is None:
            tensors[full] = draw.astype(BF16)
            numbers[full] = tensors[full].astype(np.float32)
        elif ".experts." in full:
            made, numbers[full] = _experts(
                base.replace(".experts", f"{moe}.experts"), draw, chosen, stacked
            )
            tensors |= made
        else:
            made, numbers[full] = chosen(draw)
            tensors |= {f"{base}.{part}": array for part, array in made.items()}
    wrapped = hf_layout.multimodal(config)
    vision = hf_layout.vision_shapes(wrapped)  # which such builds leave as it is
    tensors |= {name: np.ones(shape, BF16) for name, shape in vision.items()}
    tensors = {n: np.asarray(array) for n, array in tensors.items()}
    edit(tensors)
    directory.mkdir(parents=True)
    if quantization is not None:
        wrapped["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(wrapped))
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return numbers, tensors


def _experts(
    base: str, stack: np.ndarray, writer: Writer, stacked: bool
) -> tuple[Tensors, np.ndarray]:
    """Return the tensors of all experts of a layer, and their numbers [E, out, in]."""
    folder, _, last = base.rpartition(".")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    tensors: Tensors = {}
    made_of_all: list[Tensors] = []
    numbers = []
    for e, matrix in enumerate(stack):
        if stacked:
            made, found = writer(matrix)
            made_of_all.append(made)
            numbers.append(found)
            continue
        of_expert = []
        for part, piece in zip(parts, np.split(matrix, len(parts)), strict=True):
            made, found = writer(piece)
            tensors |= {f"{folder}.{e}.{part}.{end}": array for end, array in made.items()}
            of_expert.append(found)
        numbers.append(np.concatenate(of_expert))
    for end in made_of_all[0] if made_of_all else ():
        tensors[f"{base}.{end}"] = np.stack([made[end] for made in made_of_all])
    return tensors, np.stack(numbers)


# --- GGUF ----------------------------------------------------------------------------------------

_GGUF_NAMES = {
    r"embed_tokens\.weight": "token_embd.weight",
    r"norm\.weight": "output_norm.weight",
    r"embed_tokens_per_layer\.weight": "per_layer_token_embd.weight",
    r"per_layer_model_projection\.weight": "per_layer_model_proj.weight",
    r"per_layer_projection_norm\.weight": "per_layer_proj_norm.weight",
    r".*\.input_layernorm\.weight": "attn_norm.weight",
    r".*\.post_attention_layernorm\.weight": "post_attention_norm.weight",
    r".*\.pre_feedforward_layernorm\.weight": "ffn_norm.weight",
    r".*\.post_feedforward_layernorm\.weight": "post_ffw_norm.weight",
    r".*\.post_feedforward_layernorm_1\.weight": "post_ffw_norm_1.weight",
    r".*\.pre_feedforward_layernorm_2\.weight": "pre_ffw_norm_2.weight",
    r".*\.post_feedforward_layernorm_2\.weight": "post_ffw_norm_2.weight",
    r".*\.self_attn\.([qkv])_proj\.weight": r"attn_\1.weight",
    r".*\.self_attn\.o_proj\.weight": "attn_output.weight",
    r".*\.self_attn\.([qk])_norm\.weight": r"attn_\1_norm.weight",
    r".*\.mlp\.(gate|up|down)_proj\.weight": r"ffn_\1.weight",
    r".*\.router\.proj\.weight": "ffn_gate_inp.weight",
    r".*\.router\.scale": "ffn_gate_inp.scale",
    r".*\.router\.per_expert_scale": "ffn_down_exps.scale",
    r".*\.experts\.(gate_up|down)_proj": r"ffn_\1_exps.weight",
    r".*\.layer_scalar": "layer_output_scale.weight",
    r".*\.per_layer_input_gate\.weight": "inp_gate.weight",
    r".*\.per_layer_projection\.weight": "proj.weight",
    r".*\.post_per_layer_input_norm\.weight": "post_norm.weight",
}
"""Names of llama.cpp, as its gguf-py 0.19 has them."""


def write_gguf(directory: Path, name: str, *, family: str = "gemma4") -> dict[str, np.ndarray]:
    """Write a checkpoint with a GGUF file: matrices in Q4_0, the embedding in Q8_0, norms in F32."""
    config, rng = CONFIGS[name], np.random.default_rng(11)
    numbers: dict[str, np.ndarray] = {}
    stored: dict[str, tuple[tuple[int, ...], int, bytes]] = {}
    for full, shape in hf_layout.target_shapes(config).items():
        draw = np.abs(rng.normal(size=shape).astype(np.float32)) / 8 + 0.1
        if len(shape) > 1:
            draw *= rng.choice([-1, 1], shape)
        short = full.removeprefix("model.")
        pattern = next(p for p in _GGUF_NAMES if re.fullmatch(p, short))
        last = re.sub(pattern, _GGUF_NAMES[pattern], short)
        layer = re.match(r"layers\.(\d+)\.", short)
        theirs = f"blk.{layer[1]}.{last}" if layer else last
        kind, raw, found = 0, draw.tobytes(), draw
        if short == "embed_tokens.weight":
            kind, (raw, found) = 8, _q8_0(draw)
        elif len(shape) > 1 and shape[-1] % 32 == 0 and "router" not in short:
            kind, (raw, found) = 2, _q4_0(draw)
        stored[theirs], numbers[full] = (shape, kind, raw), found
    stored["rope_freqs.weight"] = ((4,), 0, np.ones(4, np.float32).tobytes())
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf_layout.multimodal(config)))
    (directory / "model-q4_0.gguf").write_bytes(_gguf_bytes(stored, family))
    return numbers


def _q4_0(w: np.ndarray) -> tuple[bytes, np.ndarray]:
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    scale = (peak / -8).astype(np.float16)
    codes = np.clip(np.round(blocks / scale.astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    raw = np.concatenate([scale.view(np.uint8), codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    return raw.tobytes(), ((codes.astype(np.float32) - 8) * scale).reshape(w.shape).astype("f4")


def _q8_0(w: np.ndarray) -> tuple[bytes, np.ndarray]:
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    codes = np.clip(np.round(blocks / scale.astype(np.float32)), -127, 127).astype(np.int8)
    raw = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=-1)
    return raw.tobytes(), (codes.astype("f4") * scale.astype("f4")).reshape(w.shape)


def _gguf_bytes(stored: dict[str, tuple[tuple[int, ...], int, bytes]], family: str) -> bytes:
    def text(said: str) -> bytes:
        return struct.pack("<Q", len(said.encode())) + said.encode()

    vocabulary = struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    out = b"GGUF" + struct.pack("<IQQ", 3, len(stored), 3)
    out += text("general.architecture") + struct.pack("<I", 8) + text(family)
    out += text("tokenizer.ggml.tokens") + vocabulary
    out += text("gemma4.rope.freq_base") + struct.pack("<If", 6, 1e6)
    offset, data = 0, b""
    for name, (shape, kind, raw) in stored.items():
        sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
        out += text(name) + struct.pack("<I", len(shape)) + sizes
        out += struct.pack("<IQ", kind, offset)
        data += raw + b"\0" * (-len(raw) % 32)
        offset = len(data)
    return out + b"\0" * (-len(out) % 32) + data
