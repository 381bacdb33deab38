"""What is wrong with a checkpoint is said in one message, and nothing half done stays behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import jaxspec
from jaxspec.commands.convert import convert_command
from jaxspec.configs.base import ConfigError
from jaxspec.configs.gemma4 import Gemma4Config
from jaxspec.weights.bridge import from_hf_names
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.weights.loading import CheckpointError, load_drafter, load_target
from jaxspec.weights.manifest import Manifest
from tests.checkpoints_convert import hf_layout
from tests.checkpoints_convert.hf_layout import TINY, TINY_ASSISTANTS, TINY_DRAFTER

Edit = Callable[[Path], None]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A good checkpoint in two shards, to be broken."""
    shapes = hf_layout.target_shapes(TINY["31b"])
    hf_layout.write(tmp_path / "hf", TINY["31b"], shapes, shard_bytes=40_000)
    return tmp_path / "hf"


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    hf_layout.write(tmp_path / "dflash", TINY_DRAFTER, hf_layout.drafter_shapes(TINY_DRAFTER))
    return tmp_path / "dflash"


def _shard(directory: Path, number: int = 1) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[number - 1]


def _edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _edit_tensors(file: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _truncate(directory: Path) -> None:
    file = _shard(directory, 2)
    os.truncate(file, file.stat().st_size - 100)


def _corrupt_header(directory: Path) -> None:
    with _shard(directory).open("r+b") as file:
        file.seek(8)
        file.write(b"\x00\xff not json")


def _absurd_header_length(directory: Path) -> None:
    with _shard(directory).open("r+b") as file:
        file.write((1 << 60).to_bytes(8, "little"))


def _append(directory: Path) -> None:
    with _shard(directory).open("ab") as file:
        file.write(b"more")


def _overlap(directory: Path) -> None:
    """The header is good JSON, but two tensors claim the same bytes."""
    file = _shard(directory)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    first, second = [n for n in header if n.endswith("input_layernorm.weight")][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    new = json.dumps(header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])


def _add_adapter(directory: Path) -> None:
    values = {"peft_type": "LORA", "base_model_name_or_path": "google/gemma-4-31B"}
    (directory / "adapter_config.json").write_text(json.dumps(values))


def _edit_names(directory: Path, new_name: Callable[[str], str]) -> None:
    """Rename all tensors, and write them to a single file."""
    tensors = {n: x for file in directory.glob("*.safetensors") for n, x in load_file(file).items()}
    for file in directory.glob("model*"):
        file.unlink()
    named = {new_name(name): x for name, x in tensors.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})


def _write_header(directory: Path, header: bytes) -> None:
    file = _shard(directory)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def _huge_header(directory: Path) -> None:
    """As long as its header says, and hardly on the disk."""
    file = _shard(directory)
    file.write_bytes((150_000_000).to_bytes(8, "little"))
    os.truncate(file, 150_000_008)


def _directory(directory: Path) -> None:
    file = _shard(directory)
    file.unlink()
    file.mkdir()


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"

