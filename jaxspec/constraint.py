"""Limit the tokens that rows may choose, by their grammars.

    Constraint         no grammars: all tokens are allowed
    FirstTokenMasks    prefill with grammars on the host: the masks come with the prompts
    HostGuides         steps with grammars on the host: each step asks `text.grammars.guides`
    DeviceAutomaton    grammars in tables on the device, by `text.grammars.automaton`

`apply` runs before the target pass, and `advance` after drafts were accepted. `decode` calls both.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.experimental import io_callback

from jaxspec.drafters.base import Draft
from jaxspec.mesh import ROWS, mesh_left_to_xla, on_each_device
from jaxspec.shapes import Array, Int, UInt32
from jaxspec.state import NO_GUIDE, DecodeSpec, DecodeState
from jaxspec.text.grammars.automaton import FREE, Automaton, advance, draft_states, masks_of
from jaxspec.text.grammars.guides import answer, answer_once
from jaxspec.text.grammars.masking import words_of
from jaxspec.text.grammars.matcher import ALL
from jaxspec.verify import AcceptResult


class Allowed(struct.PyTreeNode):
    """The tokens that each row of a block may choose.

    Attributes:
      masks: packed, see `text.grammars.masking`.
      states: the automaton's states that the masks belong to; None without an automaton.
    """

    masks: UInt32[Array, "B T words"]
    states: Int[Array, "B T"] | None = None


class Constraint:
    """Allow all tokens. Subclasses allow those of a grammar."""

    def apply(self, state: DecodeState, draft: Draft) -> tuple[Draft, Allowed | None]:
        """Return the draft, and the tokens allowed after the anchor and after each draft token.

        Where a grammar leaves one text, a draft token that differs from it is replaced, since the
        target can choose nothing else. Drawn drafts stay, since acceptance needs the distribution
        that they were drawn from.

        Returns:
          None instead of `Allowed` where all tokens are allowed.
        """
        del state
        return draft, None

    def advance(
        self, state: DecodeState, allowed: Allowed | None, result: AcceptResult
    ) -> DecodeState:
        """Return the state after the accepted drafts and the bonus token of active rows."""
        del allowed, result
        return state


@dataclass(frozen=True)
class FirstTokenMasks(Constraint):
    """Allow the tokens of masks that the host made for the first token of each reply."""

    masks: UInt32[Array, "B words"]

    def apply(self, state: DecodeState, draft: Draft) -> tuple[Draft, Allowed]:
        """Return the draft, which is empty, and the masks."""
        del state
        return draft, Allowed(self.masks[:, None])


@dataclass(frozen=True)
class HostGuides(Constraint):
    """Allow the tokens that guides on the host allow. The program waits for their answer.

    Each device asks for its own rows. Without a row that has a guide, it does not ask.

    Attributes:
      max_new: the most tokens that a row gains in a step.
    """

    vocab_size: int
    max_new: int

    def apply(self, state: DecodeState, draft: Draft) -> tuple[Draft, Allowed]:
        """Return the draft and the masks of `guides.answer`."""
        assert state.guides is not None
        numbers = jnp.where(state.active, state.guides, NO_GUIDE)
        columns = state.num_tokens[:, None] - self.max_new
        columns = columns + jnp.arange(self.max_new, dtype=jnp.int32)
        recent = jnp.take_along_axis(state.tokens, jnp.maximum(columns, 0), axis=1)
        mesh = mesh_left_to_xla()
        options = dict(
            words=words_of(self.vocab_size),
            force=draft.log_q is None,
            repeated=mesh is not None and mesh.size > 1,
        )
        with jax.named_scope("grammar"):
            tokens, masks = on_each_device(
                functools.partial(_answer_on_device, **options),
                (numbers, state.num_tokens, recent, draft.tokens),
                ROWS,
                (ROWS, ROWS),
            )
        return dataclasses.replace(draft, tokens=tokens), Allowed(masks)


def _answer_on_device(
    numbers: Int[Array, " B"],
    counts: Int[Array, " B"],
    recent: Int[Array, "B W"],
    drafts: Int[Array, "B G"],
    **options: Any,
) -> tuple[Int[Array, "B G"], UInt32[Array, "B G+1 words"]]:
    """Return the answer of `guides` for the rows of one device; without a guide, that all is allowed."""
    (b, g), words = drafts.shape, options["words"]
    shapes = (
        jax.ShapeDtypeStruct(drafts.shape, drafts.dtype),
        jax.ShapeDtypeStruct((b, g + 1, words), np.uint32),
    )

    def from_host() -> Any:
        host = functools.partial(_on_host, **options)
        return tuple(io_callback(host, shapes, numbers, counts, recent, drafts))

    def all_allowed() -> Any:
        return drafts, jnp.full(shapes[1].shape, ALL)

    return lax.cond(jnp.any(numbers != NO_GUIDE), from_host, all_allowed)


def _on_host(*arrays: Any, repeated: bool, **options: Any) -> Any:
    # Devices that hold the same rows ask for the same.
    return (answer_once if repeated else answer)(*map(np.asarray, arrays), **options)


@dataclass(frozen=True)
class DeviceAutomaton(Constraint):
    """Allow the tokens of an automaton on the device. `DecodeState.automaton` has its states."""

    automaton: Automaton

    def apply(self, state: DecodeState, draft: Draft) -> tuple[Draft, Allowed]:
        """Return the draft, and masks and states along it."""
        assert state.automaton is not None
        replace = draft.log_q is None and draft.parents is None
        with jax.named_scope("grammar"):
            begin = jnp.where(state.active, state.automaton, FREE)
            tokens, states = draft_states(
                self.automaton, begin, draft.tokens, draft.parents, replace=replace
            )
            allowed = Allowed(masks_of(self.automaton, states), states)
        return dataclasses.replace(draft, tokens=tokens), allowed

    def advance(
        self, state: DecodeState, allowed: Allowed | None, result: AcceptResult
    ) -> DecodeState:
        """Move the automaton's state of active rows past the bonus token."""
        assert allowed is not None
        assert allowed.states is not None
        assert state.automaton is not None
        row = result.accepted[:, None]
        if result.path is not None:
            row = jnp.take_along_axis(result.path, row, axis=1)
        before = jnp.take_along_axis(allowed.states, row, axis=1)[:, 0]
        after = advance(self.automaton, before, jnp.maximum(result.bonus, 0))
        return dataclasses.replace(state, automaton=jnp.where(state.active, after, state.automaton))


def constraint_of_prefill(
    automaton: Automaton | None, masks: UInt32[Array, "B words"] | None
) -> Constraint:
    """Return the constraint of the first token: the automaton's, or that of masks from the host."""
    if automaton is not None:
        return DeviceAutomaton(automaton)
    return Constraint() if masks is None else FirstTokenMasks(masks)


def constraint_of_steps(spec: DecodeSpec, automaton: Automaton | None) -> Constraint:
    """Return the constraint of later tokens: the automaton's, or the host's in a `guided` spec."""
    if automaton is not None:
        return DeviceAutomaton(automaton)
    if spec.guided:
        return HostGuides(spec.target.config.vocab_size, max_new=spec.depth + 1)
    return Constraint()
