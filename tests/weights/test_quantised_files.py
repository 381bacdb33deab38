"""Checkpoints that come quantised: every format and layout, and files that contradict their config.

`quantised_layout` writes them, apart from our readers. What is loaded must be the numbers that codes and
scales stand for.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.quantised.quantization_config import read_quantization_config
from jaxspec.options import FieldError
from jaxspec.quantised import QuantisedArray
from jaxspec.quantised.array import named_arrays
from jaxspec.weights.bridge import from_hf_names
from jaxspec.weights.conversion import convert
from jaxspec.weights.loading import CheckpointError, LoadedModel, load_target
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import make_mesh
from jaxspec.weights.source import HFSource, Recipe, open_configs, open_hf_source, read_ahead
from tests.checkpoints_convert import quantised_layout as layout

IGNORED = ["lm_head", r"re:.*(vision_tower|embed_vision|audio_tower).*", r"re:.*router.*"]
IGNORED += ["re:.*per_layer.*"]


def ct(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "stands-for-any",
        "config_groups": {"group_0": group},
        "ignore": IGNORED,
        **more,
    }


def of_int4(group: int, symmetric: bool = True) -> dict[str, Any]:
    about = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    return ct({**about, "strategy": "group", "group_size": group})


OF_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
OF_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*router*", "lm_head"]}
MODELOPT["ignore"] += ["model.vision_tower*", "*per_layer*"]
BESIDE = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": MODELOPT["ignore"]}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

FORMATS: dict[str, tuple[layout.Writer, Any]] = {
    "fp8 channel": (layout.fp8("channel"), ct(OF_FP8)),
    "fp8 tensor": (layout.fp8("tensor"), ct({**OF_FP8, "strategy": "tensor"})),
    "int8 channel": (layout.int8, ct({**OF_FP8, "type": "int"})),
    "int4 g32": (layout.pack_quantized(32, True), of_int4(32)),
    "int4 g32 zeros": (layout.pack_quantized(32, False), of_int4(32, False)),
    "int4 g16 float16": (
        layout.pack_quantized(16, True, np.dtype(np.float16)),
        of_int4(16),
    ),
    "awq": (layout.awq, AWQ),
    "gptq": (layout.gptq(True), GPTQ | {"sym": True}),
    "gptq zeros": (layout.gptq(False), GPTQ | {"sym": False}),
    "nvfp4 ct": (layout.nvfp4("ct"), ct(OF_NVFP4)),
    "nvfp4 modelopt": (layout.nvfp4("modelopt"), MODELOPT),
    "mxfp4": (layout.mxfp4, ct({**OF_NVFP4, "strategy": "group", "group_size": 32})),
}
W8 = {**OF_FP8, "type": "int"}
FORMATS["int8 packed"] = (layout.pack_int8(None), ct(W8))
PACKED_GROUPS = layout.pack_int8(32), ct({**W8, "strategy": "group", "group_size": 32})
LOADED = ("fp8 channel", "int4 g32 zeros", "nvfp4 ct", "mxfp4")
"""One of each kind of arrays is loaded too, which compiles."""
BLOCKS: dict[str, tuple[layout.Writer, Any]] = {
    "fp8 blocks": (
        layout.fp8("block"),
        ct({**OF_FP8, "strategy": "block", "block_structure": [128, 128]}),
    ),
    "fp8 blocks, inverse": (layout.block_fp8, FP8),
}


# One program in place of a dozen for each weight.
dequantised = jax.jit(ModelDef.dequantise, static_argnums=0)


def load(directory: Path, **options: Any) -> LoadedModel:
    return load_target(str(directory), dtype="float32", **options)


def check_numbers(model: LoadedModel, numbers: dict[str, np.ndarray], rtol: float = 0) -> None:
    """Compare a loaded model with the numbers that its file stands for, weight by weight."""
    expected = jax.jit(lambda numbers: from_hf_names(numbers, model.config))(numbers)
    found = dequantised(model.model_def, model.params)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        scale = np.abs(np.asarray(array)).max()
        np.testing.assert_allclose(found[name], array, rtol=0, atol=rtol * scale, err_msg=name)


def check_read(opened: HFSource, numbers: dict[str, np.ndarray]) -> None:
    """Compare what is read of a file, tensor by tensor. It compiles nothing."""
    for fill in opened.plan.fills:
        for name in fill.sources:
            found = opened.view.numbers(name, np.dtype(np.float32), lambda name, array: None)
            np.testing.assert_array_equal(found, numbers[name], err_msg=name)


# --- what is loaded ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_each_format_is_loaded_as_the_numbers_that_it_stands_for(name, tmp_path):
    """26B-A4B's features: experts one by one, and full layers whose values are their keys."""
    writer, config = FORMATS[name]
    numbers, _ = layout.write(tmp_path / "hf", "26b-a4b", writer, config)
    opened = open_hf_source(tmp_path / "hf")
    check_read(opened, numbers)
    formats = dict(opened.model_def("float32").formats)
    if name in LOADED:
        model = load(tmp_path / "hf")
        check_numbers(model, numbers)
        assert dict(model.model_def.formats) == formats
    # Everything that the file holds quantised stays so, the weight of k = v layers too.
    assert {n.partition(".")[2].partition(".")[2] for n in formats} == {
        "attention.qkv",
        "attention.out",
        "mlp.gate_up",
        "mlp.down",
        "experts.gate_up",
        "experts.down",
    }
    assert len(set(formats.values())) == 1
    # Its config alone says as much, except whether scales of 16 bits are bfloat16 or float16.
    told = dict(open_configs(tmp_path / "hf").model_def("float32").formats)
    assert told == {n: format.replace("-float16", "") for n, format in formats.items()}


