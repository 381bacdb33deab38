"""`jaxspec check`: find out whether a drafter fits a target. Read `command`, then `run`, then `replay`."""

FEWEST_ROWS = 4
"""Rows of text that an interval needs."""
