"""The command line. Each command is a folder of its own.

JAX is imported only once a command surely needs it, so that help and mistakes cost no start-up.
Exit codes: 0, all is done; 1, some prompts were refused and the rest is done; 2, a mistake, one
message, nothing done; 130, Ctrl-C; 143, SIGTERM; 141, the reader of standard output left.
`jaxspec.__main__` runs this.
"""

from __future__ import annotations

from typing import Annotated

import typer

import jaxspec
from jaxspec.commands.bench.command import bench_command
from jaxspec.commands.check.command import check_command
from jaxspec.commands.convert import convert_command
from jaxspec.commands.generate.command import generate
from jaxspec.commands.serve.command import serve

app = typer.Typer(
    name="jaxspec",
    help="Speculative decoding of Gemma 4 and Qwen3 in JAX.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # tracebacks are for bug reports: plain, and without locals
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"jaxspec {jaxspec.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


app.command("generate")(generate)
app.command("check")(check_command)
app.command("bench")(bench_command)
app.command("convert")(convert_command)
app.command("serve")(serve)
