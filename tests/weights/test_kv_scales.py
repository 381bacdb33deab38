"""Scales of keys and values that a checkpoint carries: read, kept by a conversion, refused when wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert.errors import CheckpointError
from jaxspec.weights import loading
from jaxspec.weights.conversion import convert
from jaxspec.weights.loading import load_target
from jaxspec.weights.manifest import Manifest
from jaxspec.weights.saving import save
from tests.checkpoints_convert import hf_layout

Dialect = Callable[[str], str]
DIALECTS: dict[str, Dialect] = {
    "compressed-tensors": lambda which: f"{which}_scale",
    "ModelOpt": lambda which: f"{which}_proj.{which}_scale",
}


def checkpoint(directory: Path, name: str, scales: dict[int, dict[str, float]], as_in: str) -> int:
    """Write a tiny target with these scales by layer, and return how many layers it has."""
    config = hf_layout.TINY[name]
    hf_layout.write(directory, config, hf_layout.target_shapes(config))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for layer, both in scales.items():
        for which, value in both.items():
            at = f"model.layers.{layer}.self_attn.{DIALECTS[as_in](which)}"
            tensors[at] = np.asarray([value], ml_dtypes.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    return config["num_hidden_layers"]


@pytest.mark.parametrize("as_in", DIALECTS)
def test_scales_of_a_file_are_used_and_kept(tmp_path: Path, as_in: str) -> None:
    layers = len(hf_layout.TINY["31b"]["layer_types"])
    given = {i: {"k": 0.25 + i, "v": 0.5} for i in range(layers)}
    given[1] = {"k": 0.75}  # used for values too
    checkpoint(tmp_path / "hf", "31b", given, as_in)
    expected = tuple((s["k"], s.get("v", s["k"])) for s in given.values())
    source = str(tmp_path / "hf")
    target = load_target(source, dtype="float32", kv_dtype="fp8")
    assert target.model_def.kv is not None
    assert target.model_def.kv.scales == expected
    assert target.model_def.bind(target.params).stored_kv(1).v_scale == 0.75
    assert load_target(source, dtype="float32").model_def.kv is None  # nobody asked

    convert(tmp_path / "hf", tmp_path / "ours")
    save(tmp_path / "saved", target)
    save(tmp_path / "plain", load_target(source, dtype="float32"))
    save(tmp_path / "again", load_target(str(tmp_path / "plain"), dtype="float32"))
    for name in ("ours", "saved", "plain", "again"):
        assert Manifest.read(tmp_path / name).kv_scales == expected
        again = load_target(str(tmp_path / name), dtype="float32", kv_dtype="fp8")
        assert again.model_def.kv == target.model_def.kv
    assert Manifest.read(tmp_path / "saved").cache_dtype == "fp8"


def test_layers_that_share_keys_and_values_need_no_scales(tmp_path: Path) -> None:
    config = hf_layout.TINY["e2b"]
    owners = range(len(config["layer_types"]) - config["num_kv_shared_layers"])
    checkpoint(tmp_path / "hf", "e2b", {i: {"k": 0.5, "v": 0.25} for i in owners}, "ModelOpt")
    kv = load_target(str(tmp_path / "hf"), dtype="float32", kv_dtype="fp8").model_def.kv
    assert kv is not None
    assert kv.scales is not None
    assert kv.scales[0] == (0.5, 0.25)
    assert kv.scales[-1] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({0: {"k": 0.5}}, "scales of keys and values for 1 layers, but none for layer 1"),
        ({0: {"k": -1.0}}, r"k_scale is \[-1.0\]; expected one positive number"),
        ({0: {"v": float("inf")}}, r"v_scale is \[inf\]; expected one positive number"),
    ],
)
def test_wrong_scales_are_refused_where_they_are_used(
    tmp_path: Path, given: dict[int, dict[str, float]], said: str
) -> None:
    checkpoint(tmp_path / "hf", "31b", given, "compressed-tensors")
    target = loading.load_target(str(tmp_path / "hf"), dtype="float32")
    with pytest.raises(CheckpointError, match=said):
        loading.load_target(str(tmp_path / "hf"), dtype="float32", kv_dtype="fp8")
    progress: list[Any] = []
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / "hf", tmp_path / "ours", progress=lambda *done: progress.append(done))
    assert not progress  # before anything is written
    save(tmp_path / "saved", target)
    assert Manifest.read(tmp_path / "saved").kv_scales is None


def test_a_manifest_with_other_scales_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "hf", "31b", {}, "ModelOpt")
    convert(tmp_path / "hf", tmp_path / "ours")
    file = tmp_path / "ours" / "manifest.json"
    values = json.loads(file.read_text())
    assert "kv_scales" not in values
    for wrong in ([[1.0]], [[1.0, 0.0]], "fp8"):
        file.write_text(json.dumps({**values, "kv_scales": wrong}))
        with pytest.raises(CheckpointError, match=r"kv_scales is .*, which no conversion writes"):
            Manifest.read(tmp_path / "ours")
    file.write_text(json.dumps({**values, "kv_scales": [[1.0, 1.0]]}))
    with pytest.raises(ValueError, match=r"the checkpoint has scales of 1 of \d layers"):
        load_target(str(tmp_path / "ours"), dtype="float32", kv_dtype="fp8")
