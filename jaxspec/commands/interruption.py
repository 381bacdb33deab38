"""Ctrl-C and SIGTERM end a command within two seconds, whatever it is doing.

Read `run`, then `_watch`. Python runs a handler of signals in the main thread only, between two of its
instructions. A compilation by XLA is one instruction of many seconds. So a thread watches for signals too. A command
that has something to tidy up says so with `unwinding`. It then gets a KeyboardInterrupt and a short grace. Without
such a block, and after the grace, the watching thread ends the process.

Every end is `os._exit`, after the streams were flushed. Otherwise Python and XLA would be taken apart under threads
that still compile, and that ends in a segmentation fault.

The first imports of a command are here, so nothing large is imported. Only the commands' own processes call `run`:
who imports jaxspec as a library keeps its own handlers.
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
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

GRACE_S = 1.0  # for tidying up
LAST_WORDS_S = 0.3  # for the message and for flushing: whoever reads a pipe may have stopped
CLOSED_PIPE = 128 + signal.SIGPIPE  # the exit code of programs that write to a closed pipe

_WORDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

Left = str | Callable[[], str]
"""What an interruption leaves, in words, or a function that returns them."""


class _Ending:
    """What is known of the end of this process."""

    def __init__(self) -> None:
        self.number = 0  # the first signal that came; 0 if none did
        self.taken: list[int] = []  # the signals that end this process
        self.watched = False  # a thread watches for signals
        self.unwound = False  # a KeyboardInterrupt was raised
        self.blocks: list[Left] = []  # the blocks of `unwinding` that are entered
        self.speaker = threading.Lock()  # whoever takes it says why the process ends


_ending = _Ending()


# --- for commands ------------------------------------------------------------------------------------


@contextlib.contextmanager
def unwinding(left: Left = "") -> Iterator[None]:
    """In this block an interruption is a KeyboardInterrupt, so that the block can tidy up.

    Args:
      left: what an interruption leaves, if the watching thread has to say so.
    """
    _ending.blocks.append(left)
    try:
        yield
    finally:
        _ending.blocks.pop()


def received() -> bool:
    """Tell whether a signal came that ends this process. Whatever fails afterwards may be its doing."""
    return _ending.number != 0


def message(left: Left = "") -> str:
    """Say that this process was interrupted, and what that leaves."""
    words = _WORDS.get(_ending.number, _WORDS[signal.SIGINT])
    after = left() if callable(left) else left
    return f"{words}; {after}" if after else words


def exit_code() -> int:
    """Return 130 after Ctrl-C, and 143 after SIGTERM."""
    return 128 + (_ending.number or signal.SIGINT)


def may_speak() -> bool:
    """Tell whether the caller is the first who wants to say why this process ends."""
    return not _ending.watched or _ending.speaker.acquire(blocking=False)


# --- the process -------------------------------------------------------------------------------------


def run(command_line: Callable[[], None]) -> NoReturn:
    """Run a command line, and end the process with its exit code."""
    install()
    code = 0
    try:
        command_line()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BrokenPipeError:
        code = CLOSED_PIPE
    except BaseException as error:
        code = 1
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            code = _cannot_write(error)
        elif not received():
            sys.excepthook(type(error), error, error.__traceback__)
    if received():
        _end_interrupted()
    atexit._run_exitfuncs()  # such as leaving a group of processes
    os._exit(_flushed(code))


def install() -> None:
    """End this process on Ctrl-C and on SIGTERM from now on.

    A signal that this process was started to ignore stays ignored, as `nohup` and a shell's background jobs
    want it.
    """
    _ending.taken = [n for n in _WORDS if signal.getsignal(n) is not signal.SIG_IGN]
    take_back()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    sys.unraisablehook = _say_unless_interrupted
    threading.Thread(target=_watch, args=(reading,), name="interruption", daemon=True).start()
    _ending.watched = True


def take_back() -> None:
    """Set the handlers again, after a library may have set its own."""
    for number in _ending.taken:
        signal.signal(number, _handle)


def _handle(number: int, frame: Any) -> None:
    """Unwind the stack if a block wants that. Python calls this in the main thread, as soon as it can."""
    _ending.number = _ending.number or number
    if not _ending.watched:
        _end_interrupted()
    if _ending.blocks and not _ending.unwound:
        _ending.unwound = True
        raise KeyboardInterrupt


def _watch(reading: int) -> None:
    """Wait for a signal, give a block time to tidy up, and end the process. A second signal ends the grace."""
    number = _next_signal(reading, None)
    assert number is not None
    _ending.number = _ending.number or number
    if _ending.blocks or _ending.unwound:
        _next_signal(reading, GRACE_S)
    _end_interrupted()


def _next_signal(reading: int, timeout_s: float | None) -> int | None:
    """Return the next signal that ends this process, or None if none came in time."""
    while select.select([reading], [], [], timeout_s)[0]:
        number = os.read(reading, 1)[0]  # signals with handlers of others come here too
        if number in _WORDS:
            return number
    return None


def _end_interrupted() -> NoReturn:
    """Say what happened, unless that was said, and end the process."""
    words = threading.Thread(target=_say_last_words, daemon=True)
    words.start()
    words.join(LAST_WORDS_S)
    os._exit(exit_code())


def _say_last_words() -> None:
    with contextlib.suppress(OSError, ValueError):  # closed, or full
        sys.stdout.flush()
        sys.stderr.flush()
    if not may_speak():
        return
    left = _ending.blocks[-1] if _ending.blocks else ""
    # A spinner hides the cursor of a terminal, and its line is still there.
    tidied = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{tidied}{message(left)}\n".encode())


def _flushed(code: int) -> int:
    """Flush the streams. Return the exit code, which is another one if results could not be written."""
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
    """Say that results could not be written, and return the exit code."""
    with contextlib.suppress(OSError):
        os.write(2, f"error: cannot write the output: {error.strerror}\n".encode())
    return 2


def _say_unless_interrupted(unraisable: Any) -> None:
    """Let a KeyboardInterrupt in a destructor or a callback be silent. The watching thread ends the process."""
    if not (received() and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)
