"""A whole run of training: batches, curves, acceptance on held-out prompts, checkpoints that resume exactly.

Read `train`. What a run leaves in its directory:

    checkpoints/00000200/   the state after 200 updates, in Orbax's format; the newest two are kept
    curves.jsonl            a line for each report: loss, acceptance on the training text, held-out acceptance
    curves.png              the same as a picture, with matplotlib
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.options import Drafting, Sampling
from jaxspec.rollout.sampler import Sampler
from jaxspec.shapes import Params
from jaxspec.training.features import FeatureFiles, digest_of, kept_features
from jaxspec.training.options import RunOptions
from jaxspec.training.passes import Features
from jaxspec.training.texts import Batches, Text, Texts, split, usable, width_of
from jaxspec.training.trainer import Metrics, Trainer, TrainState, full_params
from jaxspec.version import __version__
from jaxspec.weights.arrays import LazyArray, check_tree, read_params, save_params
from jaxspec.weights.atomic_dir import atomic_directory
from jaxspec.weights.loading import CheckpointError, LoadedModel

KEPT = 2
"""Checkpoints that are kept."""

Notify = Callable[[str], None]


class TrainingError(RuntimeError):
    """Training that cannot go on."""


@dataclass(frozen=True)
class TrainingResult:
    """The end of a run.

    Attributes:
      params: the drafter's weights, in its dtype: those of the best measurement; without one, the last.
      step: the update that they are of.
      acceptance_length: of `params` on the held-out prompts. None: nothing was measured.
      first_acceptance_length: before the first update.
      held_out: the prompts that were measured on.
      resumed_from: the step of the checkpoint that the run went on from; 0 for none.
      stopped: why the run ended: "steps", "patience" or "minutes".
    """

    params: Params
    step: int
    acceptance_length: float | None
    first_acceptance_length: float | None
    held_out: Sequence[tuple[int, ...]]
    resumed_from: int
    stopped: str


def train(
    trainer: Trainer,
    target: LoadedModel,
    start: Params,
    texts: Texts | Sequence[Text],
    directory: Path,
    options: RunOptions = RunOptions(),  # noqa: B008
    notify: Notify = lambda message: None,
    announce: Notify | None = None,
) -> TrainingResult:
    """Train a drafter, or go on with the run that a directory holds.

    A run that was killed goes on from its last checkpoint, and ends with the same parameters, on a CPU in
    float32 to the last bit.

    The result is the best state by acceptance on the held-out prompts, the start among them: it is never worse
    there than what the run began with.

    With `options.minutes` the number of updates follows from their speed, so another run of the same options has
    other parameters.

    Args:
      start: the drafter's weights before the first update.
      directory: of the run; it is made if needed.
      notify: called with a line of progress.
      announce: called with the size of features before they are written; None: `notify` is.

    Raises:
      DataError: no text is long enough.
      TrainingError: a loss or gradient is not finite. The last good state is in a checkpoint.
      CheckpointError: the directory holds another run, or is damaged.
    """
    entered = time.perf_counter()
    plan = trainer.plan
    drafts = plan.drafter.bind_abstract().default_draft_tokens
    texts = texts if isinstance(texts, Texts) else Texts.of(texts)
    width = width_of(texts, min(options.max_length, plan.target.config.max_positions))
    learnt, held_out = split(usable(texts, drafts, width), options.held_out, plan.options.seed)
    o = plan.options
    measure = _Acceptance(trainer, target, held_out, options.evaluated_tokens)
    run = _Run(directory, fingerprint(trainer, options, texts))
    state, best, record = run.resume(trainer.init(start))
    state, best = trainer.place((state, best))
    resumed_from = int(state.step)
    curves = _Curves(directory, resumed_from)
    notify(f"{len(learnt)} texts of up to {width} tokens, {len(held_out)} held-out prompts")
    features = _kept(trainer, target, learnt, width, options.features, announce or notify)
    batches = Batches(learnt, o.rows, o.accumulate, width, o.seed, features)
    if record.first is None and held_out:
        record.first = record.best = measure(state.params, state.fixed)
        curves.add({"step": 0, "held_out_acceptance_length": record.first})
    clock = _Clock(options.minutes, o.steps, entered - record.seconds)
    pauses = [o.steps, options.save_every, *([options.evaluate_every] if held_out else [])]
    together = min(options.updates_per_call, *pauses)

    def end_of(step: int) -> int:
        """Return the last of the updates after a step that go to the device together."""
        return min(step + together, clock.end, *(step - step % n + n for n in pauses[1:]))

    begin, stopped = time.perf_counter(), "steps"
    step, end = resumed_from, end_of(resumed_from)
    batch = batches(step, end, together) if step < o.steps else None
    while batch is not None and stopped == "steps":
        # The host reads the next texts meanwhile. After an update that is not finite the state stays.
        state, metrics = trainer.updates(state, target.params, batch, end - step, clock.end)
        done, step, end = range(step + 1, end + 1), end, end_of(end)
        last = step == clock.end
        batch = None if last else batches(step, end, together)
        evaluates = bool(held_out) and (last or step % options.evaluate_every == 0)
        saves = last or step % options.save_every == 0
        reported = [i for i in done if i % options.report_every == 0]
        if not (evaluates or saves or reported):
            continue
        if int(state.failed) >= 0:
            _refuse(run, state, best, record)
        if not last:
            clock.look(step)
            end, last = min(end, clock.end), step == clock.end
            evaluates, saves = evaluates or (last and bool(held_out)), saves or last
        if last and step < o.steps:
            stopped = "minutes"
        if (evaluates or saves) and step not in reported:
            reported.append(step)
        numbers = _values(metrics)
        lines = [{"step": i, **{n: x[i - done[0]] for n, x in numbers.items()}} for i in reported]
        if evaluates:
            lines[-1]["held_out_acceptance_length"] = measured = measure(state.params, state.fixed)
            if record.best is None or measured > record.best:
                best = jax.tree.map(jnp.copy, state.params)
                record.best, record.best_step, record.waited = measured, step, 0
            else:
                record.waited += 1
            if options.patience is not None and record.waited >= options.patience:
                stopped = "patience"
        rate = (step - resumed_from) / (time.perf_counter() - begin)
        for line in lines:
            curves.add(line)
        notify(_shown(lines[-1], clock.end, rate))
        record.seconds = clock.seconds()
        if saves or stopped != "steps":
            run.save(state, best, record)
    if not held_out:
        best, record.best_step = state.params, int(state.step)
    curves.draw()
    return TrainingResult(
        full_params(plan.drafter, best, state.fixed),
        record.best_step,
        record.best,
        record.first,
        measure.prompts,
        resumed_from,
        stopped,
    )


def fingerprint(trainer: Trainer, options: RunOptions, texts: Texts) -> dict[str, str]:
    """Return what a run depends on, by name: a run goes on only where all of it is the same."""
    plan = trainer.plan
    return {
        "target": repr(plan.target),
        "drafter": repr(dataclasses.astuple(plan.drafter.config)),
        "dtype": plan.drafter.dtype,
        "options": repr((plan.options, plan.weights)),
        "run": repr(
            (options.max_length, options.held_out, options.evaluate_every, options.patience)
        ),
        "texts": texts.digest(),
    }


def _kept(
    trainer: Trainer,
    target: LoadedModel,
    texts: Texts,
    width: int,
    directory: Path | None,
    notify: Notify,
) -> FeatureFiles | None:
    """Return the features of texts in a directory, if there is to be one."""
    if directory is None:
        return None
    plan, texts, rows = trainer.plan, texts.cut(width), trainer.plan.options.rows
    abstract = trainer.abstract_features()

    def make(indices: np.ndarray) -> tuple[Features, np.ndarray]:
        # Always as many rows, so that one program makes all.
        filled = np.concatenate([indices, np.zeros(rows - len(indices), np.int64)])
        tokens, lengths, _ = texts.rows(filled, width)
        made = trainer.features(target.params, jnp.asarray(tokens), jnp.asarray(lengths))
        return made, lengths[: len(indices)]

    about = {
        "target": repr(plan.target),
        "target's weights": digest_of(target.params),
        "drafter's features": repr(abstract),
        "drafter's layers": repr(plan.drafter.bind_abstract().feature_layers),
        "texts": texts.digest(),
        "width": str(width),
    }
    return kept_features(directory, about, abstract, texts.sizes, make, rows, notify)


@dataclass
class _Record:
    """Measurements so far, and the seconds that they and the updates took."""

    first: float | None = None
    best: float | None = None
    best_step: int = 0
    waited: int = 0
    seconds: float = 0.0


class _Clock:
    """Says how many updates a run has: all of them, or those that there is time for.

    Attributes:
      end: the last update, as far as is known.
    """

    def __init__(self, minutes: float | None, steps: int, begin: float):
        self.limit_s = None if minutes is None else 60 * minutes
        self.steps, self.begin, self.end = steps, begin, steps
        self._first: tuple[int, float] | None = None

    def seconds(self) -> float:
        """Return the time that the run has taken."""
        return time.perf_counter() - self.begin

    def look(self, step: int) -> None:
        """Set the end by the speed so far, at a moment when the device has done all updates to a step."""
        if self.limit_s is None:
            return
        now = self.seconds()
        left_s = max(self.limit_s - now, 0.0)
        if self._first is None:
            # Programs were compiled until now, which says nothing of the speed.
            self._first, steps_left = (step, now), self.steps - step if left_s else 0
        else:
            before, then = self._first
            steps_left = int(left_s * (step - before) / max(now - then, 1e-9))
        self.end = min(self.steps, step + steps_left)


class _Acceptance:
    """Measures acceptance on held-out prompts, by decoding greedily with the drafter."""

    def __init__(self, trainer: Trainer, target: LoadedModel, held_out: Texts, new_tokens: int):
        self.drafter, self.target = trainer.plan.drafter, target
        longest = target.config.max_positions - new_tokens - 32
        self.prompts = [held_out[i].prompt[-longest:] for i in range(len(held_out))]
        self.sampler = Sampler(target, self.drafter, max_new_tokens=new_tokens, drafting=Drafting())

    def __call__(self, params: Params, fixed: Params) -> float:
        params = full_params(self.drafter, params, fixed)
        result = self.sampler(self.target.params, params, self.prompts, Sampling(), 0)
        return float(result.acceptance_length())


class _Run:
    """The checkpoints of a run."""

    def __init__(self, directory: Path, about: dict[str, str]):
        self.directory, self.about = directory / "checkpoints", about

    def newest(self) -> list[Path]:
        """Return the complete checkpoints, the newest first."""
        if not self.directory.is_dir():
            return []
        return sorted((p for p in self.directory.iterdir() if p.name.isdigit()), reverse=True)

    def resume(self, state: TrainState) -> tuple[TrainState, Params, _Record]:
        """Return the newest checkpoint's contents, or those of a run that begins.

        Raises:
          CheckpointError: it is of another run, or damaged.
        """
        best = jax.tree.map(jnp.copy, state.params)
        if not (there := self.newest()):
            return state, best, _Record()
        values = json.loads((there[0] / "run.json").read_text(encoding="utf-8"))
        if other := [
            name for name, value in self.about.items() if values["about"].get(name) != value
        ]:
            raise CheckpointError(
                f"{self.directory.parent} holds a run with another {', '.join(other)}: give the options of that run "
                "to go on with it, or another directory"
            )
        leaves, tree = jax.tree.flatten((state, best))
        shapes = {_name(i): np.atleast_1d(x).shape for i, x in enumerate(leaves)}
        check_tree(there[0], shapes)
        arrays = read_params(there[0], list(shapes))
        stored = [
            jnp.asarray(x.reshape(leaf.shape), leaf.dtype)
            for leaf, x in zip(leaves, arrays, strict=False)
        ]
        state, best = jax.tree.unflatten(tree, stored)
        return state, best, _Record(**values["record"])

    def save(self, state: TrainState, best: Params, record: _Record) -> Path:
        """Write a checkpoint, then remove old ones. Return its directory."""
        place = self.directory / f"{int(state.step):08d}"
        if not place.exists():
            leaves = [np.asarray(x) for x in jax.tree.leaves((state, best))]
            with atomic_directory(place) as (temporary, _):
                save_params(temporary, {_name(i): _lazily(x) for i, x in enumerate(leaves)})
                values = {"about": self.about, "record": dataclasses.asdict(record)}
                values["version"] = __version__
                (temporary / "run.json").write_text(json.dumps(values), encoding="utf-8")
        for old in self.newest()[KEPT:]:
            shutil.rmtree(old)
        return place


def _name(index: int) -> str:
    return f"{index:05d}"


def _lazily(x: np.ndarray) -> LazyArray:
    whole = np.atleast_1d(x)
    return LazyArray(whole.shape, whole.dtype, lambda: whole)


def _refuse(run: _Run, state: TrainState, best: Params, record: _Record) -> None:
    """Keep the last good state, and raise an error.

    Raises:
      TrainingError: always.
    """
    failed = int(state.failed)
    place = run.save(state.replace(failed=jnp.int32(-1)), best, record)
    raise TrainingError(
        f"the loss or its gradient is not finite in update {failed + 1}; the state before it is in {place}. "
        "Try a lower learning rate, or look at the texts and the target's weights"
    )


def _values(metrics: Metrics) -> dict[str, list[float]]:
    names = [field.name for field in dataclasses.fields(metrics)]
    return {name: np.asarray(getattr(metrics, name)).tolist() for name in names}


def _shown(line: dict[str, Any], steps: int, rate: float) -> str:
    held_out = line.get("held_out_acceptance_length")
    more = "" if held_out is None else f", {held_out:.3f} on held-out prompts"
    return (
        f"{line['step']} of {steps}: loss {line['loss']:.4f}, {line['acceptance_length']:.3f} tokens a step on "
        f"the texts{more}; {rate:.2f} updates a second"
    )


class _Curves:
    """The file of curves. Lines behind the step that a run goes on from are dropped."""

    def __init__(self, directory: Path, step: int):
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "curves.jsonl"
        self.lines: list[dict[str, Any]] = []
        if step and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            whole = (json.loads(x) for x in lines if x.endswith("}"))
            self.lines = [x for x in whole if x["step"] <= step]
        text = "".join(json.dumps(x) + "\n" for x in self.lines)
        self.path.write_text(text, encoding="utf-8")

    def add(self, line: dict[str, Any]) -> None:
        """Write a line."""
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def draw(self) -> None:
        """Draw the curves, if matplotlib is there."""
        try:
            figure = importlib.import_module("matplotlib.figure").Figure(layout="constrained")
        except ImportError:
            return
        above, below = figure.subplots(2, sharex=True)
        names = {
            "loss": (above, "loss"),
            "acceptance_length": (below, "training texts"),
            "held_out_acceptance_length": (below, "held-out prompts"),
        }
        for name, (axes, label) in names.items():
            points = [(x["step"], x[name]) for x in self.lines if name in x]
            if points:
                axes.plot(
                    *zip(*points, strict=True), label=label, marker="." if len(points) < 40 else ""
                )
        above.set_ylabel("loss")
        below.set_ylabel("tokens a verify step")
        below.set_xlabel("update")
        if below.get_legend_handles_labels()[0]:
            below.legend()
        figure.savefig(self.path.with_suffix(".png"), dpi=120)
