"""Scorers of replies: GSM8K's number, and HumanEval's tests in a process of their own.

Read `SCORERS`. The process of a test has limits of time, memory, files and processes, an empty
directory and no environment. That stops accidents. It is no security boundary: the code has the rights
of the user, the network included. Needs no JAX.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from jaxspec.commands.evaluate.tasks import EvalPrompt
from jaxspec.commands.options import UsageError

TIMEOUT_S = 5.0
"""Seconds that the tests of a reply have."""

MEMORY_BYTES, FILE_BYTES = 1 << 30, 1 << 20

WARNING = (
    "--score runs code that the model wrote on this machine, with your rights. Its processes have "
    "limits of time, memory and files, and they are no security boundary: use a container"
)


@dataclass(frozen=True)
class Scorer:
    """A way to tell right replies of a task.

    Attributes:
      keys: the keys that a line of the task's file must have, as texts.
      is_right: takes a reply and its prompt's line.
      runs_code: whether that runs code of the reply.
    """

    keys: tuple[str, ...]
    is_right: Callable[[str, Mapping[str, Any]], bool]
    runs_code: bool = False


def scorer_of(task: str, prompts: Sequence[EvalPrompt]) -> Scorer:
    """Return the scorer of a task.

    Raises:
      UsageError: it has none, or a prompt lacks what it needs.
    """
    scorer = SCORERS.get(task)
    if scorer is None:
        raise UsageError(f"--score knows {' and '.join(SCORERS)}, not {task}; leave it out")
    for number, prompt in enumerate(prompts, 1):
        for key in scorer.keys:
            if not isinstance(prompt.line.get(key), str):
                raise UsageError(
                    f"prompt {number} has no text at {key!r}, which --score needs; leave --score out, or "
                    "take the file as its makers publish it"
                )
    return scorer


def count_right(scorer: Scorer, replies: Sequence[str], prompts: Sequence[EvalPrompt]) -> int:
    """Return the number of right replies, one of each prompt."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(scorer.is_right, replies, [prompt.line for prompt in prompts]))


# --- GSM8K ---------------------------------------------------------------------------------------

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def has_right_number(reply: str, line: Mapping[str, Any]) -> bool:
    r"""Return whether a reply's answer is the number after the line's "####".

    The answer is the first number in the last \boxed{}; without one, the last number of all.
    """
    _, is_boxed, rest = reply.rpartition("\\boxed{")
    numbers = _numbers(_to_closing_brace(rest))[:1] if is_boxed else _numbers(reply)[-1:]
    return bool(numbers) and numbers == _numbers(line["answer"].rpartition("####")[2])[:1]


def _to_closing_brace(text: str) -> str:
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:at]
    return text


def _numbers(text: str) -> list[Decimal]:
    made = []
    for literal in _NUMBER.findall(text.replace("{,}", ",")):
        with contextlib.suppress(InvalidOperation):
            made.append(Decimal(literal.replace(",", "")))
    return made


# --- HumanEval -----------------------------------------------------------------------------------

_FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

_CHILD = """
import resource, sys
seconds, memory, size = map(int, sys.argv[1:4])
for limit, value in (
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
    (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 32),
):
    resource.setrlimit(limit, (value, value))
word, program = sys.stdin.readline(), sys.stdin.read()
exec(compile(program, "reply", "exec"), {"__name__": "__main__"})
sys.__stdout__.write("\\n" + word)
"""


def program_of(reply: str, line: Mapping[str, Any]) -> str:
    """Return the program that tests a reply, which is the whole function or what follows the prompt.

    The prompt comes first in both cases: it has imports and helpers.
    """
    entry = line["entry_point"]
    blocks = _FENCED.findall(reply) or [reply]
    whole = [block for block in blocks if f"def {entry}(" in block]
    code = whole[-1] if whole else blocks[0]
    return f"{line['prompt']}{chr(10) if whole else ''}{code}\n\n{line['test']}\n\ncheck({entry})\n"


def passes_tests(reply: str, line: Mapping[str, Any]) -> bool:
    """Return whether a reply passes the line's tests, in a process with limits.

    A reply that ends the process before the tests end does not pass: the process must say a random
    word after them.
    """
    word = secrets.token_hex(16)
    limits = (round(TIMEOUT_S), MEMORY_BYTES, FILE_BYTES)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _CHILD, *map(str, limits)],
                cwd=Path(directory),
                env={},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(
                f"--score: cannot start a process for tests: {error.strerror}"
            ) from None
        try:
            text = f"{word}\n{program_of(reply, line)}".encode(errors="replace")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(text, timeout=TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return process.returncode == 0 and output.read().endswith(f"\n{word}\n".encode())


SCORERS = {
    "gsm8k": Scorer(("answer",), has_right_number),
    "humaneval": Scorer(("prompt", "entry_point", "test"), passes_tests, runs_code=True),
}
