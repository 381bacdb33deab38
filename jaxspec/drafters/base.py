"""The drafter protocol: three verbs, which are all that the decode loop knows of a drafter.

    init_state   an empty state, before prefill
    draft        anchor tokens and state -> draft tokens
    absorb       tokens that were kept, and what the target computed for them -> new state

A new drafter is a module with a subclass of `Drafter`, a table of conversion rules and an entry in `families`.
"""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

from flax import nnx, struct

from jaxspec.cache import KVCache
from jaxspec.models.target import Caches, Target, TargetOutput
from jaxspec.records import Tree
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Array, DTypeLike, Float, Int

StateT = TypeVar("StateT")


class TargetView(struct.PyTreeNode):
    """What a target lends a drafter for one call. A drafter never stores it."""

    target: Target
    caches: Caches
    suppress_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def last_kv(self, kind: str) -> KVCache:
        """Return the cache of the last layer of a kind ("sliding" or "full") that owns its K/V."""
        cache = self.caches[self.target.config.last_kv_owner(kind)]
        assert cache is not None
        return cache


class Kept(struct.PyTreeNode):
    """Tokens that were kept, with what the target computed for them: what a drafter learns from.

    The first `count` of the T tokens of a row count. They stand at positions start .. start + count - 1.

    Attributes:
      tokens: of a prompt, or the anchor and the accepted drafts of a step.
      hidden: after the target's final norm.
      features: outputs of the drafter's `feature_layers`.
      slots: state row of each row here; None when they are the same.
    """

    tokens: Int[Array, "b T"]
    hidden: Float[Array, "b T D"]
    features: tuple[Float[Array, "b T D"], ...]
    start: Int[Array, " b"]
    count: Int[Array, " b"]
    slots: Int[Array, " b"] | None = None

    @classmethod
    def of(
        cls,
        tokens: Int[Array, "b T"],
        output: TargetOutput,
        start: Int[Array, " b"],
        count: Int[Array, " b"],
        slots: Int[Array, " b"] | None = None,
    ) -> Kept:
        """Put tokens together with the target's pass over them."""
        return cls(tokens, output.hidden, output.features, start, count, slots)


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
        view: TargetView,
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
    def absorb(self, state: StateT, kept: Kept) -> StateT:
        """Take in tokens that were kept: prompts chunk by chunk, then those of every step."""


AnyDrafter = Drafter[Any]
