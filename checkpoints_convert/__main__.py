"""Run the `jaxspec convert` command as `python -m checkpoints_convert SRC DST`."""

from jaxspec.commands import interruption


def _command_line() -> None:
    import typer

    from jaxspec.commands.convert import convert_command

    typer.run(convert_command)


if __name__ == "__main__":
    interruption.run(_command_line)
