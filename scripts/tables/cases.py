"""Every cell of the tables, with the command that measures it. `CASES` are in order of importance.

Read `Case`, and then a table: a function that yields its cases. Nothing is run here.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

LONE = "docs/data/lone-requests.jsonl"
"""A trace of requests so far apart that each is alone."""
GRAPHS_OF_A_STEP = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL"
)
FOLDER = "FOLDER"
"""Stands in a command for an empty folder."""


@dataclass(frozen=True)
class Case:
    """A cell: where it stands, and how it is measured.

    Attributes:
      command: a shell line, without `--batch-size` and `--rows`.
      batch: the rows of a `jaxspec bench`, or of a product; None for a stream of requests.
      mode: of the results of a `jaxspec bench`, "plain" or "speculative"; "" for the last one.
      run: 1 if the command has to run a second time for this cell.
      env: assignments before the command.
      devices: that it needs.
      platform: "gpu" or "cpu".
      seconds: that a process takes before its first cell, and that a cell takes.
    """

    table: str
    row: str
    column: str
    command: str
    batch: int | None = None
    mode: str = ""
    run: int = 0
    env: str = ""
    devices: int = 1
    platform: str = "gpu"
    seconds: tuple[int, int] = (15, 25)

    @property
    def job(self) -> tuple[str, str, int]:
        """Cases with the same of these are measured by one process."""
        return self.env, self.command, self.devices

    @property
    def line(self) -> str:
        """The shell line that measures this cell alone."""
        return shell_line(self.env, self.command, [self.batch])


def shell_line(env: str, command: str, batches: list[int | None]) -> str:
    """Return the shell line of a command for some batch sizes."""
    flag = "--rows" if "measure_products" in command else "--batch-size"
    words = [f"{flag} {batch}" for batch in dict.fromkeys(batches) if batch is not None]
    return " ".join([*filter(None, [env]), command, *words])


# --- steps ---------------------------------------------------------------------------------------

AFTER_256 = "--context-length 256 --new-tokens 96 --repeats 4 --steps-only"
DFLASH = "--drafter dflash --num-draft-tokens 15 --synthetic-acceptance"
MTP = "--drafter mtp --num-draft-tokens"
MODELS = {
    "26B-A4B plain": ("26b-a4b", "--drafter none"),
    "26B-A4B DFlash": ("26b-a4b", f"{DFLASH} 7.7"),
    "26B-A4B MTP": ("26b-a4b", f"{MTP} 7 --synthetic-acceptance 4"),
    "31B plain": ("31b", "--drafter none"),
    "31B DFlash": ("31b", f"{DFLASH} 7.7"),
    "31B MTP": ("31b", f"{MTP} 7 --synthetic-acceptance 4"),
    "E4B plain": ("e4b", "--drafter none"),
    "E4B MTP": ("e4b", f"{MTP} 5 --synthetic-acceptance 3.5"),
    "E2B plain": ("e2b", "--drafter none"),
    "Qwen3 8B plain": ("qwen3-8b", "--drafter none"),
    "Qwen3 8B DFlash b16": ("qwen3-8b", f"{DFLASH} 6"),
}
"""By row: the preset, and the options of its drafter."""


def _seconds(row: str) -> tuple[int, int]:
    return {"3": (22, 30), "2": (18, 25)}.get(row[0], (14, 20))


def _model(row: str) -> str:
    preset, drafter = MODELS[row]
    return f"jaxspec bench --random-weights {preset} {drafter}"


def steps() -> Iterator[Case]:
    """Yield whole steps in bfloat16; those on one device are also a column of `devices`."""
    for row, batch in itertools.product(MODELS, (1, 8, 32)):
        command = f"{_model(row)} {AFTER_256}"
        yield Case("steps", row, f"batch {batch}", command, batch, seconds=_seconds(row))
        if row[:3] in ("31B", "26B"):
            place = "devices", f"{row} · {batch}", "1"
            yield Case(*place, command, batch, seconds=_seconds(row))


def devices() -> Iterator[Case]:
    """Yield steps on two and four devices."""
    for row, count in itertools.product(MODELS, (2, 4)):
        if row[:3] in ("31B", "26B"):
            command = f"{_model(row)} --mesh model={count} {AFTER_256}"
            for batch in (1, 8, 32):
                place = "devices", f"{row} · {batch}", str(count)
                yield Case(*place, command, batch, devices=count, seconds=(30, 35))


def long_context() -> Iterator[Case]:
    """Yield steps after many tokens."""
    for row, context, batch in (
        ("31B MTP", 32768, 4),
        ("31B plain", 131072, 1),
        ("26B-A4B plain", 8192, 1),
        ("26B-A4B DFlash", 32768, 8),
    ):
        command = f"{_model(row)} --context-length {context} --new-tokens 32 --repeats 4"
        place = "long-context", f"{row} · {batch} × {context:,}", ""
        yield Case(*place, f"{command} --steps-only", batch, seconds=(25, 35))


FORMATS = {
    "31B plain": {
        "`int8`, head too": "--quantize int8 --quantize-head int8",
        "`int4`, head `int8`": "--quantize int4 --quantize-head int8",
    },
    "31B DFlash": {
        "`int8`, head too, drafter and draft head `fp8-dynamic`": (
            "--quantize int8 --quantize-head int8 --quantize-drafter fp8-dynamic "
            "--quantize-draft-head fp8-dynamic"
        ),
        "`fp8-dynamic`, drafter and draft head too": (
            "--quantize fp8-dynamic --quantize-drafter fp8-dynamic "
            "--quantize-draft-head fp8-dynamic"
        ),
        "`int4`, head `int8`, drafter and draft head `fp8-dynamic`": (
            "--quantize int4 --quantize-head int8 --quantize-drafter fp8-dynamic "
            "--quantize-draft-head fp8-dynamic"
        ),
    },
    "31B MTP": {
        "`int8`, head and drafter too": (
            "--quantize int8 --quantize-head int8 --quantize-drafter int8"
        ),
        "`fp8-dynamic`, drafter too": "--quantize fp8-dynamic --quantize-drafter fp8-dynamic",
        "`int4`, head and drafter `int8`": (
            "--quantize int4 --quantize-head int8 --quantize-drafter int8"
        ),
    },
    "26B-A4B plain": {
        "`int8`, head too": "--quantize int8 --quantize-head int8",
        "`int4`, head `int8`": "--quantize int4 --quantize-head int8",
    },
    "26B-A4B DFlash": {
        "`int8`, head too, drafter and draft head `fp8-dynamic`": (
            "--quantize int8 --quantize-head int8 --quantize-drafter fp8-dynamic "
            "--quantize-draft-head fp8-dynamic"
        ),
        "`int4`, head `int8`, drafter and draft head `fp8-dynamic`": (
            "--quantize int4 --quantize-head int8 --quantize-drafter fp8-dynamic "
            "--quantize-draft-head fp8-dynamic"
        ),
    },
    "E4B plain": {"`int8`, head too": "--quantize int8 --quantize-head int8"},
}
"""By model: the formats that a table shows beside bfloat16, and their options."""


def formats() -> Iterator[Case]:
    """Yield whole steps with fewer bits, beside those in bfloat16, which `steps` has too."""
    for row, kinds in FORMATS.items():
        for kind, flags in {"bfloat16": "", **kinds}.items():
            for batch in (1, 8, 32):
                command = " ".join(filter(None, [_model(row), flags, AFTER_256]))
                place = "formats", f"{row} · {kind}", f"batch {batch}"
                yield Case(*place, command, batch, seconds=_seconds(row))


def graphs() -> Iterator[Case]:
    """Yield steps with the loop as one CUDA graph, and with a graph for each step."""
    drawn = "--temperature 0.8 --top-k 40 --top-p 0.9"
    for row, preset, options, batch, new_tokens in (
        ("26B-A4B plain", "26b-a4b", "--drafter none", 1, 96),
        ("26B-A4B plain", "26b-a4b", "--drafter none", 1, 8),
        ("E4B plain", "e4b", "--drafter none", 1, 96),
        ("E4B plain, tokens drawn", "e4b", f"--drafter none {drawn}", 1, 96),
        ("E4B plain, tokens drawn", "e4b", f"--drafter none {drawn}", 8, 96),
        ("E4B MTP, tokens drawn", "e4b", f"{MTP} 5 {drawn}", 4, 96),
    ):
        of = "--context-length 256" if "none" in options else "--prompt-length 256"
        command = (
            f"jaxspec bench --random-weights {preset} {options} --quantize int8 {of} --new-tokens "
            f"{new_tokens} --steps-only"
        )
        for column, env in (("a graph a step", f"XLA_FLAGS={GRAPHS_OF_A_STEP}"), ("one graph", "")):
            place = "graphs", f"{row} · {batch} · {new_tokens}", column
            yield Case(*place, command, batch, env=env)


# --- prompts and streams -------------------------------------------------------------------------


def prompts() -> Iterator[Case]:
    """Yield passes over prompts."""
    for row in ("26B-A4B plain", "31B plain", "E4B plain"):
        for batch, length in ((1, 512), (4, 512), (1, 8192)):
            command = f"{_model(row)} --prompt-length {length} --new-tokens 8 --steps-only"
            place = "prompts", row, f"{batch} × {length:,}"
            yield Case(*place, command, batch, seconds=_seconds(row))


def start_up() -> Iterator[Case]:
    """Yield the time from the command to the first token, without compiled programs and with."""
    command = (
        "jaxspec bench --random-weights 31b --drafter none --prompt-length 256 --new-tokens 8 "
        f"--steps-only --compilation-cache {FOLDER}"
    )
    for run in (0, 1):
        yield Case("start-up", "31B plain", str(run), command, 1, run=run, seconds=(50, 20))


ALL_AT_ONCE = "--trace generated --choose-length never"


def streams(*, first: bool) -> Iterator[Case]:
    """Yield streams of requests, all at once: the important ones first, and later the others."""
    for row, options, is_first in (
        ("26B-A4B DFlash", "--slots 32", True),
        ("26B-A4B MTP", "--requests 384 --slots 128", False),
        ("26B-A4B MTP", "--requests 384 --slots 160 --cache-tokens auto", True),
        ("26B-A4B MTP", "--requests 512 --slots 256 --read-ahead 16", False),
        ("26B-A4B DFlash", "--requests 384 --slots 128 --cache-tokens auto", True),
        ("31B DFlash", "--slots 16", True),
    ):
        if is_first == first:
            command = f"{_model(row)} {ALL_AT_ONCE} {options}"
            seconds = (60, 110 if row[0] == "2" else 140)
            yield Case("streams", f"{row} · `{options}`", "", command, seconds=seconds)


def arrivals() -> Iterator[Case]:
    """Yield a stream of requests that come one after another, as the server runs it."""
    command = (
        f"{_model('26B-A4B DFlash')} {ALL_AT_ONCE} --rate 17.7 --max-prefill-tokens 2048 "
        "--steps-per-return 4"
    )
    yield Case("arrivals", "26B-A4B DFlash", "", command, seconds=(60, 100))


def lone() -> Iterator[Case]:
    """Yield requests that are alone in an engine."""
    for row, slots in (
        ("26B-A4B DFlash", 1),
        ("26B-A4B DFlash", 32),
        ("31B DFlash", 16),
        ("E4B MTP", 128),
    ):
        command = f"{_model(row)} --trace {LONE} --choose-length never --slots {slots}"
        yield Case("lone", f"{row} · {slots}", "", command, seconds=(60, 60))


# --- products ------------------------------------------------------------------------------------


def products() -> Iterator[Case]:
    """Yield products of rows with a weight, as models multiply them."""
    sizes = {
        "31b gate_up": "5376 × 43008",
        "31b down": "21504 × 5376",
        "31b qkv": "5376 × 16384",
        "26b-a4b qkv": "2816 × 8192",
    }
    formats = ("int4", "int8", "bfloat16", "fp8-dynamic", "fp8")
    for (name, size), format in itertools.product(sizes.items(), formats):
        command = f"python -m scripts.measure_products --size {shlex.quote(name)} --format {format}"
        for rows in (1, 8, 16, 32, 64, 128, 512):
            yield Case("products", f"{size} · {rows}", format, command, rows, seconds=(12, 5))


# --- the bundled pair ----------------------------------------------------------------------------

BUNDLED = "--prompt-length 64 --new-tokens 128 --repeats 5"


def bundled_gpu() -> Iterator[Case]:
    """Yield steps of the bundled pair on a GPU."""
    command = f"jaxspec bench {BUNDLED}"
    for row, mode in (("plain", "plain"), ("DFlash, 7 drafts", "speculative")):
        yield Case("bundled-gpu", row, "", command, 1, mode, seconds=(15, 15))


def bundled_cpu() -> Iterator[Case]:
    """Yield steps of the bundled pair on a CPU, and acceptance lengths, which no machine changes."""
    for row, drafter in (("DFlash", "dflash"), ("MTP", "mtp")):
        for batch in (1, 2, 4):
            command = f"jaxspec bench --drafter {drafter} {BUNDLED}"
            place = "bundled-cpu", row, f"batch {batch}"
            yield Case(*place, command, batch, "speculative", platform="cpu")
    for threads in (1, 2):
        for column, mode in (("plain", "plain"), ("DFlash", "speculative")):
            place = "threads", str(threads), column
            env, command = f"NPROC={threads}", f"jaxspec bench {BUNDLED}"
            yield Case(*place, command, 1, mode, env=env, platform="cpu")
    drawn = "--temperature 1"
    for row, drafter, column, sampling in (
        ("DFlash · 7", "--drafter dflash", "greedy", ""),
        ("DFlash · 7", "--drafter dflash", "temperature 1", drawn),
        ("MTP · 5", "--drafter mtp", "greedy", ""),
        ("MTP · 5", "--drafter mtp", "temperature 1", drawn),
        (
            "MTP, a tree of top-k 3 and depth 5 · 11",
            "--drafter mtp --tree-topk 3 --tree-depth 5 --num-draft-tokens 11",
            "greedy",
            "",
        ),
    ):
        options = " ".join(filter(None, [drafter, sampling]))
        command = f"jaxspec bench {options} --new-tokens 128 --repeats 1 --steps-only"
        yield Case("acceptance", row, column, command, 16, platform="cpu")


CASES: tuple[Case, ...] = tuple(
    itertools.chain(
        *(steps(), bundled_gpu(), streams(first=True), start_up(), prompts(), arrivals(), lone()),
        *(long_context(), streams(first=False), formats(), graphs(), products(), devices()),
        bundled_cpu(),
    )
)
