"""Ctrl-C, SIGTERM and a closed pipe: every command ends soon, with one line and the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxspec.commands import interruption
from tests.tools.interrupts import LIMIT_S, interrupt_often, with_signals

ROOT = Path(__file__).parents[2]
PATIENT_S = 30.0  # for tidying up: nothing that ends within LIMIT_S waited for it

# One call of C that takes minutes, gives up Python's lock, and looks at no signal: as a compilation does.
BUSY = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"


def run_in(body: str) -> list[str]:
    """Return how to run statements as a command: a process of its own, with the handlers of commands."""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    script = (
        "import time\n"
        "from jaxspec.commands import interruption\n"
        "def command():\n"
        f"{indented}\n"
        "interruption.run(command)\n"
    )
    return ["-c", script]


def ended(
    args: Sequence[str], wait_for: str, *signals: int, ignore: Sequence[int] = ()
) -> tuple[int, float, str]:
    """Start Python, wait for a line on standard error, send signals; return exit code, seconds and other lines."""
    with subprocess.Popen(
        with_signals(args, ignore),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if wait_for in line:
                break
        time.sleep(0.1)
        begin = time.monotonic()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        rest = process.stderr.read()
    return process.returncode, time.monotonic() - begin, rest


READY = "import sys; print('ready', file=sys.stderr, flush=True)"


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")],
)
def test_a_signal_ends_what_python_cannot_interrupt(number: int, code: int, words: str) -> None:
    """A handler in Python runs after such a call, so Ctrl-C during a compilation waited for its end."""
    outcome, seconds, stderr = ended(run_in(f"{READY}\n{BUSY}"), "ready", number)
    assert (outcome, stderr) == (code, words)
    assert seconds < LIMIT_S


def test_a_handler_may_go_on_once() -> None:
    """A server drains on the first signal, even while the main thread compiles."""
    body = f"""
import signal
def handler(number, calls=[]):
    calls.append(number)
    return len(calls) == 1
interruption.ask_first(handler)
{READY}
{BUSY}
"""
    code, seconds, stderr = ended(run_in(body), "ready", signal.SIGTERM, signal.SIGINT)
    assert (code, stderr) == (130, "interrupted\n")
    assert seconds < LIMIT_S
    failing = "interruption.ask_first(lambda number: 1 // 0)"
    code, _, stderr = ended(run_in(f"{failing}\n{READY}\n{BUSY}"), "ready", signal.SIGTERM)
    assert (code, stderr) == (143, "terminated\n")


def test_leaving_runs_no_exit_function() -> None:
    """JAX's would tear it down under a thread that compiles, with a traceback."""
    body = f"import atexit\natexit.register(print, 'torn down')\n{READY}\ninterruption.leave(130)"
    code, _, stderr = ended(run_in(body), "ready")
    assert (code, stderr) == (130, "")


def test_what_is_left_is_tidied_and_told(tmp_path: Path) -> None:
    """The main thread is in a call of C all the while; another one removes the file."""
    file = tmp_path / "half"
    file.touch()
    body = f"""
import os, pathlib
file = pathlib.Path({str(file)!r})
interruption.GRACE_S = {PATIENT_S}
with interruption.leaving(lambda: f'the file is there: {{file.exists()}}', tidy=file.unlink):
    {READY}
    {BUSY}
"""
    code, seconds, stderr = ended(run_in(body), "ready", signal.SIGINT)
    assert (code, stderr) == (130, "interrupted; the file is there: False\n")
    assert seconds < LIMIT_S  # it does not wait when all is tidy


def test_tidying_has_a_second_and_no_more() -> None:
    body = f"""
with interruption.leaving('x is left', tidy=lambda: time.sleep(60)):
    {READY}
    {BUSY}
"""
    code, seconds, stderr = ended(run_in(body), "ready", signal.SIGINT)
    assert (code, stderr) == (130, "interrupted; x is left\n")
    assert interruption.GRACE_S <= seconds < LIMIT_S
    patient = f"interruption.GRACE_S = {PATIENT_S}\n{body}"
    code, seconds, stderr = ended(run_in(patient), "ready", signal.SIGINT, signal.SIGINT)
    assert (code, stderr) == (130, "interrupted; x is left\n")
    assert seconds < LIMIT_S  # the second one ends it at once


