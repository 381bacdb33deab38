"""Both directions, for every feature set: what goes in comes out, bit for bit, and loads the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.rules import match
from jaxspec.configs.base import GenerationDefaults
from jaxspec.configs.dflash import DFlashConfig
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.configs.gemma4_vision import Gemma4VisionConfig
from jaxspec.configs.mtp import MTPConfig
from jaxspec.options import FieldError
from jaxspec.quantised import QuantisedArray
from jaxspec.registry import family_of
from jaxspec.weights.conversion import Report, convert, to_hf, write_weights
from jaxspec.weights.define import model_def_of
from jaxspec.weights.loading import load_drafter, load_target
from jaxspec.weights.manifest import Manifest
from jaxspec.weights.saving import save, save_hf
from tests.checkpoints_convert import hf_layout
from tests.checkpoints_convert.hf_layout import (
    ASSISTANTS,
    AUDIO,
    DRAFTERS,
    TINY,
    TINY_ASSISTANTS,
    TINY_DRAFTER,
    multimodal,
)

F32 = np.dtype(np.float32)


def _tensors(directory: Path) -> dict[str, np.ndarray]:
    return {n: a for f in directory.glob("*.safetensors") for n, a in load_file(f).items()}


def _assert_same(params: Any, expected: Any) -> None:
    assert set(params) == set(expected)
    for name, array in params.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(expected[name]), err_msg=name)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of each size as released: in shards, wrapped, with towers and tokenizer files."""
    root = tmp_path_factory.mktemp("released")
    for size, text in TINY.items():
        extra = hf_layout.vision_shapes(multimodal(text)) | AUDIO
        if size == "31b":
            extra |= {"lm_head.weight": (text["vocab_size"], text["hidden_size"])}
        shapes = hf_layout.target_shapes(text, "model.language_model.") | extra
        hf_layout.write(root / size, multimodal(text), shapes, shard_bytes=20_000)
        (root / size / "generation_config.json").write_text('{"eos_token_id": [1, 6]}')
        (root / size / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    # A stored head is the embedding again.
    from safetensors.numpy import save_file

    (head,) = (f for f in (root / "31b").glob("*.safetensors") if "lm_head.weight" in load_file(f))
    table = _tensors(root / "31b")["model.language_model.embed_tokens.weight"]
    save_file(load_file(head) | {"lm_head.weight": table}, head, metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def converted(released: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    root = tmp_path_factory.mktemp("converted")
    return {size: convert(released / size, root / size) for size in TINY}


@pytest.mark.parametrize("size", TINY)
def test_there_and_back(released: Path, converted: dict[str, Report], tmp_path: Path, size: str):
    source, ours = released / size, converted[size].destination
    to_hf(ours, tmp_path / "back")
    before, after = _tensors(source), _tensors(tmp_path / "back")
    manifest = Manifest.read(ours)
    assert set(after) == set(before) - set(manifest.skipped)
    assert sum(converted[size].skipped.values()) == len(manifest.skipped)
    for name, array in after.items():
        assert array.dtype == before[name].dtype
        np.testing.assert_array_equal(array.view(np.uint16), before[name].view(np.uint16))
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()
    back = load_target(str(tmp_path / "back"), dtype="bfloat16")
    _assert_same(back.params, load_target(str(source), dtype="bfloat16").params)


@pytest.mark.parametrize("size", TINY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_layouts_load_the_same(
    released: Path, converted: dict[str, Report], size: str, dtype: str
):
    theirs = load_target(str(released / size), dtype=dtype)
    ours = load_target(str(converted[size].destination), dtype=dtype)
    assert ours.config == theirs.config == Gemma4Config.from_hf(TINY[size])
    expected = GenerationDefaults(eos_token_ids=(1, 6), temperature=0.0)
    assert ours.generation == theirs.generation == expected
    assert (ours.directory / "tokenizer.json").is_file()
    assert ours.model_def == theirs.model_def
    _assert_same(ours.params, theirs.params)
    for params in (ours.params, theirs.params):
        assert all(isinstance(a, jax.Array) and a.dtype == dtype for a in params.values())
        # Committed to their device, they would make an optimizer's program compile twice.
        assert not any(a.committed for a in params.values())
    ours.model_def.bind(ours.params)


def test_skipped_tensors_are_named(converted: dict[str, Report]):
    shared = "keys and values of layers that share an earlier layer's"
    assert converted["e2b"].skipped[shared] == 4 * 3
    assert converted["26b-a4b"].skipped == {"audio tower": 1, "audio embedder": 1}
    assert converted["31b"].skipped["tied head"] == 1


def test_weights_land_where_the_forward_pass_reads_them(released: Path):
    """The layouts by hand, on a layer with fewer kv heads than query heads."""
    tensors = {
        n.removeprefix("model.language_model."): a.astype(F32)
        for n, a in _tensors(released / "26b-a4b").items()
    }
    params = load_target(str(released / "26b-a4b"), dtype="float32").params
    d, k, g, h = 24, 4, 2, 8  # layer 0 is sliding: 8 heads over 4 kv heads
    qkv = np.asarray(params["layers.0.attention.qkv"])
    assert qkv.shape == (d, k, g + 2, h)
    for n in range(k * g):
        rows = tensors["layers.0.self_attn.q_proj.weight"][n * h : (n + 1) * h]
        np.testing.assert_array_equal(qkv[:, n // g, n % g], rows.T)
    for n in range(k):
        for slot, name in ((g, "k"), (g + 1, "v")):
            rows = tensors[f"layers.0.self_attn.{name}_proj.weight"][n * h : (n + 1) * h]
            np.testing.assert_array_equal(qkv[:, n, slot], rows.T)
    out = np.asarray(params["layers.0.attention.out"])
    columns = tensors["layers.0.self_attn.o_proj.weight"][:, 5 * h : 6 * h]
    np.testing.assert_array_equal(out[2, 1], columns.T)
    assert params["layers.1.attention.qkv"].shape == (d, 2, 4 + 1, 16)  # full: k = v, no v
    mlp = np.asarray(params["layers.0.mlp.gate_up"])
    np.testing.assert_array_equal(mlp[:, 0], tensors["layers.0.mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(mlp[:, 1], tensors["layers.0.mlp.up_proj.weight"].T)
    experts = np.asarray(params["layers.0.experts.gate_up"])
    stacked = tensors["layers.0.experts.gate_up_proj"]
    np.testing.assert_array_equal(experts[2, :, 0], stacked[2, :5].T)
    np.testing.assert_array_equal(experts[2, :, 1], stacked[2, 5:].T)
    down = np.asarray(params["layers.0.experts.down"])
    np.testing.assert_array_equal(down[1], tensors["layers.0.experts.down_proj"][1].T)


def test_per_layer_inputs_land_by_layer(released: Path):
    tensors = _tensors(released / "e2b")
    projection = tensors["model.language_model.per_layer_model_projection.weight"].astype(F32)
    params = load_target(str(released / "e2b"), dtype="float32").params
    ours = np.asarray(params["per_layer.projection"])
    assert ours.shape == (24, 8, 4)
    np.testing.assert_array_equal(ours[:, 3], projection[12:16].T)
    assert params["layers.4.mlp.gate_up"].shape == (24, 2, 40)  # shares K/V: twice as wide
    assert params["layers.3.mlp.gate_up"].shape == (24, 2, 20)


@pytest.mark.parametrize(
    "prefix", ["model.language_model.", "model.", "language_model.model.", "language_model.", ""]
)
def test_prefixes(tmp_path: Path, prefix: str):
    shapes = hf_layout.target_shapes(TINY["e4b"], prefix, shared_kv_stored=False)
    hf_layout.write(tmp_path / "hf", TINY["e4b"], shapes)
    loaded = load_target(str(tmp_path / "hf"), dtype="bfloat16")
    table = _tensors(tmp_path / "hf")[prefix + "embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(loaded.params["embedder.table"]), table)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_drafter_there_and_back(tmp_path: Path, prefix: str):
    hf_layout.write(tmp_path / "hf", TINY_DRAFTER, hf_layout.drafter_shapes(TINY_DRAFTER, prefix))
    report = convert(tmp_path / "hf", tmp_path / "ours")
    assert report.kind == "dflash"
    to_hf(tmp_path / "ours", tmp_path / "back")
    theirs = (tmp_path / "hf/model.safetensors", tmp_path / "back/model.safetensors")
    before, after = (_tensors(f.parent) for f in theirs)
    assert set(before) == set(after)
    for name in before:
        np.testing.assert_array_equal(before[name].view(np.uint16), after[name].view(np.uint16))
    ours = load_drafter(str(tmp_path / "ours"), dtype="float32")
    direct = load_drafter(str(tmp_path / "hf"), dtype="float32")
    assert ours.config == direct.config == DFlashConfig.from_hf(TINY_DRAFTER)
    assert ours.generation is None
    _assert_same(ours.params, direct.params)
    kv = np.asarray(ours.params["layers.1.kv"])  # [D, K, 2, H]
    v = before[f"{prefix}layers.1.self_attn.v_proj.weight"].astype(F32)
    np.testing.assert_array_equal(kv[:, 1, 1], v[8:16].T)


@pytest.mark.parametrize("size", TINY_ASSISTANTS)
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_assistant_there_and_back(tmp_path: Path, size: str, dtype: str | None):
    """The token ordering stays whole numbers in every dtype, 64 bits wide in files."""
    config = TINY_ASSISTANTS[size]
    generation = {"num_assistant_tokens": 3, "suppress_tokens": [7, 11]}
    hf_layout.write(tmp_path / "hf", config, hf_layout.assistant_shapes(config))
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(generation))
    report = convert(tmp_path / "hf", tmp_path / "ours", dtype=dtype)
    assert report.kind == Manifest.read(tmp_path / "ours").kind == "mtp"
    assert Manifest.read(tmp_path / "ours").dtype == (dtype or "bfloat16")
    to_hf(tmp_path / "ours", tmp_path / "back")
    before, after = _tensors(tmp_path / "hf"), _tensors(tmp_path / "back")
    assert set(before) == set(after)
    for name, array in before.items():
        assert array.dtype == after[name].dtype
        np.testing.assert_array_equal(array.view(np.uint16), after[name].view(np.uint16))
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    for load_as in ("float32", "bfloat16"):
        ours = load_drafter(str(tmp_path / "ours"), dtype=load_as)
        direct = load_drafter(str(tmp_path / "hf"), dtype=load_as)
        assert ours.config == direct.config == MTPConfig.from_hf(config, generation)
        assert (ours.config.num_draft_tokens, ours.config.suppress_tokens) == (3, (7, 11))
        _assert_same(ours.params, direct.params)
        ours.model_def.bind(ours.params)
        if config["use_ordered_embeddings"]:
            ordering = ours.params["token_ordering"]
            assert ordering.dtype == jnp.int32
            stored = before["masked_embedding.token_ordering"]
            assert stored.dtype == np.int64
            np.testing.assert_array_equal(np.asarray(ordering), stored)


@pytest.mark.parametrize("size", ASSISTANTS)
def test_released_assistants_have_every_parameter_and_no_more(size: str):
    from checkpoints_convert.rules import TensorSpec
    from jaxspec.weights.conversion import parameter_shapes

    config = MTPConfig.from_hf(ASSISTANTS[size])
    shapes = parameter_shapes(config)
    tensors = {
        n: TensorSpec(s, "I64" if n.endswith("token_ordering") else "BF16")
        for n, s in hf_layout.assistant_shapes(ASSISTANTS[size]).items()
    }
    assert len(tensors) == (50 if size in ("e2b", "e4b") else 48)
    plan = match(family_of(config).rules(config, shapes), shapes, tensors, size)
    assert {name for fill in plan.fills for name in fill.sources} == set(tensors)
    assert not plan.skipped


def test_assistants_weights_of_ours_are_written_under_their_names(tmp_path: Path):
    config = MTPConfig.from_hf(TINY_ASSISTANTS["e4b"])
    rng = np.random.default_rng(3)
    params = {
        name: jnp.asarray(rng.permutation(a.shape[0]), a.dtype)
        if name == "token_ordering"
        else jnp.asarray(hf_layout.random_array(rng, a.shape, a.dtype))
        for name, a in model_def_of(config, "bfloat16").abstract_params().items()
    }
    (tmp_path / "config.json").write_text(json.dumps(TINY_ASSISTANTS["e4b"]))
    write_weights(config, params, tmp_path, prefix="")
    names = hf_layout.assistant_shapes(TINY_ASSISTANTS["e4b"])
    assert {n: a.shape for n, a in _tensors(tmp_path).items()} == names
    _assert_same(load_drafter(str(tmp_path), dtype="bfloat16").params, params)


@pytest.mark.parametrize("name", DRAFTERS)
def test_released_drafters_have_every_parameter_and_no_more(name: str):
    from checkpoints_convert.rules import TensorSpec
    from jaxspec.weights.conversion import parameter_shapes

    config = DFlashConfig.from_hf(DRAFTERS[name])
    shapes = parameter_shapes(config)
    tensors = {
        n: TensorSpec(s, "BF16") for n, s in hf_layout.drafter_shapes(DRAFTERS[name]).items()
    }
    assert len(tensors) == 58
    plan = match(family_of(config).rules(config, shapes), shapes, tensors, name)
    assert len(plan.fills) == len(shapes)
    assert not plan.skipped


@pytest.mark.parametrize("size", hf_layout.RELEASED)
def test_released_targets_have_every_parameter_and_no_more(size: str):
    """Real shapes, no data: the whole table of every size fits."""
    from checkpoints_convert.rules import TensorSpec
    from jaxspec.weights.conversion import parameter_shapes

    config = Gemma4Config.from_hf(hf_layout.RELEASED[size])
    shapes = parameter_shapes(config)
    stored = hf_layout.target_shapes(hf_layout.RELEASED[size], "model.language_model.")
    tensors = {n: TensorSpec(s, "BF16") for n, s in stored.items()}
    plan = match(family_of(config).rules(config, shapes), shapes, tensors, size)
    used = [name for fill in plan.fills for name in fill.sources]
    assert len(used) == len(set(used))
    assert set(used) | set(plan.skipped) == set(tensors)
    assert len(plan.skipped) == {"e2b": 60, "e4b": 54}.get(size, 0)


def test_dtype_can_change_and_the_way_back_is_still_exact(tmp_path: Path):
    """bfloat16 to float32 and back loses nothing; the files are bfloat16 again."""
    shapes = hf_layout.target_shapes(TINY["31b"])
    hf_layout.write(tmp_path / "hf", TINY["31b"], shapes)
    convert(tmp_path / "hf", tmp_path / "ours", dtype="float32")
    assert Manifest.read(tmp_path / "ours").dtype == "float32"
    to_hf(tmp_path / "ours", tmp_path / "back")
    before, after = _tensors(tmp_path / "hf"), _tensors(tmp_path / "back")
    for name in before:
        np.testing.assert_array_equal(before[name].view(np.uint16), after[name].view(np.uint16))


def test_mixed_dtypes_are_kept(tmp_path: Path):
    """A float32 norm among bfloat16 weights stays one, both in our directory and on the way back."""
    from safetensors.numpy import save_file

    hf_layout.write(tmp_path / "hf", TINY["31b"], hf_layout.target_shapes(TINY["31b"]))
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = np.linspace(0.1, 1.9, 24, dtype=F32)
    save_file(tensors, file, metadata={"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "ours")
    assert Manifest.read(tmp_path / "ours").dtype == "mixed"
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = _tensors(tmp_path / "back")["model.norm.weight"]
    np.testing.assert_array_equal(back, tensors["model.norm.weight"])
    loaded = load_target(str(tmp_path / "ours"), dtype="bfloat16")
    expected = jnp.asarray(tensors["model.norm.weight"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(loaded.params["final_norm"]).view(np.uint16),
        np.asarray(expected).view(np.uint16),
    )


def test_weights_of_ours_are_written_under_their_names(tmp_path: Path):
    """What a training script needs: parameters to a Hugging Face directory, and back."""
    config = Gemma4Config.from_hf(TINY["26b-a4b"])
    rng = np.random.default_rng(3)
    params = {
        name: jnp.asarray(hf_layout.random_array(rng, a.shape, a.dtype))
        for name, a in model_def_of(config, "bfloat16").abstract_params().items()
    }
    (tmp_path / "config.json").write_text(json.dumps(TINY["26b-a4b"]))
    write_weights(config, params, tmp_path, prefix="model.")
    names = hf_layout.target_shapes(TINY["26b-a4b"])
    assert {n: a.shape for n, a in _tensors(tmp_path).items()} == names
    _assert_same(load_target(str(tmp_path), dtype="bfloat16").params, params)


def test_large_checkpoints_are_written_in_shards(tmp_path: Path, monkeypatch):
    from checkpoints_convert import hf_io
    from checkpoints_convert.errors import CheckpointError
    from checkpoints_convert.hf_io import Group, open_checkpoint, write_tensors
    from checkpoints_convert.rules import TensorSpec

    arrays = {f"t{i}": np.full((5, 2), i, np.float32) for i in range(5)}
    groups = [Group({n: TensorSpec((5, 2), "F32")}, lambda a=a: (a,)) for n, a in arrays.items()]
    assert write_tensors(tmp_path, groups, shard_bytes=90) == 200
    (tmp_path / "config.json").write_text("{}")
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    checkpoint = open_checkpoint(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.read(name), array)
    monkeypatch.setattr(hf_io, "_SLAB_BYTES", 8)  # five threads read a tensor
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.read(name), array)
    file = checkpoint.tensors["t4"].file
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="is truncated: it ended while it was read"):
        checkpoint.read("t4")


def test_transformers_writes_the_names_we_read(tmp_path: Path):
    """Real names and both shapes of config.json: transformers saves per_layer_config."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = TINY["26b-a4b"] | {"num_hidden_layers": 12, "layer_types": ["sliding_attention"] * 11}
    values["layer_types"] = [*values["layer_types"], "full_attention"]
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**values)
    model = transformers.Gemma4ForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    saved = json.loads((tmp_path / "hf/config.json").read_text())
    assert set(saved["per_layer_config"]) == {"11"}
    convert(tmp_path / "hf", tmp_path / "ours")
    loaded = load_target(str(tmp_path / "ours"), dtype="float32")
    assert loaded.config == Gemma4Config.from_hf(values)
    table = model.model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(loaded.params["embedder.table"]), table)
    to_hf(tmp_path / "ours", tmp_path / "back")
    again = transformers.Gemma4ForCausalLM.from_pretrained(tmp_path / "back")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


# --- vision parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", TINY)
def test_vision_parts_load_the_same_from_both_layouts(
    released: Path, converted: dict[str, Report], tmp_path: Path, size: str
):
    sources = (released / size, converted[size].destination)
    theirs, ours = (load_target(str(s), dtype="bfloat16", vision=True).vision for s in sources)
    assert theirs is not None
    assert ours is not None
    assert ours.config == theirs.config == Gemma4VisionConfig.from_hf(multimodal(TINY[size]))
    _assert_same(ours.params, theirs.params)
    ours.model_def.check(ours.params)
    assert load_target(str(released / size), dtype="bfloat16").vision is None


def test_a_vision_part_can_be_left_out(released: Path, tmp_path: Path) -> None:
    """The way back then has the tensors of the text part."""
    report = convert(released / "e2b", tmp_path / "text", text_only=True)
    assert report.skipped["vision tower"] > 0
    loaded = load_target(str(tmp_path / "text"), dtype="bfloat16", vision=True)
    assert loaded.vision is None
    _assert_same(loaded.params, load_target(str(released / "e2b"), dtype="bfloat16").params)
    to_hf(tmp_path / "text", tmp_path / "back")
    again = load_target(str(tmp_path / "back"), dtype="bfloat16")
    _assert_same(again.params, loaded.params)


def test_a_tower_lands_where_the_forward_pass_reads_it(released: Path):
    tensors = {
        n.removeprefix("model.vision_tower.encoder.layers.1."): a.astype(F32)
        for n, a in _tensors(released / "e2b").items()
    }
    vision = load_target(str(released / "e2b"), dtype="float32", vision=True).vision
    assert vision is not None
    layer = {
        n.removeprefix("encoder.layers.1."): np.asarray(x)
        for n, x in vision.params.items()
        if n.startswith("encoder.layers.1.")
    }
    k = tensors["self_attn.k_proj.linear.weight"]  # 3 heads of 4
    np.testing.assert_array_equal(layer["k.weight"], k.T.reshape(12, 3, 4))
    o = tensors["self_attn.o_proj.linear.weight"]
    np.testing.assert_array_equal(layer["out.weight"], o.T.reshape(3, 4, 12))
    ends = ("input_min", "input_max", "output_min", "output_max")
    ranges = np.stack([tensors[f"mlp.up_proj.{end}"] for end in ends])
    np.testing.assert_array_equal(layer["up.ranges"], ranges)


def test_a_vision_part_without_all_its_tensors_is_refused(tmp_path: Path):
    config = multimodal(TINY["31b"])
    text = hf_layout.target_shapes(TINY["31b"], "model.language_model.")
    vision = hf_layout.vision_shapes(config)
    gone = "model.vision_tower.encoder.layers.1.mlp.up_proj.linear.weight"
    less = {name: shape for name, shape in vision.items() if name != gone}
    hf_layout.write(tmp_path / "less", config, text | less)
    more = vision | {"model.vision_tower.encoder.layers.1.mlp.gate_scale": (4,)}
    hf_layout.write(tmp_path / "more", config, text | more)
    hf_layout.write(tmp_path / "none", config, text)
    with pytest.raises(CheckpointError, match=re.escape(f"{gone}: missing")):
        load_target(str(tmp_path / "less"), dtype="float32", vision=True)
    with pytest.raises(CheckpointError, match=re.escape(f"{gone}: missing")):
        convert(tmp_path / "less", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"mlp\.gate_scale: not known"):
        load_target(str(tmp_path / "more"), dtype="float32", vision=True)
    # As text they all load, and so does a checkpoint whose config.json alone speaks of images.
    for name in ("less", "more", "none"):
        assert load_target(str(tmp_path / name), dtype="float32").vision is None
    assert load_target(str(tmp_path / "none"), dtype="float32", vision=True).vision is None


@pytest.mark.parametrize("size", ["e2b", "12b", "31b"])
def test_a_target_is_saved_with_its_vision_part(released: Path, tmp_path: Path, size: str):
    target = load_target(str(released / size), dtype="bfloat16", vision=True)
    assert target.vision is not None
    save(tmp_path / "ours", target)
    save_hf(tmp_path / "theirs", target)
    before, after = _tensors(released / size), _tensors(tmp_path / "theirs")
    of_images = [n for n in before if "vision" in n]
    assert of_images
    assert {n for n in after if "vision" in n} == set(of_images)
    for name in of_images:
        np.testing.assert_array_equal(after[name].view(np.uint16), before[name].view(np.uint16))
    for directory in ("ours", "theirs"):
        again = load_target(str(tmp_path / directory), dtype="bfloat16", vision=True).vision
        assert again is not None
        _assert_same(again.params, target.vision.params)


@pytest.mark.parametrize(("size", "format"), [("31b", "int8"), ("e2b", "fp8")])
def test_a_vision_part_is_quantised_if_asked(released: Path, size: str, format: str) -> None:
    how: Any = dict(dtype="bfloat16", vision=True)
    plain = load_target(str(released / size), **how).vision
    quantised = load_target(str(released / size), **how, quantize_vision=format).vision
    assert plain is not None
    assert quantised is not None
    linears = {n for n, x in quantised.params.items() if isinstance(x, QuantisedArray)}
    layers = quantised.config.num_layers
    assert len(linears) == 7 * layers  # queries, keys, values, out, gate, up, down
    config = quantised.config
    patches = jnp.asarray(np.random.default_rng(0).random((1, 36, 3 * config.patch_size**2)))
    rows, columns = np.divmod(np.arange(36), 6)
    positions = jnp.asarray(np.stack([columns, rows], -1)[None], jnp.int32)
    # Norms of the file's random numbers would let nothing through.
    params = {
        n: jnp.ones_like(w) if "norm" in n or "scale" in n else w
        for n, w in quantised.params.items()
    }
    rounded = {n: w.dequantise() if n in linears else w for n, w in params.items()}
    got = np.asarray(quantised.model_def.bind(params)(patches, positions), np.float32)
    want = np.asarray(plain.model_def.bind(rounded)(patches, positions), np.float32)
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
    for name in linears:
        exact = np.asarray(plain.params[name], np.float32)
        difference = np.linalg.norm(np.asarray(rounded[name], np.float32) - exact)
        assert 0 < difference < 0.05 * np.linalg.norm(exact)
    with pytest.raises(FieldError, match="has no vision part here"):
        load_target(str(released / size), dtype="bfloat16", quantize_vision=format)


def test_formats_leave_vision_parts_alone(released: Path, tmp_path: Path):
    convert(released / "31b", tmp_path / "int8", quantize="int8")
    for source in (released / "31b", tmp_path / "int8"):
        quantize = "int8" if source.parent == released else None
        target = load_target(str(source), dtype="bfloat16", quantize=quantize, vision=True)
        assert target.model_def.formats
        assert target.vision is not None
        assert not target.vision.model_def.formats
        assert all(isinstance(x, jax.Array) for x in target.vision.params.values())
