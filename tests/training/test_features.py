"""Features on disk: the same training, and directories that are refused."""

from __future__ import annotations

import dataclasses
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert.errors import CheckpointError
from jaxspec.shapes import Params
from jaxspec.training import features
from jaxspec.training.objectives import LossWeights
from jaxspec.training.options import TrainingOptions
from jaxspec.training.run import TrainingResult, train
from jaxspec.training.trainer import Trainer
from jaxspec.weights.define import model_def_of
from tests import tiny, tiny_pair
from tests.cases import slow
from tests.training.test_trainer import OPTIONS, RUN, equal, start, target, texts

USAGE = namedtuple("USAGE", "total used free")


def run(
    directory: Path,
    cache: Path | None,
    kind: str = "dflash",
    said: list[str] | None = None,
    **changes: Any,
) -> TrainingResult:
    options = dataclasses.replace(RUN, features=cache, held_out=0)
    config = {"dflash": tiny_pair.DRAFTER, "mtp": tiny_pair.ASSISTANT}[kind]
    begin = start() if kind == "dflash" else tiny.random_params(model_def_of(config, "float32"), 2)
    weights = LossWeights(kl=0.5 if kind == "dflash" else 0.0)
    plan: TrainingOptions = dataclasses.replace(OPTIONS, steps=3)
    trainer = Trainer(target(), model_def_of(config, "float32"), plan, weights=weights)
    model = dataclasses.replace(target(), **changes)
    notify = (lambda message: None) if said is None else said.append
    return train(trainer, model, begin, texts(), directory, options, notify)


@pytest.mark.parametrize("kind", ["dflash", *slow("mtp")])
def test_training_with_them_is_training_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Several shards. The second run reads what the first one wrote, and makes nothing."""
    monkeypatch.setattr(features, "SHARD_BYTES", 20_000)
    online, said = run(tmp_path / "a", None, kind), []
    cached = run(tmp_path / "b", tmp_path / "cache", kind, said)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) > 2
    for name, x in online.params.items():
        np.testing.assert_allclose(cached.params[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    (size,) = (x for x in said if x.startswith("features of 12 texts"))
    written = sum(x.stat().st_size for x in (tmp_path / "cache").glob("*.safetensors"))
    needed = int(size.split(" are ")[1].split(" bytes")[0].replace(",", ""))
    assert needed < written < needed + 12 * 1000  # headers
    assert "(float32)" in size

    def made(*args: Any) -> Any:
        raise AssertionError("they are there")

    monkeypatch.setattr(Trainer, "features", made)
    again = run(tmp_path / "c", tmp_path / "cache", kind)
    assert equal(again.params, cached.params)


def test_the_state_before_is_found_again_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "a", tmp_path / "cache")
    updates = Trainer.updates

    def dies(self: Trainer, state: Any, *args: Any) -> Any:
        if int(state.step) == 2:
            raise KeyboardInterrupt
        return updates(self, state, *args)

    monkeypatch.setattr(Trainer, "updates", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", tmp_path / "cache")
    monkeypatch.setattr(Trainer, "updates", updates)
    again = run(tmp_path / "b", tmp_path / "cache")
    assert again.resumed_from == 2
    assert equal(again.params, whole.params)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(9000, 0, 9000))
    with pytest.raises(
        CheckpointError,
        match=r"are \d+,\d+ bytes, and its disk has 9,000 free; name a directory of",
    ):
        run(tmp_path / "run", tmp_path / "cache")
    assert [x.name for x in tmp_path.iterdir() if x.name.startswith("cache")] == []


def test_a_killed_write_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = features.save_file, []

    def dies(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(*args)

    monkeypatch.setattr(features, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(features, "save_file", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    # What a process leaves that had no time to tidy up.
    left = tmp_path / "cache.partial"
    left.mkdir()
    (left / "00000.safetensors").write_bytes(b"half")
    run(tmp_path / "b", tmp_path / "cache")
    assert not left.exists()
    last = max((tmp_path / "cache").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="missing or cut off"):
        run(tmp_path / "c", tmp_path / "cache")


def test_features_of_something_else_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", tmp_path / "cache")
    other: Params = dict(target().params)
    name = next(n for n in other if other[n].ndim == 2)
    changed = other | {name: other[name][::-1]}  # the same numbers at other places
    with pytest.raises(CheckpointError, match="features of another target's weights: remove it"):
        run(tmp_path / "b", tmp_path / "cache", params=changed)
    with pytest.raises(CheckpointError, match="features of another drafter's features, drafter's"):
        run(tmp_path / "c", tmp_path / "cache", "mtp")
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="holds no features: name another"):
        run(tmp_path / "d", tmp_path / "other")


def test_bfloat16_and_bytes_have_digests_too() -> None:
    x = jnp.arange(48, dtype=jnp.float32).reshape(4, 12)
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.uint8):
        one, other = x.astype(dtype), x.astype(dtype).at[2, 3].set(0)
        assert features.digest_of({"x": one}) == features.digest_of({"x": one + 0})
        assert features.digest_of({"x": one}) != features.digest_of({"x": other})
        assert features.digest_of({"x": one}) != features.digest_of({"y": one})
    jax.block_until_ready(x)
