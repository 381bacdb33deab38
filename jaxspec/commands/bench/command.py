"""`jaxspec bench`: measure prefill and decode steps. What it does after its options is `run.run`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from jaxspec.commands.bench import PROMPT_LENGTH
from jaxspec.commands.bench.trace_options import TraceOptions
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import Fields, UsageError, as_flag, command, explained
from jaxspec.commands.output import OutputOptions, refuse_inputs, write_line
from jaxspec.commands.progress import ticking
from jaxspec.options import DEFAULTS, VALUES, Drafting, Sampling, at_least, option
from jaxspec.registry import families, presets

KINDS = tuple(f.name for f in families("drafter") if f.drafter_for)
FILTERS = ("top_k", "top_p", "min_p")  # what greedy decoding does not look at


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and how often."""

    random_weights: str | None = option(
        None,
        "Random weights of this target's shape, and of its drafter's: --drafter then names a kind, "
        f"{', '.join(KINDS)} or none. One of {', '.join(presets())}.",
        metavar="PRESET",
    )
    batch_size: tuple[int, ...] = option(
        (), "Rows. Repeatable. Default: 1, 8 and 32.", range=at_least(1)
    )
    prompt_length: int | None = option(
        None,
        "Tokens of each prompt. Default: 256; with the bundled target 64, as its prompts have no more.",
        range=at_least(1),
    )
    context_length: tuple[int, ...] = option(
        (),
        "Start with so many tokens in every row's caches, which hold random numbers: nothing is prefilled. "
        "Instead of prompts; a drafter needs --synthetic-acceptance with it. Repeatable.",
        range=at_least(1),
    )
    new_tokens: int = option(
        256, "Tokens to decode in each row, after prefill's own.", range=at_least(1)
    )
    repeats: int = option(5, "Timed runs of each case.", range=at_least(1))
    seed: int = option(0, "Of random weights and prompts.", range=at_least(0))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes to measure."""
        return self.batch_size or (1, 8, 32)

    @property
    def positions(self) -> int:
        """Positions that the longest case needs, a step's own tokens not counted."""
        starts = self.context_length or (self.prompt_length or PROMPT_LENGTH,)
        return max(starts) + self.new_tokens + 1

    def __post_init__(self) -> None:
        """Refuse options that exclude each other.

        Raises:
          UsageError: naming them.
        """
        if self.context_length and self.prompt_length is not None:
            raise UsageError(
                "--prompt-length and --context-length exclude each other; leave one out"
            )


@dataclass(frozen=True)
class BenchOutput(OutputOptions):
    """Where the report goes, and a picture of it."""

    plot_path: Path | None = option(
        None,
        "Also draw where the time goes and tokens a second, with the floors and plain decoding. Needs "
        "matplotlib: the extra \\[plot].",
        metavar="FILE.png",
        flag="--plot",
    )


@command
def bench_command(
    options: Annotated[BenchOptions, Fields("Cases")],
    models: Annotated[ModelOptions, Fields("Models", without=("distributed",))],
    drafting: Annotated[Drafting, Fields("Drafting")],
    sampling: Annotated[Sampling, Fields("Sampling", only=VALUES)],
    trace: Annotated[TraceOptions, Fields("A stream of requests")],
    output: Annotated[BenchOutput, Fields("Report")],
) -> None:
    """Measure prefill and decode steps, beside the least they could take.

    Every case is compiled and warmed up first; neither is in any time. Each
    time is the median of the repeats, with the device waited for, and every
    repeat starts again from the prompts. A step's parts are timed by
    themselves, on the state in the middle of a run: the drafter drafting and
    absorbing, the target verifying and choosing its best tokens. The rest is
    what the whole step takes beyond both.

      jaxspec bench

      jaxspec bench --random-weights 26b-a4b --synthetic-acceptance 7.7 --batch-size 1 --batch-size 8

      jaxspec bench --random-weights e4b --drafter mtp --num-draft-tokens 5 --synthetic-acceptance 3.5

      jaxspec bench --temperature 0.8 --top-k 40 --draft-sampling

      jaxspec bench --random-weights 31b --drafter none --batch-size 4 --context-length 32768

      jaxspec bench --random-weights 26b-a4b --synthetic-acceptance 7.7 --trace generated --slots 32
    """
    check_sampling(sampling, drafting)
    refuse_inputs(output.json_path, ("--trace", trace.trace))
    if options.context_length and not models.is_plain and drafting.synthetic_acceptance is None:
        raise UsageError(
            "--context-length fills caches with random numbers, which no drafter can follow: add "
            "--synthetic-acceptance, or --drafter none"
        )

    from jaxspec.commands import startup
    from jaxspec.commands.bench import plot, run
    from jaxspec.commands.bench.pair import check_rows

    console = output.console
    with explained(ValueError, OSError), startup.out_of_memory_explained("--batch-size"):
        if output.plot_path is not None:
            plot.check(output.plot_path)
        if models.target is None and options.random_weights is None and models.mesh is None:
            startup.use_one_thread()
        mesh = startup.mesh_for(models)
        if mesh is not None:
            check_rows(options.batch_sizes, mesh.shape["data"])
        with output.opened() as file, ticking(Console(stderr=True, highlight=False)) as say:
            say("making random weights" if options.random_weights else "loading the models")
            if trace.trace is not None:
                report = run.run_trace(
                    console,
                    models,
                    drafting,
                    sampling,
                    trace,
                    options.random_weights,
                    options.seed,
                    output.plot_path,
                    say,
                )
            else:
                report = _steps(console, models, options, drafting, sampling, say)
                if output.plot_path is not None:
                    plot.draw(report, output.plot_path)
            if file is not None:
                write_line(file, report)


def _steps(
    console: Console,
    models: ModelOptions,
    options: BenchOptions,
    drafting: Drafting,
    sampling: Sampling,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure prefill and decode steps, print what comes of it, and return that as JSON values."""
    from jaxspec.commands.bench import run
    from jaxspec.commands.bench.pair import make_pair

    import_s, begin = process_age_s(), time.perf_counter()
    rows = max(options.batch_sizes)
    pair = make_pair(
        models,
        drafting,
        options.random_weights,
        sampling=sampling,
        seed=options.seed,
        rows=rows,
        positions=options.positions,
    )
    load_s = time.perf_counter() - begin
    report = run.run(
        console,
        pair,
        pair.prompts(rows, options.prompt_length, options.seed),
        options.batch_sizes,
        options.context_length,
        options.new_tokens,
        options.repeats,
        options.seed,
        say,
    )
    report["startup"] = run.startup_of(report["results"][0], import_s, load_s)
    console.print(f"[dim]{run.described_startup(report['startup'])}[/]")
    return report


def check_sampling(sampling: Sampling, drafting: Drafting) -> None:
    """Refuse sampling that would change nothing, or that would not be measured.

    Raises:
      UsageError: naming the option.
    """
    given = [name for name in VALUES if getattr(sampling, name) != DEFAULTS[name]]
    if given and drafting.synthetic_acceptance is not None:
        raise UsageError(
            f"{as_flag(given[0])}: with --synthetic-acceptance a step does the work of greedy decoding; leave "
            "one out"
        )
    idle = [(name,) for name in FILTERS if name in given]
    idle += [shown for _, shown in drafting.changes_acceptance]
    if sampling.temperature == 0 and idle:
        raise UsageError(
            f"{as_flag(*idle[0])} changes nothing at temperature 0; add --temperature 1"
        )


def process_age_s() -> float | None:
    """Return the seconds since this process started, where the system tells."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
