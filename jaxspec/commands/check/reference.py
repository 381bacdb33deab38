"""The maker's measurement of a drafter, and the comparison of a check with it.

`Reference` is the record that `--record` writes (`weights.measured_acceptance`). `compare_with` compares a
check with it: the acceptance on the same text, row by row, and other changes since, by name.
Weights are compared by two numbers per tensor, its root mean square and a weighted sum (`Look`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import __version__
from jaxspec.commands.check.options import MIN_ROWS
from jaxspec.commands.check.statistics import Estimate, classify, format_gain, gained
from jaxspec.commands.check.text import PromptSet
from jaxspec.commands.options import UsageError
from jaxspec.configs.base import to_json
from jaxspec.quantised.array import named_arrays
from jaxspec.registry import ModelConfig
from jaxspec.shapes import Array, Params
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.measured_acceptance import FIELD, config_file, read_acceptance
from jaxspec.weights.sharding import fetch

_FORMAT = 1
_DIGITS = 4  # of a mark; `SAME` needs no more

SIBLING_RATIO = 10.0
"""A tensor this many times larger or smaller than in other layers is mentioned."""

SAME = 0.006
"""Largest difference of two marks of one tensor, in units of its root mean square. Rounding float32
weights to bfloat16 moves a mark by 0.0009 (one standard deviation); noise of 30 % moves it by
0.3."""


# --- weights at a glance -------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """A summary of a tensor.

    Attributes:
      rms: root mean square.
      mark: sum of all numbers, each times a fixed weight of its position, over the root of their
        count. It changes when numbers swap positions.
    """

    rms: float
    mark: float
    finite: bool = True

    def is_same(self, other: Look) -> bool:
        """Return whether two looks are of the same numbers, up to rounding."""
        if not (self.finite and other.finite):
            return self.finite == other.finite
        size = max(self.rms, other.rms)
        return max(abs(self.rms - other.rms), abs(self.mark - other.mark)) <= SAME * size


def look_at(params: Params) -> dict[str, Look]:
    """Look at all weights on their devices, reading each once."""
    if not params:
        return {}
    params = named_arrays(params)
    patterns = {name: [_pattern(n, i) for i, n in enumerate(x.shape)] for name, x in params.items()}
    return {
        name: Look(float(rms), float(mark), bool(finite))
        for name, (rms, mark, finite) in fetch(_numbers(params, patterns)).items()
    }


@jax.jit
def _numbers(
    params: Params, patterns: Mapping[str, Sequence[Array]]
) -> dict[str, tuple[Array, Array, Array]]:
    numbers = {}
    for name, x in params.items():
        values, weights = x.astype(jnp.float32), jnp.float32(1)
        for axis, pattern in enumerate(patterns[name]):
            shape = [1] * x.ndim
            shape[axis] = -1
            weights = weights * pattern.reshape(shape) if axis else pattern.reshape(shape)
        rms = jnp.sqrt(jnp.mean(jnp.square(values)))
        mark = jnp.sum(values * weights) / math.sqrt(x.size)
        numbers[name] = rms, mark, jnp.all(jnp.isfinite(values))
    return numbers


@functools.cache
def _pattern(size: int, axis: int) -> np.ndarray:
    """Return fixed weights of the positions along an axis, unordered, with mean square 1."""
    angles = (1 + np.arange(size)) * (0.6180339887 + 0.1 * axis) * 2 * math.pi
    return (math.sqrt(2) * np.cos(angles)).astype(np.float32)


@dataclass(frozen=True)
class Oddity:
    """An unusual property of a tensor.

    Attributes:
      wrong: no trained model has it.
    """

    text: str
    wrong: bool


def oddities(model: str, looks: Mapping[str, Look]) -> list[Oddity]:
    """Return the tensors that are zero, not finite, or far in size from those of other layers.

    Args:
      model: its name, with which each text begins.
    """
    broken = [name for name, x in looks.items() if not x.finite]
    zero = [name for name, x in looks.items() if x.finite and x.rms == 0]
    odd = [
        Oddity(f"{model}: {join_names(names)}: {what}", wrong=True)
        for names, what in ((broken, "some numbers are not finite"), (zero, "all zero"))
        if names
    ]
    siblings: dict[str, dict[str, float]] = {}
    for name in looks.keys() - {*zero, *broken}:
        siblings.setdefault(re.sub(r"\d+", "*", name), {})[name] = looks[name].rms
    for _, sizes in sorted(siblings.items()):
        usual = statistics.median(sizes.values())
        odd += [
            Oddity(
                f"{model}: {name}: root mean square {size:.3g}, in other layers about {usual:.3g}",
                wrong=False,
            )
            for name, size in sorted(sizes.items())
            if len(sizes) >= 3 and not 1 / SIBLING_RATIO < size / usual < SIBLING_RATIO
        ]
    return odd


def join_names(names: Sequence[str], limit: int = 6) -> str:
    """Join up to `limit` names, and count the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of tensors by layer; tensors outside layers have groups of their own."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
    return groups


