"""config.json in both shapes, for every released size, and drafters' configs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from jaxspec.configs.base import ConfigError, GenerationDefaults, from_json, to_json
from jaxspec.configs.dflash import PRESETS as DFLASH_PRESETS
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.mtp import PRESETS as MTP_PRESETS
from jaxspec.configs.mtp import MTPConfig
from jaxspec.configs.qwen3 import Qwen3Config
from tests.checkpoints_convert.hf_layout import ASSISTANTS, DRAFTERS, RELEASED, multimodal
from tests.weights.test_qwen3 import released as qwen3_released


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
    assert GenerationDefaults.from_hf(None, multimodal(RELEASED["12b"])).eos_token_ids == (1, 106)


def test_the_end_of_a_turn_ends_a_reply_without_generation_config():
    """Files of GGUF often lie beside a config.json alone. Its text part does not name the end of a turn."""
    config = multimodal(RELEASED["31b"])
    assert (config["eos_token_id"], config["text_config"]["eos_token_id"]) == ([1, 106], 1)
    assert GenerationDefaults.from_hf(None, config).eos_token_ids == (1, 106)
    del config["eos_token_id"]
    assert GenerationDefaults.from_hf(None, config).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"hidden_activation": "relu"}, "hidden_activation"),
        ({"num_attention_heads": 12}, "multiple"),
        ({"vocab_size": None}, "vocab_size"),
        ({"layer_types": ["sliding_attention"]}, "layer_types lists 1 layers"),
        ({"per_layer_config": {"77": {"head_dim": 512}}}, "77"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Gemma4Config.from_hf(RELEASED["31b"] | change)


# --- keys that no reader reads --------------------------------------------------------------------

WRITTEN_BY_PROGRAMS = {
    "transformers_version": "4.57.3",
    "_name_or_path": "somebody/model",
    "_attn_implementation_autoset": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "unsloth_version": "2026.4.2",
    "auto_map": {"AutoModel": "modeling.Model"},
    "id2label": {"0": "LABEL_0"},
    "bad_words_ids": None,
    "a_key_without_a_value": None,
    "quantization_config": {"quant_method": "fp8"},
    "eos_token_id": [1, 106],
}


def _readers() -> dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]]:
    """Return a good config.json and its reader, by family."""
    return {
        "gemma4": (RELEASED["31b"], Gemma4Config.from_hf),
        "gemma4 with towers": (multimodal(RELEASED["31b"]), Gemma4Config.from_hf),
        "qwen3": (qwen3_released("qwen3-8b"), Qwen3Config.from_hf),
        "dflash": (DRAFTERS["qwen3-8b"], DFlashConfig.from_hf),
        "mtp": (ASSISTANTS["e4b"], MTPConfig.from_hf),
    }


@pytest.mark.parametrize("family", _readers())
def test_keys_that_programs_write_for_themselves_change_nothing(family: str):
    good, from_hf = _readers()[family]
    assert from_hf(good | WRITTEN_BY_PROGRAMS) == from_hf(good)


def test_keys_of_towers_change_nothing():
    towers = {"vision_soft_tokens_per_image": 280, "audio_config": {}, "boi_token_id": 255999}
    good = multimodal(RELEASED["31b"])
    assert Gemma4Config.from_hf(good | towers) == Gemma4Config.from_hf(good)


@pytest.mark.parametrize("family", _readers())
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_scale": 0.5}, r"logit_scale = 0\.5"),
        ({"residual_multiplier": 2, "x": 1}, "residual_multiplier = 2, x = 1, which jaxspec does"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"tie_word_embeddings": "False"}, "tie_word_embeddings"),
        ({"eos_token_id": math.nan}, "eos_token_id is nan; it must be a token id, or a list"),
        ({"attention_dropout": math.inf}, "attention_dropout is inf; it must be a number"),
        ({"use_sliding_window": ["x"]}, "use_sliding_window"),
        ({"sliding_window_pattern": 3}, "sliding_window_pattern = 3"),
    ],
)
def test_unknown_keys_and_nonsense_in_unused_ones_are_refused(
    family: str, change: dict[str, Any], message: str
):
    """They were ignored, and a key may stand for a computation that was left out."""
    good, from_hf = _readers()[family]
    with pytest.raises(ConfigError, match=message):
        from_hf(good | change)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("neutral", "other"),
    [
        ({"use_swa": False}, {"use_swa": True, "swa_window_size": 2048}),
        ({"input_embedding_scale": 1}, {"input_embedding_scale": 0.5}),
        ({"output_multiplier": 1.0}, {"output_multiplier": 0.19612}),
        ({"is_neox_style": True}, {"is_neox_style": False}),
        ({"sample_from_anchor": False}, {"sample_from_anchor": True}),
        ({"logit_scale": 1.0}, {"logit_scale": 2.0}),
        ({"attention_sink_bias": False}, {"attention_sink_bias": True}),
        ({"draft_vocab_size": 151936}, {"draft_vocab_size": 32000}),
        ({"target_hidden_size": 4096}, {"target_hidden_size": 2048}),
        ({}, {"projector_type": "dspark"}),
        ({}, {"logit_scale": True}),  # which is not 1
    ],
)
def test_keys_of_other_methods_are_refused_by_name(
    neutral: dict[str, Any], other: dict[str, Any], nested: bool
):
    """All were ignored: a drafter loaded, and drafted what another method would not."""
    good = DRAFTERS["qwen3-8b"]

    def with_keys(keys: dict[str, Any]) -> dict[str, Any]:
        return good | ({"dflash_config": good["dflash_config"] | keys} if nested else keys)

    assert DFlashConfig.from_hf(with_keys(neutral)) == DFlashConfig.from_hf(good)
    where = r"dflash_config\." if nested else "has "
    with pytest.raises(ConfigError, match=f"{where}{next(iter(other))}"):
        DFlashConfig.from_hf(with_keys(other))


@pytest.mark.parametrize(
    "change",
    [
        {"dflash_config": DRAFTERS["qwen3-8b"]["dflash_config"] | {"block_size": 8}},
        {"is_causal": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    ],
)
def test_two_keys_of_one_field_must_agree(change: dict[str, Any]):
    """The first was taken, without a word."""
    with pytest.raises(ConfigError, match="which are one thing; take the wrong one out"):
        DFlashConfig.from_hf(DRAFTERS["qwen3-8b"] | change)


def test_a_stretched_rope_is_refused_wherever_it_stands():
    plain = {"rope_type": "default", "rope_theta": 1_000_000}
    both = {"rope_parameters": plain, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    for good, from_hf in (_readers()["qwen3"], _readers()["dflash"]):
        with pytest.raises(ConfigError, match="rope_scaling with rope_type 'yarn'; only 'default'"):
            from_hf(good | both)
        with pytest.raises(ConfigError, match=r"rope_parameters\.partial_rotary_factor = 0\.5"):
            from_hf(good | {"rope_parameters": plain | {"partial_rotary_factor": 0.5}})


# --- rotary embeddings of Gemma 4. tests/models has logits ------------------------------------------


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({}, "rope_parameters without sliding_attention"),
        ({"full_attention": None}, "rope_parameters without sliding_attention"),
        ({"rope_type": "default", "rope_theta": 1e4}, r"rope_parameters\.rope_type = 'default'"),
    ],
)
def test_ropes_for_each_type_of_layers_are_needed(rope: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Gemma4Config.from_hf(RELEASED["31b"] | {"rope_parameters": rope})


def test_an_assistant_has_the_ropes_of_its_file():
    good = ASSISTANTS["12b"]
    config = MTPConfig.from_hf(good | {"text_config": good["text_config"] | _rope(factor=4.0)})
    assert config.full_rope_factor == 4
    whole = _rope(rope_type="default")
    config = MTPConfig.from_hf(good | {"text_config": good["text_config"] | whole})
    assert (config.full_partial_rotary_factor, config.full_rope_factor) == (1, 1)


# --- nonsense ------------------------------------------------------------------------------------


def _rope(**full: Any) -> dict[str, Any]:
    released = RELEASED["31b"]["rope_parameters"]
    return {"rope_parameters": released | {"full_attention": released["full_attention"] | full}}


PARTIAL = "rope_parameters.full_attention.partial_rotary_factor"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": -1}, r"config\.json: hidden_size is -1; it must be 1 or more"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be 1 or more"),
        ({"hidden_size": [5376]}, r"hidden_size is \[5376\]; it must be a whole number"),
        ({"hidden_size": "5376"}, "hidden_size is '5376'; it must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True; it must be a whole number"),
        ({"hidden_size": 5376.0}, r"hidden_size is 5376\.0; it must be a whole number"),
        ({"hidden_size": 2**60}, r"hidden_size is \d+; it must be 1 or more, and below 2\*\*31"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be from 1 to 512"),
        ({"head_dim": 255}, "head_dim is 255; it must be even"),
        ({"layer_types": []}, "layer_types lists 0 layers"),
        ({"layer_types": ["full"] * 60}, r"layer_types has \['full'\]; expected"),
        ({"layer_types": [5] * 60}, r"layer_types = \[5, 5, .*it must be a list of words"),
        ({"sliding_window": -512}, "sliding_window is -512; it must be 1 or more"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must be from 1e-30 to 1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; it must be a number"),
        ({"final_logit_softcapping": math.inf}, "final_logit_softcapping is inf; it must be from"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0; .*; null: none"),
        (_rope(rope_theta=math.inf), r"full_attention\.rope_theta is inf; it must be from 1 to"),
        (_rope(partial_rotary_factor=7), f"{PARTIAL} is 7; it must be from 0.001 to 1"),
        (_rope(rope_type="default", partial_rotary_factor="x"), "partial_rotary_factor is 'x'; it"),
        (_rope(factor=0), r"full_attention\.factor is 0; it must be from 0\.001 to 1e6"),
        (_rope(rope_type="default", factor=4.0), r"full_attention\.factor = 4; only \[1\.0\]"),
        (_rope(rope_type="yarn"), r"full_attention\.rope_type = 'yarn'; only"),
        (
            _rope(attention_factor=2),
            r"full_attention\.attention_factor = 2, which jaxspec does not",
        ),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\]; it must be an object"),
        (
            {"num_kv_shared_layers": 60},
            "num_kv_shared_layers is 60; it must be below the 60 layers",
        ),
        ({"attention_k_eq_v": "yes"}, "attention_k_eq_v is 'yes'; it must be true or false"),
        ({"attention_bias": 0}, "attention_bias = 0; only"),
        ({"hidden_size": "x" * 10**6}, r"hidden_size is 'xxx.{40,60}xxx'; it must be"),
    ],
)
def test_nonsense_is_refused_by_key_and_range(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        Gemma4Config.from_hf(RELEASED["31b"] | change)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target_layer_ids": [1, 9.5]},
            r"target_layer_ids\[1\] is 9\.5; it must be a whole number",
        ),
        ({"target_layer_ids": [-1]}, r"target_layer_ids\[0\] is -1; it must be from 0"),
        ({"target_layer_ids": []}, "target_layer_ids has 0 entries; expected 1 or more"),
        ({"target_layer_ids": [40]}, "do not fit a target of 36 layers"),
        ({"target_layer_ids": 5}, "target_layer_ids is 5; it must be a list"),
        ({"mask_token_id": 151936}, r"mask_token_id has \[151936\], outside the vocabulary"),
        ({"causal": [True]}, "causal names 1 layers, layer_types 5"),
        ({"causal": ["no"] * 5}, r"causal\[0\] is 'no'; it must be true or false"),
        ({"block_size": 10**9}, "block_size is 1000000000; it must be from 2 to 1,000"),
    ],
)
def test_nonsense_of_a_drafter_is_refused_by_key_and_range(change: dict[str, Any], message: str):
    good = DRAFTERS["qwen3-8b"]
    with pytest.raises(ConfigError, match=message):
        DFlashConfig.from_hf(
            {key: value for key, value in good.items() if key not in change}
            | {"dflash_config": good["dflash_config"] | change}
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token_id": [1.5]}, r"eos_token_id\[0\] is 1\.5; it must be a whole number"),
        ({"eos_token_id": "1"}, "eos_token_id is '1'; it must be a list"),
        ({"suppress_tokens": [True]}, r"suppress_tokens\[0\] is True"),
        ({"top_p": 7}, r"generation_config\.json: top_p is 7; it must be in \(0, 1\]"),
        ({"temperature": math.nan}, "temperature is nan; it must be from 0 to 1e6"),
        ({"temperature": 10**400}, "temperature is 1000.*; it must be a number"),
        ({"top_k": 10**400}, "top_k is 1000.*; it must be 0 or more; 0: off, and below"),
        ({"do_sample": "no"}, "do_sample is 'no'; it must be true or false"),
    ],
)
def test_nonsense_of_generation_config_is_refused_by_key_and_range(
    change: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        GenerationDefaults.from_hf(change, RELEASED["31b"])


def test_a_temperature_of_0_stays_0():
    """It was read as 1, because 0 counted as absent."""
    generation = {"do_sample": True, "temperature": 0.0}
    assert GenerationDefaults.from_hf(generation, RELEASED["31b"]).temperature == 0


def test_ids_outside_the_vocabulary_are_refused():
    defaults = GenerationDefaults.from_hf({"suppress_tokens": [3, 40]}, RELEASED["31b"])
    defaults.check_fits(41)
    with pytest.raises(ConfigError, match=r"suppress_tokens has \[40\], outside .* 0 to 39"):
        defaults.check_fits(40)
    suppress = {"suppress_tokens": [262_144]}
    with pytest.raises(ConfigError, match=r"suppress_tokens has \[262144\], outside"):
        MTPConfig.from_hf(ASSISTANTS["12b"], suppress)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", -1, "hidden_size is -1"),
        ("hidden_size", 5376.5, "hidden_size is 5376.5; it must be a whole number"),
        ("layer_types", ["sliding", "full"], r"layer_types is \['sliding', 'full'\]; .* a tuple"),
        ("layer_types", ("sliding", "half"), r"layer_types\[1\] is 'half'; it must be sliding or"),
        ("rope_theta", None, "rope_theta is None; it must be a number"),
        ("k_eq_v", 1, "k_eq_v is 1; it must be true or false"),
    ],
)
def test_configs_made_in_python_are_checked_too(field: str, value: Any, message: str):
    """By the config itself: the annotations, which only tests enforce, would refuse some before."""
    config = copy.copy(TARGET_PRESETS["31b"])
    object.__setattr__(config, field, value)
    with pytest.raises(ConfigError, match=message):
        config.__post_init__()
    stored = to_json(TARGET_PRESETS["31b"]) | {field: value if value is not None else "x"}
    if not isinstance(value, list):  # which is how a manifest has a tuple
        with pytest.raises(ConfigError, match=field):
            from_json(Gemma4Config, stored)


def test_a_config_is_shown_in_one_line():
    shown = repr(TARGET_PRESETS["31b"])
    assert "layer_types=<50 sliding + 10 full>" in shown
    assert "hidden_size=5376" in shown
    for config in (*TARGET_PRESETS.values(), *DFLASH_PRESETS.values(), *MTP_PRESETS.values()):
        assert len(repr(config)) < 500
        assert "\n" not in repr(config)