@pytest.mark.parametrize(("moe", "stacked"), [(".moe", False), ("", True), (".moe", True)], ids=str)
@pytest.mark.parametrize("name", ["fp8 channel", "int4 g32 zeros", "nvfp4 ct"])
def test_experts_are_found_under_every_name(name, moe, stacked, tmp_path):
    writer, config = FORMATS[name]
    numbers, _ = layout.write(tmp_path / "hf", "26b-a4b", writer, config, moe=moe, stacked=stacked)
    opened = open_hf_source(tmp_path / "hf")
    check_read(opened, numbers)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("int4 g32 zeros", "_packed"),
        ("nvfp4 ct", "_packed"),
        ("fp8 channel", "_scale"),
        ("fp8 blocks, inverse", "_scale_inv"),
    ],
)
def test_stacked_experts_may_have_the_names_of_parameters(name, last, tmp_path):
    """`experts.down_proj_packed`, as compressed-tensors writes it, and not `down_proj.weight_packed`.

    So does transformers, whose fp8 has `down_proj` and `down_proj_scale_inv`.
    """

    def rename(tensors: layout.Tensors) -> None:
        for full in [full for full in tensors if ".experts." in full]:
            short = full.replace("_proj.weight_", "_proj_").replace("_proj.weight", "_proj")
            tensors[short] = tensors.pop(full)

    writer, config = (FORMATS | BLOCKS)[name]
    where = tmp_path / "hf"
    numbers, tensors = layout.write(where, "26b-a4b", writer, config, stacked=True, edit=rename)
    assert f"model.language_model.layers.0.experts.gate_up_proj{last}" in tensors
    check_read(open_hf_source(where), numbers)


def test_experts_one_by_one_may_be_plain_numbers(tmp_path):
    plain = {
        r".*\.experts\..+": lambda w: ({"weight": w.astype(layout.BF16)}, w.astype(layout.BF16))
    }
    numbers, tensors = layout.write(tmp_path / "hf", "26b-a4b", plain, None)
    assert "model.language_model.layers.0.experts.2.up_proj.weight" in tensors
    check_numbers(load(tmp_path / "hf"), {n: x.astype(np.float32) for n, x in numbers.items()})


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_rounded_again_with_a_scale_a_channel(name, tmp_path):
    writer, config = BLOCKS[name]
    numbers, _ = layout.write(tmp_path / "hf", "26b-a4b", writer, config)
    model = load(tmp_path / "hf")
    assert model.model_def.storage == "int8 and float32"
    check_numbers(model, numbers, rtol=0.5 / 127 * 1.001)
    opened = open_hf_source(tmp_path / "hf")
    asked = opened.model_def("float32", "fp8")
    assert asked.storage == "fp8 and float32"


