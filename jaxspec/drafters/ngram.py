"""Prompt look-up: draft what followed the same words earlier in the row's own text. It has no weights.

The state is the text, a row of tokens for each slot. `draft` looks for the last place where the end of
the text stood before, the longest end first, and proposes what followed there. A text that copies from
its prompt, or repeats itself, is drafted well. All is done on the device, in a few passes over the text.

This is the smallest drafter of all: read it to learn what a drafter is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.cache import Paging
from jaxspec.configs.ngram import MAX_DRAFT_TOKENS, NGramConfig
from jaxspec.drafters.base import Draft, Drafter, Draws, Kept, TargetView
from jaxspec.mesh import on_each_part, row_numbers
from jaxspec.options import Tree
from jaxspec.shapes import Array, DTypeLike, Int

NGramState = Array
"""The committed tokens of each row, [B, S]."""


class NGramDrafter(Drafter[NGramState]):
    """Drafts from the row's own text."""

    absorbs_again = True
    absorbs_together = True
    drafts_by_slot = True
    reads_last_hidden_only = True

    def __init__(self, config: NGramConfig, *, dtype: jnp.dtype):
        del dtype
        self.config = config

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def max_draft_tokens(self) -> int:
        return MAX_DRAFT_TOKENS

    @property
    def default_draft_tokens(self) -> int:
        return self.config.num_draft_tokens

    @property
    def max_children(self) -> int:
        return 1

    def init_state(
        self, batch: int, *, cache_length: int, dtype: DTypeLike, paging: Paging | None = None
    ) -> NGramState:
        del dtype, paging
        return jnp.zeros((batch, cache_length), jnp.int32)

    def absorb(self, state: NGramState, kept: Kept) -> NGramState:
        b, t = kept.tokens.shape
        rows = row_numbers(b) if kept.slots is None else kept.slots
        offset = jnp.arange(t, dtype=jnp.int32)[None, :]
        real = offset < kept.count[:, None]
        at = jnp.where(real, kept.start[:, None] + offset, state.shape[1])  # past the end: dropped

        def put(state: Array, rows: Array, at: Array, tokens: Array) -> Array:
            return state.at[rows[:, None], at].set(tokens.astype(jnp.int32), mode="drop")

        return on_each_part(put, (state, rows, at, kept.tokens))

    def draft(
        self,
        state: NGramState,
        view: TargetView,
        anchors: Int[Array, " B"],
        lengths: Int[Array, " B"],
        *,
        num_draft_tokens: int,
        tree: Tree | None = None,
        draws: Draws | None = None,
    ) -> Draft:
        with jax.named_scope("ngram_draft"):
            text = view.rows_of(state)
            rows = jnp.arange(text.shape[0], dtype=jnp.int32)
            text = text.at[rows, lengths].set(anchors, mode="drop")
            tokens = look_up(
                text,
                lengths,
                num_draft_tokens,
                longest=self.config.max_ngram,
                shortest=self.config.min_ngram,
            )
        parents = None
        if tree is not None:  # a tree of one branch
            parents = jnp.arange(num_draft_tokens, dtype=jnp.int32)
            parents = jnp.broadcast_to(parents, tokens.shape)
        log_q = None
        if draws is not None:
            vocab = jnp.arange(view.target.config.vocab_size, dtype=jnp.int32)
            log_q = jnp.where(tokens[..., None] == vocab, jnp.float32(0), -jnp.inf)
        return Draft(tokens, parents, log_q)


def look_up(
    text: Int[Array, "B S"],
    last: Int[Array, " B"],
    count: int,
    *,
    longest: int,
    shortest: int,
) -> Int[Array, "B G"]:
    """Return what followed the last place where the end of a text stood before.

    Of several places the one with more equal tokens before it counts, at most `longest`, and the last of
    these. What follows a place may reach the end of the text: it goes on as if the text repeated itself.
    A text without such a place repeats its last token.

    Args:
      last: the position of each text's last token.
      count: the number of tokens to return.
      shortest: the least number of equal tokens.
    """
    position = jnp.arange(text.shape[1], dtype=jnp.int32)[None, :]
    equal = position < last[:, None]  # places before the end itself
    matched = jnp.zeros(text.shape, jnp.int32)
    for back in range(longest):
        end = jnp.take_along_axis(text, jnp.maximum(last - back, 0)[:, None], axis=1)
        earlier = jnp.pad(text, ((0, 0), (back, 0)))[:, : text.shape[1]]
        equal = equal & (earlier == end) & (position >= back) & (last >= back)[:, None]
        matched = matched + equal.astype(jnp.int32)
    # The best place: most equal tokens, then the last.
    place = text.shape[1] - 1 - jnp.argmax(matched[:, ::-1], axis=1).astype(jnp.int32)
    place = jnp.where(jnp.max(matched, axis=1) >= shortest, place, last - 1)
    step = jnp.arange(count, dtype=jnp.int32)[None, :]
    period = jnp.maximum(last - place, 1)[:, None]
    at = jnp.clip(place[:, None] + 1 + step % period, 0, text.shape[1] - 1)
    return jnp.take_along_axis(text, at, axis=1)
