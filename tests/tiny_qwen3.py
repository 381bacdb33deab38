"""Tiny Qwen3 models, as `tests.tiny` has them of Gemma 4.

`hf_config` is a config.json of the released shape and the source of all else. No norm is 1. The tied
model has queries that are wider than the residual stream, four for each kv head. The untied one has
three for each, which together are as wide as the stream.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.configs.qwen3 import Qwen3Config
from jaxspec.shapes import Params
from jaxspec.weights.define import model_def_of
from jaxspec.weights.model_def import ModelDef
from tests.tiny import VOCAB_SIZE, random_params

_COMMON: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=VOCAB_SIZE,
    num_hidden_layers=3,
    hidden_act="silu",
    attention_bias=False,
    max_position_embeddings=1024,
    max_window_layers=3,
    sliding_window=None,
    use_sliding_window=False,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    bos_token_id=2,
    eos_token_id=1,
)
_PER_SET: dict[str, dict[str, Any]] = {
    "qwen3-tied": dict(
        hidden_size=48,
        intermediate_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    ),
    "qwen3-untied": dict(
        hidden_size=72,
        intermediate_size=88,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=6,
        rope_theta=1_000_000,
        tie_word_embeddings=False,
    ),
}
FEATURE_SETS = tuple(_PER_SET)
# Of models that do not repeat themselves soon: ours, and those of transformers.
_SEEDS = {"qwen3-tied": (2, 1), "qwen3-untied": (3, 0)}
_EMBEDDING = 0.3  # of the size of the head's rows; layers count for more than the token itself


def hf_config(name: str) -> dict[str, Any]:
    """Return the config.json of a feature set, in the shape that the releases have."""
    return {**_COMMON, **_PER_SET[name]}


def config(name: str) -> Qwen3Config:
    """Return our config of a feature set."""
    return Qwen3Config.from_hf(hf_config(name))


def target(name: str) -> tuple[ModelDef, Params]:
    """Return a float32 target of a feature set with random weights."""
    model_def = model_def_of(config(name), "float32")
    params = random_params(model_def, _SEEDS[name][0])
    params["table"] *= _EMBEDDING
    return model_def, params


def transformers_model(name: str) -> Any:
    """Return a feature set as a transformers model in float32, with random weights like ours."""
    import torch
    import transformers

    values = transformers.Qwen3Config(**hf_config(name), attn_implementation="eager")
    model = transformers.Qwen3ForCausalLM(values).eval()
    rng = np.random.default_rng(_SEEDS[name][1])
    for key, tensor in model.state_dict().items():
        if tensor.ndim == 1:
            size = 12 if key == "model.norm.weight" else 1
            value = rng.uniform(0.5, 1.5, tensor.shape) * size
        else:
            value = rng.normal(0, 1 / math.sqrt(tensor.shape[-1]), tensor.shape)
        tensor.copy_(torch.from_numpy(value))
    model.state_dict()["model.embed_tokens.weight"] *= _EMBEDDING
    return model


def save(name: str, directory: Path) -> Any:
    """Write a feature set as a transformers checkpoint in float32; return the model."""
    model = transformers_model(name)
    model.save_pretrained(directory)
    return model
