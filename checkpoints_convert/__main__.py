"""Run the `jaxspec convert` command as `python -m checkpoints_convert SRC DST`."""

import typer

from jaxspec.commands.convert import convert_command

if __name__ == "__main__":
    typer.run(convert_command)
