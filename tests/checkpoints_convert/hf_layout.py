"""Hugging Face checkpoints as they are out there, written down apart from our tables.

`RELEASED` are the text parts of the released config.json files, `TINY` small models with the features of
each; `ASSISTANTS` and `TINY_ASSISTANTS` are those of the MTP assistants. `target_shapes`, `drafter_shapes` and
`assistant_shapes` say which tensors such a checkpoint has, `write` makes one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Shapes = dict[str, tuple[int, ...]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _types(layers: int, every: int) -> list[str]:
    full = "full_attention"
    return [full if i % every == every - 1 else "sliding_attention" for i in range(layers)]


_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.25,
    },
}
_COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "rope_parameters": _ROPE,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "bfloat16",
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "enable_moe_block": False,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}
_SMALL: dict[str, Any] = {
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "use_bidirectional_attention": None,
}


def _sizes(hidden: int, heads: int, kv: int, mlp: int, types: list[str]) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "num_hidden_layers": len(types),
        "layer_types": types,
    }


RELEASED: dict[str, dict[str, Any]] = {
    "e2b": _COMMON
    | _SMALL
    | _sizes(1536, 8, 1, 6144, _types(35, 5))
    | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    "e4b": _COMMON
    | _SMALL
    | _sizes(2560, 8, 2, 10240, _types(42, 6))
    | {"num_kv_shared_layers": 18},
    "12b": _COMMON
    | _sizes(3840, 16, 8, 15360, _types(48, 6))
    | {"model_type": "gemma4_unified_text", "num_global_key_value_heads": 1},
    "26b-a4b": _COMMON
    | _sizes(2816, 16, 8, 2112, _types(30, 6))
    | {"num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128}
    | {"top_k_experts": 8, "moe_intermediate_size": 704},
    "31b": _COMMON | _sizes(5376, 32, 16, 21504, _types(60, 6)) | {"num_global_key_value_heads": 4},
}


def _tiny(name: str, types: list[str], **changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 40, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8}
    heads = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 8}
    layers = {"num_hidden_layers": len(types), "layer_types": types}
    return RELEASED[name] | sizes | heads | layers | changes


_SHARED = {"num_kv_shared_layers": 4, "hidden_size_per_layer_input": 4}
TINY: dict[str, dict[str, Any]] = {
    "e2b": _tiny("e2b", _types(8, 2), vocab_size_per_layer_input=36, **_SHARED),
    "e4b": _tiny("e4b", _types(8, 2), vocab_size_per_layer_input=40, **_SHARED),
    "12b": _tiny("12b", _types(12, 6), num_key_value_heads=4),
    "26b-a4b": _tiny(
        "26b-a4b",
        _types(4, 2),
        num_key_value_heads=4,
        num_experts=3,
        top_k_experts=2,
        moe_intermediate_size=5,
    ),
    "31b": _tiny("31b", _types(6, 6), num_key_value_heads=4, num_global_key_value_heads=2),
}

DRAFTERS: dict[str, dict[str, Any]] = {
    "26b-a4b": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 2816,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 5632,
        "hidden_act": "silu",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 6, 11, 17, 22, 27]},
        "num_target_layers": 30,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "final_logit_softcapping": 30.0,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": 262144,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    },
    "qwen3-8b": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "hidden_act": "silu",
        "block_size": 16,
        "dflash_config": {
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "causal": False,
            "scale_embeddings": False,
        },
        "num_target_layers": 36,
        "layer_types": ["full_attention"] * 5,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
    },
}
TINY_DRAFTER: dict[str, Any] = DRAFTERS["26b-a4b"] | {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "vocab_size": 40,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1, 2]},
}


def _assistant(target: dict[str, Any], hidden: int, heads: int, mlp: int) -> dict[str, Any]:
    """Return an assistant's config.json; all of them name centroids, E2B's and E4B's alone have them."""
    unified = target["model_type"] == "gemma4_unified_text"
    small = target["num_global_key_value_heads"] is None
    return {
        "architectures": [f"Gemma4{'Unified' if unified else ''}AssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant" if unified else "gemma4_assistant",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": small,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "boi_token_id": 255999,
        "text_config": target
        | {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": mlp,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
            "final_logit_softcapping": None,
        },
    }


ASSISTANTS: dict[str, dict[str, Any]] = {
    "e2b": _assistant(RELEASED["e2b"], 256, 4, 2048),
    "e4b": _assistant(RELEASED["e4b"], 256, 4, 2048),
    "12b": _assistant(RELEASED["12b"], 1024, 16, 8192),
    "26b-a4b": _assistant(RELEASED["26b-a4b"], 1024, 16, 8192),
    "31b": _assistant(RELEASED["31b"], 1024, 32, 8192),
}
TINY_ASSISTANTS: dict[str, dict[str, Any]] = {
    size: _assistant(text, 12, 8, 20) | {"num_centroids": 10, "centroid_intermediate_top_k": 3}
    for size, text in TINY.items()
}

AUDIO: Shapes = {
    "model.audio_tower.layers.0.norm_out.weight": (4,),
    "model.embed_audio.embedding_projection.weight": (24, 4),
}

_TOWER: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "dtype": "bfloat16",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "default_output_length": 280,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
}
_EMBEDDER: dict[str, Any] = {
    "model_type": "gemma4_unified_vision",
    "model_patch_size": 48,
    "num_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "rms_norm_eps": 1e-6,
}


