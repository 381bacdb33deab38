"""`jaxspec convert`, also known as `python -m checkpoints_convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

from jaxspec.commands import interruption
from jaxspec.commands.models import INSTEAD, QUANTIZE, Dtype, Quantized
from jaxspec.commands.options import UsageError, command, explained
from jaxspec.commands.progress import ticking
from jaxspec.options import option
from jaxspec.registry import get_family

if TYPE_CHECKING:
    from jaxspec.weights.conversion import Report


@dataclass(frozen=True)
class ConvertOptions:
    """The direction and source of a conversion."""

    to_hf: bool = option(False, "The other way: write a directory of ours as Hugging Face files.")
    dtype: Dtype | None = option(
        None,
        "Cast all parameters. Default: as in SRC, and float32 for codes that become numbers (GGUF's Q8_0).",
        instead=INSTEAD,
    )
    quantize: Quantized | None = option(
        None, f"Quantise linears and experts. {QUANTIZE}", metavar="FORMAT"
    )
    quantize_head: Quantized | None = option(None, "Also embedding and head.", metavar="FORMAT")
    share_with: str | None = option(
        None,
        "Of a drafter: its target, a Hugging Face directory or hub id. An embedding that equals the "
        "target's to the bit is left out.",
        metavar="DIR",
    )
    text_only: bool = option(False, "Leave the vision part of a target out.")
    revision: str | None = option(
        None, "Branch, tag or commit of a hub id. Default: its main branch."
    )
    token: str | None = option(
        None, "Access token for the hub. Default: the one huggingface_hub knows.", secret=True
    )
    offline: bool = option(False, "Use the local hub cache alone, and no network.")

    def __post_init__(self) -> None:
        """Refuse impossible options, with UsageError."""
        others = self.quantize or self.quantize_head or self.share_with or self.text_only
        if self.to_hf and (self.dtype or others or self.revision or self.token or self.offline):
            raise UsageError("--to-hf takes no other option: it restores the files as they came")


@command
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
    options: ConvertOptions,
) -> None:
    """Convert a Gemma 4 or Qwen3 target, or a drafter, into an Orbax checkpoint, or back.

    Weights stream from safetensors to the checkpoint, one parameter at a
    time. Every tensor must be used, or be known as one to skip. Nothing is at
    DST until everything is written.

    Converting is optional: `jaxspec generate` reads Hugging Face directories
    and hub ids itself. A converted checkpoint loads with less work, and keeps
    what --to-hf needs to restore files in the layout of the releases.

      jaxspec convert google/gemma-4-E2B-it ./e2b

      jaxspec convert google/gemma-4-31B-it ./31b-int8 --quantize int8

      jaxspec convert z-lab/gemma-4-26B-A4B-it-DFlash ./dflash --revision 77d42027

      jaxspec convert ./e2b ./e2b-hf --to-hf
    """
    from jaxspec.commands import startup
    from jaxspec.commands.startup import start_devices
    from jaxspec.configs.base import ConfigError
    from jaxspec.weights.atomic_dir import abandon, partial
    from jaxspec.weights.conversion import convert, to_hf
    from jaxspec.weights.loading import CheckpointError
    from jaxspec.weights.memory import DeviceMemoryError

    def left() -> str:
        if destination.exists():
            return f"{destination} is there"
        rest = partial(destination)
        removal = f"; the next conversion to it removes {rest}" if rest.exists() else ""
        return f"{destination} was not written{removal}"

    console = Console(stderr=True)
    startup.set_compilation_cache(None, console)  # for what quantises
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    quiet = not console.is_terminal
    with (
        explained(CheckpointError, ConfigError, DeviceMemoryError, interrupted=left),
        interruption.leaving(tidy=abandon),
        Progress(*columns, console=console, transient=True, disable=quiet) as bars,
        ticking(console) as notify,
    ):
        doing = "writing" if options.to_hf else "converting"
        task = bars.add_task(doing, total=None)
        notify("reading the source")
        start_devices()

        def show(name: str, done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)
            notify(f"{doing}, {decimal(done)} of {decimal(total)}")

        if options.to_hf:
            report = to_hf(source, destination, progress=show)
        else:
            report = convert(
                source,
                destination,
                dtype=options.dtype,
                quantize=options.quantize,
                quantize_head=options.quantize_head,
                target=options.share_with,
                text_only=options.text_only,
                revision=options.revision,
                token=options.token,
                offline=options.offline,
                progress=show,
            )
    _print_summary(Console(), report)


def _print_summary(console: Console, report: Report) -> None:
    _, _, title = get_family(report.kind).title.partition(" ")  # without its article
    lines = [
        f"{title} -> {report.destination}",
        f"{report.tensors} tensors, {report.parameters} parameters, {decimal(report.nbytes)} in "
        f"{report.seconds:.1f} s ({report.nbytes / 1e9 / report.seconds:.3f} GB/s)",
    ]
    if report.left_behind:
        lines.append(
            f"removed what an interrupted conversion had left: {decimal(report.left_behind)}"
        )
    if report.shared is False:
        lines.append("the drafter's embedding differs from the target's, and is kept")
    lines += [f"skipped {count} tensors: {reason}" for reason, count in report.skipped.items()]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