def test_what_fails_after_an_interruption_is_not_told() -> None:
    """The command goes on while another thread tidies, and may fail because of that."""
    body = f"""
gone = []
with interruption.leaving('x is left', tidy=lambda: (gone.append(1), time.sleep(0.3))):
    {READY}
    while not gone:
        time.sleep(0.01)
    raise RuntimeError('it is gone')
"""
    code, _, stderr = ended(run_in(body), "ready", signal.SIGINT)
    assert (code, stderr) == (130, "interrupted\n")


def test_an_ignored_signal_stays_ignored() -> None:
    """`nohup` and background jobs of a shell start a command so."""
    body = f"{READY}\ntime.sleep(0.5)\nprint('done', file=sys.stderr)"
    code, _, stderr = ended(run_in(body), "ready", signal.SIGINT, ignore=[signal.SIGINT])
    assert (code, stderr) == (0, "done\n")


def test_ctrl_c_while_a_command_is_imported() -> None:
    """It printed a traceback: the handler came with the commands, after typer and rich."""
    imports = ["-X", "importtime", "-m", "jaxspec", "bench"]
    for module in ("jaxspec.commands.options", "jax._src.core"):
        code, seconds, stderr = ended(imports, f" {module}\n", signal.SIGINT)
        assert code == 130, module
        assert "Traceback" not in stderr
        assert "interrupted\n" in stderr
        assert seconds < LIMIT_S


def test_ctrl_c_while_xla_compiles() -> None:
    """It ended in a segmentation fault: Python was taken apart under the threads of the compiler."""
    body = f"""
import jax, jax.numpy as jnp
def chain(x):
    for i in range(400):
        x = jnp.sin(x @ x + i)
    return x
lowered = jax.jit(chain).lower(jnp.ones((8, 8)))
with interruption.leaving('nothing'):
    {READY}
    lowered.compile()
    print('compiled', file=sys.stderr)
"""
    code, seconds, stderr = ended(run_in(body), "ready", signal.SIGINT)
    assert (code, stderr) == (130, "interrupted; nothing\n")
    assert seconds < LIMIT_S


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    body = "while True:\n    print('x' * 1000)"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, *run_in(body)], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_told(unbuffered: str) -> None:
    """A full disk is noticed while something is printed, or when all is flushed at the end."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *run_in("print('x')")],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2
    assert done.stderr == "error: cannot write the output: No space left on device\n"


@pytest.mark.skipif(os.name == "nt", reason="streams are closed by a shell of Unix")
@pytest.mark.parametrize(
    ("closed", "code", "stderr"),
    [
        (">&-", 2, "error: cannot write the output: Bad file descriptor\n"),
        ("2>&-", 0, ""),
        ("<&-", 0, "read ''\n"),
        ("<&- >&- 2>&-", 2, ""),
    ],
)
def test_a_closed_stream_is_no_traceback(closed: str, code: int, stderr: str) -> None:
    body = """import os, sys
print('result')
print(f'read {sys.stdin.read()!r}', file=sys.stderr) if '<' in sys.argv[1] else None
assert os.open(os.devnull, os.O_RDONLY) > 2"""
    command = ["sh", "-c", f'"$0" "$@" {closed}', sys.executable, *run_in(body), closed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, input="given")
    assert (done.returncode, done.stderr) == (code, stderr)
    assert done.stdout == ("result\n" if code == 0 else "")


def test_a_library_leaves_signals_alone() -> None:
    """This process has imported jaxspec and its commands, and run none of them as a process of its own."""
    assert signal.getsignal(signal.SIGINT) is not interruption._handle
    assert signal.getsignal(signal.SIGTERM) is not interruption._handle


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "check", "bench", "convert"])
def test_every_command_at_random_moments(name: str) -> None:
    """Twelve tries each; `python -m tests.tools.interrupts` makes more."""
    outcome = interrupt_often(name, 12, seed=1, window_s=(0, 12))
    assert outcome["good"] == 12, outcome
    assert outcome["untidy"] == []