def vision_config(text: dict[str, Any]) -> dict[str, Any]:
    """Return the vision part beside a text config, of the release or tiny as the text is."""
    tiny = text["hidden_size"] < 1000
    if text["model_type"] == "gemma4_unified_text":
        width, positions = text["hidden_size"], 5 if tiny else 1120
        return _EMBEDDER | {
            "mm_embed_dim": width,
            "output_proj_dims": width,
            "mm_posemb_size": positions,
        }
    small = text["use_bidirectional_attention"] is None
    layers, width, heads, dim, mlp = (16, 768, 12, 64, 3072) if small else (27, 1152, 16, 72, 4304)
    if tiny:
        layers, width, heads, dim, mlp = 2, 12, 3, 4, 20
    return _TOWER | {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": dim,
        "intermediate_size": mlp,
        "position_embedding_size": 7 if tiny else 10240,
        "use_clipped_linears": small,
        "standardize": not small,
    }


def vision_shapes(config: dict[str, Any]) -> Shapes:
    """Return every tensor of the vision part of a whole config.json."""
    v, text_width = config["vision_config"], config["text_config"]["hidden_size"]
    if v["model_type"] == "gemma4_unified_vision":
        d, pixels = v["mm_embed_dim"], 3 * v["model_patch_size"] ** 2
        norms = {"patch_ln1": pixels, "patch_ln2": d, "pos_norm": d}
        shapes: Shapes = {
            f"vision_embedder.{name}.{part}": (width,)
            for name, width in norms.items()
            for part in ("weight", "bias")
        }
        shapes["vision_embedder.patch_dense.weight"] = (d, pixels)
        shapes["vision_embedder.patch_dense.bias"] = (d,)
        shapes["vision_embedder.pos_embedding"] = (v["mm_posemb_size"], 2, d)
    else:
        d, f, h = v["hidden_size"], v["intermediate_size"], v["head_dim"]
        n = v["num_attention_heads"] * h
        linears = {f"self_attn.{name}_proj": (n, d) for name in "qkv"}
        linears |= {"self_attn.o_proj": (d, n), "mlp.down_proj": (d, f)}
        linears |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d)}
        shapes = {
            "vision_tower.patch_embedder.input_proj.weight": (d, 3 * v["patch_size"] ** 2),
            "vision_tower.patch_embedder.position_embedding_table": (
                2,
                v["position_embedding_size"],
                d,
            ),
        }
        for i in range(v["num_hidden_layers"]):
            layer: Shapes = {f"{name}.linear.weight": shape for name, shape in linears.items()}
            if v["use_clipped_linears"]:
                ends = [f"{put}_{end}" for put in ("input", "output") for end in ("min", "max")]
                layer |= {f"{name}.{end}": () for name in linears for end in ends}
            norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
            layer |= {f"{name}_layernorm.weight": (d,) for name in norms}
            layer |= {f"self_attn.{name}_norm.weight": (h,) for name in "qk"}
            shapes |= {f"vision_tower.encoder.layers.{i}.{k}": x for k, x in layer.items()}
        if v["standardize"]:
            shapes |= {"vision_tower.std_bias": (d,), "vision_tower.std_scale": (d,)}
    shapes["embed_vision.embedding_projection.weight"] = (text_width, d)
    return {f"model.{name}": shape for name, shape in shapes.items()}


def multimodal(text: dict[str, Any]) -> dict[str, Any]:
    """Wrap a text config as the released config.json files do."""
    unified = text["model_type"] == "gemma4_unified_text"
    return {
        "architectures": [f"Gemma4{'Unified' if unified else ''}ForConditionalGeneration"],
        "model_type": "gemma4_unified" if unified else "gemma4",
        "text_config": text,
        "vision_config": vision_config(text),
        "image_token_id": 258880,
        "boi_token_id": 255999,
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106 if text["vocab_size"] > 106 else 6],
    }


