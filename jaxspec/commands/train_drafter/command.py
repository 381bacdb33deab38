"""The command line of `jaxspec train-drafter`. `run.run` does the work."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated

import typer
from rich.console import Console

from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import Fields, UsageError, command, explained, note
from jaxspec.commands.progress import Ticker
from jaxspec.commands.train_drafter.options import DrafterOptions, RegenerateOptions
from jaxspec.training.options import RunOptions, TrainingOptions

UNUSED = (
    *("target", "drafter", "quantize_vision", "quantize_drafter", "quantize_draft_head"),
    *("text_only", "distributed", "drafter_revision"),
)
"""Model options that training does not have. The target is an argument. One process runs it."""

OF_NEW = (
    *("layers", "hidden_size", "intermediate_size", "num_heads"),
    *("block_size", "mask_token_id", "container"),
)
"""The fields of `DrafterOptions` that say what a new drafter is like."""


@command
def train_drafter_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A directory, a hub id, or [bold]bundled[/]: the target as it will be run.",
            show_default=False,
        ),
    ],
    drafter: Annotated[DrafterOptions, Fields("Drafter")],
    training: Annotated[TrainingOptions, Fields("Training")],
    running: Annotated[RunOptions, Fields("Run")],
    answers: Annotated[RegenerateOptions, Fields("Answers")],
    models: Annotated[ModelOptions, Fields("Models", without=UNUSED)],
) -> None:
    """Train a drafter for a target, or adapt one to a target that changed.

    Reads texts that the target wrote, and learns to draft their answers. With
    --regenerate the target writes them first. Some prompts are held out:
    acceptance on them is measured during the run, by decoding, and the best
    drafter is kept. OUT/drafter loads in jaxspec; OUT/drafter-hf has the
    layout of the releases. A quantised target is trained for as it is.

      jaxspec train-drafter bundled --from dflash --quantize int4 --data texts.jsonl --out adapted

      jaxspec train-drafter ./my-gemma --kind dflash --data texts.jsonl --out run --steps 20000

      jaxspec train-drafter ./my-gemma --kind dspark --from ./run/drafter --data texts.jsonl --out run2
    """
    if not drafter.data:
        raise UsageError("--data is needed: files with a text a line")
    if drafter.out is None:
        raise UsageError("--out is needed: a directory for the run")
    if drafter.kind is None and drafter.start is None:
        raise UsageError("--kind is needed for a new drafter, or --from for one to go on with")
    if drafter.start is not None and (
        unused := [name for name in OF_NEW if getattr(drafter, name) is not None]
    ):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise UsageError(f"{flags}: of new drafters, and --from has its own; leave it out")
    models = dataclasses.replace(models, target=None if target == "bundled" else target)
    errors = Console(stderr=True, highlight=False)
    ticker = Ticker(errors)

    from jaxspec.commands import startup

    with (
        explained(ValueError, OSError, ImportError, RuntimeError),
        startup.out_of_memory_explained("--rows", "--anchors", "--max-length"),
    ):
        startup.prepare(models, errors)
        from jaxspec.commands.train_drafter import run

        with errors.status("[dim]loading the models") as status:

            def notify(message: str) -> None:
                status.update(f"[dim]{message}")
                ticker.notify(message)

            console = Console(highlight=False)
            announce = functools.partial(note, errors)
            run.run(drafter, training, running, answers, models, console, notify, announce)