def test_scales_of_activations_and_unused_layers_are_named_as_skipped(tmp_path):
    """E2B's last layers read the keys and values of others, and files hold some for them all the same."""
    numbers, _ = layout.write(tmp_path / "hf", "e2b", *FORMATS["nvfp4 modelopt"])
    skipped = open_hf_source(tmp_path / "hf").skipped
    layer = "model.language_model.layers"
    unused = "keys and values of layers that share an earlier layer's"
    for part in ("weight", "weight_scale", "weight_scale_2"):
        assert skipped[f"{layer}.7.self_attn.k_proj.{part}"] == unused
        assert f"{layer}.0.self_attn.k_proj.{part}" not in skipped
    assert "activations" in skipped[f"{layer}.0.self_attn.k_proj.input_scale"]
    report = convert(tmp_path / "hf", tmp_path / "ours")
    assert report.skipped[unused] == 4 * (2 * 3 + 1)  # and k_norm
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    assert f"{layer}.7.self_attn.k_proj.weight_scale_2" in manifest["skipped"]
    assert manifest["tensors"][f"{layer}.0.mlp.down_proj.weight"] == "U8"
    check_read(open_hf_source(tmp_path / "hf"), numbers)


def test_a_mixture_of_formats_is_loaded_if_it_is_announced(tmp_path):
    """Some builds have attention in 8 bits and the MLP in 4."""
    config = ct({})
    fp8, fp4 = FORMATS["fp8 channel"], FORMATS["nvfp4 ct"]
    config["config_groups"] = {
        "group_0": {"targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"], "weights": OF_FP8},
        "group_1": {"targets": ["Linear"], "weights": OF_NVFP4},
    }
    writers = {r".*self_attn\..*_proj\.weight": fp8[0], layout.QUANTISED: fp4[0]}
    numbers, _ = layout.write(tmp_path / "hf", "26b-a4b", writers, config)
    check_numbers(load(tmp_path / "hf"), numbers)


def test_what_the_file_leaves_may_be_quantised_and_the_rest_may_not(tmp_path):
    """NVIDIA's builds leave attention in 16 bits, and all builds leave the head."""
    mlp = {r".*\.(mlp\.\w+_proj\.weight|experts\..+)": FORMATS["fp8 channel"][0]}
    config = ct(OF_FP8, ignore=[*IGNORED, "re:.*self_attn.*"])
    layout.write(tmp_path / "hf", "26b-a4b", mlp, config)
    formats = dict(load(tmp_path / "hf", quantize="int8", quantize_head="int8").model_def.formats)
    assert formats["layers.0.mlp.down"] == "fp8"
    assert formats["layers.0.attention.qkv"] == formats["embedder.table"] == "int8"
    layout.write(tmp_path / "all", "26b-a4b", *FORMATS["fp8 channel"])
    with pytest.raises(FieldError, match="is quantised already"):
        load(tmp_path / "all", quantize="int8")
    # The same codes and scales, with activations rounded too.
    dynamic = load(tmp_path / "all", quantize="fp8-dynamic")
    assert dynamic.model_def.storage == "fp8-dynamic and float32"


@pytest.mark.parametrize("name", ["fp8 channel", "int4 g32 zeros", "nvfp4 modelopt", "mxfp4"])
def test_a_round_trip_through_convert_keeps_codes_and_scales_to_the_bit(name, tmp_path):
    writer, config = FORMATS[name]
    _, tensors = layout.write(tmp_path / "hf", "26b-a4b", writer, config)
    convert(tmp_path / "hf", tmp_path / "ours")
    direct = load(tmp_path / "hf")
    mesh = make_mesh(devices=jax.devices()[:1])
    for again in (load(tmp_path / "ours"), load(tmp_path / "hf", mesh=mesh)):
        assert again.model_def == direct.model_def
        ours = named_arrays(again.params)
        for param, array in named_arrays(direct.params).items():
            assert array.dtype == ours[param].dtype, param
            bits = [np.asarray(x).tobytes() for x in (array, ours[param])]
            assert bits[0] == bits[1], param
    if name == "fp8 channel":
        stored = tensors["model.language_model.layers.0.mlp.down_proj.weight"]
        ours = np.asarray(direct.params["layers.0.mlp.down"].codes)
        assert stored.tobytes() == ours.tobytes()
        assert direct.params["layers.0.mlp.down"].scales.dtype == jnp.float32