BROKEN: dict[str, tuple[Edit, str]] = {
    "no config.json": (
        lambda d: (d / "config.json").unlink(),
        r"hf is not a model: .*config\.json",
    ),
    "config.json is no JSON": (
        lambda d: (d / "config.json").write_text("{"),
        r"config\.json is not readable JSON",
    ),
    "config.json is a list": (
        lambda d: (d / "config.json").write_text("[]"),
        r"config\.json holds a list",
    ),
    "no weights": (
        lambda d: [f.unlink() for f in d.glob("model*")],
        r"no model\.safetensors and no model\.safetensors\.index\.json",
    ),
    "index without a map": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        r"index\.json is corrupt",
    ),
    "a shard is missing": (lambda d: _shard(d, 2).unlink(), r"lacks files.*model-00002-of-0000"),
    "truncated": (_truncate, r"model-00002-of-0000\d\.safetensors is truncated"),
    "empty": (lambda d: os.truncate(_shard(d), 0), r"model-00001.* is corrupt or truncated"),
    "corrupt header": (_corrupt_header, r"model-00001.* is corrupt: its header is not readable"),
    "absurd header length": (_absurd_header_length, r"model-00001.* is corrupt or truncated"),
    "bytes after the end": (_append, r"model-00001.* is corrupt: its header describes"),
    "overlapping tensors": (_overlap, r"model-00001.* is corrupt: .* begins at byte"),
    "unknown architecture": (
        lambda d: _edit_config(d, model_type="llama", architectures=["LlamaForCausalLM"]),
        r"hf: config\.json has model_type 'llama'",
    ),
    "malformed values": (
        lambda d: _edit_config(d, rope_parameters=["default"]),
        r"hf: config\.json has rope_parameters = \['default'\]; it must be an object",
    ),
    "a list for a number": (
        lambda d: _edit_config(d, hidden_size=[24]),
        r"hf: config\.json: hidden_size is \[24\]; it must be a whole number",
    ),
    "a deep config": (
        lambda d: (d / "config.json").write_text("[" * 200_000),
        r"config\.json is not readable JSON: it is nested too deeply",
    ),
    "a key twice": (
        lambda d: (d / "config.json").write_text('{"hidden_size": 24, "hidden_size": 48}'),
        r"config\.json is not readable JSON: the key 'hidden_size' occurs twice",
    ),
    "NaN where a number is read": (
        lambda d: _edit_config(d, rms_norm_eps=float("nan")),
        r"hf: config\.json: rms_norm_eps is nan",
    ),
    "an end-of-sequence id outside the vocabulary": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": [1, 40]}'),
        r"hf: eos_token_id has \[40\], outside the vocabulary; expected 0 to 39",
    ),
    "a deep header": (lambda d: _write_header(d, b"[" * 200_000), r"nested too deeply"),
    "a header with a key twice": (
        lambda d: _write_header(d, b'{"a": {}, "a": {}}'),
        r"model-00001.* is corrupt: its header is not readable \(the key 'a' occurs twice",
    ),
    "a header of 150 MB": (_huge_header, r"model-00001.* has 150,000,000 bytes, .* 100,000,000"),
    "a config of 150 MB": (
        lambda d: os.truncate(d / "config.json", 150_000_000),
        r"config\.json has 150,000,000 bytes",
    ),
    "weights are a Git LFS pointer": (
        lambda d: _shard(d).write_text(LFS),
        r"model-00001.* is a Git LFS pointer, not the file itself; run `git lfs pull` in .*hf",
    ),
    "the index is a Git LFS pointer": (
        lambda d: (d / "model.safetensors.index.json").write_text(LFS),
        r"index\.json is a Git LFS pointer",
    ),
    "config.json is a Git LFS pointer": (
        lambda d: (d / "config.json").write_text(LFS),
        r"config\.json is a Git LFS pointer",
    ),
    "a shard is a directory": (_directory, r"lacks files.*model-00001"),
    "a name that is too long": (
        lambda d: (d / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "x" * 5000}})
        ),
        r"lacks files that model\.safetensors\.index\.json names: xxx",
    ),
    "no GGUF": (
        lambda d: (
            [file.rename(d / "model.gguf") for file in d.glob("*1-of*.safetensors")]
            + [file.unlink() for file in d.glob("*.safetensors")]
        ),
        r"model\.gguf is no GGUF file",
    ),
    "an adapter in place of a model": (
        lambda d: [_add_adapter(d), *(file.unlink() for file in d.glob("model*"))],
        r"hf is an adapter \(LoRA\) of 'google/gemma-4-31B', no model: merge it with peft, .*merge_and",
    ),
    "an adapter beside a model": (
        lambda d: _add_adapter(d),
        r"hf holds a whole model and an adapter of 'google/gemma-4-31B' .* which is not applied",
    ),
    "an adapter that is not merged": (
        lambda d: _edit_names(d, lambda name: name.replace("q_proj", "q_proj.base_layer")),
        r"adapter that is not merged \(.*q_proj\.base_layer\.weight\); merge",
    ),
    "a tensor with and without the prefix of a trainer": (
        lambda d: _edit_tensors(
            _shard(d), lambda tensors: tensors.update({"module.model.norm.weight": np.ones(24)})
        ),
        r"hf holds model\.norm\.weight twice, as module\.model\.norm\.weight, model\.norm\.weight; leave",
    ),
    "several GGUF files": (
        lambda d: [file.rename(file.with_suffix(".gguf")) for file in d.glob("*.safetensors")],
        r"holds several GGUF files \(model-00001.*; leave one",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(target: Path, tmp_path: Path, name: str):
    edit, message = BROKEN[name]
    edit(target)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_target(str(target), dtype="float32")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        convert(target, tmp_path / "ours")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


# --- two sources of one thing ----------------------------------------------------------------------


def _params(source: Path) -> dict[str, np.ndarray]:
    return {n: np.asarray(x) for n, x in load_target(str(source), dtype="float32").params.items()}


def _add_single_file(directory: Path) -> None:
    """Write the model into one file beside its shards, with another norm: a later, smaller save."""
    tensors = {n: x for file in directory.glob("*.safetensors") for n, x in load_file(file).items()}
    tensors["model.norm.weight"] = np.full(24, 3, hf_layout.BFLOAT16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("shards_left", [True, False])
def test_a_single_file_wins_over_an_index(
    target: Path, caplog: pytest.LogCaptureFixture, shards_left: bool
):
    """A second `save_pretrained` leaves the index. The old shards were read, or the model was refused."""
    _add_single_file(target)
    if not shards_left:
        for file in target.glob("model-*"):
            file.unlink()
    assert (_params(target)["final_norm"] == 3).all()
    note = re.search(r"model\.safetensors is read, and not model-00001-\S+ model-", caplog.text)
    assert bool(note) == shards_left


def test_an_index_of_the_single_file_itself_is_fine(target: Path, caplog: pytest.LogCaptureFixture):
    _edit_names(target, str)
    names = load_file(target / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    load_target(str(target), dtype="float32")
    assert not caplog.text


def test_a_gguf_file_beside_safetensors_is_named(target: Path, caplog: pytest.LogCaptureFixture):
    (target / "old.gguf").write_bytes(b"GGUF")
    load_target(str(target), dtype="float32")
    assert "safetensors is read, and not old.gguf beside it" in caplog.text


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "adapter_model.safetensors", "pytorch_model.bin"]
)
def test_other_files_of_weights_are_named(
    target: Path, caplog: pytest.LogCaptureFixture, name: str
):
    good = _params(target)
    assert not caplog.text
    save_file({"norm.weight": np.zeros(3, np.float32)}, target / name)
    loaded = _params(target)
    assert all((loaded[param] == x).all() for param, x in good.items())
    assert f"is read, and not {name} beside it" in caplog.text
    caplog.clear()
    convert(target, target.parent / "ours")
    assert caplog.text.count("beside it") == 1


def test_what_generation_config_asks_in_vain_is_named(
    target: Path, caplog: pytest.LogCaptureFixture
):
    """All but the filters, the repetition penalty and suppressed tokens was ignored silently."""
    wishes = dict(no_repeat_ngram_size=3, stop_strings=["END"], bad_words_ids=[[5]], xtc=0.5)
    idle = dict(
        min_length=0,
        num_beams=1,
        bad_words_ids=[],
        guidance_scale=None,
        pad_token_id=0,
        max_length=20,
    )
    kept = dict(
        do_sample=True, top_k=64, repetition_penalty=1.1, suppress_tokens=[3], eos_token_id=[1]
    )
    file = target / "generation_config.json"
    for values, number in ((idle | kept | {"_from_model_config": True}, 0), (idle | wishes, 1)):
        caplog.clear()
        file.write_text(json.dumps(values))
        load_target(str(target), dtype="float32")
        assert len(caplog.records) == number
    for key in wishes:
        assert f"{key} = " in caplog.text, key
    assert caplog.messages[0].endswith("which jaxspec does not apply")


# --- checkpoints of trainers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "new_name",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"module._orig_mod.{name}".replace(
            ".mlp.", "._checkpoint_wrapped_module.mlp."
        ),
        lambda name: name.replace("model.layers", "_fsdp_wrapped_module.model._orig_mod.layers"),
    ],
)
def test_prefixes_of_trainers_are_taken_off(
    target: Path, caplog: pytest.LogCaptureFixture, new_name: Callable[[str], str], tmp_path: Path
):
    """Each name was missing and not known, in a list of 72 problems."""
    good = _params(target)
    shutil.copytree(target, tmp_path / "trained")
    _edit_names(tmp_path / "trained", new_name)
    loaded = _params(tmp_path / "trained")
    assert all((loaded[name] == x).all() for name, x in good.items())
    assert re.search(r"trained: \S+ is read as model\.\S+, and so on", caplog.text)
    caplog.clear()
    config = Gemma4Config.from_hf(TINY["31b"])
    files = (tmp_path / "trained").glob("*.safetensors")
    tree = from_hf_names({n: x for file in files for n, x in load_file(file).items()}, config)
    assert all((np.asarray(tree[name], np.float32) == x).all() for name, x in good.items())
    assert "the tree of tensors: " in caplog.text


