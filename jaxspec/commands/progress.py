"""Progress of long work where standard error is no terminal, and a bar or a spinner would not show."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

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

    def notify(self, message: str) -> None:
        """Print a message if it is time for one."""
        now = time.monotonic()
        if self.console.is_terminal or now - self._last < self.every_s:
            return
        self._last = now
        self.console.print(message, markup=False, soft_wrap=True)


@contextlib.contextmanager
def ticking(console: Console, *, every_s: float = EVERY_S) -> Iterator[Callable[[str], None]]:
    """Print now and then what is being done and for how long, also while nothing returns to Python.

    Yields:
      A function that takes what is being done from now on, such as "compiling".
    """
    begin, doing, ended = time.monotonic(), ["starting"], threading.Event()
    ticker = Ticker(console, every_s=every_s)

    def watch() -> None:
        while not ended.wait(min(1.0, every_s)):
            ticker.notify(f"{doing[0]} ({time.monotonic() - begin:.0f} s since the start)")

    def say(message: str) -> None:
        doing[0] = message

    thread = threading.Thread(target=watch, name="ticking", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()
