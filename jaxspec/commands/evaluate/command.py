"""The command line of `jaxspec eval`. `run.evaluate` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxspec.commands.evaluate.options import EvalOptions
from jaxspec.commands.evaluate.tasks import TASKS
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import Fields, command, explained
from jaxspec.commands.output import OutputOptions, refuse_inputs, write_line
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
    models: Annotated[ModelOptions, Fields("Models", without=("distributed",))],
    drafting: Annotated[Drafting, Fields("Drafting", without=("synthetic_acceptance",))],
    output: Annotated[OutputOptions, Fields("Report")],
) -> None:
    """Measure what a drafter's drafts are worth on a task.

    Decodes the task's prompts with drafts and without, and prints how many
    tokens a verify step makes: over all steps and over responses, with
    intervals; by draft, by length of context and by category; and tokens a
    second beside plain decoding. Prompts go through the target's chat template
    where it has one.

      jaxspec eval humaneval --limit 20

      jaxspec eval gsm8k --data test.jsonl --target google/gemma-4-31B-it --drafter z-lab/gemma-4-31B-it-DFlash

      jaxspec eval mine.jsonl --protocol z-lab --json result.json
    """
    refuse_inputs(output.json_path, ("--data", options.data), ("TASK", Path(task)))
    models.check_drafter(drafting)
    errors = Console(stderr=True, highlight=False)
    ticker = Ticker(errors)

    from jaxspec.commands import startup
    from jaxspec.commands.evaluate import run

    with (
        explained(ValueError, OSError),
        output.opened() as file,
        startup.out_of_memory_explained("--batch-size", "--max-new-tokens"),
    ):
        startup.prepare(models, errors)
        with errors.status("[dim]loading the models") as status:

            def notify(message: str) -> None:
                status.update(f"[dim]{message}")
                ticker.notify(message)

            result = run.evaluate(task, options, models, drafting, notify)
        run.render(result, output.console)
        if file is not None:
            write_line(file, result.to_json())