@pytest.mark.parametrize("name", ["26b-a4b", "e2b"])
def test_gguf_files_are_read_beside_a_config(name, tmp_path):
    numbers = layout.write_gguf(tmp_path / "hf", name)
    opened = open_hf_source(tmp_path / "hf")
    check_read(opened, numbers)
    if name == "e2b":
        return
    model = load(tmp_path / "hf")
    assert dict(model.model_def.formats)["layers.0.experts.down"] == "int4-float16"
    assert "embedder.table" not in dict(model.model_def.formats)  # Q8_0 becomes numbers
    check_numbers(model, numbers)


def test_conversion_keeps_every_digit_of_codes_that_become_numbers(tmp_path):
    """Embeddings in Q8_0 were rounded to bfloat16, unless float32 was asked for."""
    layout.write_gguf(tmp_path / "gguf", "26b-a4b")
    layout.write(tmp_path / "words", "26b-a4b", *PACKED_GROUPS)
    for name in ("gguf", "words"):
        convert(tmp_path / name, tmp_path / f"{name} converted")
        direct, ours = load(tmp_path / name), load(tmp_path / f"{name} converted")
        assert direct.model_def == ours.model_def
        found = named_arrays(ours.params)
        for param, array in named_arrays(direct.params).items():
            np.testing.assert_array_equal(array, found[param], param)
    convert(tmp_path / "gguf", tmp_path / "halved", dtype="bfloat16")
    sizes = [
        json.loads((tmp_path / d / "manifest.json").read_text())["dtype"]
        for d in ("gguf converted", "halved")
    ]
    assert sizes == ["float32", "bfloat16"]


def test_weights_of_8_bits_in_words_are_read_in_groups(tmp_path):
    """It was refused: with codes of a wrong shape, as if they had 4 bits."""
    numbers, _ = layout.write(tmp_path / "hf", "26b-a4b", *PACKED_GROUPS)
    opened = open_hf_source(tmp_path / "hf")
    check_read(opened, numbers)
    assert not opened.model_def("float32").formats  # no model multiplies by such groups


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
def test_blocks_of_gguf_whose_scale_is_no_number_are_refused(form, tmp_path):
    layout.write_gguf(tmp_path / "hf", "26b-a4b")
    opened = open_hf_source(tmp_path / "hf")
    tensor = next(t for n, t in opened.checkpoint.tensors.items() if n.endswith(form))
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.asarray(np.nan, np.float16).tobytes())
    with pytest.raises(CheckpointError, match="weights that are not finite"):
        load(tmp_path / "hf")


def test_gguf_files_of_others_and_damaged_ones_are_refused(tmp_path):
    layout.write_gguf(tmp_path / "llama", "26b-a4b", family="llama")
    with pytest.raises(CheckpointError, match="a model of 'llama'; only gemma4"):
        open_hf_source(tmp_path / "llama")
    layout.write_gguf(tmp_path / "cut", "26b-a4b")
    (file,) = (tmp_path / "cut").glob("*.gguf")
    whole = file.read_bytes()
    for size in (3, 20, 100, 5000, len(whole) - 64):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"truncated|no GGUF file|no whole"):
            open_hf_source(tmp_path / "cut")
    (tmp_path / "cut" / "config.json").unlink()
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"Put config.json and .* beside model-q4_0.gguf"):
        open_hf_source(tmp_path / "cut")


