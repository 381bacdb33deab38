"""The command line of `jaxspec check`. `run.run` does the work."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.console import Console

from jaxspec.commands.check.options import CheckOptions
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import Fields, UsageError, command, explained
from jaxspec.commands.output import OutputOptions, refuse_inputs, write_line
from jaxspec.commands.progress import Ticker
from jaxspec.options import Drafting

UNUSED = (
    "target",
    "drafter",
    "distributed",
    "quantize_vision",
    "quantize_drafter",
    "quantize_draft_head",
    "text_only",
)
"""Model options that `check` does not have. Target and drafter are arguments. A quantised drafter is
none, because `check` tries other weights of the drafter."""


@command
def check_command(
    checking: Annotated[CheckOptions, Fields("Check")],
    drafting: Annotated[Drafting, Fields("Check", only=("num_draft_tokens",))],
    models: Annotated[ModelOptions, Fields("Models", without=UNUSED)],
    output: Annotated[OutputOptions, Fields("Report")],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A directory, a hub id, or [bold]bundled[/]. Default: bundled.",
            show_default=False,
        ),
    ] = "bundled",
    drafter: Annotated[
        str | None,
        typer.Argument(
            metavar="DRAFTER",
            help="A directory, a hub id, or the bundled [bold]dflash[/] or [bold]mtp[/]. Default, "
            "with the bundled target: dflash.",
        ),
    ] = None,
) -> None:
    """Find out whether a drafter fits a target, and why not.

    Shows every convention in force and where it came from, how many drafts
    are accepted at each position, whether another convention does better,
    which weights are odd, what the drafter's maker measured, and whether the
    output equals plain decoding. With --quantize or --kv-dtype also what that
    changes: the same text is read by the target as it is. Exit code 0: sound;
    1: not; 2: a mistake, nothing was checked.

      jaxspec check

      jaxspec check google/gemma-4-26B-A4B-it z-lab/gemma-4-26B-A4B-it-DFlash --text mine.txt
    """
    of_target = None if target == "bundled" else target
    models = dataclasses.replace(models, target=of_target, drafter=drafter)
    if models.is_plain:
        raise UsageError("check needs a drafter: jaxspec check TARGET DRAFTER")
    refuse_inputs(output.json_path, ("--text", checking.text))
    errors = Console(stderr=True, highlight=False)
    ticker = Ticker(errors)

    from jaxspec.commands import startup
    from jaxspec.commands.check import formats, report, run

    with (
        explained(ValueError, OSError),
        output.opened() as file,
        startup.out_of_memory_explained("--batch-size", "--new-tokens"),
    ):
        startup.prepare(models, errors)
        with errors.status("[dim]loading the models") as status:

            def notify(message: str) -> None:
                status.update(f"[dim]{message}")
                ticker.notify(message)

            result = run.run(models, checking, drafting, notify)
            compared = None
            if models.rounds:
                compared = formats.compare_formats(models, checking, drafting, notify)
        output.console.print(report.render(result))
        values = result.to_json()
        if compared is not None:
            output.console.print(compared.render())
            values["formats"] = dataclasses.asdict(compared)
        if file is not None:
            write_line(file, values)
    if result.problems:
        raise typer.Exit(1)
