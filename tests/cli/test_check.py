"""`jaxspec check` on the bundled pair, and on copies of it that were broken by editing their files."""

from __future__ import annotations

import inspect
import json
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import check as checking
from jaxspec.api import BUNDLED
from jaxspec.checkpoint import LoadedModel, read_json
from tests.cli.conftest import Outcome, Run

Edit = Callable[[Path], None]


@pytest.fixture
def check(invoke: Run) -> Callable[..., tuple[Outcome, dict[str, Any]]]:
    """Run the command; all tests let one set of programs do."""

    def run(*args: str) -> tuple[Outcome, dict[str, Any]]:
        outcome = invoke("check", *args, "--new-tokens", "40", "--batch-size", "16", "--json", "-")
        return outcome, json.loads(outcome.stdout)

    return run


@pytest.fixture
def decode_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take plain decoding's text for speculative decoding's, whose loop takes longest to compile."""
    decode = checking.decode_greedily

    def plainly(target: LoadedModel, drafter: Any, prompts: Any, new_tokens: int, **options: Any):
        return decode(target, None, prompts, new_tokens, batch_size=options["batch_size"])

    monkeypatch.setattr(checking, "decode_greedily", plainly)


def copy(name: str, directory: Path, *edits: Edit) -> str:
    """Copy a bundled model and edit the copy."""
    shutil.copytree(BUNDLED / name, directory)
    for edit in edits:
        edit(directory)
    return str(directory)


def config(**changes: Any) -> Edit:
    """Change values of config.json; those of `dflash_config` are given with that object's name."""

    def edit(directory: Path) -> None:
        file = directory / "config.json"
        values = read_json(file)
        for key, value in changes.items():
            values[key] = {**values[key], **value} if isinstance(value, dict) else value
        file.write_text(json.dumps(values))

    return edit


def weights(change: Callable[[str, np.ndarray], np.ndarray]) -> Edit:
    """Change every tensor, given its name."""

    def edit(directory: Path) -> None:
        file = directory / "model.safetensors"
        tensors = {name: change(name, x) for name, x in load_file(file).items()}
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, file)

    return edit


def shuffled(name: str, x: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(x.ravel()).reshape(x.shape)


def of_another_basis(directory: Path) -> None:
    """Renumber a target's hidden units: it says the same, but no drafter of the old one can read it."""
    size = read_json(directory / "config.json")["hidden_size"]
    order = np.random.default_rng(0).permutation(size)

    def renumber(name: str, x: np.ndarray) -> np.ndarray:
        for axis in range(x.ndim):
            x = np.take(x, order, axis) if x.shape[axis] == size else x
        return x

    weights(renumber)(directory)


def test_the_bundled_pair_is_sound(check):
    outcome, report = check()
    assert outcome.code == 0
    assert report["sound"]
    assert report["problems"] == []
    assert report["verdict"].startswith("sound")
    assert report["verdict"] in outcome.stderr.replace("\n", " ")
    assert report["differing"] == []
    (round_,) = report["rounds"]
    assert {c["name"]: c["better"] for c in round_["comparisons"]} == {
        "feature layers one lower": False,
        "embeddings not scaled": False,
        "all layers causal": False,
        "no layer causal": False,
    }
    assert [r.split(":")[0] for r in round_["impossible"]] == ["feature layers one higher"]
    shares = [p["mean"] for p in report["by_position"]]
    assert len(shares) == report["num_draft_tokens"] == 7
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(report["accepted"]["mean"])
    origins = {c["name"]: c["origin"] for c in report["conventions"]}
    assert origins["feature layers"] == "config.json: dflash_config.target_layer_ids"
    assert origins["embedding scale"] == "default: scaled"


@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        (
            config(dflash_config={"target_layer_ids": [0, 3, 5]}),
            "set dflash_config.target_layer_ids to [1, 4, 6]",
        ),
        (config(scale_embeddings=False), "set scale_embeddings to true"),
        (config(is_causal=False), "set is_causal to [true, false]"),
    ],
    ids=["layers", "scale", "causality"],
)
@pytest.mark.usefixtures("decode_once")
def test_a_wrong_convention_is_named(check, tmp_path: Path, edit: Edit, cause: str):
    drafter = copy("dflash", tmp_path / "drafter", edit)
    outcome, report = check("bundled", drafter)
    assert outcome.code == 1
    assert f"{cause} in {drafter}/config.json" in report["verdict"]


def test_shuffled_weights(check, tmp_path: Path):
    drafter = copy("dflash", tmp_path / "drafter", weights(shuffled))
    outcome, report = check("bundled", drafter)
    assert outcome.code == 1
    assert report["by_position"][0]["mean"] < report["floor"]
    assert report["differing"] == []  # a bad drafter costs time, never text
    assert "no other convention explains it" in report["verdict"]


@pytest.mark.usefixtures("decode_once")
def test_the_drafter_of_another_target(check, tmp_path: Path):
    target = copy("target", tmp_path / "target", of_another_basis)
    text = inspect.getsourcefile(textwrap)
    outcome, report = check(target, "dflash", "--text", text)
    assert outcome.code == 1
    assert report["text"] == f"pieces of {text}"
    assert "no other convention explains it" in report["verdict"]