def marks_of(looks: Mapping[str, Look]) -> dict[str, str]:
    """Return a line per layer: size and mark of each of its tensors, in order of names."""
    return {
        group: " ".join(f"{x:.{_DIGITS}g}" for n in names for x in (looks[n].rms, looks[n].mark))
        for group, names in groups_of(looks).items()
    }


def looks_of(marks: Mapping[str, str], names: Iterable[str]) -> dict[str, Look]:
    """Parse the lines of `marks_of` for tensors with these names."""
    looks = {}
    for group, inside in groups_of(names).items():
        numbers = [float(x) for x in marks[group].split()]
        for i, name in enumerate(inside):
            rms, mark = numbers[2 * i : 2 * i + 2]
            looks[name] = Look(rms, mark, finite=math.isfinite(rms))
    return looks


def weights_record(model: LoadedModel, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return the record of a model's weights: a digest of names and shapes, and marks."""
    shapes = sorted((name, list(x.shape)) for name, x in named_arrays(model.params).items())
    return {"shapes": _digest(shapes), "marks": marks_of(looks)}


def changed_tensors(
    then: Mapping[str, Any], now: Mapping[str, Any], new: Mapping[str, Look]
) -> list[str]:
    """Return the tensors that differ, and the pairs that are exchanged."""
    if then["shapes"] != now["shapes"]:
        return ["its tensors have other names or shapes"]
    old = looks_of(then["marks"], new)
    differ = [name for name in old if not new[name].is_same(old[name])]
    messages = []
    for name in list(differ):
        twin = next((t for t in differ if t != name and _exchanged(old, new, name, t)), None)
        if twin is not None and name in differ:
            messages.append(f"{name} and {twin} are exchanged")
            differ = [x for x in differ if x not in (name, twin)]
    return [*messages, join_names(differ)] if differ else messages


def _exchanged(old: Mapping[str, Look], new: Mapping[str, Look], one: str, other: str) -> bool:
    return new[one].is_same(old[other]) and new[other].is_same(old[one])


# --- the record ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """A record of a measurement, as JSON values.

    Attributes:
      text_digest: of the prompts' ids and the number of new tokens.
      positions: number of positions of the text that were drafted from.
      acceptance_length: tokens per step in decoding.
      by_depth: share of drafts accepted at each depth where all earlier ones were.
      by_row: for each prompt, the share of positions whose drafts 1 to j were all accepted, j = 1,
        2, ...; numbers joined by spaces, "" for a row that was too short.
      target_config, drafter_config: all fields, as read.
      target_weights, drafter_weights: see `weights_record`.
    """

    text: str
    text_digest: str
    rows: int
    new_tokens: int
    num_draft_tokens: int
    positions: int
    dtype: str
    device: str
    accepted: float
    acceptance_length: float
    by_depth: list[float]
    by_row: list[str]
    target: str
    target_config: dict[str, Any]
    target_weights: dict[str, Any]
    drafter_config: dict[str, Any]
    drafter_weights: dict[str, Any]
    jaxspec: str = __version__
    format: int = _FORMAT

    @classmethod
    def read(cls, values: Any, where: str) -> Reference:
        """Read the values of a record.

        Raises:
          UsageError: they are no such record.
        """
        fields = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, Mapping) or values.get("format") != _FORMAT:
            raise UsageError(
                f"{where} is not a record of format {_FORMAT}; record it anew, or remove it"
            )
        if set(values) != fields:
            wrong = sorted(set(values) ^ fields)
            raise UsageError(f"{where} has unknown or missing fields: {', '.join(wrong)}")
        return cls(**values)

    @property
    def shares(self) -> np.ndarray:
        """`by_row` as numbers, [prompts, num_draft_tokens]; NaN for rows that were too short."""
        shares = np.full((len(self.by_row), self.num_draft_tokens), np.nan)
        for i, row in enumerate(self.by_row):
            if row:
                shares[i] = [float(x) for x in row.split()]
        return shares


def text_digest(prompts: PromptSet, new_tokens: int) -> str:
    """Return a digest of a text: its prompts and the number of new tokens."""
    return _digest([new_tokens, *map(list, prompts.ids)])


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def rows_of(shares: np.ndarray, enough: Sequence[int], prompts: int) -> list[str]:
    """Return `Reference.by_row` of the rows that were long enough, [rows, depths]."""
    rows = [""] * prompts
    for share, i in zip(shares, enough, strict=True):
        rows[i] = " ".join(f"{x:.4g}" for x in share)
    return rows


def plain_config(config: ModelConfig) -> dict[str, Any]:
    """Return a config as JSON values, with lists for tuples."""
    return json.loads(json.dumps(to_json(config)))


def reference_of(directory: Path) -> Reference | None:
    """Return the record in a drafter's directory; None if there is none.

    Raises:
      UsageError: its field holds something else.
    """
    values = read_acceptance(directory)
    where = f"{FIELD} in {config_file(directory)}"
    return None if values is None else Reference.read(values, where)


def check_recordable(directory: Path) -> None:
    """Refuse to record in the hub's cache.

    Raises:
      UsageError: the directory is there.
    """
    if directory.parent.name == "snapshots":
        raise UsageError(
            f"--record: {directory} is in the hub's cache, which others share; copy the drafter to "
            "a directory of your own, and check that"
        )


# --- the comparison ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceComparison:
    """A comparison of a check with the record of the drafter's maker.

    Attributes:
      causes: changes since then, in words.
      gain: in tokens per step since then, as a share; None if the texts differ.
      result: as of `search.Comparison`; "not compared" if the texts differ.
      then, now: drafts accepted per position, over the depths that both have.
      rows, depths: numbers of those that were compared.
      first_loss: the first depth at which certainly fewer drafts are accepted; None if none.
    """

    reference: Reference
    causes: list[str]
    gain: Estimate | None
    result: str = dataclasses.field(metadata={"json": "found"})
    then: float
    now: float
    rows: int
    depths: int
    first_loss: int | None


def compare_with(
    reference: Reference,
    current: Reference,
    target: Mapping[str, Look],
    drafter: Mapping[str, Look],
) -> ReferenceComparison:
    """Compare a check with a record.

    Rows are paired. The interval has level `statistics.LEVEL`: without a change, at most 1 of 40
    checks reports a loss, and only if rounding moves a row by more than `statistics.MATERIAL`.

    Args:
      target, drafter: looks at the weights.
    """
    weights = (
        changed_tensors(reference.target_weights, current.target_weights, target),
        changed_tensors(reference.drafter_weights, current.drafter_weights, drafter),
    )
    changes = {
        "the target is not the one that was measured": [
            *_fields(reference.target_config, current.target_config),
            *weights[0],
        ],
        "the drafter's config is not the one that was measured": _fields(
            reference.drafter_config, current.drafter_config
        ),
        "weights of the drafter differ from those that were measured": weights[1],
    }
    causes = [f"{what}: {'; '.join(which)}" for what, which in changes.items() if which]
    depths = min(reference.num_draft_tokens, current.num_draft_tokens)
    before, after = (r.shares[:, :depths] for r in (reference, current))
    gain, result, rows, first_loss = None, "not compared", 0, None
    if reference.text_digest == current.text_digest:
        both = ~np.isnan(before[:, 0]) & ~np.isnan(after[:, 0])
        if both.sum() >= MIN_ROWS:
            rows, before, after = int(both.sum()), before[both], after[both]
            gain = gained(before.sum(axis=1), after.sum(axis=1))
            result = classify(gain)
            lost = [Estimate.of(x).high < 0 for x in (after - before).T]
            first_loss = lost.index(True) + 1 if True in lost else None
    then, now = (float(np.nanmean(x.sum(axis=1))) for x in (before, after))
    return ReferenceComparison(reference, causes, gain, result, then, now, rows, depths, first_loss)


def _fields(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the fields of a config that differ, among those that both versions of jaxspec have."""
    return [
        f"{name} is {json.dumps(now[name])}, was {json.dumps(value)}"
        for name, value in then.items()
        if name in now and now[name] != value
    ]


def describe_comparison(a: ReferenceComparison) -> str:
    """Return the comparison in sentences: what differs, and what it changes."""
    r = a.reference
    causes = "".join(f"{as_sentence(cause)} " for cause in a.causes)
    if a.gain is None:
        return (
            f"{causes}Its maker measured {a.then:.2f} drafts accepted a position, on another text: "
            f"{r.text}, {r.rows} rows, {r.new_tokens} new tokens. The two are not compared."
        )
    text = (
        f"{causes}On the same {a.rows} rows {a.now:.2f} drafts are accepted a position. It was "
        f"{a.then:.2f} when its maker measured it ({r.dtype} on {r.device}): "
        f"{format_gain(a.gain)} tokens a step"
    )
    if a.depths < r.num_draft_tokens:
        text += f", over drafts 1 to {a.depths} of {r.num_draft_tokens}"
    if a.result == "no measurable difference":
        return f"{text}, no measurable difference."
    since = f", from draft {a.first_loss} on" if a.first_loss and a.gain.mean < 0 else ""
    same = "" if a.causes else " Neither configs nor weights differ from those that were measured."
    return f"{text}{since}.{same}"


def as_sentence(text: str) -> str:
    """Return a text with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."
