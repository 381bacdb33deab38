"""Output of a step: what rows gained since the host last fetched it.

Read `OutputRequest`, then `pack`. The program that makes the output packs it too, into few arrays.
A separate program would cost the host most of a millisecond on a GPU. Only new tokens are fetched.
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

PackedOutput = tuple[Int[Array, "B _"], Logprobs | None, Int[Array, "B _"] | None]
"""`StepOutput` on the device, with all whole numbers in one array: each array takes a fetch."""


class OutputSizes(NamedTuple):
    """Most new tokens and steps of a row: static sizes of the packed output."""

    tokens: int
    steps: int


@dataclasses.dataclass(frozen=True)
class OutputRequest:
    """The output that the host needs from a program.

    Attributes:
      known: tokens and steps of each row that the host has already, [B, 2].
    """

    known: np.ndarray
    sizes: OutputSizes


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Tokens and steps that rows gained since the last fetch, in host memory.

    Attributes:
      non_finite: whether the caches of a row may hold numbers that are not finite.
      num_tokens, num_steps: all of a row, those included that the host has already.
      tokens: new tokens. Columns past a row's last token mean nothing.
      acceptance_lengths, logprobs: likewise.
      verified: likewise the drafts that each new step verified; None if steps do not choose them.
    """

    active: np.ndarray
    stopped: np.ndarray
    failed: np.ndarray
    non_finite: np.ndarray
    num_tokens: np.ndarray
    num_steps: np.ndarray
    tokens: np.ndarray
    acceptance_lengths: np.ndarray
    logprobs: Logprobs | None
    verified: np.ndarray | None = None

    @classmethod
    def fetch(cls, packed: PackedOutput, sizes: OutputSizes) -> StepOutput:
        """Wait for a program, and fetch its packed output."""
        on_host: Any = fetch(packed)  # NumPy arrays now
        numbers, logprobs, verified = on_host
        active, stopped, failed, non_finite = numbers[:, :4].astype(bool).T
        return cls(
            *(active, stopped, failed, non_finite),
            num_tokens=numbers[:, 4],
            num_steps=numbers[:, 5],
            tokens=numbers[:, 6 : 6 + sizes.tokens],
            acceptance_lengths=numbers[:, 6 + sizes.tokens :],
            logprobs=logprobs,
            verified=verified,
        )


def pack(state: DecodeState, known: Int[Array, "B 2"], sizes: OutputSizes) -> PackedOutput:
    """Return the output of a state, inside a program."""

    def since(values: Array, start: Int[Array, " B"], count: int) -> Array:
        columns = start[:, None] + jnp.arange(count, dtype=jnp.int32)
        return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(values, columns)

    row_scalars = (
        *(state.active, state.stopped, state.failed, state.non_finite),
        *(state.num_tokens, state.num_steps),
    )
    numbers = (
        jnp.stack([x.astype(jnp.int32) for x in row_scalars], axis=1),
        since(state.tokens, known[:, 0], sizes.tokens),
        since(state.acceptance_lengths, known[:, 1], sizes.steps),
    )
    logprobs = jax.tree.map(lambda x: since(x, known[:, 0], sizes.tokens), state.logprobs)
    survival = state.survival
    verified = None if survival is None else since(survival.verified, known[:, 1], sizes.steps)
    return jnp.concatenate(numbers, axis=1), logprobs, verified