@pytest.mark.parametrize("name", ["plain", "fp8 channel", "int4 g32 zeros", "nvfp4 ct"])
def test_a_device_arranges_weights_as_the_host_does(name, tmp_path):
    """Large weights go to a GPU as they lie in the file, and are transposed and packed there."""
    writer, config = FORMATS.get(name, ({}, None))
    layout.write(tmp_path / "hf", "26b-a4b", writer, config)
    opened = open_hf_source(tmp_path / "hf")
    model_def = opened.model_def("bfloat16")
    everything = opened.all_pieces(model_def, np.dtype(ml_dtypes.bfloat16))
    for path, recipe, pieces in read_ahead(everything):
        expected, found = recipe.on_host(pieces), recipe.on_device(pieces)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert np.asarray(ours).tobytes() == theirs.tobytes(), path


def test_a_scale_for_a_whole_channel_is_repeated_for_its_groups(tmp_path):
    def write(w: np.ndarray) -> tuple[layout.Tensors, np.ndarray]:
        return layout.pack_quantized(w.shape[1], False)(w)

    config = of_int4(32, False)
    config["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": None}
    numbers, _ = layout.write(tmp_path / "hf", "26b-a4b", write, config)
    opened = open_hf_source(tmp_path / "hf")
    check_read(opened, numbers)
    model_def = opened.model_def("float32")
    fill = next(f for f in opened.plan.fills if f.path == "layers.0.experts.down")
    weight = opened.read(fill, model_def, np.dtype(np.float32), lambda name, array: None)
    assert isinstance(weight, QuantisedArray)
    abstract = model_def.abstract_params()[fill.path]
    assert isinstance(abstract, QuantisedArray)
    made_of = [numbers[name] for name in fill.sources]
    expected = Recipe(fill.transform, fill.shape).on_host(made_of)
    found = abstract.with_parts(
        {part: jnp.asarray(x) for part, x in weight.parts.items()}
    ).dequantise()
    np.testing.assert_array_equal(found, expected)


def test_what_no_model_multiplies_in_codes_becomes_numbers(tmp_path):
    """Per-layer inputs, routers, and a quantised copy of the tied head."""
    more = r".*\.(per_layer_input_gate|per_layer_projection)\.weight"
    fp8, config = FORMATS["fp8 channel"]
    config = {**config, "ignore": IGNORED[1:3]}
    head = {"lm_head.weight": np.zeros((40, 64), layout.E4M3)}
    head["lm_head.weight_scale"] = np.ones((40, 1), layout.BF16)
    numbers, _ = layout.write(
        tmp_path / "hf",
        "e2b",
        {f"{layout.QUANTISED}|{more}|.*per_layer_model_projection.weight": fp8},
        config,
        edit=lambda tensors: tensors.update(head),
    )
    opened = open_hf_source(tmp_path / "hf")
    check_read(opened, numbers)
    assert opened.skipped["lm_head.weight_scale"] == "tied head"
    formats = dict(opened.model_def("float32").formats)
    assert "layers.0.mlp.down" in formats
    assert not any("per_layer" in name for name in formats)


def test_a_model_computes_with_the_codes_of_a_file_what_it_computes_with_their_numbers(tmp_path):
    layout.write(tmp_path / "hf", "26b-a4b", *FORMATS["nvfp4 ct"])
    model = load(tmp_path / "hf")

    def logits(model_def: ModelDef, params: Any) -> jax.Array:
        tokens, start = jnp.arange(6, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
        return model_def.bind(params)(tokens, start, jnp.full(1, 6, jnp.int32), None).logits

    run = jax.jit(logits, static_argnums=0)
    found = run(model.model_def, model.params)
    expected = run(model.model_def.unquantised(), dequantised(model.model_def, model.params))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)


# --- traps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nvfp4 ct", "nvfp4 modelopt"])
def test_a_global_scale_the_wrong_way_round_is_noticed(name, tmp_path):
    """The two dialects store each other's inverse. Numbers would be off by its square."""
    global_scale = {"nvfp4 ct": "weight_global_scale", "nvfp4 modelopt": "weight_scale_2"}[name]

    def inverted(tensors: layout.Tensors) -> None:
        for key in [key for key in tensors if key.endswith(global_scale)]:
            tensors[key] = np.asarray(1 / tensors[key], np.float32)

    writer, config = FORMATS[name]
    numbers, _ = layout.write(tmp_path / "hf", "26b-a4b", writer, config, edit=inverted)
    with pytest.raises(AssertionError, match="Not equal"):
        check_numbers(load(tmp_path / "hf"), numbers, rtol=0.1)


