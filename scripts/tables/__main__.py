"""Measure the tables of the pages on speed, and write them into the pages.

python -m scripts.tables run                    measure what is missing, on the card of this machine
python -m scripts.tables run --only steps       one table
python -m scripts.tables run --gpus 0 --gpus 1 --gpus 2,3 --budget-s 560 --to out
python -m scripts.tables merge out/*.json       add measured cells to docs/data
python -m scripts.tables write                  write the tables into the pages
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.tables import pages
from scripts.tables.cases import CASES
from scripts.tables.data import DATA, merge
from scripts.tables.runner import Machine, jobs_of, run

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
NAMES = ", ".join(dict.fromkeys(case.table for case in CASES))


@app.command("run")
def run_command(
    only: Annotated[
        list[str], typer.Option(help=f"A table; all by default. Repeatable. {NAMES}.")
    ] = [],  # noqa: B006
    gpus: Annotated[
        list[str],
        typer.Option(
            help="The GPUs of one worker, as in CUDA_VISIBLE_DEVICES. Repeatable: workers run at the "
            "same time. One with n GPUs measures what needs n. Default: one worker with all."
        ),
    ] = [],  # noqa: B006
    part: Annotated[
        str, typer.Option(help="2/4 for the second quarter of the jobs, if several processes run.")
    ] = "1/1",
    budget_s: Annotated[
        float, typer.Option(min=1, help="Seconds after which nothing runs.")
    ] = float("inf"),
    to: Annotated[Path, typer.Option(help="A folder for the file of this card.")] = DATA,
    again: Annotated[
        bool, typer.Option("--again", help="Measure cells that are there already, too.")
    ] = False,
    platform: Annotated[str | None, typer.Option(help="gpu or cpu. Default: gpu if any.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="Of the code, where git cannot say it.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the commands alone.")] = False,
) -> None:
    """Measure missing cells, the most important ones first. Each is written when it is done."""
    if unknown := set(only) - {case.table for case in CASES}:
        raise typer.BadParameter(f"no table {', '.join(sorted(unknown))}; there are {NAMES}")
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise typer.BadParameter(f"--part {part} is not like 2/4")
    try:
        machine = Machine.here(platform=platform, commit=commit)
    except RuntimeError as error:
        raise typer.BadParameter(str(error)) from None
    jobs = jobs_of(c for c in CASES if not only or c.table in only)
    jobs = [job for job in jobs if job.cases[0].platform == machine.platform]
    jobs = jobs[int(number) - 1 :: int(count)]
    if plan:
        for job in jobs:
            print(f"{job.seconds:4d} s  {job.line}")
        return
    new = run(
        [case for job in jobs for case in job.cases],
        machine,
        folder=to,
        workers=gpus or [None],
        budget_s=budget_s,
        again=again,
    )
    print(f"{machine.card}, jaxspec {machine.version}, jax {machine.jax}: {len(new)} cells in {to}")


@app.command("merge")
def merge_command(files: list[Path]) -> None:
    """Add the cells of files to docs/data, where they replace those that are not newer."""
    if absent := [str(file) for file in files if not file.exists()]:
        raise typer.BadParameter(f"no file {', '.join(absent)}")
    print(f"{len(merge(files))} cells")


@app.command("write")
def write_command() -> None:
    """Write the tables into the pages."""
    for page in pages.PAGES:
        page.write_text(pages.updated(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    app()
