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

from jaxspec.cache import KVCache
from jaxspec.configs.base import TargetConfig
from jaxspec.models.gemma4 import Caches, Embedder, TargetOutput
from jaxspec.records import Tree
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Array, DTypeLike, Float, Int

StateT = TypeVar("StateT")


class TargetView(struct.PyTreeNode):
    """What the target lends a drafter for one call; a drafter never stores it."""

    embedder: Embedder
    caches: Caches
    config: TargetConfig = struct.field(pytree_node=False)
    suppress_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def last_kv(self, kind: str) -> KVCache:
        """Return the cache of the last layer of a kind ("sliding" or "full") that owns its K/V."""
        cache = self.caches[self.config.last_kv_owner(kind)]
        assert cache is not None
        return cache


class Draws(struct.PyTreeNode):
    """How to draw drafts: shaped as the target's tokens are, with a key for each of them."""

    sampling: SamplingParams
    keys: Array  # [B, G]


class Draft(struct.PyTreeNode):
    """Draft tokens a row.

    Block row 0 is the anchor and row i + 1 is draft i. `parents` names for each draft the row it follows,
    which comes before it; without it drafts follow each other, a chain. `log_q` is the log of the
    distribution that each was drawn from, -inf where it has nothing; without it each is a certain choice.
    """

    tokens: Int[Array, "B G"]
    parents: Int[Array, "B G"] | None = None
    log_q: Float[Array, "B G V"] | None = None


class Drafter(nnx.Module, Generic[StateT]):
    """A small model that proposes tokens. Its state is a pytree with one row a slot of the batch."""

    @property
    @abc.abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `absorb` wants, in order."""

    @property
    @abc.abstractmethod
    def max_draft_tokens(self) -> int:
        """Most tokens that one `draft` can propose in a row."""

    @property
    def default_draft_tokens(self) -> int:
        """Tokens to propose in a chain when nobody says how many."""
        return self.max_draft_tokens

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
        tree: Tree | None = None,
        draws: Draws | None = None,
    ) -> Draft:
        """Propose the tokens after each row's anchor, which stands at position `lengths`.

        Args:
          tree: propose the best nodes of such a tree instead of a chain.
          draws: draw a chain's tokens from the drafter's own distribution, and tell it; without, each is
            the best.
        """

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
