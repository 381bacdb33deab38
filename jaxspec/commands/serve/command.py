"""Command `jaxspec serve`. It checks the options, and then calls `run.run`."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Annotated

import typer
from rich.console import Console

from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import Fields, UsageError, command, explained
from jaxspec.commands.serve.network_options import NetworkOptions
from jaxspec.options import Drafting
from jaxspec.serving.settings import ProgramOptions, Settings

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "pydantic")


@command
def serve(
    network: Annotated[NetworkOptions, Fields("Network")],
    models: Annotated[ModelOptions, Fields("Models", without=("target",))],
    programs: Annotated[ProgramOptions, Fields("Engine")],
    drafting: Annotated[Drafting, Fields("Engine", without=("synthetic_acceptance",))],
    settings: Annotated[Settings, Fields("Clients")],
    target: Annotated[
        str | None,
        typer.Argument(help="A directory or a hub id. Default: the bundled target."),
    ] = None,
) -> None:
    """Answer requests in the OpenAI protocol: chat, completions, streaming.

    Without TARGET, a small bundled pair of target and drafter that writes Python.

      jaxspec serve

      jaxspec serve google/gemma-4-26B-A4B-it --drafter z-lab/gemma-4-26B-A4B-it-DFlash --slots 32
    """
    models = dataclasses.replace(models, target=target)
    models.check_drafter(drafting)
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:
            raise UsageError(
                f"jaxspec serve needs {package}; install the extra: "
                "pip install 'jaxspec-decoding[serve]', or from a clone: pip install '.[serve]'"
            ) from None
    console = Console(stderr=True, highlight=False)
    with console.status("[dim]starting JAX"):
        from jaxspec.commands import startup  # noqa: F401  (first: it says why JAX does not start)
        from jaxspec.commands.serve import run
    with explained(*run.USER_ERRORS):
        run.run(network, models, programs, drafting, settings, console)
