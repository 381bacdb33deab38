"""The tables of the pages on speed: measured by commands, kept in docs/data, written into the pages.

Read `cases` for what stands in a cell, `runner` for how it is measured, `pages` for how it is shown.
`python -m scripts.tables --help` has the commands.
"""
