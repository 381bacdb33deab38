"""Follow small grammars on the device, without the host.

An `Automaton` is a table of a regular expression's states over the tokens of a vocabulary. States are
numbers. `FREE` is the state of a row without a grammar: it allows everything and never changes. So one
compiled program serves rows with and without, and tables of one shape take each other's place.

Masks are packed as in `matcher`, and equal to its masks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int16, Int32, UInt32

from jaxspec.grammars.matcher import ALL, GrammarTokens
from jaxspec.records import FieldError, shown

FREE = -1
# Ends every expression. outlines-core 0.2.14 forgets that a match may go on, wherever what follows is not
# yet a match: after "4" it does not allow the "." of [0-9](\\.[0-9])?. With an end mark, nothing that tokens
# spell is a match. The last code point of Unicode is no character, and no token.
_END = "\U0010ffff"
_MAX_REGEX = 2_000


class Automaton(struct.PyTreeNode):
    """Tables of one or more grammars.

    Attributes:
      next: the state after a token. `FREE`: the token is not allowed, and what follows does not count.
      masks: the tokens that each state allows, packed.
      starts: the state before the first token, of each grammar.
    """

    next: Int16[Array, "S V"]
    masks: UInt32[Array, "S words"]
    starts: Int32[Array, " grammars"]

    @property
    def num_bytes(self) -> int:
        """The bytes of its tables."""
        return self.next.size * 2 + self.masks.size * 4


def automaton(tokens: GrammarTokens, regexes: Sequence[str], *, states: int = 256) -> Automaton:
    """Make the table of some regular expressions.

    Args:
      regexes: in the syntax of Rust's regex crate. The whole reply is a match.
      states: how many the table has room for. Programs are compiled for this number. A state takes
        two bytes and a bit for each token of the vocabulary.

    Raises:
      FieldError: outlines-core is not installed, an expression is wrong, or `states` is too small.
    """
    if not 0 < states < 2**15:
        raise FieldError("states", f"is {states}; expected 1 to {2**15 - 1}")
    vocabulary = _vocabulary(tokens)
    after = np.full((states, tokens.vocab_size), FREE, np.int16)
    stops = np.array(sorted(tokens.stop_ids))[:, None]
    starts, used = [], 0
    for regex in regexes:
        index = _index(regex, vocabulary)
        edges, may_end = _useful(index, tokens.vocab_size)
        number = {name: used + i for i, name in enumerate(edges)}
        ended, used = used + len(edges), used + len(edges) + 1
        if used > states:
            raise FieldError(
                "regex",
                f"{shown(regex)} has {len(edges) + 1} states, and the table has room for {states}; pass "
                "more states, or follow it on the host",
            )
        if not may_end:
            raise FieldError("regex", f"{shown(regex)} matches no text that tokens can spell")
        for name, following in edges.items():
            after[number[name], [*following]] = [number[to] for to in following.values()]
        after[[*(number[name] for name in may_end), ended], stops] = ended
        starts.append(number[index.get_initial_state()])
    return Automaton(
        next=jnp.asarray(after),
        masks=jnp.asarray(_packed(after >= 0, tokens.words)),
        starts=jnp.asarray(starts, jnp.int32),
    )


def advance(
    table: Automaton, state: Int32[Array, " B"], token: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """Return the state of each row after one token."""
    following = table.next[jnp.maximum(state, 0), token].astype(jnp.int32)
    return jnp.where(state < 0, FREE, following)


def states_along(
    table: Automaton, state: Int32[Array, " B"], drafts: Int32[Array, "B N"]
) -> Int32[Array, "B N+1"]:
    """Return the states before each draft and after the last.

    Behind a draft that is not allowed the state is `FREE`. The state after n accepted drafts and a
    bonus token is `advance(table, states[:, n], bonus)`.
    """

    def step(at: Int32[Array, " B"], token: Int32[Array, " B"]) -> Any:
        after = advance(table, at, token)
        return after, after

    _, rest = jax.lax.scan(step, state, drafts.T)
    return jnp.concatenate([state[:, None], rest.T], axis=1)


def masks_of(table: Automaton, states: Int32[Array, "*at"]) -> UInt32[Array, "*at words"]:
    """Return what may come next in some states."""
    rows = table.masks[jnp.maximum(states, 0)]
    return jnp.where((states < 0)[..., None], ALL, rows)


def _packed(allowed: Bool[np.ndarray, "S V"], words: int) -> UInt32[np.ndarray, "S words"]:
    bits = np.packbits(allowed, axis=1, bitorder="little")
    out = np.zeros((len(allowed), words * 4), np.uint8)
    out[:, : bits.shape[1]] = bits
    return out.view("<u4")


def _outlines() -> Any:
    try:
        return importlib.import_module("outlines_core")
    except ImportError:
        raise FieldError(
            "regex", "needs the package outlines-core; pip install 'jaxspec-decoding[grammar]'"
        ) from None


def _useful(index: Any, vocab_size: int) -> tuple[dict[int, dict[int, int]], set[int]]:
    """Return the states on a way from the start to an end, and those of them that may end.

    Each has its next states by token. The end mark is no token, though bytes of it may be.
    """
    transitions, finals = index.get_transitions(), index.get_final_states()
    edges: dict[int, dict[int, int]] = {}
    before: dict[int, set[int]] = {}
    may_end, found = set(), [index.get_initial_state()]
    for name in found:
        if name not in edges:
            following = transitions.get(name, {})
            edges[name] = {token: to for token, to in following.items() if token < vocab_size}
            for to in edges[name].values():
                before.setdefault(to, set()).add(name)
            if following.get(vocab_size) in finals:
                may_end.add(name)
            found.extend(edges[name].values())
    useful, ends = set(), list(may_end)
    for name in ends:
        if name not in useful:
            useful.add(name)
            ends.extend(before.get(name, ()))
    kept = {n: {t: to for t, to in edges[n].items() if to in useful} for n in edges if n in useful}
    return kept, may_end


@functools.lru_cache(maxsize=4)
def _vocabulary(tokens: GrammarTokens) -> Any:
    """Return the tokens by their bytes. Special tokens have no bytes, so no expression allows them."""
    by_bytes: dict[bytes, list[int]] = {_END.encode(): [tokens.vocab_size]}
    for i in range(tokens.vocab_size):
        data = b"" if tokens.tokens.is_special_token(i) else tokens.tokens.decode_bytes([i])
        if data and i not in tokens.stop_ids and _END.encode() not in data:
            by_bytes.setdefault(data, []).append(i)
    # The library allows one id where an expression may end. It is given one that no model has.
    return _outlines().Vocabulary(tokens.vocab_size + 1, by_bytes)


def _index(regex: str, vocabulary: Any) -> Any:
    if len(regex) > _MAX_REGEX:
        raise FieldError("regex", f"has {len(regex)} characters; at most {_MAX_REGEX} are taken")
    try:
        return _outlines().Index(f"(?:{regex}){_END}", vocabulary)
    except Exception as error:  # the bindings raise what they like
        why = " ".join(str(error).split())[:300]
        raise FieldError("regex", f"{shown(regex)} cannot be used: {why}") from None