def test_a_drafter_of_another_size_is_refused_before_weights_are_read(target: Path, drafter: Path):
    """The first `generate` refused it, after minutes of loading."""

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.embed_tokens.weight"][:] = np.nan  # an error of its own, if it is read

    _edit_tensors(_shard(target), spoil)
    with pytest.raises(
        ConfigError, match="does not fit the target: num_target_layers: drafter 4, "
    ):
        jaxspec.load(str(target), str(drafter))


def test_every_wrong_tensor_is_listed(target: Path, tmp_path: Path):
    """Missing, extra, misshapen and of a wrong dtype, over both shards, in one error."""
    (target / "model.safetensors.index.json").unlink()
    tensors = {n: a for f in target.glob("*.safetensors") for n, a in load_file(f).items()}
    for file in target.glob("*.safetensors"):
        file.unlink()
    del tensors["model.norm.weight"], tensors["model.layers.3.layer_scalar"]
    tensors["model.layers.9.layer_scalar"] = np.ones(1, np.float32)
    tensors["model.layers.5.self_attn.v_proj.weight"] = np.ones((32, 24), np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((20, 25), np.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] = np.ones((24, 20), np.int8)
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.ones((32, 24), np.float32)
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        convert(target, tmp_path / "ours")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{target} does not fit its config.json, 8 problems:"
    assert [line.strip() for line in lines[1:]] == [
        "model.layers.0.mlp.gate_proj.weight and model.layers.0.mlp.up_proj.weight: dtypes "
        "['BF16', 'F32'], expected the same",
        "model.layers.0.mlp.up_proj.weight: shape [20, 25], expected [20, 24]",
        "model.layers.1.mlp.down_proj.weight: dtype I8, expected one of F32, BF16, F16",
        "model.layers.2.self_attn.q_proj.weight and model.layers.2.self_attn.k_proj.weight and "
        "model.layers.2.self_attn.v_proj.weight: dtypes ['BF16', 'F32'], expected the same",
        "model.layers.3.layer_scalar: missing",
        "model.layers.5.self_attn.v_proj.weight: not known",
        "model.layers.9.layer_scalar: not known",
        "model.norm.weight: missing",
    ]
    assert not (tmp_path / "ours").exists()


def test_long_lists_are_cut_with_a_count(target: Path, tmp_path: Path):
    """Another size's config would list every tensor of 60 layers."""
    _edit_config(target, num_attention_heads=16, hidden_size=48)
    with pytest.raises(CheckpointError) as caught:
        convert(target, tmp_path / "ours")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("does not fit its config.json, 67 problems:")
    assert len(lines) == 22
    assert lines[-1].strip() == "and 47 more"
    for file in target.glob("*.safetensors"):
        if file != _shard(target):
            _edit_tensors(file, dict.clear)
    with pytest.raises(CheckpointError) as caught:
        convert(target, tmp_path / "ours")
    assert re.search(r"lacks \d+ tensors .* and \d+ more$", str(caught.value))


def test_infinity_where_nothing_reads_it_does_no_harm(target: Path):
    """Transformers writes such literals, for the audio part of a multimodal config."""
    _edit_config(target, audio_config={"time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in (target / "config.json").read_text()
    load_target(str(target), dtype="float32")


def test_an_assistant_without_its_centroids(tmp_path: Path):
    """The message says that the same weights run with a dense head; and so they do."""
    config = TINY_ASSISTANTS["e2b"]
    shapes = hf_layout.assistant_shapes(config)
    stored = {n: s for n, s in shapes.items() if not n.startswith("masked_embedding")}
    hf_layout.write(tmp_path / "hf", config, stored)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(str(tmp_path / "hf"), dtype="float32")
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[0].endswith("does not fit its config.json, 2 problems:")
    assert lines[1:3] == [
        "masked_embedding.centroids.weight: missing",
        "masked_embedding.token_ordering: missing",
    ]
    assert "set use_ordered_embeddings to false in config.json" in lines[3]
    _edit_config(tmp_path / "hf", use_ordered_embeddings=False)
    assert "centroids" not in load_drafter(str(tmp_path / "hf"), dtype="float32").params
    hf_layout.write(tmp_path / "both", config | {"use_ordered_embeddings": False}, shapes)
    assert convert(tmp_path / "both", tmp_path / "ours").skipped == {
        "centroids, which this assistant does not use": 2
    }


def test_a_token_ordering_must_be_whole_numbers(tmp_path: Path):
    """bfloat16 holds no integer above 256 exactly: such a file was damaged by a cast."""
    config = TINY_ASSISTANTS["e2b"]
    hf_layout.write(tmp_path / "hf", config, hf_layout.assistant_shapes(config))

    def cast(tensors: dict[str, np.ndarray]) -> None:
        name = "masked_embedding.token_ordering"
        tensors[name] = tensors[name].astype(hf_layout.BFLOAT16)

    _edit_tensors(tmp_path / "hf/model.safetensors", cast)
    with pytest.raises(CheckpointError, match=r"token_ordering: dtype BF16, expected .* I64, I32"):
        load_drafter(str(tmp_path / "hf"), dtype="float32")


def test_a_head_of_its_own_is_refused(tmp_path: Path):
    shapes = hf_layout.target_shapes(TINY["31b"]) | {"lm_head.weight": (40, 24)}
    hf_layout.write(tmp_path / "hf", TINY["31b"], shapes)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_target(str(tmp_path / "hf"), dtype="float32")


def test_kinds_are_not_confused(target: Path, drafter: Path, tmp_path: Path):
    convert(drafter, tmp_path / "ours")
    for source in (drafter, tmp_path / "ours"):
        with pytest.raises(CheckpointError, match="is a DFlash drafter; expected a target"):
            load_target(str(source), dtype="float32")
    with pytest.raises(CheckpointError, match="is a target; expected a DFlash drafter"):
        load_drafter(str(target), dtype="float32")


# --- where checkpoints come from -------------------------------------------------------------------


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "nowhere"])
def test_missing_path(source: str):
    with pytest.raises(CheckpointError, match=f"{source} does not exist"):
        load_target(source, dtype="float32")


def test_a_file_is_no_checkpoint(target: Path):
    with pytest.raises(CheckpointError, match=r"config\.json is a file"):
        load_target(str(target / "config.json"), dtype="float32")


@pytest.fixture
def hub_cache(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds someone/tiny at one commit."""
    from huggingface_hub import constants

    cache, commit = tmp_path / "cache", "0123456789abcdef0123456789abcdef01234567"
    repo = cache / "models--someone--tiny"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    target.rename(repo / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return repo / "snapshots" / commit


def test_hub_id_from_the_cache(hub_cache: Path, tmp_path: Path):
    loaded = load_target("someone/tiny", dtype="float32", offline=True)
    assert loaded.directory == hub_cache
    assert loaded.source == "someone/tiny"
    convert("someone/tiny", tmp_path / "ours", offline=True)
    manifest = Manifest.read(tmp_path / "ours")
    assert (manifest.source, manifest.revision) == ("someone/tiny", hub_cache.name)


def test_hub_id_not_in_the_cache(hub_cache: Path):
    with pytest.raises(CheckpointError, match=r"someone/else is neither .*offline mode is on"):
        load_target("someone/else", dtype="float32", offline=True)
    with pytest.raises(CheckpointError, match=r"neither .*offline mode is on"):
        load_target("someone/tiny", dtype="float32", revision="v2", offline=True)


def test_hub_snapshot_that_is_not_whole(hub_cache: Path):
    _shard(hub_cache).unlink()
    with pytest.raises(CheckpointError, match="lacks files"):
        load_target("someone/tiny", dtype="float32", offline=True)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "someone/gated is gated: accept its terms"),
        ("RepositoryNotFoundError", "someone/gated is neither a directory here nor a repository"),
        ("RevisionNotFoundError", "someone/gated has no revision 'v9'"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
        ("HfHubHTTPError", "someone/gated cannot be had from the hub: "),
    ],
)
def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch, error: str, message: str):
    import huggingface_hub
    from huggingface_hub import errors

    asked: dict[str, object] = {}

    def refuse(repo: str, **kwargs: object) -> str:
        asked.update(kwargs, repo=repo)
        kind = getattr(errors, error)
        raise kind.__new__(kind)  # its __init__ wants an HTTP response

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match=message):
        load_target("someone/gated", dtype="float32", revision="v9", token="secret")
    assert (asked["repo"], asked["revision"]) == ("someone/gated", "v9")
    assert (asked["token"], asked["local_files_only"]) == ("secret", False)


def test_a_connection_that_breaks_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch):
    """The HTTP client of the hub's library raises errors that are neither the library's nor the system's."""
    import huggingface_hub

    class RemoteProtocolError(Exception):
        pass

    def breaks(repo: str, **kwargs: object) -> str:
        raise RemoteProtocolError("peer closed connection\nafter 1,000 bytes")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks)
    said = "someone/tiny cannot be had from the hub: peer closed connection"
    with pytest.raises(CheckpointError, match=said):
        load_target("someone/tiny", dtype="float32")


# --- destinations ------------------------------------------------------------------------------------


def test_destination_must_be_new(target: Path, tmp_path: Path):
    (tmp_path / "there").mkdir()
    for direction in (convert, to_hf):
        if direction is to_hf:
            convert(target, tmp_path / "ours")
        source = target if direction is convert else tmp_path / "ours"
        with pytest.raises(CheckpointError, match="there exists"):
            direction(source, tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_unwritable_destination_is_known_before_the_source_is_read(target: Path, tmp_path: Path):
    """Under a file nobody can write, whoever they are; the source does not even exist."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/ours cannot be written: Not a directory"):
        convert(tmp_path / "missing", tmp_path / "file/ours")


def test_converting_a_converted_checkpoint_says_so(target: Path, tmp_path: Path):
    convert(target, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="is converted already"):
        convert(tmp_path / "ours", tmp_path / "again")
    with pytest.raises(CheckpointError, match="has no manifest"):
        to_hf(target, tmp_path / "again")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_a_conversion_that_fails_half_way_leaves_nothing(
    target: Path, tmp_path: Path, error: type[BaseException]
):
    def fail(name: str, done: int, total: int) -> None:
        if done > total / 2:
            raise error

    with pytest.raises((error, CheckpointError)):
        convert(target, tmp_path / "ours", progress=fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    convert(target, tmp_path / "ours")
    with pytest.raises((error, CheckpointError)):
        to_hf(tmp_path / "ours", tmp_path / "back", progress=fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "ours"]


def test_interrupted_by_a_signal(target: Path, tmp_path: Path):
    """Ctrl-C while arrays are being written: one line, exit code 130, and a clean directory."""
    script = f"""
import signal, time, typer
from jaxspec.commands import interruption
from jaxspec.weights import source
import jaxspec
from jaxspec.commands.convert import convert_command
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in a shell's background have not
read = source.HFSource.read
def slowly(self, *args):
    print("reading", flush=True)
    time.sleep(0.5)
    return read(self, *args)
source.HFSource.read = slowly
import sys
sys.argv = ["convert", {str(target)!r}, {str(tmp_path / "ours")!r}]
interruption.run(lambda: typer.run(convert_command))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "reading\n"
    assert any(p.name == "ours.partial" for p in tmp_path.iterdir())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert stderr == f"interrupted; {tmp_path / 'ours'} was not written\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_directory_without_its_manifest_does_not_load(target: Path, tmp_path: Path):
    """What a killed conversion can leave: everything but the manifest, under a name of its own."""
    convert(target, tmp_path / "ours")
    (tmp_path / "ours/manifest.json").unlink()
    with pytest.raises(CheckpointError, match="is not a model"):
        load_target(str(tmp_path / "ours"), dtype="float32")


# --- our own directories -----------------------------------------------------------------------------


def test_damaged_directories_of_ours(target: Path, tmp_path: Path):
    def fresh() -> Path:
        ours = tmp_path / f"ours-{time.monotonic_ns()}"
        shutil.copytree(good, ours)
        return ours

    good = convert(target, tmp_path / "good").destination

    ours = fresh()
    manifest = json.loads((ours / "manifest.json").read_text())
    (ours / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 1"):
        load_target(str(ours), dtype="float32")
    (ours / "manifest.json").write_text(json.dumps(manifest | {"config": {}}))
    with pytest.raises(CheckpointError, match="corrupt"):
        load_target(str(ours), dtype="float32")
    for field, value, message in (
        (
            "hidden_size",
            "24",
            r"manifest\.json is corrupt: config: hidden_size is '24'; it must be",
        ),
        ("layer_types", 5, r"config: layer_types is 5; it must be a list"),
        ("rms_norm_eps", [1e-6], r"config: rms_norm_eps is \[1e-06\]; it must be a number"),
    ):
        odd = manifest["config"] | {field: value}
        (ours / "manifest.json").write_text(json.dumps(manifest | {"config": odd}))
        with pytest.raises(CheckpointError, match=message):
            load_target(str(ours), dtype="float32")
    (ours / "manifest.json").write_text(LFS)
    with pytest.raises(CheckpointError, match=r"manifest\.json is a Git LFS pointer"):
        load_target(str(ours), dtype="float32")
    narrow = manifest["config"] | {"intermediate_size": 10}
    (ours / "manifest.json").write_text(json.dumps(manifest | {"config": narrow}))
    with pytest.raises(CheckpointError) as caught:
        load_target(str(ours), dtype="float32")
    assert str(caught.value).count("expected") == 6 * 2  # gate_up and down of every layer

    for damage in ("truncate", "remove", "remove all"):
        ours = fresh()
        array = ours / "params/layers.2.mlp.down"
        (chunk,) = (f for f in array.iterdir() if not f.name.startswith("."))
        if damage == "truncate":
            os.truncate(chunk, chunk.stat().st_size // 2)
        elif damage == "remove":
            chunk.unlink()
        else:
            shutil.rmtree(array)
        message = r"(?s)(is damaged|does not fit).*layers\.2\.mlp\.down(/0\.0: \d+ bytes|: missing)"
        with pytest.raises(CheckpointError, match=message):
            load_target(str(ours), dtype="float32")
        with pytest.raises(CheckpointError, match=message):
            to_hf(ours, tmp_path / "back")
        assert not (tmp_path / "back").exists()


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def command() -> Callable[..., object]:
    app = typer.Typer(add_completion=False)
    app.command()(convert_command)
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])


def test_command_both_ways(target: Path, tmp_path: Path, command: Callable[..., object]):
    result = command(target, tmp_path / "ours")
    assert result.exit_code == 0, result.output
    assert "Gemma 4 target" in result.stdout
    assert "GB/s" in result.stdout
    result = command(tmp_path / "ours", tmp_path / "back", "--to-hf")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "back/config.json").read_bytes() == (target / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{hf}", "{tmp}/hf"], "exists"),
        (["{tmp}/no", "{tmp}/ours"], "does not exist"),
        (["{hf}", "{tmp}/ours", "--dtype", "int8"], "--dtype is float32 or bfloat16"),
        (["{hf}", "{tmp}/ours", "--to-hf", "--offline"], "--to-hf takes no other option"),
        (["{hf}", "{tmp}/ours", "--to-hf"], "no manifest.json"),
        (["someone/tiny", "{tmp}/ours", "--offline"], "offline mode is on"),
    ],
)
def test_command_errors_are_one_message(
    target: Path, tmp_path: Path, command: Callable[..., object], args: list[str], message: str
):
    result = command(*(a.format(hf=target, tmp=tmp_path) for a in args))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert isinstance(result.exception, SystemExit)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
