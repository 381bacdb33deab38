"""Weights that are not finite are refused where they come in: every tensor by name, and nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import hf_io
from jaxspec.weights import finite
from jaxspec.weights.conversion import convert, to_hf
from jaxspec.weights.loading import CheckpointError, load_drafter, load_target
from jaxspec.weights.sharding import make_mesh
from tests.checkpoints_convert import hf_layout
from tests.checkpoints_convert.hf_layout import TINY, TINY_DRAFTER

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
NAN_BYTES = b"\xc0\x7f"  # of bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_judged_by_itself(dtype: Any) -> None:
    """The largest finite numbers are finite: nothing is added up. Bits of a NaN may be any of many."""
    dtype = np.dtype(dtype)
    most = ml_dtypes.finfo(dtype).max
    bits = np.dtype(f"u{dtype.itemsize}")
    infinity = int(np.asarray(np.inf, dtype).view(bits))
    odd = np.asarray(infinity + 1, bits).view(dtype)  # a NaN with one bit of its fraction set
    array = np.zeros((3, 1000), dtype)
    array[0] = most
    array[1] = -most
    array[2, 5] = ml_dtypes.finfo(dtype).smallest_subnormal
    assert finite.num_non_finite(array) == 0
    for bad in (np.nan, -np.nan, np.inf, -np.inf, odd, -odd):
        array[1, 999] = bad
        assert finite.num_non_finite(array) == 1
    array[2] = np.inf
    assert finite.num_non_finite(array) == 1001
    assert finite.num_non_finite(np.full(5, -1)) == 0


def test_no_slab_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_SLAB_BYTES", 64)
    for size in (1, 16, 17, 33, 160):
        for at in range(size):
            array = np.ones(size, np.float32)
            array[at] = np.nan
            assert finite.num_non_finite(array) == 1


@pytest.fixture
def target(tmp_path: Path) -> Path:
    hf_layout.write(tmp_path / "hf", TINY["31b"], hf_layout.target_shapes(TINY["31b"]))
    return tmp_path / "hf"


def spoil(directory: Path, *parts: str) -> list[str]:
    """Put a NaN into the second value of all tensors that have one of these in their names."""
    file = directory / "model.safetensors"
    tensors = {n: t for n, t in hf_io.read_header(file).items() if any(p in n for p in parts)}
    with file.open("r+b") as opened:
        for tensor in tensors.values():
            opened.seek(tensor.offset + 2)
            opened.write(NAN_BYTES)
    return list(tensors)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_target_with_a_nan(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threaded: bool
) -> None:
    """Also of tensors that are joined: the source is named. Large ones are looked at in a thread."""
    if threaded:
        monkeypatch.setattr(finite, "_SLAB_BYTES", 8)
    names = spoil(target, "layers.1.self_attn.k_proj", "layers.0.mlp.up_proj")
    assert len(names) == 2
    actions: list[Callable[[], object]] = [
        lambda: load_target(str(target), dtype="float32"),
        lambda: load_target(str(target), dtype="bfloat16", mesh=make_mesh()),
        lambda: convert(target, tmp_path / "ours"),
    ]
    for action in actions:
        with pytest.raises(CheckpointError, match="hf has weights that are not finite") as caught:
            action()
        told = str(caught.value).splitlines()[1:]
        assert sorted(told) == sorted(
            f"  {name}: 1 of {24 * (20 if 'mlp' in name else 32):,} values NaN or infinite"
            for name in names
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_long_list_is_cut(target: Path) -> None:
    names = spoil(target, "layernorm")
    with pytest.raises(CheckpointError) as caught:
        load_target(str(target), dtype="float32")
    told = str(caught.value).splitlines()
    assert len(told) == 1 + 5 + 1
    assert told[-1] == f"  and {len(names) - 5} more tensors"


def test_a_drafter_with_a_nan(tmp_path: Path) -> None:
    hf_layout.write(tmp_path / "dflash", TINY_DRAFTER, hf_layout.drafter_shapes(TINY_DRAFTER))
    (name,) = spoil(tmp_path / "dflash", "layers.0.mlp.gate_proj")
    with pytest.raises(CheckpointError, match=name):
        load_drafter(str(tmp_path / "dflash"), dtype="float32")


def test_a_directory_of_ours_with_a_nan(target: Path, tmp_path: Path) -> None:
    """As an earlier version may have written it."""
    ours = convert(target, tmp_path / "ours").destination
    (chunk,) = (f for f in (ours / "params/layers.2.mlp.down").iterdir() if f.name != ".zarray")
    with chunk.open("r+b") as opened:
        opened.write(NAN_BYTES)
    message = r"ours has weights that are not finite(?s:.*)layers\.2\.mlp\.down: 1 of 480 values"
    for mesh in (None, make_mesh()):
        with pytest.raises(CheckpointError, match=message):
            load_target(str(ours), dtype="float32", mesh=mesh)
    with pytest.raises(CheckpointError, match=message):
        to_hf(ours, tmp_path / "back")
    shutil.rmtree(ours)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
