"""What a drafter's maker measured, and how today's figures differ from it.

`Reference.of` makes the record that `--record` writes (`storage.acceptance`). `compared` holds a check against it:
the acceptance on the same text, row by row, and what else has changed since, by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import __version__
from jaxspec.commands.check import FEWEST_ROWS
from jaxspec.commands.check.statistics import Estimate, figures, gained, worded
from jaxspec.commands.check.text import PromptSet
from jaxspec.commands.check.weights import Look, listed
from jaxspec.commands.options import UsageError
from jaxspec.configs.base import to_json
from jaxspec.registry import ModelConfig
from jaxspec.weights.acceptance import FIELD, config_file, read_acceptance, write_acceptance
from jaxspec.weights.loading import LoadedModel

_FORMAT = 1
_DIGITS = 4  # of a mark; `weights.SAME` asks for no more


@dataclass(frozen=True)
class Looks:
    """What was seen of the weights of both models."""

    target: Mapping[str, Look]
    drafter: Mapping[str, Look]


@dataclass(frozen=True)
class Reference:
    """A record of a measurement, as JSON values.

    Attributes:
      text_digest: of the prompts' ids and the number of new tokens.
      positions: of the text, at which drafts were judged.
      acceptance_length: tokens a step in decoding.
      by_depth: share of drafts accepted at each depth where all before were.
      by_row: for each prompt, the share of positions whose drafts 1 to j were all accepted, j = 1, 2,
        ...; numbers joined by spaces, none where its row was too short.
      target_config, drafter_config: all fields, as the models were read.
      target_weights, drafter_weights: a digest of names and shapes, and marks (`marks_of`).
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
        """Read what `dataclasses.asdict` gave.

        Raises:
          UsageError: it is no such record.
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
        """`by_row` as numbers, [prompts, num_draft_tokens]; rows that were too short are not numbers."""
        shares = np.full((len(self.by_row), self.num_draft_tokens), np.nan)
        for i, row in enumerate(self.by_row):
            if row:
                shares[i] = [float(x) for x in row.split()]
        return shares


def text_digest(prompts: PromptSet, new_tokens: int) -> str:
    """Return what a text is known by: its prompts, and how far they are continued."""
    values = [new_tokens, *map(list, prompts.ids)]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def rows_of(shares: np.ndarray, enough: Sequence[int], prompts: int) -> list[str]:
    """Return `Reference.by_row` of the shares of the rows that were long enough, [rows, depths]."""
    rows = [""] * prompts
    for share, i in zip(shares, enough, strict=True):
        rows[i] = " ".join(f"{x:.4g}" for x in share)
    return rows


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Sort names of tensors into layers, and what stands beside them."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
    return groups


def marks_of(looks: Mapping[str, Look]) -> dict[str, str]:
    """Return the marks of all tensors, a line for each layer: of its tensors in order, size and mark."""
    return {
        group: " ".join(f"{x:.{_DIGITS}g}" for n in names for x in (looks[n].rms, looks[n].mark))
        for group, names in groups_of(looks).items()
    }


def looks_of(marks: Mapping[str, str], names: Iterable[str]) -> dict[str, Look]:
    """Read what `marks_of` wrote of tensors with these names."""
    looks = {}
    for group, inside in groups_of(names).items():
        numbers = [float(x) for x in marks[group].split()]
        for i, name in enumerate(inside):
            rms, mark = numbers[2 * i : 2 * i + 2]
            looks[name] = Look(rms, mark, finite=math.isfinite(rms))
    return looks


def shapes_digest(model: LoadedModel) -> str:
    """Return a digest of the names and shapes of a model's tensors."""
    shapes = sorted((name, list(x.shape)) for name, x in model.params.items())
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def weights_record(model: LoadedModel, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return what a model's weights are known by."""
    return {"shapes": shapes_digest(model), "marks": marks_of(looks)}


def plain_config(config: ModelConfig) -> dict[str, Any]:
    """Return a config as JSON has it, with lists for tuples."""
    return json.loads(json.dumps(to_json(config)))


def reference_of(directory: Path) -> Reference | None:
    """Return the record of a drafter's directory; None if there is none.

    Raises:
      UsageError: there is something else in its place.
    """
    values = read_acceptance(directory)
    where = f"{FIELD} in {config_file(directory)}"
    return None if values is None else Reference.read(values, where)


def check_recordable(directory: Path) -> None:
    """Refuse to record in a directory that is not the user's own.

    Raises:
      UsageError: it belongs to the hub's cache.
    """
    if directory.parent.name == "snapshots":
        raise UsageError(
            f"--record: {directory} is in the hub's cache, which others share; copy the drafter to a directory "
            "of your own, and check that"
        )


def record(directory: Path, measured: Reference) -> Path:
    """Write a record into a drafter's directory, and return the file that holds it.

    Raises:
      CheckpointError: it cannot be written.
    """
    return write_acceptance(directory, dataclasses.asdict(measured))


# --- against today's -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Against:
    """A check against the record of the drafter's maker.

    Attributes:
      reference: what was measured then.
      causes: what has changed since, in words.
      gain: of the tokens of a step since then, as a share; None where the texts differ.
      found: see `statistics.Comparison.found`; "not compared" where the texts differ.
      then, now: drafts accepted a position, over the depths that both have.
      rows: how many were compared.
      depths: how many depths were.
      first_loss: the first depth at which fewer drafts are accepted, for sure; None if none.
    """

    reference: Reference
    causes: list[str]
    gain: Estimate | None
    found: str
    then: float
    now: float
    rows: int
    depths: int
    first_loss: int | None


def compared(reference: Reference, current: Reference, looks: Looks) -> Against:
    """Hold a check against a record.

    Rows are paired. The interval is one of `statistics.LEVEL`: without a change, a loss is reported in at
    most 1 of 40 checks, and only where rounding moves a row by more than `statistics.MATERIAL`.
    """
    causes = changes_since(reference, current, looks)
    depths = min(reference.num_draft_tokens, current.num_draft_tokens)
    before, after = (r.shares[:, :depths] for r in (reference, current))
    if reference.text_digest == current.text_digest:
        both = ~np.isnan(before[:, 0]) & ~np.isnan(after[:, 0])
        if both.sum() >= FEWEST_ROWS:
            before, after = before[both], after[both]
            then, now = before.sum(axis=1).mean(), after.sum(axis=1).mean()
            gain = gained(before.sum(axis=1), after.sum(axis=1))
            lost = [Estimate.of(x).high < 0 for x in (after - before).T]
            first_loss = lost.index(True) + 1 if True in lost else None
            rows, found = int(both.sum()), worded(gain)
            return Against(
                reference,
                causes,
                gain,
                found,
                float(then),
                float(now),
                rows,
                depths,
                first_loss,
            )
    then, now = (float(np.nanmean(x.sum(axis=1))) for x in (before, after))
    return Against(reference, causes, None, "not compared", then, now, 0, depths, None)


def changes_since(then: Reference, now: Reference, looks: Looks) -> list[str]:
    """Say what differs from what was measured, apart from the acceptance."""
    found = []
    wrong = _fields(then.target_config, now.target_config)
    marks = changed_tensors(then.target_weights, now.target_weights, looks.target)
    if wrong or marks:
        found.append(f"the target is not the one that was measured: {'; '.join((*wrong, *marks))}")
    if wrong := _fields(then.drafter_config, now.drafter_config):
        found.append(f"the drafter's config is not the one that was measured: {'; '.join(wrong)}")
    if marks := changed_tensors(then.drafter_weights, now.drafter_weights, looks.drafter):
        found.append(
            f"weights of the drafter differ from those that were measured: {'; '.join(marks)}"
        )
    return found


def _fields(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name the fields of a config that differ. Fields that only one version of jaxspec has do not count."""
    return [
        f"{name} is {json.dumps(now[name])}, was {json.dumps(value)}"
        for name, value in then.items()
        if name in now and now[name] != value
    ]


def changed_tensors(
    then: Mapping[str, Any], now: Mapping[str, Any], new: Mapping[str, Look]
) -> list[str]:
    """Name the tensors that differ, and those that stand in each other's place."""
    if then["shapes"] != now["shapes"]:
        return ["its tensors have other names or shapes"]
    old = looks_of(then["marks"], new)
    differ = [name for name in old if not new[name].is_same(old[name])]
    found = []
    for name in list(differ):
        twin = next((t for t in differ if t != name and _exchanged(old, new, name, t)), None)
        if twin is not None and name in differ:
            found.append(f"{name} and {twin} are exchanged")
            differ = [x for x in differ if x not in (name, twin)]
    return [*found, listed(differ)] if differ else found


def _exchanged(old: Mapping[str, Look], new: Mapping[str, Look], one: str, other: str) -> bool:
    return new[one].is_same(old[other]) and new[other].is_same(old[one])


def said(against: Against) -> str:
    """Return the comparison in one sentence."""
    a, r = against, against.reference
    causes = f"; {'; '.join(a.causes)}" if a.causes else ""
    if a.gain is None:
        return (
            f"its maker measured {a.then:.2f} drafts accepted a position on another text ({r.text}, "
            f"{r.rows} rows, {r.new_tokens} new tokens): not compared{causes}"
        )
    text = (
        f"{a.now:.2f} drafts accepted a position, {a.then:.2f} when its maker measured it on the same {a.rows} rows "
        f"({r.dtype} on {r.device}): {figures(a.gain)} tokens a step"
    )
    if a.depths < r.num_draft_tokens:
        text += f", over drafts 1 to {a.depths} of {r.num_draft_tokens}"
    if a.found == "no measurable difference":
        return f"{text}, no measurable difference{causes}"
    since = f", from draft {a.first_loss} on" if a.first_loss and a.gain.mean < 0 else ""
    nothing = (
        "" if a.causes else "; neither configs nor weights differ from those that were measured"
    )
    return f"{text}{since}{causes}{nothing}"
