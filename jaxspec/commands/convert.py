"""The conversion command: `python -m checkpoints_convert`, also known as `jaxspec convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from jaxspec.configs.base import ConfigError
from jaxspec.families import named
from jaxspec.loading import CheckpointError
from jaxspec.storage.conversion import Report, convert, to_hf


def convert_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A Hugging Face directory or hub id; with --to-hf, ours."
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="The directory to write. It must not exist.")
    ],
    back: Annotated[
        bool,
        typer.Option(
            "--to-hf", help="The other way: write a directory of ours as Hugging Face files."
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float32|bfloat16", help="Cast all parameters. Default: as in SRC."),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a hub id. Default: its main branch."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="Access token for the hub. Default: the one huggingface_hub knows."),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use the local hub cache alone, and no network.")
    ] = False,
) -> None:
    """Convert a Gemma 4 target or one of its drafters into an Orbax checkpoint, or back.

    Weights stream from safetensors to the checkpoint, one parameter at a
    time. Every tensor must be used, or be known as one to skip. Nothing is at
    DST until everything is written.

    Converting is optional: `jaxspec generate` reads Hugging Face directories
    and hub ids itself. A converted checkpoint loads with less work, and keeps
    what --to-hf needs to restore the original files.

      jaxspec convert google/gemma-4-E2B-it ./e2b

      jaxspec convert z-lab/gemma-4-26B-A4B-it-DFlash ./dflash --revision 77d42027

      jaxspec convert ./e2b ./e2b-hf --to-hf
    """
    console = Console(stderr=True)
    if dtype not in (None, "float32", "bfloat16"):
        _fail(console, f"--dtype is float32 or bfloat16, not {dtype!r}")
    if back and (dtype or revision or token or offline):
        _fail(console, "--to-hf takes no other option: it restores the files as they came")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    try:
        quiet = not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=quiet) as bars:
            task = bars.add_task("writing" if back else "converting", total=None)

            def show(name: str, done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            if back:
                report = to_hf(source, destination, progress=show)
            else:
                report = convert(
                    source,
                    destination,
                    dtype=dtype,
                    revision=revision,
                    token=token,
                    offline=offline,
                    progress=show,
                )
    except (CheckpointError, ConfigError) as error:
        _fail(console, str(error))
    except KeyboardInterrupt:
        _fail(console, f"interrupted; {destination} was not written", code=130)
    _summarise(Console(), report)


def _fail(console: Console, message: str, code: int = 2) -> None:
    console.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def _summarise(console: Console, report: Report) -> None:
    _, _, title = named(report.kind).title.partition(" ")  # without its article
    lines = [
        f"{title} -> {report.destination}",
        f"{report.tensors} tensors, {report.parameters} parameters, {decimal(report.nbytes)} "
        f"in {report.seconds:.1f} s ({report.nbytes / 1e9 / report.seconds:.3f} GB/s)",
    ]
    lines += [f"skipped {count} tensors: {reason}" for reason, count in report.skipped.items()]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