def test_every_source_matrix_keeps_its_own_global_scale(tmp_path):
    """Other engines take the largest one of q, k and v, and warn of lost accuracy."""

    def smaller_key(w: np.ndarray) -> tuple[layout.Tensors, np.ndarray]:
        return FORMATS["nvfp4 ct"][0](w / 64)

    writers = {
        r".*self_attn\.k_proj\.weight": smaller_key,
        layout.QUANTISED: FORMATS["nvfp4 ct"][0],
    }
    numbers, tensors = layout.write(tmp_path / "hf", "26b-a4b", writers, FORMATS["nvfp4 ct"][1])
    base = "model.language_model.layers.0.self_attn"
    scales = [tensors[f"{base}.{p}_proj.weight_global_scale"][0] for p in "qk"]
    assert scales[1] > 16 * scales[0]
    check_numbers(load(tmp_path / "hf"), numbers)


# --- what is refused -----------------------------------------------------------------------------

GATE = "model.language_model.layers.0.mlp.gate_proj"


def _without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _changed(name: str, change: Any) -> Any:
    return lambda tensors: tensors.update({name: np.ascontiguousarray(change(tensors[name]))})


def _plain(tensors: layout.Tensors) -> None:
    shape = tensors[f"{GATE}.weight"].shape
    del tensors[f"{GATE}.weight_scale"]
    tensors[f"{GATE}.weight"] = np.zeros(shape, layout.BF16)


