"""Training on four devices of the host, in a process of its own: JAX counts devices only once.

`python -m tests.training.on_mesh KIND DATA MODEL DIRECTORY` prints a line of JSON; `test_mesh` says what it has to be.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.shapes import Params
from jaxspec.training.options import RunOptions, TrainingOptions
from jaxspec.training.run import train
from jaxspec.training.texts import Batches, Texts
from jaxspec.training.trainer import Metrics, Trainer
from jaxspec.weights.define import model_def_of
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.sharding import make_mesh
from tests import tiny, tiny_pair
from tests.tools.eight_devices import on_mesh
from tests.training.test_trainer import target, texts

OPTIONS = TrainingOptions(steps=4, rows=4, accumulate=2, anchors=8, learning_rate=1e-2)
RUN = RunOptions(max_length=32, evaluate_every=2, evaluated_tokens=6, save_every=2)


def updated(made: Trainer, start: Params, target: LoadedModel) -> tuple[Params, Metrics]:
    """Return the weights after two updates, and what the second one measured."""
    batches = Batches(Texts.of(texts()), OPTIONS.rows, OPTIONS.accumulate, 32, 0)
    state = made.init(start)
    for step in range(2):
        state, metrics = made.update(state, target.params, batches(step))
    return state.params, metrics


class Killed(Exception):
    """The end of a run that was killed."""


def main() -> None:
    """Train on the mesh, on one device, and on the mesh with a death between."""
    kind, data, model, directory = sys.argv[1], *map(int, sys.argv[2:4]), Path(sys.argv[4])
    config = {"dflash": tiny_pair.DRAFTER, "mtp": tiny_pair.ASSISTANT}[kind]
    model_def = model_def_of(config, "float32")
    start = tiny.random_params(model_def, 2)
    mesh = make_mesh(data=data, model=model, devices=jax.devices()[: data * model])
    there = on_mesh(target(), mesh)
    made = Trainer(target(), model_def, OPTIONS, mesh=mesh)
    spread, metrics = updated(made, start, there)
    alone, expected = updated(Trainer(target(), model_def, OPTIONS), start, target())
    shardings = model_def.shardings(mesh)
    far = [np.abs(np.asarray(spread[n]) - np.asarray(alone[n])).ravel() > 1e-4 for n in alone]
    found: dict[str, Any] = {
        # The first steps of Adam have the size of the rate: where a gradient is 0, rounding decides.
        "far": float(np.mean(np.concatenate(far))),
        "loss": [float(metrics.loss), float(expected.loss)],
        "norm": [float(metrics.grad_norm), float(expected.grad_norm)],
        "devices": len(spread[next(iter(spread))].sharding.device_set),
        "misplaced": [
            n for n, x in spread.items() if not x.sharding.is_equivalent_to(shardings[n], x.ndim)
        ],
    }
    try:
        Trainer(target(), model_def, dataclasses.replace(OPTIONS, rows=3), mesh=mesh)
    except ValueError as error:
        found["refused"] = str(error)
    running = dataclasses.replace(RUN, held_out=2 if kind == "mtp" else 0)
    whole = train(made, there, start, texts(), directory / "whole", running)
    updates = Trainer.updates

    def dies(self: Trainer, state: Any, *args: Any) -> Any:
        if int(state.step) == 3:
            raise Killed
        return updates(self, state, *args)

    Trainer.updates = dies
    try:
        one_by_one = dataclasses.replace(running, updates_per_call=1)
        train(made, there, start, texts(), directory / "killed", one_by_one)
    except Killed:
        Trainer.updates = updates
    again = train(made, there, start, texts(), directory / "killed", running)
    found["resumed_from"] = again.resumed_from
    found["equal"] = all(np.array_equal(again.params[n], whole.params[n]) for n in whole.params)
    # Features are made on the mesh, and read onto it.
    kept = dataclasses.replace(running, features=directory / "features")
    cached = train(made, there, start, texts(), directory / "cached", kept)
    off = [np.abs(cached.params[n] - whole.params[n]).ravel() > 1e-4 for n in whole.params]
    found["features"] = len(list((directory / "features").glob("*.safetensors")))
    found["far with features"] = float(np.mean(np.concatenate(off)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
