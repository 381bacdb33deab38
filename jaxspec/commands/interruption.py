"""End of a command on Ctrl-C and SIGTERM, within two seconds.

Read `run`, then `_watch`. Python runs signal handlers in the main thread only, between two of its
instructions, and a compilation by XLA is one instruction of many seconds. So a thread watches for
signals, and ends the process. A KeyboardInterrupt within JAX would free arrays and programs in use,
and end in a segmentation fault. Therefore the files of a command must be in order at every moment.
A block of `leaving` describes them, and may have a function that tidies.

Every end is `os._exit`, after the streams were flushed. Otherwise Python and XLA would be torn down
under threads that still compile.

This module is the first import of a command, so it imports nothing large. Only the commands' own
processes call `run`: programs that import jaxspec as a library keep their handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

GRACE_S = 1.0  # for tidying up
LAST_WORDS_S = 0.3  # for the message and for flushing: the reader of a pipe may have stopped
CLOSED_PIPE = 128 + signal.SIGPIPE  # the exit code of programs that write to a closed pipe

_FULL = (errno.ENOSPC, errno.EDQUOT)

_WORDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

Left = str | Callable[[], str]
"""A description of what an interruption leaves behind, or a function that returns it."""


class _Ending:
    """The state of the end of this process."""

    def __init__(self) -> None:
        self.number = 0  # the first signal; 0 for none
        self.taken: list[int] = []  # the signals that end this process
        self.watched = False  # a thread watches for signals
        self.handler: Callable[[int], bool] | None = None  # see `ask_first`
        self.blocks: list[tuple[Left, Callable[[], None] | None]] = []  # of `leaving`, entered


_ending = _Ending()


# --- for commands --------------------------------------------------------------------------------


@contextlib.contextmanager
def leaving(left: Left = "", tidy: Callable[[], None] | None = None) -> Iterator[None]:
    """Describe what an interruption of this block leaves behind.

    Args:
      left: for the message; called after `tidy`.
      tidy: removes leftovers, within a second. Another thread calls it while the block goes on.
    """
    _ending.blocks.append((left, tidy))
    try:
        yield
    finally:
        _ending.blocks.pop()


def await_end_if_interrupted() -> None:
    """Wait for the end of this process if a signal ends it: later failures may be its effect."""
    while _ending.number:
        time.sleep(1)


def message(left: Left = "") -> str:
    """Return the message of an interruption, with what it leaves behind."""
    words = _WORDS.get(_ending.number, _WORDS[signal.SIGINT])
    after = left() if callable(left) else left
    return f"{words}; {after}" if after else words


# --- the process ---------------------------------------------------------------------------------


def run(command_line: Callable[[], None]) -> NoReturn:
    """Run a command line, and end the process with its exit code."""
    closed = _replace_closed_streams()
    install()
    code = 0
    try:
        command_line()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BrokenPipeError:
        code = CLOSED_PIPE
    except BaseException as error:
        await_end_if_interrupted()
        code = 1
        cannot = (*_FULL, errno.EBADF) if "stdout" in closed else _FULL
        if isinstance(error, OSError) and error.errno in cannot:
            code = _cannot_write(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    await_end_if_interrupted()
    atexit._run_exitfuncs()  # such as leaving the processes of a mesh
    os._exit(_flushed(code))


def _replace_closed_streams() -> list[str]:
    """Open the standard streams that were closed at the start; return their names.

    Else a file that is opened later would get their number and their output. Nothing is read, and
    messages are dropped. Output fails when flushed, because a result must not be lost silently.
    """
    closed = []
    for number, (name, mode, flags) in enumerate(
        [("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)]
    ):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
            closed.append(name)
    return closed


def install() -> None:
    """End this process on Ctrl-C and on SIGTERM from now on.

    A signal that was ignored at the start stays ignored, as `nohup` and background jobs of a shell
    need.
    """
    _ending.taken = [n for n in _WORDS if signal.getsignal(n) is not signal.SIG_IGN]
    take_back()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), name="interruption", daemon=True).start()
    _ending.watched = True


def take_back() -> None:
    """Set the handlers again, after a library set its own."""
    for number in _ending.taken:
        signal.signal(number, _handle)


def ask_first(handler: Callable[[int], bool]) -> None:
    """Give each signal to a function from now on, such as one of a server that drains first.

    Args:
      handler: returns whether the process goes on; if not, the signal ends it. Called in the thread
        that watches for signals, so it also runs beside a compilation.
    """
    _ending.handler = handler


def leave(code: int) -> NoReturn:
    """End the process while other threads work: exit functions would tear JAX down under them."""
    os._exit(_flushed(code))


def _handle(number: int, frame: Any) -> None:
    """Note the signal. Python calls this in the main thread as soon as it can."""
    if _ending.handler is not None:
        return  # which the thread asks
    _ending.number = _ending.number or number
    if not _ending.watched:
        _end_interrupted()


def _watch(reading: int) -> None:
    """Wait for a signal, tidy up, and end the process; a second signal ends it at once."""
    number = None
    while number is None or _goes_on(number):
        number = _next_signal(reading, None)
    _ending.number = _ending.number or number
    tidying = threading.Thread(target=_tidy, daemon=True)
    tidying.start()
    end = time.monotonic() + GRACE_S
    while tidying.is_alive() and time.monotonic() < end:
        if _next_signal(reading, 0.01) is not None:
            break
    _end_interrupted()


def _goes_on(number: int) -> bool:
    """Ask the handler whether the process goes on after a signal."""
    try:
        return _ending.handler is not None and _ending.handler(number)
    except Exception:
        return False


def _next_signal(reading: int, timeout_s: float | None) -> int | None:
    """Return the next signal that ends this process; None after `timeout_s`."""
    while select.select([reading], [], [], timeout_s)[0]:
        number = os.read(reading, 1)[0]  # other handlers' signals come here too
        if number in _WORDS:
            return number
    return None


def _tidy() -> None:
    # Threads that still write would log that their files are gone.
    if "logging" in sys.modules:
        sys.modules["logging"].disable()
    for _, tidy in reversed(_ending.blocks):
        if tidy is not None:
            with contextlib.suppress(OSError):
                tidy()


def _end_interrupted() -> NoReturn:
    """Print the message, and end the process."""
    words = threading.Thread(target=_print_last_words, daemon=True)
    words.start()
    words.join(LAST_WORDS_S)
    os._exit(128 + _ending.number)


def _print_last_words() -> None:
    left = next((left for left, _ in reversed(_ending.blocks) if left), "")
    # A spinner hides the cursor of a terminal, and its line is still there.
    tidied = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
    with contextlib.suppress(OSError, ValueError):  # closed, or full
        sys.stderr.flush()
        os.write(2, f"{tidied}{message(left)}\n".encode())
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def _flushed(code: int) -> int:
    """Flush the streams; return the exit code, another one if results could not be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or CLOSED_PIPE
    except OSError as error:
        code = code or _cannot_write(error)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    return code


def _cannot_write(error: OSError) -> int:
    """Print that results could not be written, and return the exit code."""
    with contextlib.suppress(OSError):
        os.write(2, f"error: cannot write the output: {error.strerror}\n".encode())
    return 2
