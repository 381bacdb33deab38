"""config.json in both shapes, for every released size, and drafters' configs."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.configs.base import ConfigError, GenerationDefaults, from_json, to_json
from jaxspec.configs.dflash import PRESETS as DFLASH_PRESETS
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.mtp import PRESETS as MTP_PRESETS
from jaxspec.configs.mtp import MTPConfig
from tests.convert.hf_layout import ASSISTANTS, DRAFTERS, RELEASED, multimodal


def as_transformers_saves(text: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a released text config: overrides by layer index, padded to the width of the last."""
    saved = dict(text)
    head_dim, kv_heads = saved.pop("global_head_dim"), saved.pop("num_global_key_value_heads")
    override = {"head_dim": head_dim}
    if saved["attention_k_eq_v"]:
        override["num_key_value_heads"] = kv_heads
    width = len(str(len(text["layer_types"]) - 1))
    saved["per_layer_config"] = {
        str(i).zfill(width): dict(override)
        for i, kind in enumerate(text["layer_types"])
        if kind == "full_attention"
    }
    return saved


@pytest.mark.parametrize("size", RELEASED)
def test_presets_are_the_released_files(size: str):
    assert Gemma4Config.from_hf(RELEASED[size]) == TARGET_PRESETS[size]
    assert Gemma4Config.from_hf(multimodal(RELEASED[size])) == TARGET_PRESETS[size]


@pytest.mark.parametrize("size", RELEASED)
def test_both_shapes_are_the_same_model(size: str):
    saved = as_transformers_saves(RELEASED[size])
    assert any(key.startswith("0") for key in saved["per_layer_config"])
    assert Gemma4Config.from_hf(saved) == TARGET_PRESETS[size]


@pytest.mark.parametrize("size", RELEASED)
def test_configs_survive_a_manifest(size: str):
    config = TARGET_PRESETS[size]
    assert from_json(Gemma4Config, to_json(config)) == config


def test_per_layer_config_wins_over_the_released_keys():
    config = Gemma4Config.from_hf(RELEASED["31b"] | {"per_layer_config": {}})
    assert config.full_head_dim == config.head_dim == 256
    assert config.full_num_kv_heads == config.num_kv_heads == 16


def test_zlab_drafter_is_the_preset():
    assert DFlashConfig.from_hf(DRAFTERS["26b-a4b"]) == DFLASH_PRESETS["26b-a4b"]


def test_qwen_drafter_loads_all_full_and_not_causal():
    config = DFlashConfig.from_hf(DRAFTERS["qwen3-8b"])
    assert config.layer_types == ("full",) * 5
    assert config.causal == (False,) * 5
    assert (config.block_size, config.mask_token_id) == (16, 151669)
    assert config.feature_layers == (1, 9, 17, 25, 33)
    assert (config.final_logit_softcap, config.scale_embeddings) == (None, False)
    assert from_json(DFlashConfig, to_json(config)) == config


@pytest.mark.parametrize("size", ASSISTANTS)
def test_assistants_are_presets_in_both_shapes(size: str):
    released = ASSISTANTS[size]
    generation = {"suppress_tokens": [258883, 258882]} if size == "12b" else None
    saved = released | {"text_config": as_transformers_saves(released["text_config"])}
    assert set(saved["text_config"]["per_layer_config"]) == {"3"}
    for config in (released, saved):
        assert MTPConfig.from_hf(config, generation) == MTP_PRESETS[size]
    assert from_json(MTPConfig, to_json(MTP_PRESETS[size])) == MTP_PRESETS[size]


def test_suppressed_tokens_come_from_generation_config():
    generation = {"eos_token_id": [1, 106, 50], "suppress_tokens": [258883, 258882], "top_k": 64}
    defaults = GenerationDefaults.from_hf(generation, multimodal(RELEASED["12b"]))
    assert defaults.eos_token_ids == (1, 106, 50)
    assert defaults.suppress_tokens == (258883, 258882)
    assert GenerationDefaults.from_hf(None, multimodal(RELEASED["12b"])).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"hidden_activation": "relu"}, "hidden_activation"),
        ({"quantization_config": {"quant_method": "x"}}, "quantised"),
        ({"num_attention_heads": 12}, "multiple"),
        ({"vocab_size": None}, "vocab_size"),
        ({"layer_types": ["sliding_attention"]}, "layer_types lists 1 layers"),
        ({"per_layer_config": {"77": {"head_dim": 512}}}, "77"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Gemma4Config.from_hf(RELEASED["31b"] | change)
