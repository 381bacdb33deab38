"""A forecast of how long requests will become, from those that have ended.

The scheduler admits as many rows as will have pages until they end, see `PagePool.num_fitting`.
Where the forecast is too low, rows are preempted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

FIRST_TOKENS = 1024
"""New tokens that a request is expected to get before any like it has ended, if it may have as many."""
FIRST_WEIGHT = 8
"""So many ended requests count as much as this first guess."""
HISTORY = 64
"""Ended requests that are remembered of each kind."""


class LengthForecast:
    """The share of the tokens that requests may have, and that they get.

    Requests are alike whose limits, `max_new_tokens`, have the same number of binary digits.
    """

    def __init__(self) -> None:
        self._shares: dict[int, deque[float]] = {}
        self._means: dict[
            int, tuple[list[float], list[float]]
        ] = {}  # of sorted shares, from each on

    def learn(self, max_new_tokens: int, num_tokens: int) -> None:
        """Take note of a request that has ended.

        Args:
          max_new_tokens: that it might have.
          num_tokens: that it got; the same number where it ended for its length.
        """
        if max_new_tokens > 0:
            self._of(max_new_tokens).append(num_tokens / max_new_tokens)
            self._means.pop(max_new_tokens.bit_length(), None)

    def new_tokens(self, max_new_tokens: int, num_tokens: int = 0) -> int:
        """Return the new tokens that a request is expected to have in the end.

        Args:
          max_new_tokens: that it may have.
          num_tokens: that it has already. Requests that ended with fewer tell nothing about it.
        """
        kind = max_new_tokens.bit_length()
        if kind not in self._means:
            shares = sorted(self._of(max_new_tokens))
            sums = list(accumulate(reversed(shares)))
            means = [total / (count + 1) for count, total in enumerate(sums)]
            self._means[kind] = shares, means[::-1]
        shares, means = self._means[kind]
        shorter = bisect_right(shares, num_tokens / max(1, max_new_tokens))
        if shorter == len(shares):
            return num_tokens
        return min(max_new_tokens, round(max_new_tokens * means[shorter]))

    def _of(self, max_new_tokens: int) -> deque[float]:
        """Return the shares of requests like this one, the newest last."""
        kind = max_new_tokens.bit_length()
        if kind not in self._shares:
            first = min(1.0, FIRST_TOKENS / max(1, max_new_tokens))
            self._shares[kind] = deque([first] * FIRST_WEIGHT, maxlen=HISTORY)
        return self._shares[kind]
