"""Selectors: how a block drafter chooses tokens from what its backbone computed for a block.

A backbone fills all slots of a block in one pass. It knows of no slot which tokens the others get. A
selector adds what it lacks: it chooses from left to right, and what it chooses changes what may come
next. Read `Selector`. `Independent` adds nothing: it is DFlash's own.

The drafts of a selector are exact as all are: it tells the distribution that it drew each one from.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.drafters.base import Draft, Draws
from jaxspec.drafters.chain import Choices, expand_of, over_vocabulary, tokens_of, walk
from jaxspec.drafters.tree import grow
from jaxspec.options import Tree
from jaxspec.sampling import argmax, draw_drafts
from jaxspec.shapes import Array, Float, Int


class Block(NamedTuple):
    """The slots of a block that are to be drafted, as a backbone computed them.

    Attributes:
      hidden: after the final norm.
      logits: of the drafter's vocabulary. What the target never emits has -inf.
      tokens: the token of each logit; None when the logits are of all tokens, in order.
      vocab_size: of the target.
    """

    anchors: Int[Array, " B"]
    hidden: Float[Array, "B G D"]
    logits: Float[Array, "B G C"]
    tokens: Int[Array, " C"] | None
    vocab_size: int


class Selector(nnx.Module):
    """Chooses tokens for the slots of a block from left to right, as a chain or as a tree."""

    @abc.abstractmethod
    def begin(self, block: Block) -> Any:
        """Return what the first `step` gets as its carry."""

    @abc.abstractmethod
    def step(
        self,
        block: Block,
        slot: int,
        carry: Any,
        tokens: Int[Array, "B F"],
        origins: Int[Array, "B F"],
    ) -> tuple[Any, Choices]:
        """Return the next carry, and what may stand in a slot after each of some nodes.

        Arguments are as of `chain.Step`. If the nodes do not matter, one may stand for all.
        """

    def chain(self, block: Block, draws: Draws | None = None) -> Draft:
        """Choose a token for every slot, the likeliest or drawn."""
        return walk(
            self._steps(block),
            (0, self.begin(block)),
            block.anchors,
            num_draft_tokens=block.logits.shape[1],
            vocab_size=block.vocab_size,
            draws=draws,
        )

    def confidences(self, block: Block, tokens: Int[Array, "B G"]) -> Float[Array, "B G"]:
        """Return how likely each draft is to be accepted if all before it are, as a rough guide.

        None may depend on its own token, which may be drawn. Here it is the probability of the
        likeliest token of the backbone, which depends on no token of the block.

        Args:
          tokens: the drafts of a chain.
        """
        del tokens
        return jnp.exp(jnp.max(block.logits, axis=-1) - jax.nn.logsumexp(block.logits, axis=-1))

    def tree(self, block: Block, tree: Tree, num_draft_tokens: int) -> Draft:
        """Grow a tree, a level for every slot."""
        return grow(
            expand_of(self._steps(block)),
            (0, self.begin(block)),
            block.anchors,
            tree=tree,
            num_draft_tokens=num_draft_tokens,
        )

    def _steps(self, block: Block) -> Any:
        def step(carry: tuple[int, Any], tokens: Array, origins: Array) -> Any:
            slot, own = carry
            own, choices = self.step(block, slot, own, tokens, origins)
            return (slot + 1, own), choices

        return step


class Independent(Selector):
    """A slot has one distribution, whichever tokens stand before it in the block."""

    def begin(self, block: Block) -> None:
        del block

    def step(
        self,
        block: Block,
        slot: int,
        carry: None,
        tokens: Int[Array, "B F"],
        origins: Int[Array, "B F"],
    ) -> tuple[None, Choices]:
        del tokens, origins
        return carry, Choices(block.logits[:, slot, None], block.tokens)

    def chain(self, block: Block, draws: Draws | None = None) -> Draft:
        # All slots at once.
        choices = Choices(block.logits, block.tokens)
        if draws is None:
            return Draft(tokens_of(choices, argmax(block.logits)))
        keys = draws.keys[:, : block.logits.shape[1]]
        index, log_q = draw_drafts(block.logits, draws.sampling, keys)
        log_q = over_vocabulary(choices, log_q, block.vocab_size)
        return Draft(tokens_of(choices, index), log_q=log_q)
