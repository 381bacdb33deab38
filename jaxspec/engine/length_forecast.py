"""A forecast of how long requests will become, from those that have ended.

The scheduler admits as many rows as are expected to have pages until they end, see
`PagePool.num_fitting`. Where the forecast is too low, rows are preempted.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxspec.shapes import Float, Int

FIRST_TOKENS = 512
"""New tokens that a request is expected to get before any like it has ended, if it may have as many."""
HISTORY = 64
"""Ended requests that are remembered of each kind."""
NUM_TIMES = 48
"""Times of a forecast at most."""


class LengthForecast:
    """The shares of the tokens that requests may have, and that they got.

    Requests are alike whose limits, `max_new_tokens`, have the same number of binary digits.
    """

    def __init__(self) -> None:
        self._shares: dict[int, deque[float]] = {}

    def learn(self, max_new_tokens: int, num_tokens: int) -> None:
        """Take note of a request that has ended.

        Args:
          max_new_tokens: that it might have.
          num_tokens: that it got; the same number where it ended for its length.
        """
        if max_new_tokens > 0:
            kind = self._shares.setdefault(max_new_tokens.bit_length(), deque(maxlen=HISTORY))
            kind.append(num_tokens / max_new_tokens)

    def __call__(
        self, max_new_tokens: Int[np.ndarray, " R"], num_tokens: Int[np.ndarray, " R"]
    ) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, "T R"]]:
        """Return how likely rows are still there when each has so many more tokens.

        A row ends as those did that came as far. Where none did, it gets as many tokens again.

        Args:
          max_new_tokens: that each row may have.
          num_tokens: that it has.

        Returns:
          Numbers of more tokens, from 0 until all rows have ended, and the chance of each row then.
        """
        limits, got = np.maximum(max_new_tokens, 1), num_tokens
        kinds = [limit.bit_length() for limit in limits.tolist()]
        columns = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in {*kinds}}
        shares = {kind: np.sort(np.array(self._shares.get(kind, ()))) for kind in columns}
        ends = np.minimum(limits, np.maximum(FIRST_TOKENS, 2 * got))  # if nothing is known
        counts = np.zeros(len(limits))  # of ended requests that came as far
        for kind, of_kind in columns.items():
            known = shares[kind]
            counts[of_kind] = len(known) - np.searchsorted(
                known, got[of_kind] / limits[of_kind], "right"
            )
            if len(known):
                longest = np.ceil(known[-1] * limits[of_kind]).astype(int)
                again = np.minimum(limits[of_kind], 2 * got[of_kind])
                ends[of_kind] = np.where(counts[of_kind] > 0, longest, again)
        last = max(int((ends - got).max(initial=0)), 0)
        times = np.unique(np.linspace(0, last, NUM_TIMES).astype(int))
        alive = (times[:, None] < np.maximum(ends - got, 1)).astype(float)
        for kind, of_kind in columns.items():
            reached = (got[of_kind] + times[:, None]) / limits[of_kind]
            left = len(shares[kind]) - np.searchsorted(shares[kind], reached, "right")
            is_known = counts[of_kind] > 0
            chance = left / np.maximum(counts[of_kind], 1)
            alive[:, of_kind] = np.where(is_known, chance, alive[:, of_kind])
        alive[0] = 1.0
        return times, alive
