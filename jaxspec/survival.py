"""Choose how many drafts of a step to verify, from the chances that they survive.

A draft survives if it and all before it are accepted. A drafter tells a confidence for each draft,
or none. `calibrated` turns confidences into chances, by what became of drafts with like confidences.
`choose_width` takes the number of drafts, for all rows of a step, that commits the most tokens a
second. Everything here works on arrays alone, without a model.

The emitted tokens still follow the target exactly. Suppose that the decision to verify draft j uses
nothing that depends on draft j itself. Then, whatever came before, draft j is either drawn from q
and judged by the rule of `verify`, or left out, and the target's own token takes its place. Both
give a token of the target's distribution, so all prefixes have the target's distribution, one token
after the other. Block verification is as exact: the weight of a prefix is the chance that it or a
longer one is accepted, and that holds by induction from any end that depends on the prefix alone.

The decision for draft j may use the confidences up to j, which are made of the tokens before j, the
other rows, and what earlier steps measured. It may not use the probability of the drawn token j, nor
confidences of later drafts, which depend on it. So `choose_width` goes from the shortest width to
the next, and stops where that does not pay. For drafts that it has not reached it takes the mean of
the past in place of their confidences. Drafts that are certain choices hold nothing random, so there
it uses all confidences at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import struct

from jaxspec.shapes import Array, Bool, Float, Int

BINS = 8
"""Bins of confidences, by log-odds."""
_SPREAD = 5.0  # log-odds where bins end

PRIOR = 4.0
"""Weight of a confidence itself beside the drafts that were counted in its bin."""
HALF_LIFE_STEPS = 512
"""Steps after which a count weighs half."""
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
    """

    trials: Float[Array, "B G K"]
    hits: Float[Array, "B G K"]
    verified: Int[Array, "B M"]

    @classmethod
    def empty(cls, batch: int, num_draft_tokens: int, steps: int) -> SurvivalState:
        """Return one without any drafts."""
        counts = jnp.zeros((batch, num_draft_tokens, BINS), jnp.float32)
        return cls(counts, counts, jnp.zeros((batch, steps), jnp.int32))

    def counting(
        self,
        confidence: Float[Array, "B G"],
        accepted: Int[Array, " B"],
        active: Bool[Array, " B"],
        width: int,
    ) -> SurvivalState:
        """Return the counts after a step.

        Args:
          accepted: drafts of each row.
          width: drafts that were verified.
        """
        position = jnp.arange(confidence.shape[1], dtype=jnp.int32)[None, :]
        tried = (position <= accepted[:, None]) & (position < width) & active[:, None]
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
