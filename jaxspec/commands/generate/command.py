"""The command line of `jaxspec generate`. `run.run` does the work."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from jaxspec.commands.generate.options import (
    DecodingOptions,
    GenerateOptions,
    RunningOptions,
    TextOptions,
)
from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import Fields, PartialRecord, command, explained
from jaxspec.options import Drafting, Sampling


@command
def generate(
    text: Annotated[TextOptions, Fields("Prompts and text")],
    models: Annotated[ModelOptions, Fields("Models")],
    decoding: Annotated[DecodingOptions, Fields("Decoding")],
    sampling: Annotated[PartialRecord[Sampling], Fields("Decoding")],
    drafting: Annotated[Drafting, Fields("Decoding", without=("synthetic_acceptance",))],
    running: Annotated[RunningOptions, Fields("Running")],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to continue. Without any: standard input, as one prompt."),
    ] = None,
) -> None:
    """Continue prompts with a target, several tokens a target pass.

    Without --target, a small bundled pair of target and drafter that writes Python.

      jaxspec generate 'def read_config(path):'

      jaxspec generate --target google/gemma-4-26B-A4B-it --drafter z-lab/gemma-4-26B-A4B-it-DFlash \
--chat 'Why is the sky blue?'

      jaxspec generate --prompts prompts.jsonl --json out.jsonl
    """
    options = GenerateOptions(text, models, sampling, drafting, decoding, running)
    console = Console(stderr=True, highlight=False)

    # The tokenizer's module loads slowly, and JAX even more so. Only now are both surely needed.
    from jaxspec.commands.generate.prompts import read_prompts
    from jaxspec.commands.generate.rows import is_resumable

    inputs = []
    with explained():
        if prompts or text.prompt_ids or text.prompts_file or not running.dry_run:
            stdin = None if sys.stdin.isatty() else sys.stdin.buffer.read
            inputs = read_prompts(
                prompts or (),
                text.prompt_ids,
                text.prompts_file,
                stdin,
                chat=text.chat,
                writes_json=text.json_path is not None,
            )

    with console.status("[dim]starting JAX"):
        from jaxspec.commands import startup  # noqa: F401  (first: it says why JAX does not start)
        from jaxspec.commands.generate import run

    if running.dry_run:
        with explained(*run.USER_ERRORS):
            run.dry_run(inputs, options, console)
        return
    left = f"{text.json_path} keeps what is done, and the same command goes on from there"
    with explained(*run.USER_ERRORS, interrupted=left if is_resumable(text.json_path) else ""):
        refused = run.run(inputs, options, console)
    if refused:
        raise typer.Exit(1)
