"""The measurement of cells: each job is a process of the command that the page shows.

Read `run`. Cases with the same command are one job. A job that is refused for its memory leaves
that in its cells; any other failure leaves them as they were, and is printed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.version import __version__
from scripts.tables.cases import FOLDER, Case, shell_line
from scripts.tables.data import DATA, ROOT, Cell, Place, file_of, read, write

LEAST_S = 20  # no process starts with less time
REFUSED = re.compile("^error: .*(not enough memory| GiB)", re.M)
"""A command's own message of a lack of memory. Other failures may have GiB in their logs."""
RESULT = ("tokens_per_s", "step_ms", "ttft_ms")
STREAM = (
    *("requests", "tokens_per_s", "wall_s", "prefill_s", "decode_s", "host_s", "floor_s", "slots"),
    *(
        "slots_in_use",
        "preemptions",
        "longest_pause_ms",
        "programs",
        "compile_s",
        "late_compilations",
    ),
)


# --- where and with what -------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The card and the code of a run.

    Attributes:
      platform: "gpu" or "cpu".
      version: of jaxspec, with the commit.
    """

    card: str
    platform: str
    version: str
    jax: str

    @classmethod
    def here(cls, *, platform: str | None = None, commit: str | None = None) -> Machine:
        """Return the GPU of this machine, or its CPU, and the commit of this source tree.

        A plus behind the commit stands for changes that are not committed.

        Raises:
          RuntimeError: there is no GPU, and one is wanted.
        """
        name = "" if platform == "cpu" else _gpu()
        platform = platform or ("gpu" if name else "cpu")
        if platform == "gpu" and not name:
            raise RuntimeError("JAX finds no GPU here")
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
        commit = commit or _output(describe).strip()
        version = f"{__version__} ({commit})" if commit else __version__
        return cls(
            name if platform == "gpu" else _cpu(),
            platform,
            version,
            importlib.metadata.version("jax"),
        )


def _gpu() -> str:
    """Return the name of the first GPU as JAX has it, by a process that gives its memory back."""
    script = "import jax; d = jax.devices()[0]; print(d.device_kind if d.platform == 'gpu' else '')"
    return _output([sys.executable, "-c", script]).strip()


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu() -> str:
    """Return the name of this machine's CPU, its cores, and its widest vectors."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    name = re.search(r"^model name\s*: (.+)$", text, re.M)
    vectors = next(
        (v for flag, v in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in text), ""
    )
    cores = f"{os.cpu_count()} cores" + (f" with {vectors}" if vectors else "")
    return cores if name is None else f"{name[1].strip()}, {cores}"


