"""The command line of `jaxspec bench`. `run.run` and `run.run_trace` do the work."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from jaxspec.commands.bench.options import BenchOptions, TraceOptions
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import (
    Fields,
    UsageError,
    as_flag,
    command,
    explained,
    idle_when_greedy,
)
from jaxspec.commands.output import OutputOptions, check_picture, refuse_inputs, write_line
from jaxspec.commands.progress import Notify, ticking
from jaxspec.options import DEFAULTS, VALUES, Drafting, Sampling, option


@dataclass(frozen=True)
class BenchOutput(OutputOptions):
    """The files of the report."""

    plot_path: Path | None = option(
        None,
        "Also draw where the time goes and tokens a second, with the floors and plain decoding. "
        "Needs matplotlib: the extra \\[plot].",
        metavar="FILE.png",
        flag="--plot",
    )


@command
def bench_command(
    options: Annotated[BenchOptions, Fields("Cases")],
    models: Annotated[ModelOptions, Fields("Models", without=("distributed", "text_only"))],
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

      jaxspec bench --random-weights e4b --drafter none --images
    """
    check_sampling(sampling, drafting)
    refuse_inputs(output.json_path, ("--trace", trace.trace))
    if options.dry_run and output.plot_path is not None:
        raise UsageError("--plot draws what was measured, and --dry-run measures nothing")
    if options.steps_only and (output.plot_path is not None or options.images):
        raise UsageError("--steps-only times whole steps alone: leave --plot and --images out")
    if options.images and (output.plot_path is not None or trace.trace is not None):
        raise UsageError("--images has tables alone: leave --plot and --trace out")
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
            check_picture(output.plot_path)
        errors = Console(stderr=True, highlight=False)
        startup.prepare(models, errors, bundled=options.random_weights is None)
        mesh = startup.mesh_for(models)
        if mesh is not None and trace.trace is None:  # an engine rounds its slots up
            check_rows(options.batch_sizes, mesh.shape["data"])
        if options.dry_run:
            run.dry_run(models, options, drafting, sampling, trace, output.json_path)
            return
        with output.opened() as file, ticking(errors) as notify:
            notify("making random weights" if options.random_weights else "loading the models")
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
                    notify,
                )
            elif options.images:
                report = run.run_images(
                    *(console, models, options, drafting, sampling), notify=notify
                )
            else:
                report = _steps(console, models, options, drafting, sampling, notify)
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
    notify: Notify,
) -> dict[str, Any]:
    """Measure prefill and decode steps, print the results, and return them as JSON values."""
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
    prompts = pair.prompts(rows, options.prompt_length, options.seed)
    report = run.run(console, pair, prompts, options, notify)
    report["startup"] = run.startup_of(report["results"][0], import_s, load_s)
    console.print(f"[dim]{run.described_startup(report['startup'])}[/]")
    return report


def check_sampling(sampling: Sampling, drafting: Drafting) -> None:
    """Refuse sampling that changes nothing, or that is not measured, with UsageError."""
    changed = [name for name in VALUES if getattr(sampling, name) != DEFAULTS[name]]
    if changed and drafting.synthetic_acceptance is not None:
        raise UsageError(
            f"{as_flag(changed[0])}: with --synthetic-acceptance a step does the work of greedy "
            "decoding; leave one out"
        )
    idle = idle_when_greedy(vars(sampling), drafting)
    if sampling.temperature == 0 and idle:
        raise UsageError(f"{idle[0]} changes nothing at temperature 0; add --temperature 1")


def process_age_s() -> float | None:
    """Return the seconds since this process started; None if the system does not report them."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
