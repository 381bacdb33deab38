"""Compute some rows of a state and leave the others alone.

`take_rows` and `put_rows` stand around a pass over prompts, and around a decode loop for few active
rows. Small arrays are taken out of the state and put back. Caches and the drafter's state stay
where they are, and are read and written by slot number. An engine picks the program by the number
of active rows, see `counts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.shapes import Array, Int
from jaxspec.state import DecodeSpec, DecodeState


def take_rows(state: DecodeState, slots: Int[Array, " b"]) -> DecodeState:
    """Return the rows in `slots`, with the caches and the drafter's state of all slots."""
    rows = jax.tree.map(lambda x: x[slots], state.small)
    return dataclasses.replace(rows, caches=state.caches, drafter=state.drafter, slots=slots)


def put_rows(state: DecodeState, rows: DecodeState) -> DecodeState:
    """Write rows of `take_rows` back after a step. A slot past the last is dropped."""
    assert rows.slots is not None

    def put(old: Array, new: Array) -> Array:
        return old.at[rows.slots].set(new, mode="drop")

    changed = {
        name: jax.tree.map(put, getattr(state, name), getattr(rows, name)) for name in _CHANGED
    }
    return dataclasses.replace(state, caches=rows.caches, drafter=rows.drafter, **changed)


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
)
"""The fields that a step changes in a row."""


def counts(spec: DecodeSpec, slots: int, mesh: Mesh, *, invariant: bool) -> tuple[int, ...]:
    """Return the numbers of rows that are worth a program beside that for all slots, ascending.

    One row is the case of a server with one user. For a quarter of the slots, the products of a
    dense model take clearly less time than for all. The result is empty if a row must not depend on
    how many run, if slots are split over devices, and if the state cannot be addressed by slot.
    That is so for draft trees, and for drafters without `drafts_by_slot`.
    """
    if invariant or mesh.shape["data"] > 1 or spec.tree is not None:
        return ()
    if spec.drafter is not None and not spec.drafter.bind_abstract().drafts_by_slot:
        return ()
    return tuple(sorted({1, slots // 4} - {0, slots}))


def fill(active: Sequence[int], rows: int, slots: int) -> np.ndarray:
    """Return the slots for a program of `rows` rows: the active ones, then inactive ones.

    Returns:
      [rows], int32, no slot twice.
    """
    others = (slot for slot in range(slots) if slot not in set(active))
    return np.array([*active, *(next(others) for _ in range(rows - len(active)))], np.int32)
