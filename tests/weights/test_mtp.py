"""What assistants alone have in their files, and what is refused there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.configs.base import ConfigError
from jaxspec.configs.gemma4 import PRESETS as TARGET_PRESETS
from jaxspec.configs.mtp import PRESETS as MTP_PRESETS
from jaxspec.weights.conversion import convert
from jaxspec.weights.loading import CheckpointError, load_drafter, load_target
from tests.checkpoints_convert import hf_layout
from tests.checkpoints_convert.hf_layout import TINY, TINY_ASSISTANTS

Tensors = dict[str, np.ndarray]

ORDERING = "masked_embedding.token_ordering"
TABLE = "model.embed_tokens.weight"


@pytest.fixture
def assistant(tmp_path: Path) -> Path:
    """A good assistant with centroids, to be changed."""
    config = TINY_ASSISTANTS["e2b"]
    hf_layout.write(tmp_path / "hf", config, hf_layout.assistant_shapes(config))
    return tmp_path / "hf"


def _edit(directory: Path, edit: Callable[[Tensors], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _refused(source: Path) -> str:
    """Return what both ways to read a checkpoint say of it; neither leaves anything behind."""
    before = sorted(source.parent.iterdir())
    with pytest.raises(CheckpointError) as loading:
        load_drafter(str(source), dtype="bfloat16")
    with pytest.raises(CheckpointError) as converting:
        convert(source, source.parent / "ours")
    assert str(loading.value) == str(converting.value)
    assert sorted(source.parent.iterdir()) == before
    return str(loading.value)


def test_a_stored_head_is_left_out_where_it_is_the_embedding(assistant: Path):
    _edit(assistant, lambda tensors: tensors.update({"lm_head.weight": tensors[TABLE].copy()}))
    assert convert(assistant, assistant.parent / "ours").skipped == {"tied head": 1}


def test_a_head_of_its_own_is_refused(assistant: Path):
    _edit(
        assistant, lambda tensors: tensors.update({"lm_head.weight": tensors[TABLE][::-1].copy()})
    )
    assert f"lm_head.weight differs from {TABLE}" in _refused(assistant)


@pytest.mark.parametrize("value", [0, 40, -1, 1 << 32])
def test_a_token_ordering_must_have_every_token_once(assistant: Path, value: int):
    """Repeated, beyond the vocabulary, or such that 32 bits would hide it."""

    def replace_token_7(tensors: Tensors) -> None:
        tensors[ORDERING][tensors[ORDERING] == 7] = value

    _edit(assistant, replace_token_7)
    message = (
        f"{ORDERING} must list every token from 0 to 39 once, but 1 are not in it, 7 the first"
    )
    assert message in _refused(assistant)


def test_everything_that_does_not_fit_is_listed(assistant: Path):
    """Keys and values of its own, and matrices that are turned around."""

    def spoil(tensors: Tensors) -> None:
        for part in ("k_proj", "v_proj"):
            query = tensors["model.layers.3.self_attn.q_proj.weight"]
            tensors[f"model.layers.3.self_attn.{part}.weight"] = query[:16].copy()
        tensors["pre_projection.weight"] = tensors["pre_projection.weight"].T.copy()

    _edit(assistant, spoil)
    lines = _refused(assistant).splitlines()
    assert lines[0].endswith("does not fit its config.json, 3 problems:")
    assert [line.strip() for line in lines[1:]] == [
        "model.layers.3.self_attn.k_proj.weight: not known",
        "model.layers.3.self_attn.v_proj.weight: not known",
        "pre_projection.weight: shape [48, 12], expected [12, 48]",
    ]


def test_an_assistant_is_no_target(assistant: Path, tmp_path: Path):
    convert(assistant, tmp_path / "ours")
    for source in (assistant, tmp_path / "ours"):
        with pytest.raises(CheckpointError, match="is an MTP assistant; expected a target"):
            load_target(str(source), dtype="float32")
    hf_layout.write(tmp_path / "target", TINY["31b"], hf_layout.target_shapes(TINY["31b"]))
    with pytest.raises(CheckpointError, match=r"is a target; expected .* or an MTP assistant"):
        load_drafter(str(tmp_path / "target"), dtype="float32")


def test_the_assistant_of_another_size_is_refused_number_by_number():
    with pytest.raises(ConfigError) as caught:
        MTP_PRESETS["31b"].check_fits(TARGET_PRESETS["12b"])
    assert str(caught.value) == (
        "the assistant does not fit the target: backbone_hidden_size: assistant 5376, target 3840; "
        "kv heads of sliding layers: assistant 16, target 8; "
        "kv heads of full layers: assistant 4, target 1; use the assistant of the target's own size"
    )
    for size, assistant in MTP_PRESETS.items():
        assistant.check_fits(TARGET_PRESETS[size])
