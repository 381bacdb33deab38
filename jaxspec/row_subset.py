"""Some rows of a state: passes and steps that compute these, and leave the others alone.

A pass over prompts takes the rows that it reads. Where few rows run, a decode loop takes those alone: read `narrowed`
and `widened`, between which it runs (`decode.decode_loop`). What is small is taken out of the state and put back. Caches
stay where they are, and are read and written by slot number. An engine picks the program by how many rows run: see
`counts`.
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
    """Return what some slots hold beside their caches and the drafter's state."""
    return jax.tree.map(lambda x: x[slots], state.small)


def put_rows(state: DecodeState, rows: DecodeState, slots: Int[Array, " b"]) -> DecodeState:
    """Write back what a step changed in such rows; a slot past the last is dropped."""

    def put(old: Array, new: Array) -> Array:
        return old.at[slots].set(new, mode="drop")

    changed = {
        name: jax.tree.map(put, getattr(state, name), getattr(rows, name)) for name in _CHANGED
    }
    return dataclasses.replace(state, **changed)


_CHANGED = (
    "lengths",
    "anchors",
    "active",
    "stopped",
    "failed",
    "spoilt",
    "tokens",
    "num_tokens",
    "num_steps",
    "acceptance_lengths",
    "logprobs",
    "counts",
    "automaton",
)
"""What a step changes in a row."""


def counts(spec: DecodeSpec, slots: int, mesh: Mesh, *, invariant: bool) -> tuple[int, ...]:
    """Return for how many rows it is worth to have a program beside that for all slots, fewest first.

    One row is the case of a server with one user. A quarter of the slots is where products of a dense model take
    clearly less time than those of all. None where a row must not depend on how many run, where slots are split over
    devices, and for what cannot address its state by slot: draft trees, and drafters that do not say that they can.
    """
    if invariant or mesh.shape["data"] > 1 or spec.tree is not None:
        return ()
    if spec.drafter is not None and not spec.drafter.bind_abstract().drafts_by_slot:
        return ()
    return tuple(sorted({1, slots // 4} - {0, slots}))


def fill(active: Sequence[int], rows: int, slots: int) -> np.ndarray:
    """Return the slots that a program for some rows computes: the active ones, then others that are not.

    Returns:
      [rows], int32, no slot twice.
    """
    others = (slot for slot in range(slots) if slot not in set(active))
    return np.array([*active, *(next(others) for _ in range(rows - len(active)))], np.int32)


def narrowed(state: DecodeState, slots: Int[Array, " R"]) -> DecodeState:
    """Return a state of some rows over the caches of all."""
    rows = take_rows(state, slots)
    return dataclasses.replace(rows, caches=state.caches, drafter=state.drafter, slots=slots)


def widened(state: DecodeState, rows: DecodeState) -> DecodeState:
    """Return the whole state after steps of such rows."""
    assert rows.slots is not None
    state = dataclasses.replace(state, caches=rows.caches, drafter=rows.drafter)
    return put_rows(state, rows, rows.slots)
