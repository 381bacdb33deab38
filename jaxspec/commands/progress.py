"""Progress of long work where standard error is no terminal, and a bar or a spinner would not show."""

from __future__ import annotations

import time

from rich.console import Console

EVERY_S = 10.0


class Ticker:
    """Prints a line of progress now and then. On a terminal it prints nothing: a bar or a spinner is there.

    Args:
      every_s: the least seconds from one line to the next, and from the start to the first line.
    """

    def __init__(self, console: Console, *, every_s: float = EVERY_S):
        self.console, self.every_s = console, every_s
        self._last = time.monotonic()

    def say(self, message: str) -> None:
        """Print a message if it is time for one."""
        now = time.monotonic()
        if self.console.is_terminal or now - self._last < self.every_s:
            return
        self._last = now
        self.console.print(message, markup=False, soft_wrap=True)
