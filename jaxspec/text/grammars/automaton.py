"""Follow small grammars on the device, without the host.

An `Automaton` is a table of a grammar's states over the tokens of a vocabulary. States are numbers.
`FREE` is the state of a row without a grammar: it allows all tokens and never changes. One compiled
program therefore serves rows with and without a grammar, and all tables of one shape. `tables`
makes them.

Masks are packed as in `matcher`. They allow every way to write a text in tokens. `matcher` allows
one way where the grammar leaves no choice of the text.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int16, Int32, UInt32

from jaxspec.text.grammars.matcher import ALL

FREE = -1
"""The state of a row without a grammar."""


class Automaton(struct.PyTreeNode):
    """Tables of one or more grammars. `tables.automaton` makes them.

    Attributes:
      classes: the class of each token. Tokens of one class lead to the same state from every state.
      next: the state after a token of a class. `FREE`: the token is not allowed, and later states
        mean nothing.
      masks: the tokens that each state allows, packed.
      likely: a token that each state allows, where it leaves no choice of the text; -1 elsewhere.
      starts: the state of each grammar before the first token. `FREE`: there is no grammar.
      stops: the tokens that end a reply.
    """

    classes: Int32[Array, " V"]
    next: Int16[Array, "S C"]
    masks: UInt32[Array, "S words"]
    likely: Int32[Array, " S"]
    starts: Int32[Array, " grammars"]
    stops: Int32[Array, " stops"]

    @property
    def num_bytes(self) -> int:
        """The size of the tables in bytes."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


def advance(
    table: Automaton, state: Int32[Array, " B"], token: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """Return the state of each row after one token."""
    following = table.next[jnp.maximum(state, 0), table.classes[token]].astype(jnp.int32)
    return jnp.where(state < 0, FREE, following)


def states_along(
    table: Automaton,
    state: Int32[Array, " B"],
    drafts: Int32[Array, "B N"],
    parents: Int32[Array, "B N"] | None = None,
) -> Int32[Array, "B N+1"]:
    """Return the states before each draft and after the last.

    Behind a draft that is not allowed, the state is `FREE`. The state after n accepted drafts and a
    bonus token is `advance(table, states[:, n], bonus)`.

    Args:
      parents: the parents of a tree, see `drafters.base.Draft`. None: a chain.
    """
    return draft_states(table, state, drafts, parents, replace=False)[1]


def draft_states(
    table: Automaton,
    state: Int32[Array, " B"],
    drafts: Int32[Array, "B N"],
    parents: Int32[Array, "B N"] | None = None,
    *,
    replace: bool,
) -> tuple[Int32[Array, "B N"], Int32[Array, "B N+1"]]:
    """Return drafts and their states, as `states_along` does.

    Args:
      replace: whether to replace a draft that is not allowed by an allowed token, where the grammar
        leaves no choice of the text.
    """

    def step(n: Any, carry: Any) -> Any:
        drafts, states = carry
        token, row = drafts[:, n], n if parents is None else parents[:, n]
        row = jnp.broadcast_to(row, state.shape)[:, None]
        before = jnp.take_along_axis(states, row, axis=1)[:, 0]
        after = advance(table, before, token)
        if replace:
            likely = table.likely[jnp.maximum(before, 0)]
            wrong = (before >= 0) & (after < 0) & (likely >= 0)
            token = jnp.where(wrong, likely, token)
            after = jnp.where(wrong, advance(table, before, token), after)
            drafts = drafts.at[:, n].set(token)
        return drafts, states.at[:, n + 1].set(after)

    begin = jnp.concatenate([state[:, None], jnp.full_like(drafts, FREE)], axis=1)
    if not (count := drafts.shape[1]):
        return drafts, begin
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(count), step, (drafts, begin))


def state_after(
    table: Automaton,
    state: Int32[Array, " B"],
    tokens: Int32[Array, "B T"],
    count: Any,
) -> Int32[Array, " B"]:
    """Return the state of each row after its counted tokens.

    Args:
      count: [B, T], whether each token counts.
    """

    def step(at: Int32[Array, " B"], of: Any) -> Any:
        token, counts = of
        return jnp.where(counts, advance(table, at, token), at), None

    return jax.lax.scan(step, state, (tokens.T, count.T))[0]


def masks_of(table: Automaton, states: Int32[Array, "*at"]) -> UInt32[Array, "*at words"]:
    """Return the mask of the tokens that each state allows."""
    rows = table.masks[jnp.maximum(states, 0)]
    return jnp.where((states < 0)[..., None], ALL, rows)
