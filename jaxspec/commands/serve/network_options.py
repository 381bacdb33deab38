"""Network options of `jaxspec serve`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.commands.models import DRY_RUN
from jaxspec.commands.options import UsageError
from jaxspec.options import Range, option, whole


@dataclass(frozen=True)
class NetworkOptions:
    """Address of the server, and its start and end."""

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
    dry_run: bool = option(False, DRY_RUN)

    def __post_init__(self) -> None:
        """Check the TLS options.

        Raises:
          UsageError: only one of them is set.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key go together; give both, or none")
