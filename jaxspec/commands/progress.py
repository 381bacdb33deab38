"""Progress of long work on a standard error that is no terminal, and shows no bar or spinner."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

EVERY_S = 10.0

Notify = Callable[[str], None]
"""Shows the current activity."""


class Ticker:
    """A printer of progress lines. On a terminal, which has a bar or a spinner, it prints nothing.

    Args:
      every_s: least seconds between two lines, and from the start to the first line.
    """

    def __init__(self, console: Console, *, every_s: float = EVERY_S):
        self.console, self.every_s = console, every_s
        self._last = time.monotonic()

    def notify(self, message: str) -> None:
        """Print a message if `every_s` has passed."""
        now = time.monotonic()
        if self.console.is_terminal or now - self._last < self.every_s:
            return
        self._last = now
        self.console.print(message, markup=False, soft_wrap=True)


@contextlib.contextmanager
def ticking(console: Console, *, every_s: float = EVERY_S) -> Iterator[Notify]:
    """Print the current activity and its time regularly, also while no call returns to Python.

    Yields:
      A function that sets the activity, such as "compiling".
    """
    begin, activity, ended = time.monotonic(), ["starting"], threading.Event()
    ticker = Ticker(console, every_s=every_s)

    def watch() -> None:
        while not ended.wait(min(1.0, every_s)):
            ticker.notify(f"{activity[0]} ({time.monotonic() - begin:.0f} s since the start)")

    def notify(message: str) -> None:
        activity[0] = message

    thread = threading.Thread(target=watch, name="ticking", daemon=True)
    thread.start()
    try:
        yield notify
    finally:
        ended.set()
        thread.join()
