"""The drafter protocol: the three verbs by which the decode loop uses a drafter.

    init_state   an empty state, before prefill
    draft        anchor tokens and state -> draft tokens
    absorb       tokens that were kept, and what the target computed for them -> new state

A new drafter needs a module with a subclass of `Drafter`, a table of conversion rules, and an
entry in `registry`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx, struct

from jaxspec.cache import KVCache, Paging
from jaxspec.mesh import on_each_part, rows_at, set_rows
from jaxspec.models.target import Caches, Target, TargetOutput
from jaxspec.options import Tree
from jaxspec.quantised.kv import KVStorage
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Array, DTypeLike, Float, Int

StateT = TypeVar("StateT")
S = TypeVar("S")


class TargetView(struct.PyTreeNode):
    """A target and its caches, for one call of a drafter. A drafter never stores the view.

    Attributes:
      num_verified: the number of a chain's drafts that the target verifies, from the first one on.
        A drafter may leave the others out if that does not change these. None: all.
      slots: each row's row in the caches and in the drafter's state; None: row i has row i. On a mesh they
        are numbered in each part of the batch for itself, so that a state is read by `rows_of`.
      wants_confidence: whether a chain should have `Draft.confidence`, if the drafter can tell it.
    """

    target: Target
    caches: Caches
    suppress_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())
    num_verified: int | None = struct.field(pytree_node=False, default=None)
    slots: Int[Array, " B"] | None = None
    wants_confidence: bool = struct.field(pytree_node=False, default=False)

    def rows_of(self, state: S) -> S:
        """Return the rows of a drafter's state, of arrays alone, that the rows of the call have."""
        return state if self.slots is None else rows_at(state, self.slots)

    def last_kv(self, kind: str) -> KVCache:
        """Return the cache of the last layer of a kind ("sliding" or "full") that owns its K/V."""
        cache = self.caches[self.target.config.last_kv_owner(kind)]
        assert cache is not None
        return cache

    def stored_kv(self, kind: str) -> KVStorage | None:
        """Return the storage of that layer's K/V; None: as computed."""
        return self.target.stored_kv(self.target.config.last_kv_owner(kind))


class Kept(struct.PyTreeNode):
    """Tokens that were kept, with what the target computed for them. `Drafter.absorb` takes it.

    A row has T tokens, of which the first `count` are real. The real tokens stand at positions
    start .. start + count - 1.

    Attributes:
      tokens: part of a prompt, or the anchor and the accepted drafts of a step.
      hidden: the target's hidden states after its final norm. Of a prompt it may be that of the
        last real token alone, [b 1 D]: see `Drafter.reads_last_hidden_only`.
      features: the outputs of the drafter's `feature_layers`.
      start: the position of each row's first token.
      count: the number of real tokens of each row.
      slots: the state row of each row; None when row i belongs to state row i. As in `TargetView`.
    """

    tokens: Int[Array, "b T"]
    hidden: Float[Array, "b T D"] | Float[Array, "b 1 D"]
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
        """Make a `Kept` of tokens and the target's output for them."""
        return cls(tokens, output.hidden, output.features, start, count, slots)

    def rows_of(self, state: S) -> S:
        """Return the rows of a drafter's state, of arrays alone, that the tokens belong to."""
        return state if self.slots is None else rows_at(state, self.slots)

    def put(self, state: S, rows: S) -> S:
        """Write these rows into the state, those with tokens alone, and of a slot's rows the last."""
        if self.slots is None:

            def choose(old: Array, new: Array) -> Array:
                return jnp.where(self.count.reshape(-1, *(1,) * (old.ndim - 1)) > 0, new, old)

            return jax.tree.map(choose, state, rows)
        past_last = max(len(x) for x in jax.tree.leaves(state))

        def are_last(slots: Array, start: Array, count: Array) -> Array:
            follows = (slots == slots[:, None]) & (start > start[:, None]) & (count > 0)
            return (count > 0) & ~jnp.any(follows, axis=1)

        last = on_each_part(are_last, (self.slots, self.start, self.count))
        return set_rows(state, jnp.where(last, self.slots, past_last), rows)


class Draws(struct.PyTreeNode):
    """The sampling parameters of the target's tokens, and a random key for each draft."""

    sampling: SamplingParams
    keys: Array  # [B, G]


