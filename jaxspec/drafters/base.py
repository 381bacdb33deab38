"""The drafter protocol: three verbs, which are all that the decode loop knows of a drafter.

    init_state   an empty state, before prefill
    draft        anchor tokens and state -> draft tokens
    absorb       what the target computed for tokens that were kept -> new state

A new drafter is one new file with a subclass of `Drafter`.
"""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

from flax import nnx, struct

from jaxspec.models.gemma4 import Embedder, TargetOutput
from jaxspec.shapes import Array, DTypeLike, Int

StateT = TypeVar("StateT")


class TargetView(struct.PyTreeNode):
    """What the target lends a drafter for one call; a drafter never stores it."""

    embedder: Embedder
    suppress_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())


class Draft(struct.PyTreeNode):
    """A chain of draft tokens a row, each a certain choice: its draft distribution is one-hot."""

    tokens: Int[Array, "B G"]


class Drafter(nnx.Module, Generic[StateT]):
    """A small model that proposes tokens. Its state is a pytree with one row a slot of the batch."""

    @property
    @abc.abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `absorb` wants, in order."""

    @property
    @abc.abstractmethod
    def max_draft_tokens(self) -> int:
        """Most tokens that one `draft` can propose."""

    @abc.abstractmethod
    def init_state(self, batch: int, *, cache_length: int, dtype: DTypeLike) -> StateT:
        """Return an empty state for `batch` rows of up to `cache_length` positions."""

    @abc.abstractmethod
    def draft(
        self,
        state: StateT,
        target: TargetView,
        anchors: Int[Array, " B"],
        lengths: Int[Array, " B"],
        *,
        num_draft_tokens: int,
    ) -> Draft:
        """Propose the tokens after each row's anchor, which stands at position `lengths`."""

    @abc.abstractmethod
    def absorb(
        self,
        state: StateT,
        output: TargetOutput,
        start: Int[Array, " b"],
        count: Int[Array, " b"],
        slots: Int[Array, " b"] | None = None,
    ) -> StateT:
        """Take in the first `count` rows of a target pass that began at position `start`: only these were kept.

        Args:
          slots: state row of each row of `output`; None when they are the same.
        """


AnyDrafter = Drafter[Any]
