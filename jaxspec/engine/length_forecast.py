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
MOST_DIGITS = 64
"""Binary digits of a limit at most."""


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
        self,
        max_new_tokens: Int[np.ndarray, " R"],
        num_tokens: Int[np.ndarray, " R"],
        every: int = 1,
    ) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, "T R"]]:
        """Return how likely rows are still there when each has so many more tokens.

        A row ends as those did that came as far. Where none did, it gets as many tokens again.

        Args:
          max_new_tokens: that each row may have.
          num_tokens: that it has.
          every: one of so many times is returned, the first one among them.

        Returns:
          Numbers of more tokens, from 0 until all rows have ended, and the chance of each row then.
        """
        limits, got = np.maximum(max_new_tokens, 1), num_tokens
        kinds = np.frexp(limits)[1]
        shares = {kind: np.sort(of_kind) for kind, of_kind in sorted(self._shares.items())}
        # Shares are at most 1. So those of all kinds are in order, 2 apart.
        of_all = np.concatenate([[], *(2 * kind + of_kind for kind, of_kind in shares.items())])
        known, longest = np.zeros(MOST_DIGITS, int), np.zeros(MOST_DIGITS)
        for kind, of_kind in shares.items():
            known[kind], longest[kind] = len(of_kind), of_kind[-1]
        up_to = known.cumsum()[kinds]

        def num_longer(share: np.ndarray) -> np.ndarray:
            """Return the ended requests of each row's kind that got a larger share."""
            at = np.minimum(share, 1.5) + 2 * kinds
            return up_to - np.searchsorted(of_all, at, "right")

        counts = num_longer(got / limits)
        again = np.maximum(2 * got, np.where(known[kinds] > 0, 0, FIRST_TOKENS))
        as_longest = np.ceil(longest[kinds] * limits).astype(int)
        ends = np.where(counts > 0, as_longest, np.minimum(limits, again))
        last = max(int((ends - got).max(initial=0)), 0)
        times = np.unique(np.linspace(0, last, NUM_TIMES).astype(int))[::every]
        left = num_longer((got + times[:, None]) / limits)
        as_expected = times[:, None] < np.maximum(ends - got, 1)
        alive = np.where(counts > 0, left / np.maximum(counts, 1), as_expected)
        alive[0] = 1.0
        return times, alive
