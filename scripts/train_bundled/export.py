"""Write the pair in the Hugging Face layout: bfloat16 weights, configs, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxspec.shapes import Params
from jaxspec.training.new import hf_config
from jaxspec.weights.conversion import write_weights
from scripts.train_bundled import recipe

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}"
)


def export(directory: Path, models: dict[str, Params], tokenizer: Tokenizer) -> None:
    """Write `directory`/target, `directory`/dflash and `directory`/mtp."""
    for name in ("target", "dflash", "mtp"):
        shutil.rmtree(directory / name, ignore_errors=True)
        (directory / name).mkdir(parents=True)
    write_weights(recipe.TARGET, models["target"], directory / "target", prefix="model.")
    write_weights(recipe.DFLASH, models["dflash"], directory / "dflash", prefix="")
    write_weights(recipe.MTP, models["mtp"], directory / "mtp", prefix="")
    _dump(target_config(), directory / "target" / "config.json")
    _dump(drafter_config(), directory / "dflash" / "config.json")
    _dump(assistant_config(), directory / "mtp" / "config.json")
    _dump(
        {
            "bos_token_id": recipe.BOS,
            "eos_token_id": recipe.EOS,
            "pad_token_id": recipe.PAD,
            "num_assistant_tokens": recipe.MTP.num_draft_tokens,
        },
        directory / "mtp" / "generation_config.json",
    )
    _dump(
        {
            "bos_token_id": recipe.BOS,
            "eos_token_id": recipe.EOS,
            "pad_token_id": recipe.PAD,
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 64,
            "top_p": 0.95,
        },
        directory / "target" / "generation_config.json",
    )
    tokenizer.save(str(directory / "target" / "tokenizer.json"), pretty=False)
    tokens = dict(zip(("pad", "eos", "bos", "unk", "mask"), recipe.SPECIALS, strict=True))
    _dump(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{kind}_token": token for kind, token in tokens.items()},
            "clean_up_tokenization_spaces": False,
            "model_max_length": recipe.TARGET.max_positions,
            "chat_template": CHAT_TEMPLATE,
        },
        directory / "target" / "tokenizer_config.json",
    )


def target_config() -> dict[str, Any]:
    c = recipe.TARGET
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": c.k_eq_v,
        "bos_token_id": recipe.BOS,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": recipe.EOS,
        "final_logit_softcapping": c.final_logit_softcap,
        "global_head_dim": c.full_head_dim,
        "head_dim": c.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": c.hidden_size,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "layer_types": [f"{kind}_attention" for kind in c.layer_types],
        "max_position_embeddings": c.max_positions,
        "num_attention_heads": c.num_heads,
        "num_global_key_value_heads": c.full_num_kv_heads,
        "num_hidden_layers": c.num_layers,
        "num_key_value_heads": c.num_kv_heads,
        "num_kv_shared_layers": 0,
        "pad_token_id": recipe.PAD,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": c.full_partial_rotary_factor,
                "rope_theta": c.full_rope_theta,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": c.rope_theta, "rope_type": "default"},
        },
        "sliding_window": c.sliding_window,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": c.vocab_size,
        "vocab_size_per_layer_input": c.vocab_size,
    }


def assistant_config() -> dict[str, Any]:
    """Return a config of the released shape: the decoder's part is the target's but for its sizes."""
    c = recipe.MTP
    text = target_config() | {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "layer_types": [f"{kind}_attention" for kind in c.layer_types],
        "num_hidden_layers": c.num_layers,
        "num_kv_shared_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "final_logit_softcapping": None,
        "vocab_size_per_layer_input": 0,
    }
    del text["architectures"]
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": c.backbone_hidden_size,
        "dtype": "bfloat16",
        "text_config": text,
        "tie_word_embeddings": True,
        "use_ordered_embeddings": False,
    }


def drafter_config() -> dict[str, Any]:
    c = recipe.DFLASH
    values, _ = hf_config(c)
    return values | {
        "attention_dropout": 0.0,
        "bos_token_id": recipe.BOS,
        "dflash_config": {
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": list(c.feature_layers),
        },
        "dtype": "bfloat16",
        "eos_token_id": recipe.EOS,
        "rope_scaling": None,
    }


def _dump(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
