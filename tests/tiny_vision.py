"""Tiny models of every released size with their vision parts, for tests.

`hf_config` is a whole config.json of the released shape. `config` is what we read of its vision part, `vision` adds
random weights of our own, and `save` writes a transformers model with weights of its own. As in `tiny`, no norm and
no scale is 1. Clips of E2B and E4B cut some numbers off, and leave most.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.configs.gemma4_vision import Gemma4VisionConfig
from jaxspec.shapes import Params
from jaxspec.weights.define import model_def_of
from jaxspec.weights.model_def import ModelDef
from tests import tiny

IMAGE, BEGIN, END = 150, 151, 152
"""The placeholder of a token of an image, and the tokens around an image."""

_TOWER: dict[str, Any] = dict(
    model_type="gemma4_vision",
    intermediate_size=20,
    num_hidden_layers=2,
    position_embedding_size=3360,
    patch_size=16,
    pooling_kernel_size=3,
    default_output_length=280,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_theta=100.0, rope_type="default"),
)
_SMALL = _TOWER | dict(
    hidden_size=24,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=8,
    use_clipped_linears=True,
    standardize=False,
)
_LARGE = _TOWER | dict(
    hidden_size=28,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=12,
    use_clipped_linears=False,
    standardize=True,
)
_EMBEDDER: dict[str, Any] = dict(
    model_type="gemma4_unified_vision",
    mm_embed_dim=48,
    mm_posemb_size=1120,
    model_patch_size=48,
    patch_size=16,
    pooling_kernel_size=3,
    num_soft_tokens=280,
    output_proj_dims=48,
    rms_norm_eps=1e-6,
)
_VISION = {"e2b": _SMALL, "e4b": _SMALL, "12b": _EMBEDDER, "26b-a4b": _LARGE, "31b": _LARGE}


def hf_config(name: str) -> dict[str, Any]:
    """Return the config.json of a feature set, with text and vision part."""
    return dict(
        model_type="gemma4_unified" if name == "12b" else "gemma4",
        text_config=tiny.hf_config(name),
        vision_config=dict(_VISION[name]),
        audio_config=None,
        image_token_id=IMAGE,
        boi_token_id=BEGIN,
        eoi_token_id=END,
        video_token_id=153,
        audio_token_id=154,
        boa_token_id=155,
        eoa_token_index=156,
    )


def config(name: str) -> Gemma4VisionConfig:
    """Return our config of the vision part of a feature set."""
    found = Gemma4VisionConfig.from_hf(hf_config(name))
    assert found is not None
    return found


def vision(name: str, *, seed: int = 0) -> tuple[ModelDef, Params]:
    """Return a float32 vision part of a feature set with random weights."""
    model_def = model_def_of(config(name), "float32")
    params = tiny.random_params(model_def, seed)
    return model_def, {n: _ranges(n, x) for n, x in params.items()}


def _ranges(name: str, x: Any) -> Any:
    return jnp.asarray([-2.0, 1.5, -1.5, 2.0], x.dtype) if name.endswith(".ranges") else x


def transformers_model(name: str, *, seed: int = 0) -> Any:
    """Return a feature set with its vision part as a transformers model in float32, with random weights."""
    import torch
    import transformers

    unified = name == "12b"
    cls: Any = (
        transformers.Gemma4UnifiedForConditionalGeneration
        if unified
        else transformers.Gemma4ForConditionalGeneration
    )
    model = cls(cls.config_class(**hf_config(name), attn_implementation="eager")).eval()
    text = tiny.transformers_model(name, seed=seed).model.state_dict()
    rng = np.random.default_rng(seed + 1)
    for key, tensor in model.state_dict().items():
        if (short := key.removeprefix("model.language_model.")) in text:
            value = text[short].numpy()
        elif key == "lm_head.weight":
            value = text["embed_tokens.weight"].numpy()
        elif key.endswith("_min"):
            value = rng.uniform(-2.5, -1.5)
        elif key.endswith("_max"):
            value = rng.uniform(1.5, 2.5)
        elif tensor.ndim == 1:
            value = rng.uniform(0.5, 1.5, tensor.shape)
        else:
            value = rng.normal(0, 1 / math.sqrt(tensor.shape[-1]), tensor.shape)
        tensor.copy_(torch.as_tensor(value))
    return model


def save(name: str, directory: Path, *, seed: int = 0) -> Any:
    """Write a feature set with its vision part as a transformers checkpoint in float32; return the model."""
    model = transformers_model(name, seed=seed)
    model.save_pretrained(directory)
    return model
