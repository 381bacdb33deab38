"""Qwen3's checkpoints: configs and their errors, both directions, z-lab's drafters for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert.rules import TensorSpec, match
from jaxspec.configs.base import ConfigError, GenerationDefaults, from_json, to_json
from jaxspec.configs.dflash import PRESETS as DFLASH_PRESETS
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.qwen3 import PRESETS, Qwen3Config
from jaxspec.registry import family_of, presets, recognise
from jaxspec.weights.bridge import from_hf_names, to_hf_names
from jaxspec.weights.conversion import (
    convert,
    open_hf_source,
    parameter_shapes,
    to_hf,
    write_weights,
)
from jaxspec.weights.loading import CheckpointError, load_drafter, load_target
from jaxspec.weights.manifest import Manifest
from tests.checkpoints_convert import hf_layout
from tests.checkpoints_convert.hf_layout import Shapes
from tests.tiny_qwen3 import FEATURE_SETS, hf_config

_SIZES = {  # layers, hidden, MLP, heads, tied; and billions of parameters
    "qwen3-0.6b": ((28, 1024, 3072, 16, True), 0.596),
    "qwen3-1.7b": ((28, 2048, 6144, 16, True), 1.721),
    "qwen3-4b": ((36, 2560, 9728, 32, True), 4.022),
    "qwen3-8b": ((36, 4096, 12288, 32, False), 8.191),
    "qwen3-14b": ((40, 5120, 17408, 40, False), 14.768),
    "qwen3-32b": ((64, 5120, 25600, 64, False), 32.762),
}
GENERATION = {
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}


def released(size: str) -> dict[str, Any]:
    """Return the config.json of a released size, written down apart from our presets."""
    (layers, hidden, mlp, heads, tied), _ = _SIZES[size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": mlp,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def drafter_config(hidden: int, mlp: int, target_layers: int) -> dict[str, Any]:
    """Return the config.json of a drafter in z-lab's layout, without layer types and causality."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "num_target_layers": target_layers,
        "num_hidden_layers": 5,
        "max_window_layers": 5,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
    }


def shapes_of(c: dict[str, Any], *, head: bool | None = None) -> Shapes:
    """Return every tensor of a target. `head`: whether it stores one; None: unless it is tied."""
    d = c["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"] if head is None else head:
        shapes["lm_head.weight"] = (c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        layer = hf_layout.qwen3_layer_shapes(c)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return {n: a for f in directory.glob("*.safetensors") for n, a in load_file(f).items()}


def bits(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


# --- configs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", _SIZES)
def test_presets_are_the_released_files(size: str):
    assert Qwen3Config.from_hf(released(size)) == PRESETS[size]
    assert from_json(Qwen3Config, to_json(PRESETS[size])) == PRESETS[size]
    assert recognise(released(size)).name == "qwen3"


def test_presets_are_all_there_and_have_names_of_their_own():
    assert list(PRESETS) == list(_SIZES)
    assert set(PRESETS) < set(presets())


@pytest.mark.parametrize("size", _SIZES)
def test_released_sizes_have_every_parameter_and_no_more(size: str):
    """Real shapes, no data: the whole table of every size fits."""
    stored = shapes_of(released(size))
    config, billions = PRESETS[size], _SIZES[size][1]
    shapes = parameter_shapes(config)
    assert sum(int(np.prod(s)) for s in shapes.values()) / 1e9 == pytest.approx(billions, abs=6e-4)
    tensors = {n: TensorSpec(s, "BF16") for n, s in stored.items()}
    plan = match(family_of(config).rules(config, shapes), shapes, tensors, size)
    assert {name for fill in plan.fills for name in fill.sources} == set(tensors)
    assert not plan.skipped


def test_generation_defaults_are_the_releases():
    defaults = GenerationDefaults.from_hf(GENERATION, released("qwen3-8b"))
    assert defaults == GenerationDefaults((151645, 151643), (), 0.6, 20, 0.95)
    assert GenerationDefaults.from_hf(None, released("qwen3-8b")).eos_token_ids == (151645,)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_scaling": {"type": "default"}},
        {"layer_types": ["full_attention"] * 36},
        {"sliding_window": 4096},  # transformers' default, which says nothing by itself
        {"architectures": None},
        {"attention_bias": None},
    ],
)
def test_shapes_of_config_that_say_the_same(change: dict[str, Any]):
    assert Qwen3Config.from_hf(released("qwen3-8b") | change) == PRESETS["qwen3-8b"]


