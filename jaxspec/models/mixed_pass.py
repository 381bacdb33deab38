"""One pass of a target over rows of several widths: those that decode, and chunks of prompts.

All of their tokens stand behind each other in one row. Norms, products and experts take that row, so the weights are
read once. Each part attends by itself (`attention.Attention`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.models.target import (
    Caches,
    Placement,
    Target,
    TargetOutput,
    joined_row,
    placement_of,
    split_row,
)
from jaxspec.shapes import Array, Float, Int


class PassPart(struct.PyTreeNode):
    """The rows of one width. Its fields are arguments of a target's call."""

    tokens: Int[Array, "B T"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]
    slots: Int[Array, " B"]
    logit_rows: Int[Array, "B R"] | None = None
    only_logit_rows: bool = struct.field(pytree_node=False, default=False)

    @property
    def placement(self) -> Placement:
        """The positions of its tokens."""
        where = placement_of(self.tokens, self.start, self.count, slots=self.slots)
        return where.replace(wanted=self.logit_rows) if self.only_logit_rows else where

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """The rows and the width of its hidden states."""
        if not self.only_logit_rows or self.logit_rows is None:
            return self.tokens.shape
        return self.logit_rows.shape

    def for_logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B R D"]:
        """Return the hidden states whose logits are wanted."""
        if self.only_logit_rows or self.logit_rows is None:
            return hidden
        return jnp.take_along_axis(hidden, self.logit_rows[..., None], axis=1)


def mixed_pass(
    target: Target,
    parts: Sequence[PassPart],
    caches: Caches,
    *,
    feature_layers: tuple[int, ...] = (),
) -> list[TargetOutput]:
    """Run the target over all parts at once.

    No part may have a row that is longer than the slack of a ring.

    Args:
      caches: with the tables of all rows, in the order of the parts.

    Returns:
      An output for each part. All have the caches with all parts in them.
    """
    where = Placement.joined(tuple(x.placement for x in parts))
    tokens = joined_row([x.tokens for x in parts])
    done = target.run_layers(tokens, target.embed(tokens), where, caches, feature_layers)
    hidden = split_row(done.hidden, [x.hidden_shape for x in parts])
    with jax.named_scope("head"):
        # Of all parts at once they would be in memory twice, since each part is copied out.
        rows = [x.for_logits(of_part) for x, of_part in zip(parts, hidden, strict=True)]
        logits = [target.logits(x) for x in rows]
    features = [where.split(x) for x in done.features]
    return [
        TargetOutput(logits[i], hidden[i], tuple(x[i] for x in features), done.caches)
        for i in range(len(parts))
    ]