def target_shapes(
    c: dict[str, Any], prefix: str = "model.", *, shared_kv_stored: bool = True
) -> Shapes:
    """Return every text tensor of a target; released files store K/V that sharing layers never read."""
    d, p, n = c["hidden_size"], c["hidden_size_per_layer_input"], c["num_hidden_layers"]
    shapes: Shapes = {"embed_tokens.weight": (c["vocab_size"], d), "norm.weight": (d,)}
    if p:
        shapes["embed_tokens_per_layer.weight"] = (c["vocab_size_per_layer_input"], n * p)
        shapes["per_layer_model_projection.weight"] = (n * p, d)
        shapes["per_layer_projection_norm.weight"] = (p,)
    for i, kind in enumerate(c["layer_types"]):
        full, shared = kind == "full_attention", i >= n - c["num_kv_shared_layers"]
        k_eq_v = full and c["attention_k_eq_v"]
        h = c["global_head_dim"] if full else c["head_dim"]
        kv = c["num_global_key_value_heads"] if k_eq_v else c["num_key_value_heads"]
        mlp = c["intermediate_size"] * (2 if shared and c["use_double_wide_mlp"] else 1)
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        layer: Shapes = {f"{name}_layernorm.weight": (d,) for name in norms}
        layer["layer_scalar"] = (1,)
        layer["self_attn.q_proj.weight"] = (c["num_attention_heads"] * h, d)
        layer["self_attn.q_norm.weight"] = (h,)
        layer["self_attn.o_proj.weight"] = (d, c["num_attention_heads"] * h)
        if not shared or shared_kv_stored:
            layer["self_attn.k_proj.weight"] = (kv * h, d)
            layer["self_attn.k_norm.weight"] = (h,)
            if not k_eq_v:
                layer["self_attn.v_proj.weight"] = (kv * h, d)
        layer["mlp.gate_proj.weight"] = layer["mlp.up_proj.weight"] = (mlp, d)
        layer["mlp.down_proj.weight"] = (d, mlp)
        if p:
            layer["per_layer_input_gate.weight"] = (p, d)
            layer["per_layer_projection.weight"] = (d, p)
            layer["post_per_layer_input_norm.weight"] = (d,)
        if c["enable_moe_block"]:
            e, f = c["num_experts"], c["moe_intermediate_size"]
            layer["router.proj.weight"] = (e, d)
            layer["router.scale"], layer["router.per_expert_scale"] = (d,), (e,)
            layer["experts.gate_up_proj"] = (e, 2 * f, d)
            layer["experts.down_proj"] = (e, d, f)
            for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"):
                layer[f"{name}.weight"] = (d,)
            layer["post_feedforward_layernorm_1.weight"] = (d,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return {prefix + name: shape for name, shape in shapes.items()}


def qwen3_layer_shapes(c: dict[str, Any]) -> Shapes:
    """Return every tensor of a layer of Qwen3, which DFlash drafters have too."""
    d, h, f = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * h, c["num_key_value_heads"] * h
    return {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "self_attn.q_norm.weight": (h,),
        "self_attn.k_norm.weight": (h,),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
    }


def drafter_shapes(c: dict[str, Any], prefix: str = "") -> Shapes:
    """Return every tensor of a DFlash drafter."""
    d = c["hidden_size"]
    features = len(c["dflash_config"]["target_layer_ids"])
    shapes: Shapes = {
        "fc.weight": (d, features * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for i in range(c["num_hidden_layers"]):
        layer = qwen3_layer_shapes(c)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return {prefix + name: shape for name, shape in shapes.items()}


def assistant_shapes(c: dict[str, Any]) -> Shapes:
    """Return every tensor of an MTP assistant; the head is its embedding."""
    text, d, b = c["text_config"], c["text_config"]["hidden_size"], c["backbone_hidden_size"]
    shapes = {
        name: shape
        for name, shape in target_shapes(text).items()
        if not any(part in name for part in ("k_proj", "k_norm", "v_proj"))
    }
    shapes |= {"pre_projection.weight": (d, 2 * b), "post_projection.weight": (b, d)}
    if c["use_ordered_embeddings"]:
        shapes["masked_embedding.centroids.weight"] = (c["num_centroids"], d)
        shapes["masked_embedding.token_ordering"] = (text["vocab_size"],)
    return shapes


def write(
    directory: Path,
    config: dict[str, Any],
    shapes: Shapes,
    *,
    dtype: np.dtype = BFLOAT16,
    shard_bytes: int = 1 << 30,
    seed: int = 0,
) -> None:
    """Write a checkpoint of random numbers, sharded like Hugging Face's own."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    shards = list(_shards(shapes, dtype.itemsize, shard_bytes))
    rng = np.random.default_rng(seed)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        tensors = {
            name: rng.permutation(shapes[name][0])  # int64
            if name.endswith("token_ordering")
            else random_array(rng, shapes[name], dtype)
            for name in names
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return random finite numbers of both signs, all bits of their fraction in use."""
    bits = rng.integers(0, 1 << 16, (*shape, dtype.itemsize // 2), np.uint16, endpoint=False)
    bits[..., -1] &= 0xBFFF  # the top bit of the exponent: no infinity, no NaN
    return bits.view(dtype).reshape(shape)


def _shards(shapes: Shapes, itemsize: int, shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize
        if names and size + nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names
