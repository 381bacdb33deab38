"""Updates, and whole runs: killed and resumed, not finite, quantised, in bfloat16."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.quantised import QuantisedArray
from jaxspec.shapes import Params
from jaxspec.training import run as runs
from jaxspec.training.objectives import LossWeights
from jaxspec.training.options import RunOptions, TrainingOptions
from jaxspec.training.run import TrainingError, TrainingResult, train
from jaxspec.training.texts import Text, Texts
from jaxspec.training.trainer import Batch, Trainer, fixed_weights
from jaxspec.weights.arrays import read_params, stored_arrays
from jaxspec.weights.define import formats_for, model_def_of
from jaxspec.weights.loading import CheckpointError, LoadedModel
from tests import fakes, tiny, tiny_pair

OPTIONS = TrainingOptions(steps=6, rows=2, anchors=8, learning_rate=1e-2)
RUN = RunOptions(
    max_length=32, held_out=2, evaluate_every=3, evaluated_tokens=6, report_every=1, save_every=2
)


@functools.cache
def target() -> LoadedModel:
    model_def = model_def_of(tiny_pair.TARGET, "float32")
    made = fakes.loaded(model_def, tiny.random_params(model_def, 1), tiny_pair.GENERATION)
    return dataclasses.replace(made, generation=None)


@functools.cache
def start() -> Params:
    return tiny.random_params(model_def_of(tiny_pair.DRAFTER, "float32"), 2)


@functools.cache
def trainer(**changes: Any) -> Trainer:
    options = dataclasses.replace(OPTIONS, **changes)
    return Trainer(target(), model_def_of(tiny_pair.DRAFTER, "float32"), options)


def texts(count: int = 12) -> list[Text]:
    rng = np.random.default_rng(0)
    pairs = (rng.integers(6, 200, (2, n)).tolist() for n in rng.integers(9, 14, count))
    return [Text(tuple(prompt), tuple(answer)) for prompt, answer in pairs]


def equal(a: Params, b: Params) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a) and a.keys() == b.keys()


def run(directory: Path, options: RunOptions = RUN, **changes: Any) -> TrainingResult:
    return train(trainer(**changes), target(), start(), texts(), directory, options)


def last_state(directory: Path) -> list[np.ndarray]:
    """Return all numbers of the last checkpoint: weights, optimizer, step, the best weights so far."""
    last = directory / "checkpoints" / "00000006"
    return list(read_params(last, list(stored_arrays(last))))


def test_a_run_that_is_killed_at_any_step_ends_as_if_it_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that is killed sends one update at a time to the device, the others two and one."""
    whole = run(tmp_path / "whole")
    expected = last_state(tmp_path / "whole")
    assert not all(map(np.array_equal, expected, jax.tree.leaves(trainer().init(start()))))
    lines = (tmp_path / "whole" / "curves.jsonl").read_text()
    updates = Trainer.updates
    for killed_after in (1, 5):

        def dies(self: Trainer, state: Any, *args: Any) -> Any:
            if int(state.step) == killed_after:  # noqa: B023
                raise KeyboardInterrupt
            return updates(self, state, *args)

        directory = tmp_path / str(killed_after)
        monkeypatch.setattr(Trainer, "updates", dies)
        with pytest.raises(KeyboardInterrupt):
            run(directory, dataclasses.replace(RUN, updates_per_call=1))
        monkeypatch.setattr(Trainer, "updates", updates)
        again = run(directory)
        assert again.resumed_from == killed_after // 2 * 2
        assert all(map(np.array_equal, last_state(directory), expected))
        assert equal(again.params, whole.params)
        assert (again.step, again.acceptance_length) == (whole.step, whole.acceptance_length)
        assert (directory / "curves.jsonl").read_text() == lines
        assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == [
            "00000004",
            "00000006",
        ]
    over = run(tmp_path / "whole")
    assert over.resumed_from == 6
    assert equal(over.params, whole.params)
    with pytest.raises(CheckpointError, match="another options: give the options of that run"):
        run(tmp_path / "whole", seed=1)
    with pytest.raises(CheckpointError, match="another texts"):
        train(trainer(), target(), start(), texts(13), tmp_path / "whole", RUN)


def test_the_rate_rises_and_falls_as_optax_says() -> None:
    for steps, share in ((1, 0.5), (20, 0.0), (50, 0.1)):
        plan = trainer(warmup=share, learning_rate=2.0).plan
        warmup = min(round(share * steps), steps - 1)
        rise = [optax.linear_schedule(0.0, 2.0, warmup)] if warmup else []
        fall = optax.cosine_decay_schedule(2.0, steps - warmup)
        expected = optax.join_schedules([*rise, fall], [warmup] if warmup else [])
        at = jnp.arange(steps + 1)
        rates = jax.vmap(lambda i: plan.rate(i, jnp.int32(steps)))(at)  # noqa: B023
        np.testing.assert_allclose(
            rates, [np.asarray(expected(i)) for i in range(steps + 1)], atol=1e-6
        )