NVFP4_GLOBAL = f"{GATE}.weight_global_scale"
WRONG: dict[str, tuple[str, Any, str]] = {
    "no scales": ("fp8 channel", _without(f"{GATE}.weight_scale"), "weight_scale is missing"),
    "no global scale": (
        "nvfp4 ct",
        _without(f"{GATE}.weight_global_scale"),
        "weight_global_scale is missing",
    ),
    "no codes": ("int4 g32", _without(f"{GATE}.weight_packed"), "its codes are missing"),
    "scales of a wrong shape": (
        "fp8 channel",
        _changed(f"{GATE}.weight_scale", lambda x: x[:-1]),
        r"shape \[95, 1\], which fits neither",
    ),
    "groups that do not divide": (
        "int4 g32",
        _changed(f"{GATE}.weight_scale", lambda x: np.repeat(x, 2, axis=1)[:, :3]),
        r"shape \[96, 3\], which does not divide \[96, 64\] into groups; expected \[96, 64 / group\]",
    ),
    "other groups than announced": (
        "int4 g32",
        _changed(f"{GATE}.weight_scale", lambda x: np.repeat(x, 2, axis=1)),
        "is int4, groups of 16, announced is int4, groups of 32",
    ),
    "zero points that were not announced": (
        "int4 g32",
        lambda tensors: tensors.update({f"{GATE}.weight_zero_point": np.zeros((12, 2), np.int32)}),
        "with zero points, announced is int4, groups of 32",
    ),
    "plain numbers that were announced as codes": (
        "fp8 channel",
        _plain,
        "is BF16, announced is fp8",
    ),
    "another shape than the model's": (
        "fp8 channel",
        _changed(f"{GATE}.weight", lambda x: x[:, :32]),
        r"gate_proj.weight: shape \[96, 32\], expected \[96, 64\]",
    ),
    "a shape that contradicts the codes": (
        "int4 g32",
        _changed(f"{GATE}.weight_shape", lambda x: x[::-1]),
        r"weight_shape is \[64, 96\], its codes have \[96, 64\]",
    ),
    "zero points that say asymmetric": (
        "gptq",
        _changed(f"{GATE}.qzeros", lambda x: x - 1),
        "says that it is symmetric",
    ),
    "an expert is missing": (
        "fp8 channel",
        _without("model.language_model.layers.1.experts.1.up_proj.weight"),
        "experts.1.up_proj.weight: its codes are missing",
    ),
    "scales that are not finite": (
        "nvfp4 ct",
        _changed(f"{GATE}.weight_scale", lambda x: np.full_like(x, np.nan)),
        "not finite.*\n.*gate_proj.weight_scale",
    ),
    "a global scale of 0 that divides": (
        "nvfp4 ct",
        _changed(NVFP4_GLOBAL, np.zeros_like),
        r"gate_proj.weight: its global scale multiplies by \[inf\]; expected positive",
    ),
    "a global scale so small that its inverse is infinite": (
        "nvfp4 ct",
        _changed(NVFP4_GLOBAL, lambda x: np.full_like(x, 1e-45)),
        r"multiplies by \[inf\]",
    ),
    "a global scale of 0 that multiplies": (
        "nvfp4 modelopt",
        _changed(f"{GATE}.weight_scale_2", np.zeros_like),
        r"multiplies by \[0\.0\]",
    ),
    "a power of two that is NaN": (
        "mxfp4",
        _changed(f"{GATE}.weight_scale", lambda x: np.full_like(x, 255)),
        "not finite.*\n.*gate_proj.weight, its scales: 192 of 192 values",
    ),
    "two names of the scales": (
        "fp8 channel",
        lambda tensors: tensors.update(
            {f"{GATE}.weight_scale_inv": tensors[f"{GATE}.weight_scale"]}
        ),
        "has weight_scale and weight_scale_inv, which are one thing",
    ),
    "codes of two builds": (
        "int4 g32",
        lambda tensors: tensors.update({f"{GATE}.weight": np.zeros((96, 64), layout.E4M3)}),
        "weight beside weight_packed do not belong to it",
    ),
    "activations are scaled too": (
        "nvfp4 modelopt",
        lambda tensors: tensors.update({f"{GATE}.pre_quant_scale": np.ones(64, layout.BF16)}),
        "pre_quant_scale",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_damaged_or_contradict_their_config_are_refused(name, tmp_path):
    format, edit, message = WRONG[name]
    layout.write(tmp_path / "hf", "26b-a4b", *FORMATS[format], edit=edit)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "hf")


@pytest.mark.parametrize(
    "ignored", [GATE, "model.layers.0.mlp.gate_proj", r"re:.*layers\.0\.mlp\.gate_proj$"]
)
def test_the_ignore_list_is_honoured_tensor_by_tensor(ignored, tmp_path):
    """Listed by name, by expression, and under the prefix of another program."""
    config = ct(OF_FP8, ignore=[*IGNORED, ignored])
    layout.write(tmp_path / "hf", "26b-a4b", FORMATS["fp8 channel"][0], config)
    with pytest.raises(
        CheckpointError, match=r"1 problem:\n.*gate_proj.weight: is fp8, .* no format"
    ):
        open_hf_source(tmp_path / "hf")


def test_codes_that_no_config_announces_are_refused(tmp_path):
    layout.write(tmp_path / "hf", "26b-a4b", FORMATS["nvfp4 modelopt"][0], None)
    with pytest.raises(CheckpointError, match="announces no format"):
        open_hf_source(tmp_path / "hf")
    # ModelOpt may say it in a file of its own.
    layout.write(tmp_path / "two", "26b-a4b", FORMATS["nvfp4 modelopt"][0], None, beside=BESIDE)
    assert open_hf_source(tmp_path / "two").view.spec(f"{GATE}.weight") is not None


def test_groups_in_the_order_of_activations_are_refused(tmp_path):
    writer = layout.gptq(True, shuffled=True)
    layout.write(tmp_path / "hf", "26b-a4b", writer, GPTQ | {"desc_act": True})
    with pytest.raises(CheckpointError, match=r"act-order.*not read: take a build without"):
        load(tmp_path / "hf")


def test_one_weight_of_two_formats_is_refused(tmp_path):
    config = ct(OF_FP8, ignore=[*IGNORED, "re:.*up_proj$"])
    writers = {r".*(self_attn\.\w_proj|mlp\.(gate|down)_proj)\.weight": FORMATS["fp8 channel"][0]}
    config["ignore"] += ["re:.*experts.*"]
    layout.write(tmp_path / "hf", "26b-a4b", writers, config)
    with pytest.raises(CheckpointError, match=r"up_proj.weight is plain numbers.* one weight here"):
        load(tmp_path / "hf")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gemma"}, "Gemma's mobile format of 2, 4 and 8 bits"),
        ({"quant_method": "exl9"}, "by a method that is not known, 'exl9'"),
        ("int4", "no object"),
        (ct({**OF_FP8, "num_bits": 2, "type": "int"}), "weights of 2-bit 'int'"),
        (ct({**OF_FP8, "strategy": "block", "block_structure": [64, 64]}), "not 128 x 128"),
        (ct(OF_FP8, transform_config={"config_groups": {}, "a": 1}), "rotates weights"),
        (ct(OF_FP8, sparsity_config={"format": "sparse-24-bitmask"}), "leaves zeros out"),
        (ct(OF_FP8, ignore=["re:("]), "ignore has 're:"),
        (ct({}), "announces no groups"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "the quant_algo 'W4A8_AWQ'"),
        (AWQ | {"version": "gemv"}, "the layout 'gemv'"),
        (AWQ | {"bits": 3}, "weights of 3 bits"),
        (GPTQ | {"group_size": 0}, "groups of 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "the layout 'marlin'"),
        (FP8 | {"weight_block_size": [64, 64]}, "not 128 x 128"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name_with_what_works(values, said):
    """Also where a multimodal config says it of its text part."""
    for config in (
        {"quantization_config": values},
        {"text_config": {"quantization_config": values}},
    ):
        with pytest.raises(CheckpointError, match=rf"{said}.*(--quantize int8|no regular)"):
            read_quantization_config(config)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("re:(unclosed", "no regular expression"),
        (r"re:(a+)+$", "repeats in repeats"),
        (r"re:.*(ab|\w\w|\w)*x$", "repeats in repeats"),
        (r"re:(x(.*y){3})*z", "repeats in repeats"),
        (r"re:.*.*.*.*.*.*z$", "too many of them"),
    ],
)
@pytest.mark.parametrize("key", ["targets", "ignore"])
def test_expressions_that_do_not_compile_or_backtrack_are_refused(key, pattern, said):
    """One in targets was a traceback, and one that backtracks held loading up for minutes."""
    values = ct(OF_FP8)
    if key == "ignore":
        values["ignore"] = [pattern]
    else:
        values["config_groups"]["group_0"]["targets"] = [pattern]
    with pytest.raises(CheckpointError, match=rf"{key} has .*{said}"):
        read_quantization_config({"quantization_config": values})


@pytest.mark.parametrize(
    "pattern",
    [
        r"re:.*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj.*",
        r"re:^model\.(?!vision)(\w+\.){1,3}lm_head$",
        r"re:.*(q|k|v)_proj$|.*router.*",
    ],
)
def test_expressions_of_real_builds_are_taken(pattern):
    assert read_quantization_config({"quantization_config": ct(OF_FP8, ignore=[pattern])})


RUBBISH: tuple[Any, ...] = (
    None,
    0,
    -1,
    4,
    True,
    1.5,
    "",
    "x",
    [],
    [[]],
    [4, 4],
    {},
    {"a": 1},
    [{}],
)


def _paths(values: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = values.items() if isinstance(values, dict) else ()
    return [at] * bool(at) + [path for key, x in items for path in _paths(x, (*at, key))]


@pytest.mark.parametrize(
    "config", [ct(OF_FP8), MODELOPT, AWQ, GPTQ, FP8], ids=lambda c: c["quant_method"]
)
def test_rubbish_in_a_config_is_read_or_refused(config):
    """Never a traceback of another kind, whatever stands under a key."""
    extra = {"quantized_layers": {"a": {"quant_algo": "FP8"}}, "dynamic": {"-:a": {}}}
    extra |= {"modules_to_not_convert": ["a"], "transform_config": {}, "sparsity_config": {}}
    whole = {**config, **extra}
    for path in _paths(whole):
        for rubbish in RUBBISH:
            values = json.loads(json.dumps(whole))
            inner = values
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = rubbish
            with contextlib.suppress(CheckpointError):
                announced = read_quantization_config({"quantization_config": values})
                assert announced is not None
                announced.of(GATE)
