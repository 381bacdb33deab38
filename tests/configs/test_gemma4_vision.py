"""The vision part of config.json: released sizes, what is refused, what has none."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.configs.base import ConfigError, from_json, to_json
from jaxspec.configs.gemma4_vision import PRESETS, Gemma4VisionConfig
from jaxspec.registry import recognise_vision
from jaxspec.weights.define import model_def_of
from tests.checkpoints_convert.hf_layout import ASSISTANTS, RELEASED, multimodal


def read(size: str, **changes: Any) -> Gemma4VisionConfig | None:
    config = multimodal(RELEASED[size])
    return Gemma4VisionConfig.from_hf(config | {"vision_config": config["vision_config"] | changes})


@pytest.mark.parametrize("size", RELEASED)
def test_presets_are_the_released_files(size: str) -> None:
    assert read(size) == PRESETS[size]
    assert from_json(Gemma4VisionConfig, to_json(PRESETS[size])) == PRESETS[size]
    recognised = recognise_vision(multimodal(RELEASED[size]))
    assert recognised is not None
    assert recognised[1] == PRESETS[size]


@pytest.mark.parametrize(
    ("size", "millions"),
    [("e2b", 167.4 + 1.2), ("e4b", 167.4 + 2.0), ("12b", 49.9), ("26b-a4b", 572.7), ("31b", 575.7)],
)
def test_numbers_of_parameters(size: str, millions: float) -> None:
    """As many as in transformers, at the real sizes."""
    weights = model_def_of(PRESETS[size], "bfloat16").abstract_params()
    count = sum(weight.size for weight in weights.values()) / 1e6
    assert count == pytest.approx(millions, abs=0.15)


def test_transformers_writes_its_own_word_for_the_rotary_embedding() -> None:
    assert (
        read("31b", rope_parameters={"rope_theta": 100.0, "rope_type": "axial"}) == PRESETS["31b"]
    )


@pytest.mark.parametrize(
    ("size", "change", "message"),
    [
        (
            "31b",
            {"model_type": "siglip"},
            r"vision_config.model_type 'siglip'; expected one of gemma4",
        ),
        ("31b", {"hidden_activation": "silu"}, r"vision_config.hidden_activation = 'silu'"),
        ("31b", {"attention_bias": True}, r"vision_config.attention_bias = True"),
        ("31b", {"num_key_value_heads": 4}, r"4 key and value heads for 16 heads"),
        (
            "31b",
            {"layer_scale": 0.5},
            r"vision_config.layer_scale = 0.5, which jaxspec does not know",
        ),
        ("31b", {"head_dim": 70}, "head_dim is 70; expected a multiple of 4"),
        ("31b", {"num_hidden_layers": 0}, r"num_hidden_layers is 0"),
        ("31b", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "linear"}}, "rope_type"),
        ("31b", {"rope_parameters": {"rope_theta": 100.0, "factor": 2.0}}, "factor = 2,"),
        (
            "31b",
            {"default_output_length": 300},
            "default_output_length is 300; it must be one of 70",
        ),
        ("12b", {"model_patch_size": 32}, r"model_patch_size = 32; only \[48\]"),
        ("12b", {"output_proj_dims": 768}, r"output_proj_dims = 768; only \[3840\]"),
        ("12b", {"standardize": True}, r"vision_config.standardize = True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    size: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(size, **change)


def test_text_models_and_assistants_have_none() -> None:
    released = multimodal(RELEASED["e2b"])
    for config in (RELEASED["e2b"], released | {"vision_config": None}, ASSISTANTS["e2b"]):
        assert recognise_vision(config) is None
