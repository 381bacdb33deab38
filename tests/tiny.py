"""Tiny models with the features of every released size, for tests.

`hf_config` is a config.json of the released shape and the source of all else: `config` is what we read
from it, `target` adds random weights of our own (no torch), `transformers_model` is the same architecture
in transformers, with weights of its own, and `save` writes that as a checkpoint.

In all of them no norm, scalar or scale is 1, since that would hide one that is forgotten; attention and
routing are far from uniform; logits reach into the bend of the soft cap. Attention counts for more than
the token itself, since a model whose head is its embedding else repeats itself for ever.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.models.gemma4 import Gemma4
from jaxspec.shapes import Params
from jaxspec.weights.model_def import ModelDef

FEATURE_SETS = ("e2b", "e4b", "12b", "26b-a4b", "31b")
VOCAB_SIZE = 160
WINDOW = 8

_FULL, _SLIDING = "full_attention", "sliding_attention"
_COMMON: dict[str, Any] = dict(
    model_type="gemma4_text",
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=64,
    head_dim=16,
    global_head_dim=32,
    sliding_window=WINDOW,
    max_position_embeddings=4096,
    final_logit_softcapping=30.0,
    hidden_size_per_layer_input=0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    eos_token_id=1,
    bos_token_id=2,
    pad_token_id=0,
)
_PER_SET: dict[str, dict[str, Any]] = {
    # The K/V donors are layers 1 and 2: neither the first of their type nor the readers' neighbours.
    "e2b": dict(
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        num_attention_heads=4,
        num_key_value_heads=1,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "e4b": dict(
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "12b": dict(
        model_type="gemma4_unified_text",
        layer_types=[_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        use_bidirectional_attention="vision",
    ),
    "26b-a4b": dict(
        layer_types=[_SLIDING, _FULL, _SLIDING, _FULL],
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=24,
        use_bidirectional_attention="vision",
    ),
    "31b": dict(
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        use_bidirectional_attention="vision",
    ),
}
SUPPRESS_TOKENS = {"12b": (7, 11)}
"""Ids whose embeddings are large, as in the released 12B: unless suppressed, they win greedy decoding."""


def hf_config(name: str) -> dict[str, Any]:
    """Return the config.json of a feature set, in the shape that the releases have."""
    values = {**_COMMON, **_PER_SET[name]}
    return {**values, "num_hidden_layers": len(values["layer_types"])}


def hf_assistant_config(name: str) -> dict[str, Any]:
    """Return the config.json of a feature set's MTP assistant: with centroids where the released one has them."""
    of_target = hf_config(name)
    text = {k: v for k, v in of_target.items() if k in _COMMON or "key_value_heads" in k}
    text |= dict(
        hidden_size=32,
        intermediate_size=40,
        layer_types=[_SLIDING, _SLIDING, _SLIDING, _FULL],
        num_hidden_layers=4,
        num_kv_shared_layers=4,
        num_attention_heads=8,
        attention_k_eq_v=of_target.get("attention_k_eq_v", False),
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        final_logit_softcapping=None,
    )
    return dict(
        model_type="gemma4_unified_assistant" if name == "12b" else "gemma4_assistant",
        text_config=text,
        backbone_hidden_size=of_target["hidden_size"],
        use_ordered_embeddings=name in ("e2b", "e4b"),
        num_centroids=16,
        centroid_intermediate_top_k=3,
    )


def config(name: str) -> Gemma4Config:
    """Return our config of a feature set."""
    return Gemma4Config.from_hf(hf_config(name))


def target(name: str, *, seed: int = 0) -> tuple[ModelDef, Params]:
    """Return a float32 target of a feature set with random weights."""
    model_def = ModelDef(Gemma4, config(name), "float32")
    return model_def, random_params(model_def, seed)


def random_params(model_def: ModelDef, seed: int) -> Params:
    """Return random weights for tests; unlike `model_def.random_params` they compile nothing."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "token_ordering":
            return rng.permutation(shape[0])
        if len(shape) == 1:
            return rng.uniform(0.5, 1.5, shape) * _size(name, "final_norm", "post_attention_norm")
        if name.endswith(".router"):
            return rng.normal(0, 1.5, shape)
        if name in ("embedder.table", "head"):
            return rng.normal(0, _embedding_spread(shape), shape)
        if name.endswith("table") or ".experts." in name:
            fan_in = shape[1]
        else:
            fan_in = math.prod(shape[:-1]) if name.endswith(".out") else shape[0]
        return rng.normal(0, fan_in**-0.5, shape)

    # Cast on the host: `jnp.asarray` compiles a program for each shape.
    return {
        name: jax.device_put(draw(name, spec.shape).astype(np.float32).astype(spec.dtype))
        for name, spec in sorted(model_def.abstract_params().items())
    }


def transformers_model(name: str, *, seed: int = 0) -> Any:
    """Return a feature set as a transformers model in float32, with random weights like ours."""
    import torch
    import transformers

    unified = name == "12b"
    cls = transformers.Gemma4UnifiedForCausalLM if unified else transformers.Gemma4ForCausalLM
    model = cls(cls.config_class(**hf_config(name), attn_implementation="eager")).eval()
    model.generation_config.suppress_tokens = list(SUPPRESS_TOKENS.get(name, ())) or None
    rng = np.random.default_rng(seed)
    for key, tensor in model.state_dict().items():
        if tensor.ndim == 1:
            size = _size(key, "model.norm.weight", "post_attention_layernorm.weight")
            value = rng.uniform(0.5, 1.5, tensor.shape) * size
        elif key in ("model.embed_tokens.weight", "lm_head.weight"):  # the same array
            value = rng.normal(0, _embedding_spread(tensor.shape), tensor.shape)
        else:
            spread = 1.5 if "router" in key else 1 / math.sqrt(tensor.shape[-1])
            value = rng.normal(0, spread, tensor.shape)
        tensor.copy_(torch.from_numpy(value))
    model.state_dict()["model.embed_tokens.weight"][list(SUPPRESS_TOKENS.get(name, ()))] *= 4
    return model


def save_assistant(name: str, directory: Path, *, seed: int = 1) -> Any:
    """Write a feature set's assistant as a transformers checkpoint in float32; return the model."""
    import torch
    import transformers

    unified = name == "12b"
    cls = (
        transformers.Gemma4UnifiedAssistantForCausalLM
        if unified
        else transformers.Gemma4AssistantForCausalLM
    )
    model = cls(cls.config_class(**hf_assistant_config(name), attn_implementation="eager")).eval()
    rng = np.random.default_rng(seed)
    for key, tensor in model.state_dict().items():
        if key.endswith("token_ordering"):
            value = rng.permutation(tensor.shape[0])
        elif tensor.ndim == 1:
            value = rng.uniform(0.5, 1.5, tensor.shape)
        else:
            value = rng.normal(0, 1 / math.sqrt(tensor.shape[-1]), tensor.shape)
        tensor.copy_(torch.from_numpy(value))
    model.save_pretrained(directory)
    return model


def _size(name: str, final_norm: str, attention_norm: str) -> float:
    """Return the mean of a norm or scale: logits get a standard deviation of about 6."""
    return 12 if name == final_norm else 2 if name.endswith(attention_norm) else 1


def _embedding_spread(shape: tuple[int, ...]) -> float:
    return 0.5 / math.sqrt(shape[1])


def save(name: str, directory: Path, *, seed: int = 0) -> Any:
    """Write a feature set as a transformers checkpoint in float32; return the model."""
    model = transformers_model(name, seed=seed)
    model.save_pretrained(directory)
    return model
