"""`python -m jaxspec`."""

from jaxspec.cli import main

if __name__ == "__main__":
    main()
