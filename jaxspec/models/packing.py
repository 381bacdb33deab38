"""Give the rows of one target pass different numbers of tokens.

A pass has B rows of T tokens each. Here it has U units of `UNIT` tokens instead, and a row has as many
units as it needs. To the target a unit is a batch row: its own tokens, its own start, and the cache row
that it shares with the other units of its row. A layer writes the keys and values of all units before
any query attends, so a unit sees the earlier units of its row in the cache. U is a part of the program,
and which row has how many units is not.

Read `Packing`, then `packed_pass`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.models.target import Caches, Target, TargetOutput
from jaxspec.shapes import Array, Int

UNIT = 2
"""Tokens of a unit: the anchor and a draft, or two drafts."""


class Packing(struct.PyTreeNode):
    """The units of all rows, one row after the other.

    Attributes:
      row: the batch row of each unit. A unit that no row needs has count 0.
      first: the block slot of each unit's first token.
      count: real tokens of each unit.
      begin: the first unit of each batch row.
      tokens: of each batch row.
    """

    row: Int[Array, " U"]
    first: Int[Array, " U"]
    count: Int[Array, " U"]
    begin: Int[Array, " B"]
    tokens: Int[Array, " B"]

    @classmethod
    def of(cls, tokens: Int[Array, " B"], units: int) -> Packing:
        """Return the packing of rows with these numbers of tokens.

        Args:
          units: of the pass, as many as the rows need or more.
        """
        needed = -(-tokens // UNIT)
        ends = jnp.cumsum(needed, dtype=jnp.int32)
        unit = jnp.arange(units, dtype=jnp.int32)
        row = jnp.sum(ends[None, :] <= unit[:, None], axis=1, dtype=jnp.int32)
        is_used = row < tokens.shape[0]
        row = jnp.minimum(row, tokens.shape[0] - 1)
        begin = ends - needed
        first = jnp.where(is_used, (unit - begin[row]) * UNIT, 0)
        count = jnp.where(is_used, jnp.clip(tokens[row] - first, 0, UNIT), 0)
        return cls(row, first, count, begin, tokens)

    def pack(self, block: Int[Array, "B T"]) -> Int[Array, "U X"]:
        """Return the tokens of each unit."""
        slots = self.first[:, None] + jnp.arange(UNIT, dtype=jnp.int32)
        return block[self.row[:, None], jnp.minimum(slots, block.shape[1] - 1)]

    def unpack(self, x: Array, width: int) -> Array:
        """Return values of units [U, X, ...] as values of rows [B, width, ...].

        Slots past a row's last token have the values of that token.
        """
        slots = jnp.arange(width, dtype=jnp.int32)[None, :]
        slots = jnp.minimum(slots, jnp.maximum(self.tokens - 1, 0)[:, None])
        unit = jnp.minimum(self.begin[:, None] + slots // UNIT, x.shape[0] - 1)
        return x[unit, slots % UNIT]


def packed_pass(
    target: Target,
    block: Int[Array, "B T"],
    start: Int[Array, " B"],
    tokens: Int[Array, " B"],
    caches: Caches,
    *,
    units: int,
    slots: Int[Array, " B"] | None = None,
    feature_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Run the target over the first tokens of each row's block, a different number for each row.

    Args:
      block: anchors and drafts, from position `start` on.
      tokens: how many tokens of each row the target sees, the anchor included; 0 for finished rows.
      units: of the whole pass.
      slots, feature_layers: as in a target's call.

    Returns:
      Rows of T tokens. What stands behind a row's last token means nothing.
    """
    packing = Packing.of(tokens, units)
    slots = packing.row if slots is None else slots[packing.row]
    is_used = packing.count > 0
    output = target(
        packing.pack(block),
        jnp.where(is_used, start[packing.row] + packing.first, 0),
        packing.count,
        _for_rows(caches, packing.row),
        slots=slots,
        feature_layers=feature_layers,
    )
    width = block.shape[1]
    assert output.caches is not None
    written = tuple(
        new if new is None or old is None else new.replace(table=old.table)
        for new, old in zip(output.caches, caches, strict=True)
    )
    features = tuple(packing.unpack(x, width) for x in output.features)
    logits, hidden = (packing.unpack(x, width) for x in (output.logits, output.hidden))
    return TargetOutput(logits, hidden, features, written)


def _for_rows(caches: Caches, row: Int[Array, " U"]) -> Caches:
    """Return caches whose tables have the pages of these batch rows."""

    def one(cache: KVCache) -> KVCache:
        return cache if cache.table is None else cache.replace(table=cache.table[row])

    return jax.tree.map(one, caches, is_leaf=lambda x: isinstance(x, KVCache))
