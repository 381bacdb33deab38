"""A family of drafters, as small as one can be: it says what followed a token before.

Its state is what followed each token in this row, which it learns from the tokens that were kept. For a token
that is new in the row it has a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.configs.base import ConfigError, TargetConfig
from jaxspec.configs.fields import check_fields, flag, read_fields, size
from jaxspec.drafters.base import Draft, Drafter, Draws, Kept, TargetView
from jaxspec.options import Tree
from jaxspec.shapes import Array, DTypeLike, Int
from jaxspec.weights.model_def import param

KEYS = {"recall": ("recall_config.recall", "recall")}
ALL_KEYS = {
    "vocab_size": ("vocab_size",),
    "num_draft_tokens": ("num_draft_tokens",),
    **KEYS,
}


@dataclass(frozen=True)
class RecallConfig:
    """A drafter that recalls; without `recall` it only looks tokens up in its table."""

    vocab_size: int = size()
    num_draft_tokens: int = size()
    recall: bool = flag(True)

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> RecallConfig:
        del generation
        return cls(**read_fields(cls, config, ALL_KEYS))

    def check_fits(self, target: TargetConfig) -> None:
        if target.vocab_size != self.vocab_size:
            raise ConfigError(
                f"the drafter has {self.vocab_size} tokens, the target {target.vocab_size}"
            )


class Recalled(struct.PyTreeNode):
    """The newest token of each row, and what followed each token there; -1: nothing yet."""

    last: Int[Array, " B"]
    followers: Int[Array, "B V"]


class RecallDrafter(Drafter[Recalled]):
    """Proposes a chain, each token by the one before it."""

    def __init__(self, config: RecallConfig, *, dtype: jnp.dtype):
        self.config = config
        v = config.vocab_size
        self.bigrams = param(v, v, dtype=dtype, fan_in=v, lookup=True)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def max_draft_tokens(self) -> int:
        return self.config.num_draft_tokens

    def init_state(self, batch: int, *, cache_length: int, dtype: DTypeLike) -> Recalled:
        del cache_length, dtype
        shape = batch, self.config.vocab_size
        return Recalled(jnp.full(batch, -1, jnp.int32), jnp.full(shape, -1, jnp.int32))

    def draft(
        self,
        state: Recalled,
        view: TargetView,
        anchors: Int[Array, " B"],
        lengths: Int[Array, " B"],
        *,
        num_draft_tokens: int,
        tree: Tree | None = None,
        draws: Draws | None = None,
    ) -> Draft:
        del view, lengths, draws  # each draft is a certain choice
        assert tree is None, "this drafter proposes chains"
        rows, tokens, drafts = jnp.arange(anchors.shape[0]), anchors, []
        # The anchor was not absorbed: it followed the newest token that was.
        followers = state.followers.at[rows, state.last].set(anchors)
        for _ in range(num_draft_tokens):
            known = jnp.argmax(self.bigrams[...][tokens], axis=-1).astype(jnp.int32)
            if self.config.recall:
                seen = followers[rows, tokens]
                known = jnp.where(seen >= 0, seen, known)
            tokens = known
            drafts.append(tokens)
        return Draft(jnp.stack(drafts, axis=1))

    def absorb(self, state: Recalled, kept: Kept) -> Recalled:
        before, new = kept.rows_of(state), kept.start == 0  # another request's row
        last = jnp.where(new, -1, before.last)
        followers = jnp.where(new[:, None], -1, before.followers)
        own = jnp.arange(len(last))

        def learn(
            carry: tuple[Array, Array], token: tuple[Array, Array]
        ) -> tuple[tuple[Array, Array], None]:
            last, followers = carry
            tokens, is_kept = token
            at = jnp.where(is_kept & (last >= 0), last, self.config.vocab_size)
            followers = followers.at[own, at].set(tokens, mode="drop")
            return (jnp.where(is_kept, tokens, last), followers), None

        is_kept = jnp.arange(kept.tokens.shape[1])[:, None] < kept.count[None, :]
        (last, followers), _ = lax.scan(learn, (last, followers), (kept.tokens.T, is_kept))
        return kept.put(state, Recalled(last, followers))
