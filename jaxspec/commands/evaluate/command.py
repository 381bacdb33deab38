"""The command line of `jaxspec eval`. `run.evaluate` does the work."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxspec.commands.evaluate import score
from jaxspec.commands.evaluate.options import EvalOptions, EvalOutput
from jaxspec.commands.evaluate.tasks import TASKS
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import Fields, UsageError, command, explained, note
from jaxspec.commands.output import check_picture, refuse_inputs, same_file, write_line
from jaxspec.commands.progress import Ticker
from jaxspec.options import Drafting


@command
def eval_command(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help=f"{', '.join(TASKS)}, or a file with a prompt a line, as of generate.",
        ),
    ],
    options: Annotated[EvalOptions, Fields("Task")],
    models: Annotated[ModelOptions, Fields("Models", without=("distributed", "quantize_vision"))],
    drafting: Annotated[Drafting, Fields("Drafting", without=("synthetic_acceptance",))],
    output: Annotated[EvalOutput, Fields("Report")],
) -> None:
    """Measure what a drafter's drafts are worth on a task.

    Decodes the task's prompts with drafts and without, and prints how many
    tokens a verify step makes: over all steps and over responses, with
    intervals; by draft, by length of context and by category; and tokens a
    second beside plain decoding. Prompts go through the target's chat template
    where it has one.

      jaxspec eval humaneval --limit 20

      jaxspec eval gsm8k --score --target google/gemma-4-31B-it --drafter z-lab/gemma-4-31B-it-DFlash

      jaxspec eval mine.jsonl --protocol z-lab --rows rows.jsonl --json result.json --plot result.png
    """
    inputs = ("--data", options.data), ("TASK", Path(task))
    refuse_inputs(output.json_path, *inputs, ("--rows", output.rows_path))
    if output.overwrite and output.rows_path is None:
        raise UsageError("--overwrite begins the file of --rows anew; add --rows FILE.jsonl")
    for name, path in inputs:
        if output.rows_path and path is not None and same_file(output.rows_path, path):
            raise UsageError(f"--rows {output.rows_path} is the file of {name}; name another one")
    models.check_drafter(drafting)
    errors = Console(stderr=True, highlight=False)
    ticker = Ticker(errors)
    if options.score and task in score.SCORERS and score.SCORERS[task].runs_code:
        note(errors, score.WARNING)

    from jaxspec.commands import startup
    from jaxspec.commands.evaluate import report, run
    from jaxspec.commands.generate.rows import is_resumable, open_rows

    left = f"{output.rows_path} keeps what is done, and the same command goes on from there"
    with (
        explained(ValueError, OSError, interrupted=left if is_resumable(output.rows_path) else ""),
        output.opened() as file,
        startup.out_of_memory_explained("--batch-size", "--max-new-tokens"),
        contextlib.ExitStack() as stack,
    ):
        if output.plot_path is not None:
            check_picture(output.plot_path)
        rows = None
        if output.rows_path is not None:
            rows = stack.enter_context(open_rows(output.rows_path, overwrite=output.overwrite))
        startup.prepare(models, errors)
        with errors.status("[dim]loading the models") as status:

            def notify(message: str) -> None:
                status.update(f"[dim]{message}")
                ticker.notify(message)

            result = run.evaluate(task, options, models, drafting, notify, rows)
        report.render(result, output.console)
        if output.plot_path is not None:
            report.draw(result, output.plot_path)
        if file is not None:
            write_line(file, result.to_json())
