"""`python -m jaxspec`."""

from jaxspec.commands.cli import main

if __name__ == "__main__":
    main()
