"""The `jaxspec` command, also `python -m jaxspec`."""

from jaxspec.commands import interruption


def main() -> None:
    """Run the command line, and end the process."""
    interruption.run(_command_line)


def _command_line() -> None:
    from jaxspec.commands.cli import app  # only now: until here Ctrl-C would print a traceback

    app()


if __name__ == "__main__":
    main()
