"""`jaxspec check`: find out whether a drafter fits a target. Read `command`, `run`, `replay`, `search`."""

FEWEST_ROWS = 4
"""Rows of text that an interval needs."""
