"""Commands that are interrupted at random moments, and what became of them.

    python -m tests.tools.interrupts --times 100 --seed 0 generate check bench convert

A try starts a command in a process of its own, sends a signal after a random time, and waits. Half of the tries
compile everything, the others find all programs in a cache, so that moments fall on all that a command does. A try
in which the command ended by itself, or in which Python had not come to the command's first line, is counted, and
drawn again: Python's own start-up is nothing that a command could change.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxspec

ROOT = Path(__file__).parents[2]
BUNDLED = Path(jaxspec.__file__).parent / "bundled"
LIMIT_S = 2.0


@dataclass(frozen=True)
class Try:
    """One interrupted command.

    Attributes:
      after_s: when the signal was sent.
      handled: whether the command had come to its first line by then.
      code: the exit code; negative for a signal.
      seconds: from the signal to the end.
      load: processes that wanted a core when the command ended, on average of the last minute.
    """

    after_s: float
    handled: bool
    code: int
    seconds: float
    stderr: str
    load: float

    @property
    def shape(self) -> str:
        """Say what standard error is like, without what differs from try to try."""
        if "Traceback" in self.stderr:
            return "a traceback"
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        words = lines[-1] if lines else ""
        return re.sub(r"\S*/\S+", "PATH", words)

    @property
    def is_good(self) -> bool:
        """Tell whether it ended as it should."""
        clean = self.stderr.splitlines()[-1:] != [] and self.shape.startswith("interrupted")
        return self.code == 130 and self.seconds < LIMIT_S and clean


def with_signals(args: Sequence[str], ignored: Sequence[int] = ()) -> list[str]:
    """Return a command that starts Python with SIGINT as on a terminal, and other signals ignored.

    A process in the background of a shell starts with SIGINT ignored, and Python leaves it so. A program of its own
    sets that: a function between fork and exec may deadlock where JAX has threads.
    """
    settle = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "[signal.signal(int(n), signal.SIG_IGN) for n in sys.argv[1].split()]; "
        "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    )
    return [sys.executable, "-S", "-E", "-c", settle, " ".join(map(str, map(int, ignored))), *args]


def interrupt(
    args: Sequence[str],
    after_s: float,
    number: int = signal.SIGINT,
    environment: dict[str, str] | None = None,
) -> Try | None:
    """Start a command, send it a signal, and wait for its end. None: it ended before the signal."""
    process = subprocess.Popen(
        with_signals(args),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        try:
            process.wait(after_s)
            return None
        except subprocess.TimeoutExpired:
            pass
        handled = is_handled(process.pid)
        begin = time.monotonic()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
        seconds = time.monotonic() - begin
        return Try(after_s, handled, process.returncode, seconds, stderr, os.getloadavg()[0])
    finally:
        process.kill()
        process.communicate()


def is_handled(pid: int) -> bool:
    """Tell whether a process handles SIGTERM, which Python does not do by itself."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


def commands(directory: Path) -> dict[str, list[str]]:
    """Return the commands to interrupt, by name. They write into a directory."""
    prompts = directory / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(200)]
    prompts.write_text("".join(lines))
    many = ["--prompts", str(prompts), "--json", str(directory / "out.jsonl")]
    return {
        "generate": ["-m", "jaxspec", "generate", *many, "--max-new-tokens", "48"],
        "check": ["-m", "jaxspec", "check", "--json", str(directory / "check.json")],
        "bench": ["-m", "jaxspec", "bench", "--batch-size", "4", "--new-tokens", "128"],
        "convert": ["-m", "jaxspec", "convert", str(BUNDLED / "target"), str(directory / "ours")],
    }


def untidy(name: str, directory: Path) -> list[str]:
    """List what an interrupted command left that it should not have left, and make room for the next try."""
    wrong = []
    results = directory / "out.jsonl"
    if name == "generate" and results.exists():
        for line in results.read_text().splitlines():
            try:
                json.loads(line)
            except ValueError:
                wrong.append(f"a broken line of {len(line)} characters")
        results.unlink()
    if (directory / "ours").exists():
        if not (directory / "ours/manifest.json").is_file():
            wrong.append("a checkpoint without manifest")
        shutil.rmtree(directory / "ours")
    (directory / "check.json").unlink(missing_ok=True)
    return wrong


def interrupt_often(
    name: str, times: int, seed: int, window_s: tuple[float, float]
) -> dict[str, Any]:
    """Interrupt one command at so many random moments of a window, and return what is worth knowing."""
    drawn = random.Random(f"{seed} {name}")
    tries: list[Try] = []
    too_early: list[Try] = []
    too_late, wrong = 0, []
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        command = commands(directory)[name]
        warm = {"JAX_COMPILATION_CACHE_DIR": str(directory / "compiled")}
        cold = warm | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        keep_all = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | warm | keep_all,
            capture_output=True,
            check=True,
        )
        untidy(name, directory)
        while len(tries) < times:
            environment = drawn.choice([warm | keep_all, cold])
            done = interrupt(command, drawn.uniform(*window_s), environment=environment)
            wrong += untidy(name, directory)
            if done is None:
                too_late += 1
            elif not done.handled:
                too_early.append(done)
            else:
                tries.append(done)
                if not done.is_good:
                    print(name, done, file=sys.stderr, flush=True)
        left = sorted(p.name for p in directory.iterdir() if ".partial" in p.name)
    seconds = sorted(t.seconds for t in tries)
    return {
        "command": name,
        "tries": len(tries),
        "good": sum(t.is_good for t in tries),
        "codes": dict(Counter(t.code for t in tries)),
        "stderr": dict(Counter(t.shape for t in tries)),
        "seconds": {
            "median": statistics.median(seconds),
            "95 of 100": seconds[int(0.95 * (len(seconds) - 1))],
            "most": seconds[-1],
        },
        "moments_s": [min(t.after_s for t in tries), max(t.after_s for t in tries)],
        "load": [min(t.load for t in tries), max(t.load for t in tries)],
        "untidy": wrong,
        "left_at_the_end": left,
        "before_the_first_line": [[round(t.after_s, 3), t.code] for t in too_early],
        "after_the_end": too_late,
    }


def main() -> None:
    """Interrupt commands and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=["generate", "check", "bench", "convert"])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--window", type=float, nargs=2, default=(0.0, 15.0), help="seconds of a command to cover"
    )
    given = parser.parse_args()
    for name in given.names:
        found = interrupt_often(name, given.times, given.seed, tuple(given.window))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