class Draft(struct.PyTreeNode):
    """The draft tokens of each row of a batch.

    The anchor and the drafts of a row form a block. Block row 0 is the anchor, and block row i + 1
    is draft i.

    Attributes:
      parents: the block row that each draft follows, which comes before the draft's own; None for
        a chain, where each draft follows the one before it.
      log_q: the log-probabilities of the distribution that each draft was drawn from, -inf for
        impossible tokens; None when each draft is a certain choice.
      confidence: how sure the drafter is, from 0 to 1, that the target accepts each draft if it
        accepts all before it; None: it does not tell. It may depend on the drafts before, and never
        on the draft itself or on later ones: `survival` chooses by it what to verify.
      limit: how many drafts of each row are verified, from the first one on; None: all. A chain's.
      units: with `limit`, the units of the target's pass, see `packing`.
    """

    tokens: Int[Array, "B G"]
    parents: Int[Array, "B G"] | None = None
    log_q: Float[Array, "B G V"] | None = None
    confidence: Float[Array, "B G"] | None = None
    limit: Int[Array, " B"] | None = None
    units: int = struct.field(pytree_node=False, default=0)

    @classmethod
    def none(cls, batch: int) -> Draft:
        """Return no drafts."""
        return cls(jnp.zeros((batch, 0), jnp.int32))

    def first(self, count: int) -> Draft:
        """Return the first drafts of a chain."""
        assert self.parents is None
        log_q = None if self.log_q is None else self.log_q[:, :count]
        return Draft(self.tokens[:, :count], log_q=log_q)

    def along(self, path: Int[Array, "B T"] | None) -> Int[Array, "B G"]:
        """Return the drafts on a path of block rows, which starts at the anchor; None: all drafts."""
        if path is None:
            return self.tokens
        return jnp.take_along_axis(self.tokens, jnp.maximum(path[:, 1:] - 1, 0), axis=1)


class Drafter(nnx.Module, Generic[StateT]):
    """A small model that proposes tokens. Its state is a pytree with one row for each slot.

    Attributes:
      absorbs_again: whether a state may absorb its newest tokens, at most a block, a second time,
        with other tokens from some position on, and is then as if only the second were absorbed. A
        stored prefix then serves prompts that differ from it in its last few tokens.
      absorbs_together: whether one `absorb` may have several chunks of a prompt, in rows of one slot, and is then as
        if they came one after the other. On a GPU chunks of a prompt then share passes.
      drafts_by_slot: whether `draft` uses `TargetView.slots`. An engine then computes few rows
        alone where few are active.
      reads_last_hidden_only: whether `absorb` reads only the hidden state of the last real token.
        Passes over prompts then skip layers for all other tokens, if the target has such layers.
    """

    absorbs_again: ClassVar[bool] = False
    absorbs_together: ClassVar[bool] = False
    drafts_by_slot: ClassVar[bool] = False
    reads_last_hidden_only: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `absorb` reads, in order."""

    @property
    @abc.abstractmethod
    def max_draft_tokens(self) -> int:
        """The longest chain of tokens that one `draft` can propose."""

    @property
    def max_children(self) -> int | None:
        """The widest tree: the children that a node may have. None: any number."""
        return None

    @property
    def default_draft_tokens(self) -> int:
        """The length of a chain when the caller does not give one."""
        return self.max_draft_tokens

    def assume(self, values: Mapping[str, Array]) -> None:
        """Use other values of config fields from now on, which may be traced.

        `check` calls it on a model that it has just bound, to try many values in one program.

        Args:
          values: scalars by the name of their field: the numbers among the fields that the
            family's `Conventions.traced` names. None in a config is infinity here.
        """
        assert not values, f"{type(self).__name__} takes no other values of {list(values)}"

    @abc.abstractmethod
    def init_state(
        self, batch: int, *, cache_length: int, dtype: DTypeLike, paging: Paging | None = None
    ) -> StateT:
        """Return an empty state for `batch` rows of up to `cache_length` positions.

        Args:
          paging: of caches that are made by `cache.init_cache`; None: one page a row. Other arrays
            have one row for each slot.
        """

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
          tree: the shape of the tree to propose nodes of; None proposes a chain.
          draws: how to draw a chain's tokens from the drafter's own distribution, which the draft
            then holds as `log_q`; None takes the most likely token each time.
        """

    @abc.abstractmethod
    def absorb(self, state: StateT, kept: Kept) -> StateT:
        """Update the state with kept tokens: chunks of a prompt, then the tokens of every step.

        With `absorbs_together` one call may have several chunks of a prompt, in rows of one slot.
        """


AnyDrafter = Drafter[Any]
