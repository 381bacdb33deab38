"""What rows have that the host does not know yet: packed at the end of the program that made it.

Read `Ask`, then `pack`. The device says in a few numbers a row what is new since the host last looked, and only that is
fetched. A program that packs costs no further one; on a GPU each one costs the host most of a millisecond.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling import Logprobs
from jaxspec.shapes import Array, Int
from jaxspec.state import DecodeState
from jaxspec.weights.sharding import fetch

Packed = tuple[Int[Array, "B _"], Logprobs | None]
"""`News` on the device, with all whole numbers in one array: each array takes a fetch."""


class Most(NamedTuple):
    """The most tokens and steps of a row that can be new: sizes of what a program packs, and so a part of it."""

    tokens: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Ask:
    """What the host wants to hear of a program.

    Attributes:
      known: how many tokens of each row the host knows, and how many steps: [B, 2].
    """

    known: np.ndarray
    most: Most


@dataclasses.dataclass(frozen=True)
class News:
    """What rows have that the host does not know yet.

    Attributes:
      num_tokens: all tokens of a row, known ones included; `num_steps` likewise.
      tokens: the first ones that are not known. Columns past a row's last token mean nothing.
      acceptance_lengths, logprobs: likewise.
    """

    active: np.ndarray
    stopped: np.ndarray
    failed: np.ndarray
    spoilt: np.ndarray
    num_tokens: np.ndarray
    num_steps: np.ndarray
    tokens: np.ndarray
    acceptance_lengths: np.ndarray
    logprobs: Logprobs | None

    @classmethod
    def of(cls, packed: Packed, most: Most) -> News:
        """Wait for a program, and fetch what it packed."""
        on_host: Any = fetch(packed)  # arrays of numpy now
        numbers, logprobs = on_host
        active, stopped, failed, spoilt = numbers[:, :4].astype(bool).T
        return cls(
            *(active, stopped, failed, spoilt),
            num_tokens=numbers[:, 4],
            num_steps=numbers[:, 5],
            tokens=numbers[:, 6 : 6 + most.tokens],
            acceptance_lengths=numbers[:, 6 + most.tokens :],
            logprobs=logprobs,
        )


def pack(state: DecodeState, known: Int[Array, "B 2"], most: Most) -> Packed:
    """Return what is new in a state, inside a program."""

    def since(values: Array, start: Int[Array, " B"], count: int) -> Array:
        columns = start[:, None] + jnp.arange(count, dtype=jnp.int32)
        return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(values, columns)

    of_rows = (
        *(state.active, state.stopped, state.failed, state.non_finite),
        *(state.num_tokens, state.num_steps),
    )
    some = (
        jnp.stack([x.astype(jnp.int32) for x in of_rows], axis=1),
        since(state.tokens, known[:, 0], most.tokens),
        since(state.acceptance_lengths, known[:, 1], most.steps),
    )
    logprobs = jax.tree.map(lambda x: since(x, known[:, 0], most.tokens), state.logprobs)
    return jnp.concatenate(some, axis=1), logprobs
