"""Choose how many drafts of a step to verify, from the chances that they survive.

A draft survives if it and all before it are accepted. A drafter tells a confidence for each draft,
or none. `calibrated` turns confidences into chances, by what became of drafts with like confidences.
Rows then compete for the units of a pass: `unit_values` says what each unit of each row is worth,
`ranks` puts those of all rows in order, and `expected_tokens` adds up what passes of several sizes
commit, of which the one with the most tokens a second is taken. A row that is alone has `choose_width`.
Everything here works on arrays alone, without a model.

The emitted tokens still follow the target exactly. Suppose that the decision to verify draft j uses
nothing that depends on draft j itself. Then, whatever came before, draft j is either drawn from q
and judged by the rule of `verify`, or left out, and the target's own token takes its place. Both
give a token of the target's distribution, so all prefixes have the target's distribution, one token
after the other. Block verification is as exact: the weight of a prefix is the chance that it or a
longer one is accepted, and that holds by induction from any end that depends on the prefix alone.

The decision for draft j may use the confidences up to j, which are made of the tokens before j, the
other rows, and what earlier steps measured. It may not use the probability of the drawn token j, nor
confidences of later drafts, which depend on it. So a unit is worth what its first draft tells, the
means of the past for its other drafts, and never more than the unit before it. Whether it is among the
best of all rows is then settled by itself, the earlier units of its row and the units of other rows.
The size of the pass is chosen by the confidences of earlier steps. And `choose_width` goes from the
shortest width to the next, and stops where that does not pay. Drafts that are certain choices hold
nothing random, so there all confidences of the step are used at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.shapes import Array, Bool, Float, Int

BINS = 8
"""Bins of confidences, by log-odds."""
_SPREAD = 5.0  # log-odds where bins end

PRIOR = 4.0
"""Weight of a confidence itself beside the drafts that were counted in its bin."""
HALF_LIFE_STEPS = 512
"""Steps after which a count weighs half."""
SHARE_OF_NEW = 0.25
"""Weight of the newest step in `SurvivalState.expected`."""
UNKNOWN = 0.5
"""Confidence in the drafts of a drafter that tells none. Chances are then means of the past."""


class SurvivalState(struct.PyTreeNode):
    """Past drafts by their confidence, and the widths of past steps.

    Counts belong to slots, so that every array has rows; their sums are used. A new request keeps
    those of its slot.

    Attributes:
      trials: verified drafts whose predecessors were all accepted, by position and bin.
      hits: those of them that were accepted.
      verified: drafts that each step verified. Step n is in column n modulo M.
      expected: tokens that each row was expected to commit in recent steps, by the width of the pass.
    """

    trials: Float[Array, "B G K"]
    hits: Float[Array, "B G K"]
    verified: Int[Array, "B M"]
    expected: Float[Array, "B W"]

    @classmethod
    def empty(
        cls, batch: int, num_draft_tokens: int, steps: int, widths: Sequence[int] = ()
    ) -> SurvivalState:
        """Return one without any drafts."""
        counts = jnp.zeros((batch, num_draft_tokens, BINS), jnp.float32)
        # Half of the drafts, until a step says more.
        half = 1 + jnp.asarray(widths, jnp.float32) / 2
        expected = jnp.broadcast_to(half, (batch, len(widths)))
        return cls(counts, counts, jnp.zeros((batch, steps), jnp.int32), expected)

    def counting(
        self,
        confidence: Float[Array, "B G"],
        accepted: Int[Array, " B"],
        active: Bool[Array, " B"],
        width: int | Int[Array, " B"],
    ) -> SurvivalState:
        """Return the counts after a step.

        Args:
          accepted: drafts of each row.
          width: drafts that were verified, of all rows or of each.
        """
        position = jnp.arange(confidence.shape[1], dtype=jnp.int32)[None, :]
        verified = position < jnp.broadcast_to(jnp.asarray(width), accepted.shape)[:, None]
        tried = (position <= accepted[:, None]) & verified & active[:, None]
        of_bin = bins_of(confidence)[:, :, None] == jnp.arange(BINS, dtype=jnp.int32)
        new = (tried[:, :, None] & of_bin).astype(jnp.float32)
        hit = jnp.where((position < accepted[:, None])[:, :, None], new, 0.0)
        keep = jnp.where(active, jnp.float32(0.5 ** (1 / HALF_LIFE_STEPS)), 1.0)[:, None, None]
        return self.replace(trials=self.trials * keep + new, hits=self.hits * keep + hit)


def bins_of(confidence: Float[Array, "B G"]) -> Int[Array, "B G"]:
    """Return the bin of each confidence."""
    likely = jnp.clip(confidence, 1e-6, 1 - 1e-6)
    odds = jnp.log(likely) - jnp.log1p(-likely)
    scaled = jnp.floor((odds + _SPREAD) * (BINS / (2 * _SPREAD))).astype(jnp.int32)
    return jnp.clip(scaled, 0, BINS - 1)


def calibrated(
    state: SurvivalState, confidence: Float[Array, "B G"]
) -> tuple[Float[Array, "B G"], Float[Array, " G"]]:
    """Return the chance of each draft if all before it are accepted, and the mean of the past.

    The drafts of all rows count. A bin without any leaves a confidence as it is.
    """
    trials, hits = jnp.sum(state.trials, axis=0), jnp.sum(state.hits, axis=0)  # [G, K]
    position = jnp.arange(confidence.shape[1], dtype=jnp.int32)[None, :]
    bins = bins_of(confidence)
    chance = (hits[position, bins] + PRIOR * confidence) / (trials[position, bins] + PRIOR)
    mean = (jnp.sum(hits, axis=1) + PRIOR * UNKNOWN) / (jnp.sum(trials, axis=1) + PRIOR)
    return chance, mean


def choose_width(
    chances: Float[Array, "B G"],
    means: Float[Array, " G"],
    active: Bool[Array, " B"],
    costs: Float[Array, " W"],
    widths: Sequence[int],
    *,
    drawn: bool,
) -> Int[Array, ""]:
    """Return the index of the width that all rows of a step verify.

    Args:
      chances: of each draft if all before it are accepted, made of tokens before it alone.
      means: of the past.
      costs: seconds of a step of each width.
      widths: ascending, from 1 on; the last one is all drafts.
      drawn: whether drafts are random. See the module's docstring.
    """
    g = chances.shape[1]
    position = jnp.arange(g, dtype=jnp.int32)[None, :]
    index, goes_on = jnp.int32(0), jnp.bool_(True)
    for i, width in enumerate(widths[:-1]):
        # Draft number width, counted from 0, is the first that the next width adds. Its chance is
        # made of the drafts before it.
        known = position <= (width if drawn else g)
        survival = jnp.cumprod(jnp.where(known, chances, means[None, :]), axis=1)
        survival = jnp.sum(jnp.where(active[:, None], survival, 0.0), axis=0)
        tokens = jnp.sum(active, dtype=jnp.float32) + jnp.cumsum(survival)
        rates = tokens[jnp.asarray(widths, jnp.int32) - 1] / costs
        goes_on &= jnp.max(rates[i + 1 :]) > rates[i]
        index += goes_on.astype(jnp.int32)
    return index


# --- rows that compete -------------------------------------------------------------------------------


def unit_values(
    chances: Float[Array, "B G"], means: Float[Array, " G"], unit: int, *, drawn: bool
) -> tuple[Float[Array, " B"], Float[Array, "B M"]]:
    """Return the tokens that each row is expected to gain from its first unit, and from each later one.

    The first unit has the anchor and `unit - 1` drafts, a later one has `unit` drafts. A later unit is
    never worth more than the one before it.

    Args:
      chances, means, drawn: as in `choose_width`.
    """
    b, g = chances.shape
    survival = jnp.cumprod(chances, axis=1)
    first = 1 + jnp.sum(survival[:, : unit - 1], axis=1)
    values = []
    for begin in range(unit - 1, g, unit):
        size = min(unit, g - begin)
        if drawn:
            after = jnp.cumprod(means[begin + 1 : begin + size])
            values.append(survival[:, begin] * (1 + jnp.sum(after)))
        else:
            values.append(jnp.sum(survival[:, begin : begin + size], axis=1))
    if not values:
        return first, jnp.zeros((b, 0), jnp.float32)
    return first, lax.cummin(jnp.stack(values, axis=1), axis=1)


def ranks(values: Float[Array, "B M"], active: Bool[Array, " B"]) -> Int[Array, "B M"]:
    """Return how many units of active rows come before each unit. Of equal ones, earlier units do."""
    b, m = values.shape
    flat = jnp.where(active[:, None], values, -1.0).T.reshape(-1)  # earlier units first
    place = jnp.arange(b * m, dtype=jnp.int32)
    ahead = (flat[None, :] > flat[:, None]) | (
        (flat[None, :] == flat[:, None]) & (place[None, :] < place[:, None])
    )
    return jnp.sum(ahead, axis=1, dtype=jnp.int32).reshape(m, b).T


def expected_tokens(
    first: Float[Array, " B"],
    values: Float[Array, "B M"],
    rank: Int[Array, "B M"],
    spare: Int[Array, " W"],
) -> Float[Array, "B W"]:
    """Return the tokens that each row is expected to commit in passes of several sizes.

    Args:
      first, values: of `unit_values`.
      rank: of `ranks`.
      spare: units of each pass beside the first one of each active row.
    """
    kept = rank[:, :, None] < spare
    return first[:, None] + jnp.sum(jnp.where(kept, values[:, :, None], 0.0), axis=1)


def limits(
    rank: Int[Array, "B M"],
    active: Bool[Array, " B"],
    spare: Int[Array, ""],
    unit: int,
    num_draft_tokens: int,
) -> Int[Array, " B"]:
    """Return the drafts that each row verifies. Rows that are not active verify none."""
    units = 1 + jnp.sum(rank < spare, axis=1, dtype=jnp.int32)
    return jnp.where(active, jnp.minimum(units * unit - 1, num_draft_tokens), 0)
