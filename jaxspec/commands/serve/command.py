"""`jaxspec serve`: answer requests over HTTP. Read `serve`; what it does after its options is `run.run`."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from jaxspec.commands.models import ModelOptions
from jaxspec.commands.options import Fields, UsageError, command, explained
from jaxspec.options import Drafting, Range, option, whole
from jaxspec.serving.settings import ProgramOptions, Settings

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "pydantic")


@dataclass(frozen=True)
class NetworkOptions:
    """Where the server listens, and how it ends."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = option(8000, "Port to listen on; 0 for any that is free.", range=whole(0, 65535))
    tls_cert: str | None = option(
        None, "Serve HTTPS with this certificate, a file.", metavar="FILE"
    )
    tls_key: str | None = option(None, "The certificate's key, a file.", metavar="FILE")
    drain_timeout: float = option(
        60.0,
        "Seconds that requests get to end after SIGTERM; a second signal ends them at once.",
        range=Range("0 or more", lambda x: x >= 0),
    )
    no_warm_up: bool = option(
        False, "Compile each program when a request needs it, not all before /health says ready."
    )
    compilation_cache: str | None = option(
        None,
        "Where compiled programs are kept. Default: the user's cache directory.",
        metavar="DIR|off",
    )

    def __post_init__(self) -> None:
        """Refuse one half of a pair.

        Raises:
          UsageError: naming the options.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key go together; give both, or none")


@command
def serve(
    network: Annotated[NetworkOptions, Fields("Network")],
    models: Annotated[ModelOptions, Fields("Models", without=("target", "distributed"))],
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
                f"jaxspec serve needs {package}; install the extra: pip install 'jaxspec-decoding[serve]', "
                "or from a clone: pip install '.[serve]'"
            ) from None
    console = Console(stderr=True, highlight=False)
    with console.status("[dim]starting JAX"):
        from jaxspec.commands.serve import run
    with explained(*run.USER_ERRORS):
        run.run(network, models, programs, drafting, settings, console)