# --- jobs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Cases that one process measures."""

    cases: tuple[Case, ...]

    @property
    def batches(self) -> list[int | None]:
        """The batch sizes of the command."""
        return [*dict.fromkeys(case.batch for case in self.cases)]

    @property
    def seconds(self) -> int:
        """A guess of what it takes."""
        start, each = self.cases[0].seconds
        return start * (1 + max(c.run for c in self.cases)) + each * len(self.batches)

    def within(self, seconds: float) -> Job | None:
        """Return the job with as many of its batch sizes as the time allows; None for none."""
        start, each = self.cases[0].seconds
        count = len(self.batches) if self.seconds <= seconds else int((seconds - start) // each)
        batches = self.batches[:count] if self.batches != [None] or count else []
        cases = tuple(case for case in self.cases if case.batch in batches)
        return Job(cases) if cases else None

    @property
    def line(self) -> str:
        """Its shell line."""
        return shell_line(self.cases[0].env, self.cases[0].command, self.batches)


def jobs_of(cases: Iterable[Case]) -> list[Job]:
    """Return the jobs of cases, in the order of their first ones."""
    jobs: dict[tuple[str, str, int], list[Case]] = {}
    for case in cases:
        jobs.setdefault(case.job, []).append(case)
    return [Job(tuple(cases)) for cases in jobs.values()]


def is_fresh(case: Case, cells: Mapping[Place, Cell], machine: Machine) -> bool:
    """Return whether a cell is there already, by this command, version and card."""
    cell = cells.get((case.table, case.row, case.column))
    here = case.line, machine.card, machine.version, machine.jax
    return cell is not None and (cell.command, cell.card, cell.version, cell.jax) == here


# --- one process ---------------------------------------------------------------------------------


def measure(job: Job, gpus: str | None, seconds: float) -> list[dict[str, Any]]:
    """Run a job's command, and return its reports: one, or two if some case wants a second run.

    A product has a report for each batch size.

    Raises:
      RuntimeError: with the end of its errors.
      TimeoutError: it took longer.
    """
    deadline = time.monotonic() + seconds
    reports: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.jsonl"
        (cache := Path(folder) / "empty").mkdir()
        first = job.cases[0]
        words = shlex.split(shell_line("", first.command, job.batches).replace(FOLDER, str(cache)))
        python = [sys.executable, "-m", "jaxspec"] if words[0] == "jaxspec" else [sys.executable]
        command = [*python, *words[1:], "--json", str(file)]
        for _ in range(1 + max(case.run for case in job.cases)):
            file.unlink(missing_ok=True)
            _finish(command, _environment(first, gpus), deadline)
            reports += map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return reports


def _environment(case: Case, gpus: str | None) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    name, _, value = case.env.partition("=")
    if name:
        env[name] = f"{env[name]} {value}" if name == "XLA_FLAGS" and name in env else value
    if case.platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    return env


def _finish(command: Sequence[str], env: Mapping[str, str], deadline: float) -> None:
    """Wait for a process and its children, and end them at the deadline."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(env),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(max(deadline - time.monotonic(), 1))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"no end after {error.timeout:.0f} s") from None
            raise
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(errors.read()[-1500:])


def values_of(case: Case, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a cell keeps of its job's reports."""
    if "us" in reports[0]:
        (report,) = (r for r in reports if r["rows"] == case.batch)
        return {"us": rounded(report["us"]), "floor_us": rounded(report["floor_us"])}
    report = reports[case.run]
    if "ttft_ms" in report:
        kept = {name: rounded(report[name]) for name in STREAM if report[name] is not None}
        spreads = ("ttft_ms", "tpot_ms")
        return kept | {name: {k: rounded(v) for k, v in report[name].items()} for name in spreads}
    of_batch = [r for r in report["results"] if r["batch_size"] == case.batch]
    *_, result = (r for r in of_batch if case.mode in ("", r["mode"]))
    medians = {n: result[n]["median"] for n in RESULT if result[n] is not None}
    values = medians | {"floor_ms": result["floor_ms"]}
    if result["acceptance_length"] is not None:
        values["acceptance_length"] = result["acceptance_length"]
    if (plain := of_batch[0]) is not result:
        values["speedup"] = medians["tokens_per_s"] / plain["tokens_per_s"]["median"]
    if case.table == "start-up":
        values |= {name: report["startup"][name] for name in ("first_token_s", "load_s")}
    if case.platform == "gpu":
        values |= {name: report["ceiling"][name] for name in ("bytes_per_s", "flops_per_s")}
    return {name: rounded(value) for name, value in values.items()}


def rounded(value: float) -> float:
    """Return a number with four digits."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


# --- all of them ---------------------------------------------------------------------------------


def today() -> str:
    """Return the day as a cell keeps it, as 2026-11-27."""
    return datetime.date.today().isoformat()


def run(
    cases: Sequence[Case],
    machine: Machine,
    *,
    folder: Path = DATA,
    workers: Sequence[str | None] = (None,),
    budget_s: float = float("inf"),
    again: bool = False,
) -> list[Cell]:
    """Measure the cells that are not there yet, and return them. Each job's are written at once.

    Args:
      workers: the GPUs of each, as CUDA_VISIBLE_DEVICES names them; None for all. A worker of n
        takes jobs that need n.
      budget_s: nothing runs longer.
      again: whether to measure cells that are there too.
    """
    end, lock = time.monotonic() + budget_s, threading.Lock()
    path, new = folder / file_of(machine.card), []
    cells = read(path)
    known = read(DATA / path.name) | cells
    missing = [c for c in cases if again or not is_fresh(c, known, machine)]
    waiting = jobs_of(c for c in missing if c.platform == machine.platform)

    def next_job(devices: int | None) -> Iterator[Job]:
        while True:
            with lock:
                left = end - time.monotonic()
                for i, job in enumerate(waiting):
                    suits = devices is None or job.cases[0].devices == devices
                    if suits and left > LEAST_S and (part := job.within(left)) is not None:
                        rest = tuple(c for c in job.cases if c not in part.cases)
                        waiting[i : i + 1] = [Job(rest)] if rest else []
                        break
                else:
                    return
            yield part

    def work(gpus: str | None) -> None:
        for job in next_job(None if gpus is None else len(gpus.split(","))):
            begin, outcome = time.monotonic(), "ok"
            values: dict[Case, dict[str, Any]] = {}
            try:
                reports = measure(job, gpus, end - begin)
                values = {case: values_of(case, reports) for case in job.cases}
            except TimeoutError as error:
                outcome = str(error)
            except RuntimeError as error:
                outcome = str(error)
                if REFUSED.search(outcome) and len(job.batches) == 1:
                    values = {case: {"error": "does not fit"} for case in job.cases}
                elif len(job.batches) > 1:  # of several batch sizes some may fit
                    with lock:
                        waiting[:0] = jobs_of_each_batch(job)
            date = today()
            with lock:
                for case, kept in values.items():
                    cell = Cell(
                        *(case.table, case.row, case.column, machine.card, machine.version),
                        *(machine.jax, date, case.line, kept),
                    )
                    cells[cell.place] = cell
                    new.append(cell)
                if values:
                    write(path, cells.values())
                where = "" if gpus is None else f"[{gpus}] "
                took = f"{time.monotonic() - begin:.0f} s (guess {job.seconds})"
                print(f"{where}{took}: {job.line}: {outcome}", flush=True)

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(work, workers))
    for job in waiting:
        print(f"not run: {job.line}")
    return new


def jobs_of_each_batch(job: Job) -> list[Job]:
    """Return a job for each batch size."""
    return [Job(tuple(c for c in job.cases if c.batch == batch)) for batch in job.batches]
