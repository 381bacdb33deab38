"""`jaxspec check`: find out whether a drafter fits a target. Read `command`, `run`, `replay`, `search`."""

MIN_ROWS = 4
"""Least number of rows of text for an interval."""