def test_theta_and_positions_of_later_releases():
    """The 2507 variants differ in nothing else."""
    config = Qwen3Config.from_hf(
        released("qwen3-4b") | {"rope_theta": 5_000_000, "max_position_embeddings": 262144}
    )
    assert (config.rope_theta, config.max_positions) == (5e6, 262144)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2'; a dense Qwen3 target has qwen3"),
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            r"\['Qwen3ForSequenceClassification'\]; a Qwen3 target has Qwen3ForCausalLM",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'; only \['silu'\]"),
        ({"attention_bias": True}, "attention_bias = True; only"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"use_sliding_window": True}, "only full attention is supported for Qwen3"),
        ({"layer_types": ["sliding_attention"] * 36}, "only full attention is supported"),
        ({"rope_scaling": YARN}, "rope_type 'yarn'; only 'default' .* Take rope_scaling out"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_parameters": YARN | {"rope_theta": 1e6}}, "rope_type 'yarn'"),
        ({"rope_theta": None}, "has no rope_parameters.rope_theta or .* or rope_theta"),
        ({"num_key_value_heads": 5}, "num_heads 32 is not a multiple of 5 kv heads"),
        ({"num_key_value_heads": 0}, "config.json: num_key_value_heads is 0; it must be 1 or more"),
        ({"head_dim": 127}, "head_dim is 127; it must be even"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be from 1 to 512"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be from 1e-30 to 1"),
        ({"rope_theta": -1.0}, "rope_theta is -1; it must be from 1 to 1e20"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Qwen3Config.from_hf(released("qwen3-8b") | change)


# --- both directions ------------------------------------------------------------------------------


@pytest.fixture(params=FEATURE_SETS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def source(name: str, tmp_path: Path) -> Path:
    """A checkpoint in several shards."""
    config = hf_config(name)
    hf_layout.write(tmp_path / "hf", config, shapes_of(config), shard_bytes=30_000)
    generation = GENERATION | {"eos_token_id": [5, 3]}
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "hf/tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    return tmp_path / "hf"


def test_there_and_back(name: str, source: Path, tmp_path: Path):
    report = convert(source, tmp_path / "ours")
    assert report.kind == Manifest.read(tmp_path / "ours").kind == "qwen3"
    assert report.skipped == {}
    to_hf(tmp_path / "ours", tmp_path / "back")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert set(before) == set(after)
    assert ("lm_head.weight" in after) == (name == "qwen3-untied")
    for tensor, array in before.items():
        assert array.dtype == after[tensor].dtype
        np.testing.assert_array_equal(bits(array), bits(after[tensor]))
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()
    for dtype in ("float32", "bfloat16"):
        ours = load_target(str(tmp_path / "ours"), dtype=dtype)
        theirs = load_target(str(source), dtype=dtype)
        assert ours.config == theirs.config == Qwen3Config.from_hf(hf_config(name))
        assert ours.generation == theirs.generation
        assert ours.generation is not None
        assert ours.generation.top_k == 20
        assert set(ours.params) == set(theirs.params)
        for path, array in ours.params.items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(theirs.params[path]), path)
        ours.model_def.bind(ours.params)


def test_weights_land_where_the_forward_pass_reads_them(name: str, source: Path):
    """The layouts by hand, on a layer with several query heads for each kv head."""
    tensors = {n: a.astype(np.float32) for n, a in tensors_of(source).items()}
    model = load_target(str(source), dtype="float32")
    c = model.config
    params = {n: np.asarray(x) for n, x in model.params.items()}
    g, h = c.num_heads // c.num_kv_heads, c.head_dim
    qkv = params["layers.1.attention.qkv"]
    assert qkv.shape == (c.hidden_size, c.num_kv_heads, g + 2, h)
    for head in range(c.num_heads):
        rows = tensors["model.layers.1.self_attn.q_proj.weight"][head * h : (head + 1) * h]
        np.testing.assert_array_equal(qkv[:, head // g, head % g], rows.T)
    for head in range(c.num_kv_heads):
        for slot, letter in ((g, "k"), (g + 1, "v")):
            weight = tensors[f"model.layers.1.self_attn.{letter}_proj.weight"]
            np.testing.assert_array_equal(qkv[:, head, slot], weight[head * h : (head + 1) * h].T)
    gate_up = params["layers.2.mlp.gate_up"]
    for slot, letter in enumerate(("gate", "up")):
        weight = tensors[f"model.layers.2.mlp.{letter}_proj.weight"]
        np.testing.assert_array_equal(gate_up[:, slot], weight.T)
    np.testing.assert_array_equal(params["table"], tensors["model.embed_tokens.weight"])
    if name == "qwen3-untied":
        np.testing.assert_array_equal(params["head_table"], tensors["lm_head.weight"])
        assert not np.array_equal(params["head_table"], params["table"])


def test_weights_of_ours_are_written_under_their_names(name: str, source: Path, tmp_path: Path):
    """What a training program needs: files again, and the same names for arrays in memory."""
    model = load_target(str(source), dtype="bfloat16")
    (tmp_path / "out").mkdir()
    write_weights(model.config, model.params, tmp_path / "out", prefix="model.")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    named = to_hf_names(model.params, model.config)
    assert set(before) == set(after) == set(named)
    for tensor, array in before.items():
        np.testing.assert_array_equal(bits(array), bits(after[tensor]))
        np.testing.assert_array_equal(bits(array), bits(np.asarray(named[tensor])))
    back = from_hf_names(named, model.config)
    assert set(back) == set(model.params)


def test_names_without_their_prefix_are_found(name: str, source: Path):
    """As a model without its head is saved; the head's own name has no prefix anyway."""
    model = load_target(str(source), dtype="bfloat16")
    bare = to_hf_names(model.params, model.config, prefix="")
    assert "embed_tokens.weight" in bare
    assert ("lm_head.weight" in bare) == (name == "qwen3-untied")
    back = from_hf_names(bare, model.config)
    for path, array in model.params.items():
        np.testing.assert_array_equal(bits(np.asarray(array)), bits(np.asarray(back[path])))


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path):
    config = hf_config("qwen3-tied")
    hf_layout.write(tmp_path / "hf", config, shapes_of(config, head=True))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        load_target(str(tmp_path / "hf"), dtype="float32")
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert open_hf_source(tmp_path / "hf").plan.skipped == {"lm_head.weight": "tied head"}


def test_what_is_missing_and_what_is_not_known_is_listed(tmp_path: Path):
    config = hf_config("qwen3-untied")
    shapes = shapes_of(config, head=False)
    shapes["model.layers.0.self_attn.q_proj.bias"] = (72,)
    shapes["model.layers.1.mlp.up_proj.weight"] = (80, 72)
    hf_layout.write(tmp_path / "hf", config, shapes)
    with pytest.raises(CheckpointError) as refused:
        load_target(str(tmp_path / "hf"), dtype="float32")
    message = str(refused.value)
    assert "3 problems" in message
    assert "lm_head.weight: missing" in message
    assert "model.layers.0.self_attn.q_proj.bias: not known" in message
    assert "model.layers.1.mlp.up_proj.weight: shape [80, 72], expected [88, 72]" in message


def test_a_target_is_not_taken_for_a_drafter(source: Path):
    with pytest.raises(CheckpointError, match="is a target; expected a DFlash drafter"):
        load_drafter(str(source), dtype="float32")


# --- z-lab's drafters -----------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "hidden", "mlp"), [("4b", 2560, 9728), ("8b", 4096, 12288)])
def test_released_drafters_are_presets_and_fit_their_targets(size: str, hidden: int, mlp: int):
    """They say the target's model_type. They do not say layer types, causality, scale, soft cap."""
    values = drafter_config(hidden, mlp, 36)
    assert recognise(values).name == "dflash"
    config = DFlashConfig.from_hf(values)
    assert config == DFLASH_PRESETS[f"qwen3-{size}"]
    assert config.layer_types == ("full",) * 5
    assert config.causal == (False,) * 5
    assert (config.block_size, config.mask_token_id) == (16, 151669)
    assert config.feature_layers == (1, 9, 17, 25, 33)
    assert config.final_logit_softcap is None
    config.check_fits(PRESETS[f"qwen3-{size}"])
    with pytest.raises(ConfigError, match="hidden_size: drafter"):
        config.check_fits(PRESETS["qwen3-14b"])


def test_feature_layers_that_no_file_names_are_the_released_ones():
    values = drafter_config(4096, 12288, 36)
    del values["dflash_config"]["target_layer_ids"]
    assert DFlashConfig.from_hf(values).feature_layers == (1, 9, 17, 25, 33)


def test_windows_of_drafters_come_from_layer_types():
    """By transformers a drafter would turn full silently: it wants `use_sliding_window` as well."""
    types = ["sliding_attention"] * 4 + ["full_attention"]
    windows = {"layer_types": types, "sliding_window": 2048, "use_sliding_window": False}
    config = DFlashConfig.from_hf(drafter_config(4096, 12288, 36) | windows)
    assert config.layer_types == ("sliding",) * 4 + ("full",)
    assert (config.sliding_window, config.causal) == (2048, (True,) * 4 + (False,))
    no_types = {"sliding_window": 2048, "use_sliding_window": True}
    with pytest.raises(ConfigError, match="use_sliding_window = True but no layer_types"):
        DFlashConfig.from_hf(drafter_config(4096, 12288, 36) | no_types)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_drafters_with_stretched_positions_are_refused(key: str):
    """The one for gpt-oss has YaRN."""
    values = drafter_config(4096, 12288, 36) | {"rope_scaling": {key: "yarn", "factor": 32.0}}
    with pytest.raises(ConfigError, match="rope_scaling with rope_type 'yarn'"):
        DFlashConfig.from_hf(values)


def test_drafter_there_and_back(tmp_path: Path):
    small = {"hidden_size": 72, "intermediate_size": 88, "vocab_size": 160, "num_target_layers": 3}
    small |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    small |= {"num_hidden_layers": 2}
    small |= {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1]}}
    config = drafter_config(72, 88, 3) | small
    hf_layout.write(tmp_path / "hf", config, hf_layout.drafter_shapes(config))
    assert convert(tmp_path / "hf", tmp_path / "ours").kind == "dflash"
    to_hf(tmp_path / "ours", tmp_path / "back")
    before, after = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back")
    assert set(before) == set(after)
    for tensor, array in before.items():
        np.testing.assert_array_equal(bits(array), bits(after[tensor]))
    loaded = load_drafter(str(tmp_path / "ours"), dtype="float32")
    assert loaded.config == DFlashConfig.from_hf(config)
    loaded.config.check_fits(Qwen3Config.from_hf(hf_config("qwen3-untied")))
