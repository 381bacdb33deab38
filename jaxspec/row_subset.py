"""Compute some rows of a state and leave the others alone.

Rows that a mesh splits are numbered in each part for itself, see `mesh.on_each_part`.
`take_rows` and `put_rows` stand around a pass over prompts, and around a decode loop for few active
rows. Small arrays are taken out of the state and put back. Caches and the drafter's state stay
where they are, and are read and written by slot number. An engine with rows that are read ahead
decodes a part of its rows so, and it picks the program by the number of active rows, see `counts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxspec.cache import Tables
from jaxspec.mesh import rows_at, set_rows
from jaxspec.shapes import Array, Int
from jaxspec.state import DecodeSpec, DecodeState


def take_rows(state: DecodeState, slots: Int[Array, " b"]) -> DecodeState:
    """Return the rows in `slots`, with the caches and the drafter's state of all slots."""
    rows = rows_at(state.small, slots)
    return dataclasses.replace(rows, caches=state.caches, drafter=state.drafter, slots=slots)


def put_rows(state: DecodeState, rows: DecodeState) -> DecodeState:
    """Write rows of `take_rows` back after a step. A slot past the last is dropped."""
    assert rows.slots is not None
    old, new = ({name: getattr(of, name) for name in _CHANGED} for of in (state, rows))
    changed = set_rows(old, rows.slots, new)
    return dataclasses.replace(state, caches=rows.caches, drafter=rows.drafter, **changed)


def rows_of(tables: Tables | None, slots: Int[Array, " b"] | None) -> Tables | None:
    """Return the pages of the rows in `slots`, of the pages of all slots.

    Args:
      slots: a slot past the last gets pages that it must not use. None: all.
    """
    if tables is None or slots is None:
        return tables
    return rows_at(tables, slots)


_CHANGED = (
    "lengths",
    "anchors",
    "active",
    "stopped",
    "failed",
    "non_finite",
    "tokens",
    "num_tokens",
    "num_steps",
    "acceptance_lengths",
    "logprobs",
    "counts",
    "automaton",
    "survival",
)
"""The fields that a step changes in a row."""


MANY_SLOTS, VERY_MANY_SLOTS = 32, 128
"""Slots of a part from which half and three quarters of them have programs, and five and seven eighths."""


def counts(spec: DecodeSpec, slots: int, mesh: Mesh, *, invariant: bool) -> tuple[int, ...]:
    """Return the numbers of rows that are worth a program beside that for all slots, ascending.

    One row is the case of a server with one user. For a quarter of the slots, the products of a
    dense model take clearly less time than for all. Of many slots, half and three quarters have
    programs too: 94 rows of 26B-A4B take 43 ms a step in a program for 112, and 48 in one for 140, on an H100.
    Memory may hold fewer rows than there are slots, so of very many slots every eighth from half on has a program.
    Where a mesh splits rows, each part has as many. The result is empty if a row must not depend on how
    many run, for draft trees, which were not measured, and where rows are not `addressable`.
    """
    if invariant or spec.tree is not None or not addressable(spec):
        return ()
    parts = mesh.shape["data"]
    each = slots // parts
    eighths = [2]
    eighths += [4, 6] if each >= MANY_SLOTS else []
    eighths += [5, 7] if each >= VERY_MANY_SLOTS else []
    return tuple(parts * n for n in sorted({1, *(n * each // 8 for n in eighths)} - {0, each}))


def addressable(spec: DecodeSpec) -> bool:
    """Return whether a program can compute some rows of a state: not with a drafter without `drafts_by_slot`."""
    return spec.drafter is None or spec.drafter.bind_abstract().drafts_by_slot


def mixes(spec: DecodeSpec) -> bool:
    """Return whether rows can decode in passes over prompts, see `mixed_step`."""
    together = spec.drafter is None or spec.drafter.bind_abstract().absorbs_together
    return spec.tree is None and addressable(spec) and together and spec.target.module.mixes


def fill(
    active: Sequence[int],
    rows: int,
    slots: int,
    parts: int = 1,
    waiting: Collection[int] = (),
) -> np.ndarray:
    """Return the slots for a program of `rows` rows: the active ones, then inactive ones.

    Args:
      slots: of the state.
      waiting: slots to take last, since they are active on the device.
      parts: of the slots, on a mesh that splits them. At most a part's share of `rows` is active there.

    Returns:
      [rows], int32, numbers in each part, no slot twice.
    """
    filled, each, last = [], slots // parts, {*waiting}
    for part in range(parts):
        of_part = [slot for slot in active if slot // each == part]
        taken = {*of_part}
        others = (slot for slot in range(part * each, (part + 1) * each) if slot not in taken)
        others = sorted(others, key=lambda slot: slot in last)
        of_part += others[: rows // parts - len(of_part)]
        filled += [slot - part * each for slot in of_part]
    return np.array(filled, np.int32)


def first(rows: int, slots: int, parts: int) -> list[int]:
    """Return the first slots of each part, `rows` together."""
    each = slots // parts
    return [part * each + i for part in range(parts) for i in range(rows // parts)]
