"""`python -m checkpoints_convert SRC DST`."""

import typer

from checkpoints_convert.cli import convert_command

if __name__ == "__main__":
    typer.run(convert_command)