def test_a_run_of_some_minutes_ends_in_time_at_a_rate_of_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call takes 40 seconds, as compiling does, and each update 1 second, from the 30th on 2."""
    now = 0.0
    updates = Trainer.updates

    def takes_time(self: Trainer, state: Any, *args: Any) -> Any:
        nonlocal now
        begin, count = int(state.step), args[2]
        now += 40 * (begin == 0) + sum(1 if i < 30 else 2 for i in range(begin, begin + count))
        return updates(self, state, *args)

    monkeypatch.setattr(Trainer, "updates", takes_time)
    monkeypatch.setattr(runs, "time", SimpleNamespace(perf_counter=lambda: now))
    options = dataclasses.replace(RUN, minutes=2, held_out=0, updates_per_call=4, save_every=1000)
    result = run(tmp_path, options, steps=100_000)
    # 40 seconds, 30 updates in 30 seconds and 25 in 50; at the end the speed is a mean of both.
    assert result.stopped == "minutes"
    assert 50 <= result.step <= 58
    assert 115 <= now <= 128
    lines = [json.loads(x) for x in (tmp_path / "curves.jsonl").read_text().splitlines()]
    rates = [x["learning_rate"] for x in lines]
    assert [x["step"] for x in lines] == list(range(1, result.step + 1))
    assert max(rates) > 0.9 * OPTIONS.learning_rate
    assert rates[-1] < 0.02 * OPTIONS.learning_rate
    (place,) = (tmp_path / "checkpoints").iterdir()
    assert int(place.name) == result.step
    # Its time is over: the same command measures and writes, and no more.
    again = run(tmp_path, options, steps=100_000)
    assert again.resumed_from == result.step
    assert again.step <= result.step + 4


def test_updates_together_are_those_one_by_one() -> None:
    batches = runs.Batches(Texts.of(texts()), 2, 1, 32, 0)
    state, losses = trainer().init(start()), []
    for step in range(3):
        state, metrics = trainer().update(state, target().params, batches(step))
        losses.append(float(metrics.loss))
    for sizes in ((3,), (1, 2)):
        together, step, found = trainer().init(start()), 0, []
        for size in sizes:
            batch = batches(step, step + size, 3)
            together, metrics = trainer().updates(together, target().params, batch, size)
            found += np.asarray(metrics.loss)[:size].tolist()
            assert not np.any(np.asarray(metrics.loss)[size:])
            step += size
        assert found == losses
        jax.tree.map(np.testing.assert_array_equal, together, state)


def test_a_run_that_only_gets_worse_returns_its_start(tmp_path: Path) -> None:
    """The drafter has learnt a text by heart. Other texts and a high rate then spoil it."""
    text = texts(1)[0]
    done = fakes.naive_greedy(target(), [list(text.prompt)], 12).sequences[0]
    same = Text(text.prompt, tuple(done[len(text.prompt) :]))
    options = dataclasses.replace(RUN, evaluate_every=40, save_every=100, evaluated_tokens=12)
    learnt = train(trainer(steps=80), target(), start(), [same] * 8, tmp_path / "a", options)
    spoilt = [Text(text.prompt, tuple(x.answer)) for x in texts(8)]
    options = dataclasses.replace(options, evaluate_every=4)
    again = trainer(steps=12, learning_rate=0.1)
    result = train(again, target(), learnt.params, spoilt, tmp_path / "b", options)
    lines = [json.loads(x) for x in (tmp_path / "b" / "curves.jsonl").read_text().splitlines()]
    measured = [x for x in lines if "held_out_acceptance_length" in x]
    assert len(measured) == 4
    first, *others = [x["held_out_acceptance_length"] for x in measured]
    assert max(others) < first == result.acceptance_length == result.first_acceptance_length
    assert result.step == 0
    assert equal(result.params, learnt.params)


def test_a_loss_that_is_not_finite_stops_and_the_last_good_state_is_kept(tmp_path: Path) -> None:
    batch = runs.Batches(Texts.of(texts()), 2, 1, 32, 0)
    state = trainer().init(start())
    state, _ = trainer().update(state, target().params, batch(0))
    before = jax.tree.map(np.asarray, state)
    broken = {n: x.at[(0,) * x.ndim].set(jnp.nan) for n, x in target().params.items()}
    for _ in range(2):
        state, metrics = trainer().update(state, broken, batch(1))
        assert not np.isfinite(metrics.loss)
    assert (int(state.step), int(state.failed)) == (1, 1)
    jax.tree.map(np.testing.assert_array_equal, state.replace(failed=jnp.int32(-1)), before)
    ill = dataclasses.replace(target(), params=broken)
    with pytest.raises(TrainingError, match=r"not finite in update 1; .*00000000.* lower learning"):
        train(trainer(), ill, start(), texts(), tmp_path, dataclasses.replace(RUN, held_out=0))
    (there,) = (tmp_path / "checkpoints").iterdir()
    kept, _, _ = runs._Run(tmp_path, json.loads((there / "run.json").read_text())["about"]).resume(
        trainer().init(start())
    )
    assert equal(kept.params, start())


@pytest.mark.slow
def test_parts_of_an_update_make_the_step_of_the_whole() -> None:
    """With all places as anchors nothing is drawn, so that the parts hold what the whole holds."""
    pairs = [(text.prompt, text.answer) for text in texts(4)]
    one, four = trainer(anchors=32), trainer(anchors=32, accumulate=4)
    made, norms = [], []
    for which, parts in ((one, 1), (four, 4)):
        batch = Batch.padded(pairs, 32, parts)
        state, metrics = which.update(which.init(start()), target().params, batch)
        made.append(which.params(state))
        norms.append(float(metrics.grad_norm))
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)
    # The first step of Adam has the size of the rate, whichever the gradient: where it is 0, rounding decides.
    far = [np.abs(made[0][n] - made[1][n]) > 1e-5 for n in made[0]]
    assert np.mean(np.concatenate([x.ravel() for x in far])) < 1e-2


def test_training_improves_acceptance_and_stops_when_it_no_longer_does(tmp_path: Path) -> None:
    """One text again and again is learnt by heart. Its prompt is among those that are measured."""
    text = texts(1)[0]
    done = fakes.naive_greedy(target(), [list(text.prompt)], 12).sequences[0]
    same = Text(text.prompt, tuple(done[len(text.prompt) :]))
    options = dataclasses.replace(
        RUN, patience=2, evaluate_every=10, save_every=100, evaluated_tokens=12
    )
    result = train(trainer(steps=80), target(), start(), [same] * 8, tmp_path, options)
    assert result.first_acceptance_length is not None
    assert result.acceptance_length is not None
    assert result.acceptance_length > result.first_acceptance_length + 1
    assert result.stopped == "patience"
    lines = [json.loads(x) for x in (tmp_path / "curves.jsonl").read_text().splitlines()]
    measured = {
        x["step"]: x["held_out_acceptance_length"]
        for x in lines
        if "held_out_acceptance_length" in x
    }
    assert measured[result.step] == result.acceptance_length == max(measured.values())
    assert max(measured) == lines[-1]["step"] == result.step + 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_a_quantised_target_and_bfloat16(kind: str) -> None:
    """Masters stay float32, and only what is trained changes."""
    plain = model_def_of(tiny_pair.TARGET, "bfloat16")
    params = tiny.random_params(plain, 1)
    quantised = plain.with_formats(formats_for(plain, linears="int8", tables="int8"))
    packed = {n: quantised.pack(n, x) for n, x in params.items()}
    assert any(isinstance(x, QuantisedArray) for x in packed.values())
    config: Any = {
        "dflash": dataclasses.replace(tiny_pair.DRAFTER, own_embedding=True, own_head=True),
        "mtp": dataclasses.replace(tiny_pair.ASSISTANT, num_centroids=2, num_top_centroids=1),
    }[kind]
    model_def = model_def_of(config, "bfloat16")
    weights = LossWeights(kl=0.5, total_variation=0.5)
    made = Trainer(quantised, model_def, OPTIONS, weights=weights)
    begin = tiny.random_params(model_def, 2)
    state = made.init(begin)
    for step in range(3):
        batch = runs.Batches(Texts.of(texts()), 2, 1, 32, 0)(step)
        state, metrics = made.update(state, packed, batch)
    assert np.isfinite(metrics.loss)
    assert {str(x.dtype) for x in state.params.values()} == {"float32"}
    after = made.params(state)
    for name, x in after.items():
        assert x.dtype == begin[name].dtype
        if name in fixed_weights(model_def):
            np.testing.assert_array_equal(x, begin[name])
        else:
            assert not np.array_equal(state.params[name], begin[name].astype(jnp.float32)), name


def test_without_optax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxspec-decoding\[train\]'"):
        importlib.reload(sys.modules[Trainer.__module__])
